"""What the tensors of a Megatron checkpoint say about the model: sizes, layers, and which of them have experts."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_ROOTS = r"(?:(?:model\d*|module)\.)*"
_LAYER = re.compile(_ROOTS + r"(decoder|mtp)\.layers\.(?:(\d+)\.)?(.+)")
_OUTSIDE = re.compile(_ROOTS + r"((?:embedding|decoder|output_layer)\..+)")
EMBED, QKV, PROJ = "embedding.word_embeddings.weight", "self_attention.linear_qkv", "self_attention.linear_proj"
_CUT = {EMBED: 0, f"{QKV}.weight": 0, f"{PROJ}.weight": 1, "mlp.linear_fc1.weight": 0}
"""The dimension along which per-rank files cut what is measured here. The MLA projections are cut by one layer spec and
not by the other, experts by the expert mesh: there, arguments have to do."""


@dataclass
class Stored:
    """What the tensors say.

    shapes   name inside a layer (or outside of all) → its shape there, whole
    layers   how many; `mtp` of which kind; `dtype` what most tensors have
    sparse   layers with a router, where `indexed`: where names tell the layers of the whole model apart
    tp, stages   how many ranks cut a tensor (1 for torch_dist), and how many pipeline stages there are
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    layers: int = 0
    mtp: int = 0
    dtype: str = ""
    sparse: set[int] = field(default_factory=set)
    indexed: bool = False
    tp: int = 1
    stages: int = 1

    @classmethod
    def of(cls, found: Any) -> Stored:
        """Measure the tensors of a checkpoint; what is not the model's (an optimizer's state) is passed over."""
        places = found.facts.get("coordinates") or [(0, 0, 0)]
        self = cls(tp=1 + max(place[0] for place in places), stages=1 + max(place[1] for place in places))
        deepest: dict[tuple[int, int], int] = {}
        types: Counter[str] = Counter()
        for tensor in found.tensors:
            layer = _LAYER.fullmatch(tensor.name)
            outside = None if layer else _OUTSIDE.fullmatch(tensor.name)
            if outside is not None:
                self._measure(outside[1], tensor.shape)
            elif layer is not None:
                index = self._layer(layer[1], layer[2], layer[3], tensor.shape)
                if index is not None:
                    stage = places[tensor.rank][1] if tensor.rank < len(places) else 0
                    deepest[stage, tensor.chunk] = max(deepest.get((stage, tensor.chunk), 0), index + 1)
            if layer or outside:
                types[tensor.dtype] += 1
        self.layers = self.layers or sum(deepest.values())
        self.indexed = len(deepest) == 1  # with several stages, numbers are local
        self.dtype = max(types, key=types.__getitem__, default="")
        return self

    def _layer(self, kind: str, number: str | None, rest: str, shape: tuple[int, ...]) -> int | None:
        """Take in a tensor of a layer; returns the layer's number where the name has one."""
        if kind == "mtp":
            self.mtp = max(self.mtp, int(number or 0) + 1)
            return None
        if number is None:  # stacked: the first axis counts the layers
            self.layers = max(self.layers, shape[0])
            self._measure(rest, shape[1:])
            return None
        self._measure(rest, shape)
        if rest == "mlp.router.weight":
            self.sparse.add(int(number))
        return int(number)

    def _measure(self, name: str, shape: tuple[int, ...]) -> None:
        cut = _CUT.get(name)
        self.shapes.setdefault(name, tuple(n * self.tp if d == cut else n for d, n in enumerate(shape)))

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def size(self, name: str, dim: int, *, whole: bool = False) -> int | None:
        """A dimension of a tensor, if there is such a tensor. `whole`: it is cut in ways that are not known here."""
        shape = self.shapes.get(name)
        return shape[dim] if shape is not None and (self.tp == 1 or not whole) else None

    def half(self, name: str, *, whole: bool = False) -> int | None:
        """The width of a gated MLP, whose gate and up lie in one tensor."""
        rows = self.size(name, -2, whole=whole)
        return rows // 2 if rows else None
