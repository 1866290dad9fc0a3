"""Whether boxes tile a tensor exactly, in time linear in their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

MAX_CUT_AXES = 8  # the check takes 2**axes steps for each box
_COMPARED = 200
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def cover_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """What is wrong with `boxes` as a partition of a tensor of this shape, or nothing."""
    if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape):
        return ""
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"a chunk at {list(offsets)} of {list(sizes)} has other dimensions than the tensor, {list(shape)}"
        if any(at + size > extent for at, size, extent in zip(offsets, sizes, shape, strict=True)):
            return f"a chunk at {list(offsets)} of {list(sizes)} reaches beyond the tensor, {list(shape)}"
    axes = [axis for axis, extent in enumerate(shape) if any(sizes[axis] != extent for _, sizes in boxes)]
    if len(axes) > MAX_CUT_AXES:
        return f"is cut along {len(axes)} axes; more than {MAX_CUT_AXES} are not read"
    if _partitions(shape, boxes, axes):
        return ""
    return _describe(shape, boxes)


def _partitions(shape: tuple[int, ...], boxes: Sequence[Box], axes: list[int]) -> bool:
    """Exact, not a volume count: a hole and an overlap of equal size do not cancel.

    The mixed difference of a box's indicator function is +1 or -1 at its corners and 0 elsewhere, and it determines
    the function. So boxes sum up to the whole exactly when their signed corners sum up to the whole's.
    """
    if math.prod(shape) == 0:
        return True  # there is nothing to cover
    corners: dict[tuple[int, ...], int] = {}
    signs = [1]
    for _ in axes:
        signs = [sign for one in signs for sign in (one, -one)]
    whole = ((0,) * len(shape), shape)
    for weight, (offsets, sizes) in ((-1, whole), *((1, box) for box in boxes)):
        edges = [(offsets[axis], offsets[axis] + sizes[axis]) for axis in axes]
        for corner, sign in zip(product(*edges), signs, strict=True):
            corners[corner] = corners.get(corner, 0) + weight * sign
    return not any(corners.values())


def _describe(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    for index, (offsets, sizes) in enumerate(boxes[:_COMPARED]):
        for other, extents in boxes[:index]:
            if _overlap(offsets, sizes, other, extents):
                return f"the chunks at {list(other)} of {list(extents)} and at {list(offsets)} of {list(sizes)} overlap"
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    return f"its {len(boxes)} chunks hold {covered} elements and do not cover the {math.prod(shape)} of {list(shape)}"


def _overlap(at: tuple[int, ...], sizes: tuple[int, ...], other: tuple[int, ...], extents: tuple[int, ...]) -> bool:
    return all(
        max(a, b) < min(a + size, b + extent) for a, size, b, extent in zip(at, sizes, other, extents, strict=True)
    )
