"""A micro-batch through transformers' model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..api.configs import TrainEngineConfig
from ..forward import Forward, Rows


@dataclass(frozen=True, kw_only=True)
class ModelForward(Forward):
    """With the model itself. `aux_loss`: the coefficient of the routers' auxiliary loss."""

    model: nn.Module
    aux_loss: float = 0.0

    def logits(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """(rows, vocabulary) of this rank's slice of tokens and of the vocabulary; and the routers' auxiliary loss."""
        out: Any = self.model(
            input_ids=rows.ids[None], position_ids=rows.positions[None], packing=rows.packing, use_cache=False
        )
        # Not `[0]`, whose gradient would be another tensor of that size.
        return out.logits.squeeze(0), getattr(out, "aux_loss", None) if self.aux_loss else None


def aux_loss_of(hf_config: Any, config: TrainEngineConfig) -> float:
    """The coefficient of the routers' load-balancing loss: the model's own, when its config.json asks for the loss."""
    if config.is_critic or not getattr(hf_config, "output_router_logits", False):
        return 0.0
    return float(getattr(hf_config, "router_aux_loss_coef", 0.0))
