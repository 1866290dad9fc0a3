"""What ranks do in the tests of the engines: the plain transformers loop, and the same training through an engine."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS = 20
LR = 1e-3
BATCHES = 4


@dataclass(frozen=True)
class Case:
    """One training: the model, the layout, and whatever else of the configuration differs from fp32 AdamW."""

    path: str
    dp: int = 1
    tp: int = 1
    cp: int = 1
    replicate: int = 1
    n_mbs: int = 1
    max_tokens: int | None = None
    padded: bool = False
    steps: int = STEPS
    config: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.cp


def sequences(step: int) -> list[torch.Tensor]:
    """The global batch of a step: eight samples of different lengths; four batches take turns, so that loss falls."""
    g = torch.Generator().manual_seed(100 + step % BATCHES)
    return [torch.randint(3, 1000, (n,), generator=g) for n in (13, 7, 24, 9, 17, 5, 11, 20)]


def loss_mask(row: torch.Tensor) -> torch.Tensor:
    """All but the first two tokens are targets: a prompt that is left out."""
    return (torch.arange(len(row)) >= 2).long()


# ------------------------------------------------------------------------------------------------ transformers alone


def reference(paths: Sequence[str], steps: int = STEPS) -> list[dict[str, Any]]:
    """transformers and torch.optim.AdamW, padded rows, the loss from its definition; nothing of ours."""
    return [_reference(path, steps) for path in paths]


def _reference(path: str, steps: int) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    config._experts_implementation = "eager"
    model: Any = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)
    first = _plain_logprobs(model.eval())
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    losses, norms = [], []
    for step in range(steps):
        ids, mask = _padded(sequences(step))
        logits = model(input_ids=ids, attention_mask=mask).logits
        targets = mask[:, 1:].bool().clone()
        targets[:, 0] = False  # token 1: part of the prompt; token 0 is never predicted
        nll = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        loss = nll[targets].sum() / targets.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return {"losses": losses, "norms": norms, "first": first, "last": _plain_logprobs(model.eval())}


def _padded(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()


@torch.no_grad()
def _plain_logprobs(model: Any) -> list[torch.Tensor]:
    """Of the first batch, sequence by sequence; 0 at the last position."""
    found = []
    for row in sequences(0):
        logits = model(input_ids=row[None]).logits[0]
        own = torch.log_softmax(logits[:-1], -1).gather(1, row[1:, None])[:, 0]
        found.append(torch.cat([own, torch.zeros(1)]))
    return found


# ------------------------------------------------------------------------------------------------ through an engine


def make_engine(case: Case, ft_spec: Any = None) -> Any:
    """An FSDPEngine, made and initialised."""
    from areal_convert.engines.api.configs import (
        MicroBatchSpec,
        OptimizerConfig,
        ParallelStrategy,
        TrainEngineConfig,
    )
    from areal_convert.engines.fsdp.engine import FSDPEngine

    strategy = ParallelStrategy(
        data_parallel_size=case.dp,
        tensor_parallel_size=case.tp,
        context_parallel_size=case.cp,
        data_parallel_replicate_size=case.replicate,
    )
    settings: dict[str, Any] = {"dtype": "float32", "attn_impl": "sdpa", **case.config}
    config = TrainEngineConfig(
        path=case.path,
        optimizer=OptimizerConfig(**{"lr": LR, "weight_decay": 0.01, **case.optimizer}),
        mb_spec=MicroBatchSpec(n_mbs=case.n_mbs, max_tokens_per_mb=case.max_tokens),
        parallel_strategy=strategy,
        **settings,
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, ft_spec)
    return engine


def batch_of(engine: Any, step: int, *, padded: bool = False) -> Any:
    """This data-parallel rank's part of a step's batch."""
    from areal_convert.engines.data.batches import from_sequences

    rows = sequences(step)[engine.data_parallel_rank :: engine.data_parallel_world_size]
    if padded:
        ids, mask = _padded(rows)
        return {"input_ids": ids, "attention_mask": mask, "loss_mask": mask * (torch.arange(ids.shape[1]) >= 2)}
    return from_sequences(rows, loss_mask=[loss_mask(row) for row in rows])


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
        "loaded": engine.loaded.bytes_read if engine.loaded is not None else 0,
        "digest": digest(engine.model),
    }
    engine.destroy()
    return answer


def digest(model: Any) -> str:
    """Of all parameters, whole; the same on every layout that holds the same values."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.update(name.encode() + value.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


# ------------------------------------------------------------------------------------------------ other jobs


