"""The blocks of a manifest: numbered through all senders' boxes, cut alike by hub and servers.

A box is cut as `execute.chunks` cuts an atom: along its leading axes, into parts of at most `manifest.block` bytes that
follow each other in row-major order. A block's box is computed from its number, so a model of terabytes costs one entry
for each box and none for each block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import prod
from operator import sub
from typing import NamedTuple

import numpy as np

from ..codecs import Array
from ..dtypes import BY_NAME
from ..errors import ConvertError, Problems
from ..slots import Box, Ints, tiles
from .wire import MOST_NUMBERS, Manifest


class _Cut(NamedTuple):
    """How one box falls into blocks: `step` along `axis`, once for each index of the axes before it.

    first  number of its first block; `blocks` of them
    parts  blocks along `axis`; `inner` bytes of one index of `axis`; `axis` -1: the box is one block
    """

    atom: int
    lo: Ints
    hi: Ints
    first: int
    blocks: int
    axis: int
    step: int
    parts: int
    inner: int


def _cut(atom: int, lo: Ints, hi: Ints, itemsize: int, limit: int, first: int) -> _Cut:
    sizes = tuple(map(sub, hi, lo))
    inner, axis = itemsize, len(sizes)
    while axis > 0 and inner * sizes[axis - 1] <= limit:
        axis -= 1
        inner *= sizes[axis]
    if axis == 0:
        return _Cut(atom, lo, hi, first, 1, -1, 0, 1, inner)
    axis -= 1
    step = max(1, limit // inner)
    parts = -(-sizes[axis] // step)
    return _Cut(atom, lo, hi, first, prod(sizes[:axis]) * parts, axis, step, parts, inner)


class Run(NamedTuple):
    """Blocks of a bucket that follow each other in one box: their bytes are one part of the box's, in row-major order.

    cut     number of the box (of all senders together); `atom` of the manifest, `lo` and `hi` of the box
    at      where its first block stands in the bucket; `blocks` of them
    begin   where its bytes begin among the box's; `nbytes` of them
    """

    cut: int
    atom: int
    lo: Ints
    hi: Ints
    at: int
    blocks: int
    begin: int
    nbytes: int


class Blocks:
    """All blocks of a manifest.

    count   how many there are; `total` their bytes
    largest bytes of the largest (more than `manifest.block` only where one element is)
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        sizes = [BY_NAME[atom.dtype].size for atom in manifest.atoms]
        self._cuts: list[_Cut] = []
        self._senders: list[range] = []
        first = 0
        for boxes in manifest.senders:
            begin = first
            for atom, lo, hi in boxes:
                cut = _cut(atom, lo, hi, sizes[atom], manifest.block, first)
                self._cuts.append(cut)
                first += cut.blocks
            self._senders.append(range(begin, first))
        self._starts = [cut.first for cut in self._cuts]
        self._firsts = np.array(self._starts, np.int64)
        self.count = first
        self._itemsizes = sizes
        self.total = sum(self._box_bytes(cut) for cut in self._cuts)
        self.largest = max(map(self._largest, self._cuts), default=0)

    def of_sender(self, sender: int) -> range:
        """The numbers of a sender's blocks, in the order in which it sends them."""
        return self._senders[sender]

    def box(self, number: int) -> tuple[int, Ints, Ints]:
        """A block: the number of its atom, lower and upper bounds. Raises IndexError for a number that is none."""
        cut = self._cut_of(number)
        if cut.axis < 0:
            return cut.atom, cut.lo, cut.hi
        lead, part = divmod(number - cut.first, cut.parts)
        lo, hi = list(cut.lo), list(cut.hi)
        for axis in range(cut.axis - 1, -1, -1):
            lead, index = divmod(lead, cut.hi[axis] - cut.lo[axis])
            lo[axis] = cut.lo[axis] + index
            hi[axis] = lo[axis] + 1
        lo[cut.axis] = cut.lo[cut.axis] + part * cut.step
        hi[cut.axis] = min(lo[cut.axis] + cut.step, cut.hi[cut.axis])
        return cut.atom, tuple(lo), tuple(hi)

    def nbytes(self, number: int) -> int:
        """Bytes of a block."""
        cut = self._cut_of(number)
        if cut.axis < 0:
            return cut.inner
        part = (number - cut.first) % cut.parts
        length = cut.hi[cut.axis] - cut.lo[cut.axis]
        return min(cut.step, length - part * cut.step) * cut.inner

    def lengths(self, numbers: range | Array) -> Array:
        """Bytes of many blocks at once, int64."""
        n = np.asarray(numbers, np.int64)
        if not n.size:
            return np.zeros(0, np.int64)
        which = np.searchsorted(self._firsts, n, side="right") - 1
        axis, first, step, parts, inner, length = self._columns().T[:, which]
        part = (n - first) % parts
        return np.where(axis < 0, inner, np.minimum(step, length - part * step) * inner)

    def runs(self, numbers: Array, lengths: Array) -> list[Run]:
        """The runs of a bucket's blocks, in its order. `lengths` of the same blocks, in bytes."""
        n = np.asarray(numbers, np.int64)
        if not n.size:
            return []
        which = np.searchsorted(self._firsts, n, side="right") - 1
        breaks = np.flatnonzero((np.diff(n) != 1) | (np.diff(which) != 0)) + 1
        starts = [0, *breaks.tolist()]
        sums = np.add.reduceat(lengths, starts).tolist()
        found = []
        for at, end, nbytes in zip(starts, [*starts[1:], n.size], sums, strict=True):
            number = int(which[at])
            cut = self._cuts[number]
            lead, part = divmod(int(n[at]) - cut.first, cut.parts)
            row = (cut.hi[cut.axis] - cut.lo[cut.axis]) * cut.inner if cut.axis >= 0 else 0
            begin = lead * row + part * cut.step * cut.inner
            found.append(Run(number, cut.atom, cut.lo, cut.hi, at, end - at, begin, nbytes))
        return found

    def _columns(self) -> Array:
        found: Array | None = getattr(self, "_table", None)
        if found is None:
            rows = [
                (c.axis, c.first, c.step, c.parts, c.inner, c.hi[c.axis] - c.lo[c.axis] if c.axis >= 0 else 0)
                for c in self._cuts
            ]
            found = self._table = np.array(rows, np.int64).reshape(len(rows), 6)
        return found

    def _cut_of(self, number: int) -> _Cut:
        if not 0 <= number < self.count:
            raise IndexError(f"There is no block {number}; the manifest has {self.count}.")
        return self._cuts[bisect_right(self._starts, number) - 1]

    def _box_bytes(self, cut: _Cut) -> int:
        return prod(map(sub, cut.hi, cut.lo)) * self._itemsizes[cut.atom]

    @staticmethod
    def _largest(cut: _Cut) -> int:
        return cut.inner if cut.axis < 0 else min(cut.step, cut.hi[cut.axis] - cut.lo[cut.axis]) * cut.inner


