"""What ranks do in the tests of failures that only one of them has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import archon_jobs
import engine_jobs
import megatron_jobs
from engine_jobs import batch_of

JOBS: Mapping[str, Any] = {"archon": archon_jobs, "fsdp": engine_jobs, "megatron": megatron_jobs}
Attempt = Callable[[], Any]


def said(call: Attempt) -> str:
    """What it raises; nothing when it does not."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def attempts(engine: Any, failing: int) -> dict[str, Attempt]:
    """What goes wrong on the rank `failing`, by name."""
    from areal_convert.engines.losses import sft_loss, sft_weight

    here = dist.get_rank() == failing
    number = iter(range(1000))

    def broken(*args: Any) -> torch.Tensor:
        """In the second micro-batch: the first has gone through."""
        if here and next(number) == 1:
            raise ValueError("the loss is broken")
        return sft_loss(*args)

    def always(*args: Any) -> torch.Tensor:
        if here:
            raise ValueError("the loss is broken")
        return sft_loss(*args)

    def constant(*args: Any) -> torch.Tensor:
        return sft_loss(*args).detach() if here else sft_loss(*args)

    def weight(batch: Mapping[str, Any]) -> torch.Tensor:
        return torch.tensor(1 / 0) if here else sft_weight(batch)

    def own(logits: torch.Tensor, ctx: Mapping[str, Any]) -> torch.Tensor | None:
        """A micro-batch without a loss, and a loss that is a view of something."""
        return None if here else logits.float().mean(0)[0]

    batch = batch_of(engine, 0)
    odd = {"input_ids": batch["input_ids"] + 5000 * here}
    short = {"loss_mask": batch["loss_mask"][: len(batch["loss_mask"]) - 2 * here]}
    return {
        "loss": lambda: engine.train_batch(batch, broken, sft_weight),
        "evaluation": lambda: engine.eval_batch(batch, always, sft_weight),
        "constant": lambda: engine.train_batch(batch, constant, sft_weight),
        "weight": lambda: engine.train_batch(batch, sft_loss, weight),
        "tokens": lambda: engine.train_batch({**batch, **odd}, sft_loss, sft_weight),
        "mask": lambda: engine.train_batch({**batch, **short}, sft_loss, sft_weight),
        "number": lambda: engine.forward_backward_batch([batch] * (4 + 4 * here), own),
        "own": lambda: engine.forward_backward_batch([batch] * 4, own),
    }


def fail(cases: Sequence[tuple[str, Any, int]]) -> list[dict[str, Any]]:
    """Of each engine: what every failure says here, and whether training goes on as if there had been none."""
    from areal_convert.engines.losses import sft_loss, sft_weight

    found = []
    for kind, case, failing in cases:
        engine = JOBS[kind].make_engine(case)
        answer: dict[str, Any] = {}
        losses = [engine.train_batch(batch_of(engine, 0), sft_loss, sft_weight)["loss"]]
        for name, attempt in attempts(engine, failing).items():
            answer[name] = said(attempt)
        engine.optimizer_zero_grad()
        engine.offload()
        answer["away"] = said(lambda: engine.train_batch(batch_of(engine, 0), sft_loss, sft_weight))  # noqa: B023
        engine.onload()
        losses += [engine.train_batch(batch_of(engine, step), sft_loss, sft_weight)["loss"] for step in (1, 2)]
        engine.destroy()
        engine = JOBS[kind].make_engine(case)
        undisturbed = [engine.train_batch(batch_of(engine, step), sft_loss, sft_weight)["loss"] for step in range(3)]
        engine.destroy()
        found.append({"says": answer, "losses": losses, "undisturbed": undisturbed})
    return found


def break_off(case: Any) -> str:
    """Rank 1 fails in the middle of a backward pass, where nothing can be held back, and ends."""
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = archon_jobs.make_engine(case)
    if dist.get_rank() == 1:

        def fall(gradient: torch.Tensor) -> None:
            raise MemoryError("no room for a gradient")

        engine.parts[0].output.weight.register_hook(fall)
    return said(lambda: engine.train_batch(batch_of(engine, 0), sft_loss, sft_weight))


def balanced(cases: Sequence[tuple[str, Any]]) -> list[list[dict[str, list[float]]]]:
    """The experts' biases after four steps, and after a step that was skipped and one that failed."""
    from areal_convert.engines.losses import sft_loss, sft_weight

    found = []
    for kind, case in cases:
        engine = JOBS[kind].make_engine(case)
        for step in range(4):
            engine.train_batch(batch_of(engine, step), sft_loss, sft_weight)
        seen = [_biases(kind, engine)]
        skipped = engine.train_batch(batch_of(engine, 0), lambda *a: sft_loss(*a) * float("nan"), sft_weight)
        assert skipped["update_successful"] == 0.0
        seen.append(_biases(kind, engine))
        assert "ZeroDivisionError" in said(
            lambda: engine.train_batch(batch_of(engine, 0), lambda *a: 1 / 0, sft_weight)  # noqa: B023
        )
        seen.append(_biases(kind, engine))
        found.append(seen)
        engine.destroy()
    return found


def _biases(kind: str, engine: Any) -> dict[str, list[float]]:
    parts = engine.parts if kind == "archon" else engine.model
    return {
        name.split(".moe.")[0].split(".mlp.")[0].removeprefix("decoder."): value.tolist()
        for part in parts
        for name, value in part.named_buffers()
        if name.endswith("expert_bias")
    }
