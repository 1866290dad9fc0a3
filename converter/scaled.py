"""FP8 with block scales, as DeepSeek-V3 stores it: read as the values that it stands for.

A weight `[rows, cols]` of F8_E4M3 comes with `<name>_scale_inv`, fp32, one factor for each block of 128 × 128 (the last
ones smaller). The value is `float32(weight) · factor`, rounded once to bfloat16, as DeepSeek's own `weight_dequant`
does (github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py). Declared exactness: `dequant`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .codecs import Array, bits, cast
from .slots import Box, Ints, Scale

VALUES = "BF16"
"""The type in which scaled weights are handed on."""

SLAB = 1 << 20
"""Elements dequantised in one go."""


def dequantise(raw: Array, factors: Array, scale: Scale, box: Box) -> Array:
    """Values (bfloat16 bits) of one box of a block-scaled weight.

    raw      the box as stored, one byte an element; `factors` those of the whole weight, fp32
    """
    values = cast(raw, scale.stored, "F32").view(np.float32)
    rows = _coordinates(box, scale.rows, scale.base[0]) // scale.block[0]
    cols = _coordinates(box, scale.cols, scale.base[1]) // scale.block[1]
    return cast((values * factors[rows, cols]).view(bits(4)), "F32", VALUES)


def _coordinates(box: Box, strides: Ints, base: int) -> Array:
    """The row (or column) of every element of a box, shaped to broadcast over it. `strides` are 0 for other axes."""
    total = np.full((1,) * len(strides), base, np.int64)
    for axis, stride in enumerate(strides):
        if stride:
            shape = [1] * len(strides)
            shape[axis] = -1
            total = total + (np.arange(box.lo[axis], box.hi[axis], dtype=np.int64) * stride).reshape(shape)
    return total


def slabs(box: Box) -> Iterator[Box]:
    """Pieces of a box of about SLAB elements, along its first axis."""
    sizes = box.sizes
    step = max(1, SLAB // max(1, box.volume // max(1, sizes[0])))
    for start in range(box.lo[0], box.hi[0], step):
        yield Box((start, *box.lo[1:]), (min(start + step, box.hi[0]), *box.hi[1:]))
