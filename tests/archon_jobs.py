"""What ranks do in the tests of ArchonEngine: trainings on many layouts, one after the other on the same ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from engine_jobs import LR, STEPS, batch_of


@dataclass(frozen=True)
class Case:
    """One training: the model, the layout, and whatever else of the configuration differs from fp32 AdamW.

    Routers keep their biases, unless `archon` says otherwise: transformers alone does not move them.
    """

    path: str
    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    replicate: int = 1
    schedule: str = "1f1b"
    n_mbs: int = 1
    max_tokens: int | None = None
    steps: int = STEPS
    archon: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.cp * self.pp


def make_engine(case: Case, ft_spec: Any = None) -> Any:
    """An ArchonEngine, made and initialised."""
    from areal_convert.engines.api.configs import (
        ArchonEngineConfig,
        MicroBatchSpec,
        OptimizerConfig,
        ParallelStrategy,
        TrainEngineConfig,
    )
    from areal_convert.engines.archon.engine import ArchonEngine

    strategy = ParallelStrategy(
        data_parallel_size=case.dp,
        tensor_parallel_size=case.tp,
        context_parallel_size=case.cp,
        pipeline_parallel_size=case.pp,
        expert_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        data_parallel_replicate_size=case.replicate,
    )
    archon: dict[str, Any] = {"attn_type": "sdpa", "pp_schedule": case.schedule, "moe_router_bias_update_rate": 0.0}
    settings: dict[str, Any] = {"dtype": "float32", **case.config}
    if "optimizer" not in settings:
        settings["optimizer"] = OptimizerConfig(**{"lr": LR, "weight_decay": 0.01, **case.optimizer})
    config = TrainEngineConfig(
        path=case.path,
        mb_spec=MicroBatchSpec(n_mbs=case.n_mbs, max_tokens_per_mb=case.max_tokens),
        parallel_strategy=strategy,
        archon=ArchonEngineConfig(**{**archon, **case.archon}),
        **settings,
    )
    engine = ArchonEngine(config)
    engine.create_process_group()
    engine.initialize(None, ft_spec)
    return engine


def many(jobs: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Jobs of this module one after the other, on ranks that are started once."""
    return [globals()[name](**arguments) for name, arguments in jobs]


def train(case: Case) -> dict[str, Any]:
    """Log-probabilities before, losses and norms of every step, evaluation after."""
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case)
    first = engine.eval().forward_batch(batch_of(engine, 0), aggregate_fn=list)
    engine.train()
    results = [engine.train_batch(batch_of(engine, step), sft_loss, sft_weight) for step in range(case.steps)]
    answer = {
        "losses": [r["loss"] for r in results],
        "norms": [r["grad_norm"] for r in results],
        "micro_batches": results[-1]["num_micro_batches"],
        "first": first,
        "evaluated": float(engine.eval().eval_batch(batch_of(engine, case.steps), sft_loss, sft_weight)),
        "dp_rank": engine.data_parallel_rank,
        "loaded": engine.loaded.bytes_read,
        "copies": copies(engine),
        "biases": biases(engine),
    }
    engine.destroy()
    return answer


def copies(engine: Any) -> dict[str, bytes]:
    """This rank's part of the embedding and of the head, where they are here."""
    named = {name: p for part in engine.parts for name, p in part.named_parameters()}
    wanted = ("tok_embeddings.weight", "output.weight")
    return {name: whole(named[name]).numpy().tobytes() for name in wanted if name in named}


def biases(engine: Any) -> dict[int, list[float]]:
    """Of the experts of every sparse layer that is here."""
    found = {}
    for part in engine.parts:
        for name, layer in part.layers.items():
            if layer.sparse and layer.moe.expert_bias is not None:
                found[int(name)] = layer.moe.expert_bias.tolist()
    return found


def whole(tensor: Any) -> torch.Tensor:
    value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return value.detach().float().cpu()


def digests(engine: Any) -> dict[str, str]:
    """Of every parameter of this rank's stages, whole; the same on every layout that holds the same values."""
    named = [named for part in engine.parts for named in part.named_parameters()]
    return {name: hashlib.sha256(whole(p).numpy().tobytes()).hexdigest() for name, p in named}


# ------------------------------------------------------------------------------------------------ other jobs


def own_loss(case: Case) -> dict[str, Any]:
    """`forward_backward_batch` with a loss of one's own: the logits, forward only, and a norm, forward and backward; a
    micro-batch without a loss counts nothing."""
    from areal_convert.engines.data.batches import from_sequences

    engine = make_engine(case)
    batches = [from_sequences([torch.arange(5, 5 + n)]) for n in (7, 9)]
    logits: dict[int, torch.Tensor] = {}

    def look(found: torch.Tensor, ctx: dict[str, Any]) -> None:
        logits[ctx["number"]] = found[: ctx["rows"].tokens].clone()

    def process(found: torch.Tensor, ctx: dict[str, Any]) -> torch.Tensor | None:
        return ctx["forward"].logprobs(found, ctx["rows"])[0].sum() if ctx["number"] else None

    engine.forward_backward_batch(batches, look, forward_only=True)
    engine.forward_backward_batch(batches, process)
    answer = {"logits": logits, "norm": engine.optimizer_step()["grad_norm"]}
    try:
        engine.forward_backward_batch(batches[:1], process)
        answer["refused"] = ""
    except Exception as error:
        answer["refused"] = f"{type(error).__name__}: {error}"
    engine.destroy()
    return answer


