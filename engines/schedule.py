"""The learning rate as a plain function of the step: its whole state is the step.

The warm-up is part of the steps, once: it climbs over `warmup` steps, and the decay ends at `total` (AReaL once
counted it a second time, so that the rate never came down).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..converter.errors import ConfigError, Problems
from .api.configs import OptimizerConfig

__all__ = ["KINDS", "Schedule"]

KINDS = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Schedule:
    """Rates from 0 up to `lr` over the warm-up, then as `kind` says, down to `lr * min_ratio` at `total`.

    At step s (from 0) without a floor it is the rate of transformers' schedules of the same names.
    """

    kind: str
    lr: float
    total: int
    warmup: int = 0
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        problems = Problems()
        if self.kind not in KINDS:
            problems.add("lr_scheduler_type", f"{self.kind!r} is none of {', '.join(KINDS)}")
        if self.total < 1:
            problems.add("total steps", f"{self.total}; at least one is needed")
        if not 0 <= self.warmup <= max(self.total, 0):
            problems.add("warmup_steps", f"{self.warmup} of {self.total} steps", "they are part of the total")
        if not 0 <= self.min_ratio <= 1:
            problems.add("min_lr_ratio", f"{self.min_ratio} is not between 0 and 1")
        if not math.isfinite(self.lr) or self.lr < 0:
            problems.add("lr", f"{self.lr} is no learning rate")
        problems.raise_as(ConfigError, "This learning-rate schedule cannot be.")

    @classmethod
    def of(cls, config: OptimizerConfig, total: int | None) -> Schedule:
        """As the configuration has it: `warmup_steps`, or else a proportion of the total, rounded down. Of a training
        whose length is not known (None), the rate stays what it is."""
        if total is None:
            return cls("constant", config.lr, 1)
        return cls(config.lr_scheduler_type, config.lr, total, config.warmup_of(total), config.min_lr_ratio)

    def factor(self, step: int) -> float:
        """The rate at a step as a share of `lr`. Steps beyond the total stay where it ended."""
        if step < self.warmup:
            return step / self.warmup
        if self.kind == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        left = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_ratio + (1.0 - self.min_ratio) * left

    def at(self, step: int) -> float:
        """The rate with which the optimizer takes its step number `step`, counted from 0."""
        return self.lr * self.factor(step)
