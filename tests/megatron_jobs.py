"""What ranks do in the tests of MegatronEngine."""

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
    """One training: the model, the layout, and whatever else of the configuration differs from fp32 AdamW."""

    path: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    n_mbs: int = 1
    max_tokens: int | None = None
    padded: bool = False
    steps: int = STEPS
    megatron: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = field(default_factory=dict)


def make_engine(case: Case, ft_spec: Any = None) -> Any:
    """A MegatronEngine, made and initialised."""
    from areal_convert.engines.api.configs import (
        MegatronEngineConfig,
        MicroBatchSpec,
        OptimizerConfig,
        ParallelStrategy,
        TrainEngineConfig,
    )
    from areal_convert.engines.megatron.engine import MegatronEngine

    strategy = ParallelStrategy(
        data_parallel_size=case.dp,
        tensor_parallel_size=case.tp,
        pipeline_parallel_size=case.pp,
        context_parallel_size=case.cp,
        expert_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    settings: dict[str, Any] = {"dtype": "float32", "attn_impl": "sdpa", **case.config}
    if case.optimizer is not None:
        settings["optimizer"] = OptimizerConfig(**{"lr": LR, "weight_decay": 0.01, **case.optimizer})
    config = TrainEngineConfig(
        path=case.path,
        mb_spec=MicroBatchSpec(n_mbs=case.n_mbs, max_tokens_per_mb=case.max_tokens),
        parallel_strategy=strategy,
        megatron=MegatronEngineConfig(**case.megatron),
        **settings,
    )
    engine = MegatronEngine(config)
    engine.create_process_group()
    engine.initialize(None, ft_spec)
    return engine


def train(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Train every case after another on the ranks of this world."""
    return [_train(case) for case in cases]


def _train(case: Case) -> dict[str, Any]:
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case)
    first = engine.eval().forward_batch(batch_of(engine, 0), aggregate_fn=list)
    engine.train()
    results = []
    for step in range(case.steps):
        batch = batch_of(engine, step, padded=case.padded)
        results.append(engine.train_batch(batch, sft_loss, sft_weight))
    answer = {
        "losses": [r["loss"] for r in results],
        "norms": [r["grad_norm"] for r in results],
        "micro_batches": results[-1]["num_micro_batches"],
        "first": first,
        "last": engine.eval().forward_batch(batch_of(engine, 0), aggregate_fn=list),
        "evaluated": float(engine.eval_batch(batch_of(engine, 0), sft_loss, sft_weight)),
        "dp_rank": engine.data_parallel_rank,
        "loaded": engine.loaded.bytes_read,
        "groups": topology(engine),
    }
    engine.destroy()
    return answer


def topology(engine: Any) -> dict[str, Any]:
    """Who is with whom."""
    return {
        "data": dist.get_process_group_ranks(engine.data_parallel_group),
        "model": dist.get_process_group_ranks(engine.context_and_model_parallel_group),
        "cpu": dist.get_process_group_ranks(engine.cpu_group),
        "head": engine.current_data_parallel_head(),
        "is_head": engine.is_data_parallel_head(),
    }


# ------------------------------------------------------------------------------------------------ other jobs


def digest(engine: Any) -> str:
    """Of all parameters of this rank."""
    found = hashlib.sha256()
    for chunk in engine.model:
        for name, parameter in chunk.named_parameters():
            found.update(name.encode() + parameter.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


def trained_and_saved(cases: Sequence[Case], outs: Sequence[str]) -> None:
    """Some steps, then a Hugging Face directory written by all ranks."""
    from areal_convert.engines.api.metas import SaveLoadMeta
    from areal_convert.engines.losses import sft_loss, sft_weight

    for case, out in zip(cases, outs, strict=True):
        engine = make_engine(case)
        for step in range(case.steps):
            engine.train_batch(batch_of(engine, step), sft_loss, sft_weight)
        engine.save(SaveLoadMeta(out))
        engine.destroy()


def reloaded(case: Case, out: str) -> dict[str, Any]:
    """Save, train on, load what was saved: the parameters are what they were, and training goes on from there."""
    from areal_convert.engines.api.metas import SaveLoadMeta
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case)
    before = digest(engine)
    engine.save(SaveLoadMeta(out))
    first = engine.train_batch(batch_of(engine, 0), sft_loss, sft_weight)
    moved = digest(engine)
    engine.load(SaveLoadMeta(out))
    after = digest(engine)
    again = engine.train_batch(batch_of(engine, 0), sft_loss, sft_weight)
    engine.destroy()
    return {"same": before == after, "moved": moved != before, "losses": (first["loss"], again["loss"])}


def skipped_step(case: Case) -> dict[str, Any]:
    """A loss that is not finite: on one data-parallel rank only, which all have to notice."""
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case)
    before = digest(engine)

    def broken(*args: Any) -> torch.Tensor:
        return sft_loss(*args) * (float("nan") if engine.data_parallel_rank == 0 else 1.0)

    bad = engine.train_batch(batch_of(engine, 0), broken, sft_weight)
    same = digest(engine) == before
    good = engine.train_batch(batch_of(engine, 0), sft_loss, sft_weight)
    answer = {"bad": bad, "good": good, "unchanged": same, "changed": digest(engine) != before}
    engine.destroy()
    return answer


def moved(case: Case) -> tuple[list[float], list[float], int]:
    """Losses with everything moved away and back between the steps, and without; bytes that were left meanwhile."""
    from areal_convert.engines.losses import sft_loss, sft_weight

    found, left = [], 0
    for away in (True, False):
        engine = make_engine(case)
        losses = []
        for step in range(4):
            losses.append(engine.train_batch(batch_of(engine, step), sft_loss, sft_weight)["loss"])
            if away:
                engine.offload()
                left += sum(p.untyped_storage().nbytes() for chunk in engine.model for p in chunk.parameters())
                engine.onload()
        found.append(losses)
        engine.destroy()
    return found[0], found[1], left


def schedule_of(case: Case) -> list[float]:
    """Learning rates of a run of four steps, as the optimizer has them."""
    from areal_convert.engines.api.metas import FinetuneSpec
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case, FinetuneSpec(1, 32, 8))
    rates = []
    for step in range(4):
        engine.train_batch(batch_of(engine, step), sft_loss, sft_weight)
        rates.append({group["lr"] for group in engine.optimizer.param_groups}.pop())
        engine.lr_scheduler_step()
    engine.destroy()
    return rates


def masters(case: Case, compare: str) -> float:
    """The largest difference of the fp32 masters from the values in the checkpoint."""
    from areal_convert.engines.megatron.optim import _masters
    from areal_convert.engines.megatron.weights import load

    engine = make_engine(case)
    _, values = load(engine.model, engine.checkpoint, engine.mesh, engine.rank, masters=True)
    assert values is not None
    worst, count = 0.0, 0
    for part in engine.optimizer.chained_optimizers:
        for parameter, master, begin in _masters(part):
            wanted = values[parameter].view(-1)[begin : begin + master.numel()]
            worst = max(worst, float((wanted - master.view(-1)).abs().max()))
            count += master.numel()
    assert count, compare
    engine.destroy()
    return worst


def lifetimes(case: Case) -> dict[str, Any]:
    """Two engines one after the other, a second one beside the first, and what is left of both."""
    from megatron.core import parallel_state

    from areal_convert.converter.errors import ConfigError

    engine = make_engine(case)
    try:
        make_engine(case)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    engine.destroy()
    engine.destroy()
    groups = len(dist.distributed_c10d._world.pg_map)
    make_engine(case).destroy()
    return {
        "refused": refused,
        "initialized": engine.initialized or parallel_state.model_parallel_is_initialized(),
        "groups": (groups, len(dist.distributed_c10d._world.pg_map)),
    }


def resized(case: Case) -> list[list[float]]:
    """Log-probabilities of two sequences: as they are, cut to 3, filled up to 9."""
    from areal_convert.engines.data.batches import from_sequences

    engine = make_engine(case)
    batch = from_sequences([torch.arange(5, 11), torch.arange(20, 25)])
    whole = engine.forward_batch(batch)
    changed = engine.forward_batch([batch, batch], [3, 9, 6, 5], aggregate_fn=list)
    engine.destroy()
    return [whole.tolist(), *(row.tolist() for row in changed)]


def own_loss(case: Case) -> dict[str, Any]:
    """`forward_backward_batch` with a loss of one's own: on the last stage only, forward only, and backward."""
    from areal_convert.engines.data.batches import from_sequences

    engine = make_engine(case)
    batches = [from_sequences([torch.arange(5, 5 + n)]) for n in (7, 9)]
    shapes: list[tuple[int, ...]] = []

    def process(logits: torch.Tensor, ctx: dict[str, Any]) -> torch.Tensor | None:
        shapes.append(tuple(logits.shape))
        return ctx["steps"].logprobs(logits, ctx["rows"])[0].sum()

    engine.forward_backward_batch(batches, process, forward_only=True)
    engine.forward_backward_batch(batches, process)
    stats = engine.optimizer_step()
    answer = {"shapes": shapes, "norm": stats["grad_norm"]}
    engine.destroy()
    return answer
