"""Boxes, slots, and the arithmetic that turns a range of a flattened dimension into boxes of an atom.

A `Slot` is the home of one box of one atom: a byte offset in a buffer and a byte stride for each axis. QKV interleave,
fused gate and up, TP cuts, stacked layers and experts, uneven FSDP rows: each is only other numbers in a slot.
Offsets and strides are computed here and in `layout.py`, nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from operator import sub
from typing import NamedTuple

Ints = tuple[int, ...]


class Box(NamedTuple):
    """The elements `lo <= index < hi`, axis by axis."""

    lo: Ints
    hi: Ints

    @property
    def sizes(self) -> Ints:
        return tuple(map(sub, self.hi, self.lo))

    @property
    def volume(self) -> int:
        return prod(map(sub, self.hi, self.lo))


def whole(shape: Ints) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def within(box: Box, outer: Box, shape: Ints) -> Box | None:
    """`intersect`, at no cost where `outer` is all of `shape`: most atoms are moved in one chunk."""
    return box if outer.hi == shape and not any(outer.lo) else intersect(box, outer)


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes have in common, or None."""
    if a is b or a == b:
        return a
    lo = tuple(map(max, a.lo, b.lo))
    hi = tuple(map(min, a.hi, b.hi))
    return Box(lo, hi) if all(a < b for a, b in zip(lo, hi, strict=True)) else None


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A run of bytes that holds one tensor, or one piece of it.

    file   path of the file (relative to the target's directory when it is still to be written)
    begin  first byte in that file
    size   bytes
    name   the tensor's name there, for messages
    """

    file: str
    begin: int
    size: int
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Block scales of a quantised matrix: where they are, and how an atom's axes run over its rows and columns.

    stored      the matrix' element type on disk; `block` rows and columns to one factor
    rows, cols  for each axis of the atom, how far it moves along rows and columns; `base` where it begins
    """

    buffer: Buffer
    shape: Ints
    dtype: str
    stored: str
    block: tuple[int, int]
    rows: Ints
    cols: Ints
    base: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Where one box of one atom lives.

    offset   of the box's first element, in bytes from the start of `buffer`
    strides  bytes between neighbours, for each axis of the atom
    dtype    of the values; what is stored differs only where there is a `scale`
    copy     0 for the tensor itself; others are replicas (TP ranks' norms, EP ranks' dense weights, tied heads)
    """

    box: Box
    buffer: Buffer
    offset: int
    strides: Ints
    dtype: str
    copy: int = 0
    scale: Scale | None = None

    def at(self, lo: Ints) -> int:
        """Byte offset in the file of the element `lo` (in the atom's coordinates)."""
        if lo is self.box.lo:
            return self.buffer.begin + self.offset
        inside = sum((x - o) * s for x, o, s in zip(lo, self.box.lo, self.strides, strict=True))
        return self.buffer.begin + self.offset + inside


@lru_cache(maxsize=65536)
def split_range(lo: int, hi: int, axes: tuple[tuple[int, int], ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Write the coordinates `lo <= Σ index·stride < hi` as few boxes over the axes of a flattened dimension.

    axes: (size, stride) from the outermost to the innermost; a stride is at least the extent of what lies inside it.
    Returns boxes, each a (start, stop) for every axis. `lo` may be negative and `hi` beyond the end.

    >>> split_range(3, 8, ((3, 4), (4, 1)))      # rows of 4; elements 3 to 7
    (((0, 1), (3, 4)), ((1, 2), (0, 4)))
    """
    if not axes:
        return ((),) if lo <= 0 < hi else ()
    (count, stride), inner = axes[0], axes[1:]
    extent = 1 + sum((n - 1) * s for n, s in inner)
    first = max(0, (lo - extent) // stride + 1)
    last = min(count, -((-hi) // stride))
    full_first = min(max(first, -((-lo) // stride)), last)
    full_last = max(min(last, (hi - extent) // stride + 1), full_first)
    boxes: list[tuple[tuple[int, int], ...]] = []
    for i in range(first, full_first):
        boxes += [((i, i + 1), *rest) for rest in split_range(lo - i * stride, hi - i * stride, inner)]
    if full_first < full_last:
        boxes.append(((full_first, full_last), *((0, n) for n, _ in inner)))
    for i in range(full_last, last):
        boxes += [((i, i + 1), *rest) for rest in split_range(lo - i * stride, hi - i * stride, inner)]
    return tuple(boxes)


def tiles(boxes: Sequence[Box], shape: Ints) -> bool:
    """Whether the boxes cover `shape` with every element exactly once. Near-linear for the cuts that meshes make."""
    if sum(b.volume for b in boxes) != prod(shape):
        return False
    if any(a < 0 or b > n for box in boxes for a, b, n in zip(box.lo, box.hi, shape, strict=True)):
        return False
    return len(boxes) <= 1 or _disjoint(list(boxes), 0)


def _disjoint(boxes: list[Box], axis: int) -> bool:
    """No two boxes overlap. Boxes are sorted along one axis after the other; ranges that merely touch are apart."""
    if len(boxes) <= 1:
        return True
    if axis == len(boxes[0].lo):
        return False
    boxes.sort(key=lambda b: (b.lo[axis], b.hi[axis]))
    group: list[Box] = [boxes[0]]
    end = boxes[0].hi[axis]
    for box in boxes[1:]:
        if box.lo[axis] < end:
            group.append(box)
            end = max(end, box.hi[axis])
        else:
            if not _apart(group, axis):
                return False
            group, end = [box], box.hi[axis]
    return _apart(group, axis)


def _apart(group: list[Box], axis: int) -> bool:
    """Boxes whose ranges along `axis` hang together: they must be apart along the later axes."""
    if len(group) == 1:
        return True
    same = len({(b.lo[axis], b.hi[axis]) for b in group}) == 1
    if same or len(group) > 64:
        return _disjoint(group, axis + 1) if same else _pairwise(group)
    return _pairwise(group)


def _pairwise(boxes: Sequence[Box]) -> bool:
    return all(intersect(a, b) is None for n, a in enumerate(boxes) for b in boxes[n + 1 :])


@lru_cache(maxsize=65536)
def row_major(shape: Ints, itemsize: int) -> Ints:
    """Byte strides of a contiguous tensor."""
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


class Run(NamedTuple):
    """How a strided box lies in memory once neighbouring axes that touch are merged: `block` contiguous bytes,
    repeated over (count, stride) loops, outermost first."""

    block: int
    loops: tuple[tuple[int, int], ...]

    @property
    def span(self) -> int:
        """Bytes from the first to the last byte that the box touches."""
        return self.block + sum((n - 1) * s for n, s in self.loops)

    @property
    def pieces(self) -> int:
        return prod(n for n, _ in self.loops)


@lru_cache(maxsize=65536)
def runs(sizes: Ints, strides: Ints, itemsize: int) -> Run:
    """Merge the axes of a box into contiguous blocks and loops over them."""
    block = itemsize
    loops: list[tuple[int, int]] = []
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if not loops and stride == block:
            block *= size
        elif loops and stride == loops[-1][0] * loops[-1][1]:
            loops[-1] = (loops[-1][0] * size, loops[-1][1])
        else:
            loops.append((size, stride))
    return Run(block, tuple(reversed(loops)))


def starts(run: Run) -> Iterable[int]:
    """Byte offset of every block of a run, in the order of the axes."""
    return (sum(offsets) for offsets in product(*([i * s for i in range(n)] for n, s in run.loops)))
