"""Runs a plan: gather an atom's pieces, digest them in the atom's own order, scatter them to their homes.

An atom is handled in chunks along its leading axes, so memory is workers × a few chunks whatever the model's size.
Threads suffice: reading, writing, copying and hashing all release the GIL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from math import prod
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from .codecs import Array, bits, cast, has_nan
from .dtypes import BY_NAME
from .errors import Problems
from .plan import AtomPlan
from .rawio import Files, read_box, write_box
from .remote.fetch import Stopped
from .slots import Box, Ints, Slot, intersect, within

MIB = 1 << 20
ALGORITHM = "xxh3_128"


@dataclass(frozen=True, slots=True)
class Limits:
    """workers: threads, by default a core's each, up to eight. memory: bytes that all chunks in flight may take.

    For sources that lie elsewhere: connections: requests at the same time. max_gap: bytes between two wanted pieces
    that are fetched along rather than asked for around; by default as much as costs a few per cent of what is wanted.
    """

    workers: int = field(default_factory=lambda: min(8, len(os.sched_getaffinity(0))))
    memory: int = 384 * MIB
    connections: int = 8
    max_gap: int | None = None

    @property
    def chunk(self) -> int:
        """Bytes of one chunk. A worker holds up to four: gathered, cast, made contiguous, and a replica. More than 8
        MiB gain nothing: the passes over a chunk then find it in a cache no more."""
        return max(1 * MIB, min(8 * MIB, self.memory // (4 * max(1, self.workers))))

    @property
    def ahead(self) -> int:
        """Bytes that may be fetched before they are needed."""
        return max(64 * MIB, self.memory // 2)


def chunks(shape: Ints, itemsize: int, limit: int) -> Iterator[Box]:
    """Cut an atom into boxes of at most `limit` bytes that follow each other in row-major order.

    >>> [b.sizes for b in chunks((3, 4), 1, 8)]
    [(2, 4), (1, 4)]
    """
    inner = itemsize
    axis = len(shape)
    while axis > 0 and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield Box((0,) * len(shape), tuple(shape))
        return
    axis -= 1
    step = max(1, limit // inner)
    for lead in product(*(range(n) for n in shape[:axis])):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            rest = shape[axis + 1 :]
            yield Box((*lead, start, *(0 for _ in rest)), (*(x + 1 for x in lead), stop, *rest))


def parts_of(region: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """The same for a box of an atom, in the atom's coordinates."""
    if not any(region.lo):
        yield from chunks(region.hi, itemsize, limit)
        return
    for part in chunks(region.sizes, itemsize, limit):
        yield Box(tuple(map(add, part.lo, region.lo)), tuple(map(add, part.hi, region.lo)))


def _inside(array: Array, outer: Box, box: Box) -> Array:
    """The view of `box` in an array that holds `outer`."""
    return array[tuple(slice(a - o, b - o) for a, b, o in zip(box.lo, box.hi, outer.lo, strict=True))]


_held = threading.local()


def _staging(box: Box, dtype: np.dtype[Any], which: str) -> Array:
    """This thread's buffer, shaped for a box. Fresh memory for each chunk would cost a page fault every 4 KiB."""
    size = box.volume * dtype.itemsize
    buffer: Array | None = getattr(_held, which, None)
    if buffer is None or buffer.nbytes < size:
        buffer = np.empty(max(size, 1 << 20), np.uint8)
        setattr(_held, which, buffer)
    return buffer[:size].view(dtype).reshape(box.sizes)


def gather(files: Files, slots: Sequence[Slot], box: Box, which: str = "first") -> Array:
    """The elements of one box of an atom, from wherever they lie, as raw bits in row-major order.

    The array is this thread's buffer (`which` of its two) and is overwritten by the next call.
    """
    out = _staging(box, bits(BY_NAME[slots[0].dtype].size), which)
    for slot in slots:
        common = intersect(slot.box, box)
        if common is not None:
            read_box(files, slot, common, _inside(out, box, common))
    return out


def reads(copies: Sequence[Sequence[Slot]], region: Box, limit: int) -> Iterator[tuple[Slot, Box]]:
    """Every box that gathering a box of an atom will read, from each of its copies, chunk by chunk: for `expect`."""
    if copies:
        for box in parts_of(region, BY_NAME[copies[0][0].dtype].size, limit):
            for slots in copies:
                for slot in slots:
                    common = intersect(slot.box, box)
                    if common is not None:
                        yield slot, common


def content_digest(files: Files, slots: Sequence[Slot], region: Box, limit: int) -> str:
    """Digest of an atom's bytes, or a box's, in its own order: equal wherever the same values are stored, however they
    are cut."""
    h = xxhash.xxh3_128()
    for box in parts_of(region, BY_NAME[slots[0].dtype].size, limit):
        h.update(gather(files, slots, box).reshape(-1).view(np.uint8).data)
    return h.hexdigest()


