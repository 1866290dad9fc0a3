"""Routers that are balanced by a bias of each expert: what is counted, and when it moves.

Megatron-Core counts and moves in every backward pass. Here padding counts nothing, whole numbers stay whole under half
precision, and a step that is not taken moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KeptBiases", "count_tokens_alone", "has_losses", "takes_masks"]


def has_losses(core: Any) -> bool:
    """Whether routers have losses of their own, from which padding has to be left out."""
    losses = core.moe_z_loss_coeff or (core.moe_router_load_balancing_type != "none" and core.moe_aux_loss_coeff)
    return core.num_moe_experts is not None and bool(losses)


def takes_masks(core: Any) -> bool:
    """Whether routers have to be told what is padding: it would count as tokens do."""
    moves = core.moe_router_enable_expert_bias and core.moe_router_bias_update_rate
    return has_losses(core) or (core.num_moe_experts is not None and bool(moves))


def count_tokens_alone(chunks: Iterable[nn.Module]) -> None:
    """Have routers leave padding out of what they count, in fp32.

    Megatron-Core (0.16) applies the mask along the wrong axis there, and half precision, to which the counts are cast
    with everything else, does not know all whole numbers above 256.
    """
    for router in _routers(chunks):
        router.local_tokens_per_expert = router.local_tokens_per_expert.float()
        router._apply_expert_bias = _masked(router._apply_expert_bias)


def _masked(count: Any) -> Any:
    def without_padding(routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        count(routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])

    return without_padding


class KeptBiases:
    """What the biases were at the last step, until the next one is taken."""

    def __init__(self, chunks: Iterable[nn.Module]) -> None:
        self._biases: list[Tensor] = [router.expert_bias for router in _routers(chunks)]
        self._kept: list[Tensor] | None = None

    def keep(self) -> None:
        """Before a backward pass; a second one before the step changes nothing."""
        if self._kept is None:
            self._kept = [bias.clone() for bias in self._biases]

    @torch.no_grad()
    def settle(self, *, taken: bool) -> None:
        """The step was taken, or not: then everything goes back."""
        if self._kept is not None and not taken:
            for bias, kept in zip(self._biases, self._kept, strict=True):
                bias.copy_(kept)
        self._kept = None


def _routers(chunks: Iterable[nn.Module]) -> Iterator[Any]:
    return (
        module
        for chunk in chunks
        for module in chunk.modules()
        if getattr(module, "enable_expert_bias", False) and getattr(module, "expert_bias", None) is not None
    )
