"""FP8 with block scales on the fly, in the form that DeepSeek's and Qwen's FP8 checkpoints have on disk.

A weight `[rows, cols]` becomes F8_E4M3 and `<name>_scale_inv`, fp32, one factor for each block of 128 × 128 (the last
ones smaller): factor = largest magnitude of the block / 448, weight = value / factor, rounded to nearest even. A block
of zeros has the factor 1. `scaled.py` reads it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...codecs import Array, bits, cast, numpy_dtype
from ...dtypes import FLOATS
from ...errors import Problems, ServerRefused
from ...opening import open_checkpoint
from ..sink import Wanted

LARGEST = 448.0
"""Of F8_E4M3 (OCP 8-bit floating point)."""
STORED = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which tensors a server holds as FP8: weight → name of its scales; `block` rows and columns to one factor."""

    scales: Mapping[str, str]
    block: tuple[int, int]

    def said(self) -> str:
        """What a push does to the weights, for its report."""
        rows, columns = self.block
        return f"{len(self.scales)} tensors were quantised to {STORED} with a factor for {rows} × {columns} values"

    def expand(self, wanted: Sequence[Wanted], url: str) -> list[Wanted]:
        """What is sent instead: the quantised weights, each followed by its scales. Raises ServerRefused for weights
        that the server holds as FP8 and nobody sends, or that are no matrices of floating point."""
        problems, found = Problems(), list[Wanted]()
        for name in sorted(self.scales.keys() - {w.name for w in wanted}):
            problems.add(name, "is FP8 on the server, and the model to send does not have it")
        for want in wanted:
            if want.name not in self.scales:
                found.append(want)
            elif len(want.shape) != 2 or want.dtype not in FLOATS:
                problems.add(want.name, f"is {want.dtype} {list(want.shape)}; FP8 blocks want a matrix of floats")
            else:
                shape = tuple(-(-n // b) for n, b in zip(want.shape, self.block, strict=True))
                found.append(Wanted(want.name, want.shape, STORED))
                found.append(Wanted(self.scales[want.name], shape, "F32"))
        if problems:
            raise ServerRefused("mismatch", f"{url} holds FP8 that cannot be made of this model:", problems.found)
        return found

    def tensors(self, read: Iterable[tuple[Wanted, Array]]) -> Iterator[tuple[Wanted, Array]]:
        """The tensors of a feed with those of the recipe quantised, in the order of `expand`."""
        for want, data in read:
            if want.name not in self.scales:
                yield want, data
                continue
            weight, scale = quantise(data, want.dtype, self.block)
            yield Wanted(want.name, want.shape, STORED), weight
            yield Wanted(self.scales[want.name], scale.shape, "F32"), scale


def recipe_of(directory: str | Path) -> Recipe:
    """What an FP8 model directory holds quantised, by its headers. Raises SourceError for what is no checkpoint, and
    ServerRefused for one that holds no FP8."""
    ckpt = open_checkpoint(directory)
    said = ckpt.config.get("quantization_config")
    given = said.get("weight_block_size") if isinstance(said, Mapping) else None
    rows, cols = given if isinstance(given, (list, tuple)) and len(given) == 2 else (128, 128)
    names = {t.name for t in ckpt.found.tensors} | {t.scale.name for t in ckpt.found.tensors if t.scale}
    scales = {
        t.name: t.scale.name if t.scale else f"{t.name}_scale_inv"
        for t in ckpt.found.tensors
        if t.dtype == STORED and (t.scale is not None or f"{t.name}_scale_inv" in names)
    }
    if not scales:
        raise ServerRefused("mismatch", f"{directory} holds no FP8 weights with block scales.")
    return Recipe(scales, (int(rows), int(cols)))


def quantise(data: Array, dtype: str, block: tuple[int, int] = (128, 128)) -> tuple[Array, Array]:
    """Raw bits of a matrix [rows, cols] of `dtype` → (F8_E4M3 bits [rows, cols], fp32 bits of the factors)."""
    rows, cols = data.shape
    high, wide = block
    counts = (-(-rows // high), -(-cols // wide))
    out = np.empty((rows, cols), np.uint8)
    factors = np.ones(counts, np.float32)
    for i in range(counts[0]):  # a row of blocks at a time: fp32 of it is all that is held besides
        slab = np.ascontiguousarray(data[i * high : (i + 1) * high])
        values = cast(slab, dtype, "F32").view(np.float32)
        starts = np.arange(0, cols, wide)
        largest = np.maximum.reduceat(np.abs(values).max(axis=0), starts)
        factors[i] = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1))
        scaled = np.clip(values / np.repeat(factors[i], wide)[:cols], -LARGEST, LARGEST)
        out[i * high : (i + 1) * high] = scaled.astype(numpy_dtype(STORED)).view(np.uint8)
    return out, factors.view(bits(4))
