"""The numbers of a step: what it learned, how fast, and how much of the machine that was.

All numbers are those of the whole run, the same on every rank: tokens and FLOPs are added up over the data-parallel
ranks, times are those of the slowest rank, memory of the fullest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .flops import Architecture

__all__ = ["Meter", "Reduce", "StepTimes", "alone"]

Reduce = Callable[[Sequence[float], str], list[float]]
"""Numbers of this rank and "sum" (over data-parallel ranks) or "max" (over all): those of the run."""


def alone(values: Sequence[float], how: str) -> list[float]:
    """For a single process."""
    return list(values)


@dataclass
class StepTimes:
    """Seconds of the parts of a step."""

    seconds: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is done inside, added to what the part has already."""
        start = self.clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - start


@dataclass
class Meter:
    """Makes a step's record of what the engine returned, and keeps the totals of the run.

    `architecture` is None where FLOPs cannot be counted, `peak` (TFLOP/s of one device) where it is not known: the
    numbers that need them are left out then, never guessed.
    """

    architecture: Architecture | None = None
    peak: float | None = None
    devices: int = 1
    recompute: bool = False
    reduce: Reduce = alone
    tokens: int = 0
    """Of all steps so far, those before a resume among them."""
    skipped: int = 0
    frozen: bool = False
    """Only adapters are trained."""

    def record(
        self, step: int, result: Mapping[str, float], lengths: Sequence[int], times: Mapping[str, float], memory: int
    ) -> dict[str, Any]:
        """One line of the log.

        result    of `train_batch`: loss, grad_norm, lr, update_successful, num_micro_batches, perhaps mtp_loss
        lengths   of this rank's sequences
        times     seconds on this rank: `data`, `step` (of the engine), `total`
        memory    bytes of this rank's device at its fullest
        """
        model = self.architecture.training(lengths, frozen=self.frozen) if self.architecture else 0
        hardware = model
        if self.architecture and self.recompute:
            hardware = self.architecture.training(lengths, recompute=True, frozen=self.frozen)
        tokens, model, hardware = self.reduce([float(sum(lengths)), float(model), float(hardware)], "sum")
        total, data, engine, full = self.reduce([times["total"], times["data"], times["step"], float(memory)], "max")
        self.tokens += int(tokens)
        self.skipped += not result["update_successful"]
        line: dict[str, Any] = {
            "step": step,
            "loss": result["loss"],
            "grad_norm": result["grad_norm"],
            "lr": result["lr"],
            "tokens": int(tokens),
            "total_tokens": self.tokens,
            "tokens_per_second": tokens / total,
            "seconds": total,
            "step_seconds": engine,
            "data_share": data / total,
            "memory_bytes": int(full),
            "micro_batches": int(result["num_micro_batches"]),
            "skipped_steps": self.skipped,
        }
        if "mtp_loss" in result:
            line["mtp_loss"] = result["mtp_loss"]
        if self.architecture:
            line["tflops_per_device"] = model / engine / self.devices / 1e12
        if self.architecture and self.peak:
            line["mfu"] = model / engine / self.devices / (self.peak * 1e12)
            if self.recompute:
                line["hfu"] = hardware / engine / self.devices / (self.peak * 1e12)
        return line

    def state_dict(self) -> dict[str, int]:
        return {"tokens": self.tokens, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.tokens, self.skipped = int(state["tokens"]), int(state["skipped"])