@dataclass
class Shared:
    """What the workers of one run share: a way to stop, progress, and findings."""

    stop: threading.Event = field(default_factory=threading.Event)
    problems: Problems = field(default_factory=Problems)
    advance: Callable[[int], None] = lambda n: None


def transfer(
    atom: AtomPlan, source: Files, target: Files | None, limit: int, shared: Shared, *, allow_nan: bool = False
) -> str:
    """Move one atom, or the box of it that is wanted, and return the digest of what was written. A replica that
    differs, or a NaN, joins the problems."""
    h = xxhash.xxh3_128()
    size = BY_NAME[atom.source_dtype].size
    differing: set[str] = set()
    poisoned = False
    for box in parts_of(atom.box, size, limit):
        data = gather(source, atom.source, box)
        for replica in atom.replicas:
            other = cast(gather(source, replica, box, "second"), replica[0].dtype, atom.source_dtype)
            if not np.array_equal(data, other):
                differing.add(_whereabouts(replica[0]))
        if not (allow_nan or poisoned) and has_nan(data, atom.source_dtype):
            poisoned = True
            first = atom.source[0].buffer.name
            shared.problems.add(
                first, f"holds NaN (in {atom.name})", "a broken save; --allow-nan converts it all the same"
            )
        shared.advance(data.nbytes)
        data = cast(data, atom.source_dtype, atom.target_dtype)
        h.update(data.reshape(-1).view(np.uint8).data)
        for slot in atom.target if target is not None else ():
            common = within(slot.box, box, atom.shape)
            if common is not None and target is not None:
                write_box(target, slot, common, _inside(data, box, common))
    for name in sorted(differing):
        first = _whereabouts(atom.source[0])
        shared.problems.add(atom.name, f"its copies differ: {name} is not equal to {first}", "which one is right?")
    return h.hexdigest()


def _whereabouts(slot: Slot) -> str:
    """A tensor and its file, the way a user would look for it."""
    return f"{slot.buffer.name} in {'/'.join(slot.buffer.file.split('/')[-2:])}"


def run_all(work: Iterable[tuple[int, Callable[[], None]]], workers: int, stop: threading.Event) -> None:
    """Run jobs (bytes, action) on threads, small ones in batches. The first exception stops all and is raised."""
    batches: list[list[Callable[[], None]]] = []
    filled = 0
    for size, action in work:
        if not batches or filled >= 8 * MIB or len(batches[-1]) >= 64:
            batches.append([])
            filled = 0
        batches[-1].append(action)
        filled += size

    def run(batch: list[Callable[[], None]]) -> None:
        for action in batch:
            if stop.is_set():
                return
            try:
                action()
            except Stopped:  # another one failed: its exception is the one to raise
                return
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="areal") as pool:
        try:
            for future in [pool.submit(run, batch) for batch in batches]:
                future.result()
        except BaseException:  # Ctrl-C too: what is queued is not begun
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def atom_bytes(slots: Sequence[Slot]) -> int:
    """Bytes that some homes of an atom hold together."""
    return sum(s.box.volume * BY_NAME[s.dtype].size for s in slots)


def digest_all(
    atoms: Mapping[str, Sequence[Sequence[Slot]]],
    boxes: Mapping[str, Box],
    limits: Limits,
    shared: Shared,
    root: Path | None = None,
) -> dict[str, list[str]]:
    """Content digests of every copy of every atom (atom → copies → slots), or of a box of it.

    root   put before the names of files that are relative
    """
    files, result = Files(root), {name: [""] * len(copies) for name, copies in atoms.items()}

    def job(name: str, n: int, slots: Sequence[Slot]) -> Callable[[], None]:
        def action() -> None:
            result[name][n] = content_digest(files, slots, boxes[name], limits.chunk)
            shared.advance(atom_bytes(slots))

        return action

    order = [
        (slots[0].buffer.file, slots[0].buffer.begin, name, n, slots)
        for name, c in atoms.items()
        for n, slots in enumerate(c)
    ]
    order.sort(key=lambda x: x[:2])
    expected = (pair for _, _, name, _, slots in order for pair in reads([slots], boxes[name], limits.chunk))
    try:
        files.expect(expected, limits, shared.stop)
        run_all(((atom_bytes(s), job(name, n, s)) for _, _, name, n, s in order), limits.workers, shared.stop)
    finally:
        files.close()
    return result


def elements(shape: Ints) -> int:
    """How many elements a shape has."""
    return prod(shape)
