"""Keys and values of a batch of sequences of different lengths: padded on the left, so that all write one column."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GROW = 64
"""Columns that are added at a time: growing copies the batch's keys, and must not happen at every token."""


@cache
def _layer_class() -> type[Any]:
    """transformers' layer that grows by concatenation, with room to write into instead. Made late: it needs torch."""
    from transformers.cache_utils import DynamicLayer

    class Roomy(DynamicLayer):
        """`keys` and `values` are views of the filled part of `room`."""

        room: list[Any] | None = None

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            have = 0 if self.room is None else self.keys.shape[-2]  # type: ignore[union-attr]
            need = have + key_states.shape[-2]
            if self.room is None or self.room[0].shape[-2] < need:
                self._grow((key_states, value_states), have, need)
            assert self.room is not None
            for room, new in zip(self.room, (key_states, value_states), strict=True):
                room[:, :, have:need] = new
            self.keys, self.values = (room[:, :, :need] for room in self.room)
            return self.keys, self.values

        def _grow(self, new: Any, have: int, need: int) -> None:
            room = []
            for old, like in zip(self.room or (None, None), new, strict=True):
                size = (like.shape[0], like.shape[1], need + GROW, like.shape[3])
                larger = like.new_empty(size)
                if old is not None:
                    larger[:, :, :have] = old[:, :, :have]
                room.append(larger)
            self.room = room

        def replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
            """Hold exactly these, in memory of its own."""
            self.room = [keys, values]
            self.keys, self.values = keys, values
            self.is_initialized = True

    return Roomy


def new_cache() -> Any:
    """An empty cache for one batch: every layer holds all positions; windows are the attention mask's business."""
    from transformers.cache_utils import Cache

    return Cache(layer_class_to_replicate=_layer_class())


def select(cached: Any, rows: Sequence[int], skip: int) -> None:
    """Keep these rows (any may come several times), without the first `skip` columns."""
    import torch

    for layer in cached.layers:
        index = torch.tensor(rows, device=layer.keys.device)
        layer.replace(*(part[:, :, skip:].index_select(0, index) for part in (layer.keys, layer.values)))


def merge(first: Any, second: Any) -> Any:
    """Both batches as one, the shorter padded on its left."""
    import torch

    merged = new_cache()
    for a, b in zip(first.layers, second.layers, strict=True):
        layer = _layer_class()()
        layer.lazy_initialization(a.keys, a.values)
        layer.replace(*(_stack(torch, x, y) for x, y in ((a.keys, b.keys), (a.values, b.values))))
        merged.layers.append(layer)
    return merged


def _stack(torch: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    width = max(a.shape[2], b.shape[2])
    out = a.new_zeros((a.shape[0] + b.shape[0], a.shape[1], width, a.shape[3]))
    out[: a.shape[0], :, width - a.shape[2] : width] = a
    out[a.shape[0] :, :, width - b.shape[2] : width] = b
    return out
