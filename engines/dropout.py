"""Dropout where several ranks share a batch: each has masks of its own for what it has of its own.

Ranks with the same batch draw the same numbers, since what all of them compute has to be equal (the noise of a router
that sees the whole sequence). A dropout works on a rank's own heads, or on its own slice of the tokens: with the same
numbers every rank would drop the same places of its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["own_masks", "own_stream"]


@contextmanager
def own_stream(stream: int | None, device: torch.device) -> Iterator[None]:
    """Inside, random numbers are those of this stream; outside, the shared generators have moved on by the same number
    on every rank. None: nothing is shared, nothing changes."""
    if stream is None:
        yield
        return
    shared = int(torch.randint(1 << 62, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(shared + stream)
        yield


def own_masks(model: nn.Module, stream: int) -> None:
    """Every dropout layer of the model draws from this stream."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            _draw_apart(module, stream)


def _draw_apart(module: Any, stream: int) -> None:
    inner = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return inner(x)
        with own_stream(stream, x.device):
            return inner(x)

    module.forward = torch.compiler.disable(forward)