def check_tiling(manifest: Manifest, error: type[ConvertError], what: str) -> None:
    """Every element of every atom must be sent exactly once, by whichever sender. Raises `error` with all that is not
    so."""
    problems = Problems()
    names: set[str] = set()
    for atom in manifest.atoms:
        if atom.name in names:
            problems.add(atom.name, "stands in the manifest twice")
        names.add(atom.name)
    boxes: list[list[Box]] = [[] for _ in manifest.atoms]
    for sender in manifest.senders:
        for atom, lo, hi in sender:
            boxes[atom].append(Box(lo, hi))
    for atom, parts in zip(manifest.atoms, boxes, strict=True):
        if not parts:
            problems.add(atom.name, "no sender has it")
        elif not tiles(parts, atom.shape):
            held, total = sum(box.volume for box in parts), prod(atom.shape)
            how = "some more than once" if held >= total else "the others are missing"
            problems.add(atom.name, f"{held} of its {total} elements would be sent, {how}")
    problems.raise_as(error, what)


def by_bucket(blocks: Blocks, numbers: Iterable[int], limit: int) -> Iterable[tuple[list[int], int]]:
    """Gather block numbers into buckets whose payload (4 bytes for each number, and the blocks) is at most `limit`, and
    which have at most MOST_NUMBERS blocks.

    Yields (numbers, bytes of the payload). A block that is larger than the limit alone makes a bucket of its own.
    """
    held: list[int] = []
    filled = 0
    for number in numbers:
        size = blocks.nbytes(number) + NUMBER_BYTES
        if held and (filled + size > limit or len(held) == MOST_NUMBERS):
            yield held, filled
            held, filled = [], 0
        held.append(number)
        filled += size
    if held:
        yield held, filled


def parts_of(runs: Iterable[Run]) -> list[list[Run]]:
    """How a bucket's bytes are cut where they travel in several messages: a long run alone, so that it may be sent from
    where it lies and received where it belongs; the short ones between two long ones together. Both sides cut alike."""
    found: list[list[Run]] = []
    for run in runs:
        if found and run.nbytes < LONG and found[-1][0].nbytes < LONG:
            found[-1].append(run)
        else:
            found.append([run])
    return found


LONG = 1 << 20
"""Bytes from which on a run is worth a message of its own: one takes about as long as this much does in one that is
under way already. Part of the protocol, as `MOST_NUMBERS` is: both sides cut by it."""

NUMBER_BYTES = 4
"""Of a block's number in a payload (uint32)."""


def whole_boxes(shapes: Sequence[Ints]) -> list[tuple[int, Ints, Ints]]:
    """Every atom as one box: what a single sender says that it sends."""
    return [(n, (0,) * len(shape), tuple(shape)) for n, shape in enumerate(shapes)]
