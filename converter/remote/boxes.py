"""Strided boxes of remote files: which bytes hold them, and how they are put together from what was fetched.

A local file is read through a mapping, gaps and all; here a gap costs time on the wire. So a box becomes runs of bytes
that are wanted, each at least RUN long where the box allows it, and only those are fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from ..codecs import Array, bits
from ..dtypes import BY_NAME
from ..slots import Box, Ints, Slot
from .mounts import remote_file

RUN = 256
"""Bytes: pieces shorter than this are fetched together with what lies between them, where that is at most NEAR. A
request's own headers are about as long as a gap of such a piece."""

NEAR = 8 * 1024

Read = Callable[[str, int, memoryview], None]
"""Fills memory from a file, from a byte on."""


class Runs(NamedTuple):
    """A box as equal runs of bytes. The array that holds them one after the other has the shape `outer + (block,)`.

    order    the box's axes, from the largest stride to the smallest
    outer    sizes of the axes over which runs repeat; `outer_strides` bytes in the file
    block    bytes of a run; `inner` sizes and `inner_strides` of the axes inside it
    """

    order: Ints
    start: int
    outer: Ints
    outer_strides: Ints
    block: int
    inner: Ints
    inner_strides: Ints

    def starts(self) -> Iterator[int]:
        """First byte of every run."""
        if not self.outer:
            return iter((self.start,))
        steps = (range(0, n * s, s) if n else range(0) for n, s in zip(self.outer, self.outer_strides, strict=True))
        return (self.start + sum(offsets) for offsets in product(*steps))


def runs_of(slot: Slot, box: Box) -> Runs:
    """The runs that hold one box of a slot (of what is stored, where there is a scale)."""
    itemsize = stored_size(slot)
    sizes, strides = box.sizes, slot.strides
    order = tuple(sorted(range(len(sizes)), key=lambda axis: (sizes[axis] > 1, -strides[axis])))
    block, split = itemsize, len(order)
    while split > 0:
        size, stride = sizes[order[split - 1]], strides[order[split - 1]]
        if size > 1 and stride != block and (block >= RUN or stride - block > NEAR):
            break
        block += (size - 1) * stride if size > 1 else 0
        split -= 1
    outer, inner = order[:split], order[split:]
    return Runs(
        order,
        slot.at(box.lo),
        tuple(sizes[a] for a in outer),
        tuple(strides[a] for a in outer),
        block,
        tuple(sizes[a] for a in inner),
        tuple(strides[a] for a in inner),
    )


def stored_size(slot: Slot) -> int:
    """Bytes of one element as it is stored."""
    return BY_NAME[slot.scale.stored if slot.scale is not None else slot.dtype].size


def wanted(slot: Slot, box: Box) -> Iterator[tuple[str, int, int]]:
    """File, first byte and end of everything that reading a box of a slot needs."""
    if slot.scale is not None:
        buffer = slot.scale.buffer
        size = prod(slot.scale.shape) * BY_NAME[slot.scale.dtype].size
        yield buffer.file, buffer.begin, buffer.begin + size
    runs = runs_of(slot, box)
    for start in runs.starts():
        yield slot.buffer.file, start, start + runs.block


def to_prove(slot: Slot) -> Iterator[tuple[str, int, int]]:
    """Bytes that must be looked at before the slot is read: what is supposed of them may be wrong."""
    place = remote_file(slot.buffer.file)
    supposed = place[0].unproved(place[1], slot.buffer.begin) if place is not None else None
    if supposed is not None:
        yield slot.buffer.file, supposed.begin, supposed.end


def prove(slot: Slot, read: Callable[[str, int, memoryview], object]) -> None:
    """Look at them. Raises SourceError when they are otherwise."""
    place = remote_file(slot.buffer.file)
    supposed = place[0].unproved(place[1], slot.buffer.begin) if place is not None else None
    if supposed is not None and place is not None:
        head = bytearray(supposed.end - supposed.begin)
        read(slot.buffer.file, supposed.begin, memoryview(head))
        supposed.prove(bytes(head))
        place[0].proved(place[1], slot.buffer.begin)


def read_plain(read: Read, slot: Slot, box: Box, out: Array) -> None:
    """Copy one box of a slot without scale into `out` (raw bits, the box's shape, any strides)."""
    runs = runs_of(slot, box)
    turned = out.transpose(runs.order)
    kind = bits(stored_size(slot))
    if not runs.outer and turned.flags.c_contiguous and runs.block == turned.nbytes:
        read(slot.buffer.file, runs.start, turned.reshape(-1).view(np.uint8).data)
        return
    count = prod(runs.outer)
    raw = bytearray(count * runs.block)
    memory = memoryview(raw)
    for n, start in enumerate(runs.starts()):
        read(slot.buffer.file, start, memory[n * runs.block : (n + 1) * runs.block])
    strides = [runs.block] * len(runs.outer)
    for axis in range(len(strides) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * runs.outer[axis + 1]
    np.copyto(turned, np.ndarray(runs.outer + runs.inner, kind, raw, 0, (*strides, *runs.inner_strides)))