def critic(case: Case, engine_of: str = "archon") -> dict[str, Any]:
    """A value head on a language model's checkpoint, trained towards 1, by this engine or by FSDPEngine."""
    import engine_jobs

    plain = engine_jobs.Case(case.path, config={"is_critic": True, "disable_dropout": True})
    engine = make_engine(case) if engine_of == "archon" else engine_jobs.make_engine(plain)

    def loss(values: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        return (values - 1.0).square().mean()

    def weight(batch: Mapping[str, Any]) -> torch.Tensor:
        return torch.tensor(float(len(batch["input_ids"])))

    before = engine.eval().forward_batch(batch_of(engine, 0))
    engine.train()
    results = [engine.train_batch(batch_of(engine, 0), loss, weight) for _ in range(3)]
    engine.destroy()
    return {"losses": [r["loss"] for r in results], "norms": [r["grad_norm"] for r in results], "shape": before.shape}


def scratch(case: Case) -> dict[str, Any]:
    """A model of random weights: what is in it, and the loss of its first step."""
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case)
    answer = {"digests": digests(engine), "biases": biases(engine)}
    answer["loss"] = engine.train_batch(batch_of(engine, 0), sft_loss, sft_weight)["loss"]
    engine.destroy()
    return answer


def skipped_step(case: Case) -> dict[str, Any]:
    """A loss that is not finite, on one data-parallel rank only, which all have to notice; biases stay as well."""
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case)
    before = digests(engine), biases(engine)

    def broken(*args: Any) -> torch.Tensor:
        return sft_loss(*args) * (float("nan") if engine.data_parallel_rank == 0 else 1.0)

    bad = engine.train_batch(batch_of(engine, 0), broken, sft_weight)
    same = (digests(engine), biases(engine)) == before
    good = engine.train_batch(batch_of(engine, 0), sft_loss, sft_weight)
    answer = {"bad": bad, "good": good, "unchanged": same, "changed": digests(engine) != before[0]}
    engine.destroy()
    return answer


def moved(case: Case) -> tuple[list[float], list[float], list[float]]:
    """Losses and rates with everything moved away and back between the steps, and losses without."""
    from areal_convert.converter.errors import ConfigError
    from areal_convert.engines.api.metas import FinetuneSpec
    from areal_convert.engines.losses import sft_loss, sft_weight

    found: list[list[float]] = []
    rates = []
    for away in (True, False):
        engine = make_engine(case, FinetuneSpec(1, 32, 8))
        losses = []
        for step in range(3):
            stats = engine.train_batch(batch_of(engine, step), sft_loss, sft_weight)
            losses.append(stats["loss"])
            rates.append(stats["lr"])
            engine.lr_scheduler_step()
            if away:
                engine.offload()
                try:
                    engine.forward_batch(batch_of(engine, step))
                    raise AssertionError("an engine that is away computes")
                except ConfigError:
                    engine.onload()
        found.append(losses)
        engine.destroy()
    return found[0], found[1], rates


def saved(case: Case, out: str, back: Case | None = None) -> dict[str, Any]:
    """Train, save both ways, train on; then load each into a model of other values, on another layout with `back`."""
    from areal_convert.engines.api.metas import SaveLoadMeta
    from areal_convert.engines.losses import sft_loss, sft_weight

    hf, dcp = SaveLoadMeta(out + "-hf"), SaveLoadMeta(out + "-dcp", "dcp", with_optim=True)

    def steps(engine: Any, first: int) -> list[float]:
        return [
            engine.train_batch(batch_of(engine, step), sft_loss, sft_weight)["loss"] for step in range(first, first + 2)
        ]

    engine = make_engine(case)
    steps(engine, 0)
    engine.set_version(7)
    engine.save(hf)
    engine.save(dcp)
    answer: dict[str, Any] = {"on": steps(engine, 2)}
    engine.destroy()
    engine = make_engine(back or case)
    for kind, meta in (("hf", hf), ("dcp", dcp)):
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.fill_(0.5)
        engine.load(meta)
        answer[kind] = digests(engine)
    answer |= {"resumed": steps(engine, 2), "version": engine.get_version()}
    engine.destroy()
    return answer


def topology(case: Case) -> dict[str, Any]:
    """Who is with whom, and what one resized result looks like."""
    engine = make_engine(case)
    batch = batch_of(engine, 0)
    lengths = [int(n) + (1 if i % 2 else -1) for i, n in enumerate(batch["cu_seqlens"].diff())]
    answer = {
        "data": dist.get_process_group_ranks(engine.data_parallel_group),
        "model": dist.get_process_group_ranks(engine.context_and_model_parallel_group),
        "cpu": dist.get_process_group_ranks(engine.cpu_group),
        "head": engine.current_data_parallel_head(),
        "is_head": engine.is_data_parallel_head(),
        "resized": [len(row) for row in engine.forward_batch(batch, lengths, aggregate_fn=list)] == lengths,
        "initialized": engine.initialized,
    }
    engine.destroy()
    engine.destroy()
    return answer | {"destroyed": not engine.initialized}