def two_steps(cases: Sequence[Case]) -> list[list[tuple[float, float]]]:
    """Losses and gradient norms of two steps, nothing else."""
    from areal_convert.engines.losses import sft_loss, sft_weight

    found = []
    for case in cases:
        engine = make_engine(case)
        results = [engine.train_batch(batch_of(engine, step), sft_loss, sft_weight) for step in range(2)]
        found.append([(result["loss"], result["grad_norm"]) for result in results])
        engine.destroy()
    return found


def resized(case: Case) -> list[list[float]]:
    """Log-probabilities of two sequences: as they are, cut to 3, filled up to 9."""
    from areal_convert.engines.data.batches import from_sequences

    engine = make_engine(case)
    batch = from_sequences([torch.arange(5, 11), torch.arange(20, 25)])
    whole = engine.eval().forward_batch(batch)
    changed = engine.forward_batch([batch, batch], [3, 9, 6, 5], aggregate_fn=list)
    engine.destroy()
    return [whole.tolist(), *(row.tolist() for row in changed)]


def critic(case: Case) -> dict[str, Any]:
    """A value head on a language model's checkpoint, trained towards 1."""
    engine = make_engine(case)

    def loss(values: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        return (values - 1.0).square().mean()

    def weight(batch: Mapping[str, Any]) -> torch.Tensor:
        return torch.tensor(float(len(batch["input_ids"])))

    before = engine.eval().forward_batch(batch_of(engine, 0))
    engine.train()
    losses = [engine.train_batch(batch_of(engine, 0), loss, weight)["loss"] for _ in range(6)]
    names = [name for name, _ in engine.model.named_parameters() if "score" in name or "lm_head" in name]
    engine.destroy()
    return {"losses": losses, "names": names, "shape": tuple(before.shape)}


def scratch_digests(cases: Sequence[Case]) -> list[str]:
    """Digests of models with random weights."""
    found = []
    for case in cases:
        engine = make_engine(case)
        found.append(digest(engine.model))
        engine.destroy()
    return found


def skipped_step(case: Case) -> dict[str, Any]:
    """A loss that is not finite: on one data-parallel rank only, which all have to notice."""
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case)
    before = digest(engine.model)

    def broken(*args: Any) -> torch.Tensor:
        return sft_loss(*args) * (float("nan") if dist.get_rank() == 0 else 1.0)

    bad = engine.train_batch(batch_of(engine, 0), broken, sft_weight)
    same = digest(engine.model) == before
    good = engine.train_batch(batch_of(engine, 0), sft_loss, sft_weight)
    answer = {"bad": bad, "good": good, "unchanged": same, "changed": digest(engine.model) != before}
    engine.destroy()
    return answer


def moved(case: Case) -> tuple[list[float], list[float]]:
    """Losses with everything moved away and back between the steps, and without."""
    from areal_convert.engines.losses import sft_loss, sft_weight

    found = []
    for away in (True, False):
        engine = make_engine(case)
        losses = []
        for step in range(4):
            losses.append(engine.train_batch(batch_of(engine, step), sft_loss, sft_weight)["loss"])
            if away:
                engine.offload()
                engine.onload()
        found.append(losses)
        engine.destroy()
    return found[0], found[1]


def schedule_of(case: Case) -> list[float]:
    """Learning rates of a run of four steps."""
    from areal_convert.engines.api.metas import FinetuneSpec
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case, FinetuneSpec(1, 32, 8))
    rates = []
    for step in range(4):
        rates.append(engine.train_batch(batch_of(engine, step), sft_loss, sft_weight)["lr"])
        engine.lr_scheduler_step()
    engine.destroy()
    return rates


def loading_memory(case: Case, tiny: str) -> dict[str, int]:
    """Bytes: the largest tensor made while loading, by how much this process grew at most, and what it then holds.

    A tiny model is made first: what torch and transformers keep for themselves is none of the model's.
    """
    os.sched_setaffinity(0, set(list(os.sched_getaffinity(0))[:2]))  # readers: a core's each
    make_engine(dataclasses.replace(case, path=tiny)).destroy()
    largest = _largest_tensor()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    with largest:
        engine = make_engine(case)
    storages = [p._local_tensor.untyped_storage().nbytes() for p in engine.model.parameters()]
    answer = {
        "tensor": largest.seen,
        "box": max(storages),
        "held": sum(storages),
        "grown": _memory("VmHWM") - before,
        "whole": sum(p.numel() * 4 for p in engine.model.parameters()),
    }
    engine.destroy()
    return answer


def _memory(field_: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field_))
    return int(line.split()[1]) * 1024


def _largest_tensor() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else (out,):
                if type(value) is torch.Tensor and value.device.type != "meta":
                    self.seen = max(self.seen, value.untyped_storage().nbytes())
            return out

    return Largest()
