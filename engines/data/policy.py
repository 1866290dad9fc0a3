"""Policy-gradient training: which fields samples need, and what is derived from them batch by batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..api.base import TrainEngine
from ..api.run import LossConfig
from ..losses import group_advantages, per_token
from .batches import Batch, lengths, unshift

__all__ = ["Completion", "needed"]


def needed(loss: LossConfig) -> tuple[str, ...]:
    """Fields that every sample must have for this loss."""
    if loss.kind == "sft":
        return ()
    own = "reward" if loss.kind == "grpo" else "advantages"
    return (own, "ref_logprobs") if loss.kl_coef else (own,)


@dataclass(frozen=True)
class Completion:
    """Adds to a batch what its loss needs and its samples do not have."""

    engine: TrainEngine
    loss: LossConfig

    def __call__(self, batch: Batch) -> Batch:
        added: Batch = dict(batch)
        if self.loss.kind == "grpo":
            scores = group_advantages(
                batch["reward"],
                self.loss.group_size,
                scale=self.loss.scale_advantages,
                leave_one_out=self.loss.leave_one_out,
            )
            added["advantages"] = per_token(scores, batch)
        if "old_logprobs" not in batch:
            added["old_logprobs"] = self._current(batch)
        if "versions" in batch:
            added["current_version"] = self.engine.get_version()
        return added

    def _current(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Logprobs under the policy as it is now: the samples are its own."""
        self.engine.eval()
        found = self.engine.forward_batch(dict(batch), output_seqlens=lengths(batch))
        assert isinstance(found, torch.Tensor)
        return unshift(found.detach().float().cpu(), batch["cu_seqlens"])
