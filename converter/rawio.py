"""Strided boxes in and out of files: the only place that reads and writes tensor bytes.

A box whose rows are long is moved with `preadv` and `pwrite`; one that is fine-grained (a bias interleaved by head, a
transposed expert) through a mapping of just its span. Nothing larger than the caller's chunk is ever held. Boxes of a
file that is mounted (`remote`) are fetched into memory: ahead of time where they were expected.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Event, Lock, local
from typing import TYPE_CHECKING, Any

import numpy as np

from .codecs import Array, bits, cast
from .dtypes import BY_NAME
from .errors import CorruptFile, SourceError
from .remote.boxes import Read, prove, read_plain, to_prove, wanted
from .remote.mounts import anything_mounted, remote_file
from .remote.windows import requests
from .scaled import dequantise, slabs
from .slots import Box, Ints, Scale, Slot, runs, starts

if TYPE_CHECKING:
    from .execute import Limits
    from .remote.ahead import ReadAhead

BLOCK = 32 * 1024
"""Rows at least this long (bytes) are read and written one by one; shorter ones through a mapping."""

SMALL = 1024 * 1024
"""A span up to this long (bytes) is read whole, whatever its rows."""

STEP = 128 * 1024
"""Bytes of one write. Larger ones make the kernel look for larger pages, which costs three times the copy itself where
memory is full of cached files (measured with `dd bs=64K` and `bs=1M`)."""

_OPEN_FILES = 96


class Files:
    """Open files, a few for each thread. `root` is put before relative names."""

    def __init__(self, root: Path | None = None, *, write: bool = False) -> None:
        self.root = root
        self.flags = os.O_RDWR if write else os.O_RDONLY
        self._local = local()
        self._all: list[OrderedDict[str, int]] = []
        self._ahead: ReadAhead | None = None
        self._stop: Event | None = None

    def fd(self, name: str) -> int:
        """A descriptor of the file, valid until this thread asks for the next one."""
        held: OrderedDict[str, int] | None = getattr(self._local, "held", None)
        if held is None:
            held = self._local.held = OrderedDict()
            self._all.append(held)
        if name in held:
            held.move_to_end(name)
            return held[name]
        if len(held) >= _OPEN_FILES:
            os.close(held.popitem(last=False)[1])
        try:
            held[name] = os.open(self.root / name if self.root else name, self.flags | os.O_CLOEXEC)
        except OSError as error:
            if self.flags != os.O_RDONLY:
                raise
            raise SourceError(f"{name}: cannot be read: {error.strerror}.") from error
        return held[name]

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from a file."""
        place = remote_file(name) if anything_mounted() else None
        if place is not None:
            place[0].fetcher.read_into(place[1], offset, buffer, self._stop)
            return
        read_exactly(self.fd(name), buffer, offset, name)

    def expect(self, reads: Iterable[tuple[Slot, Box]], limits: Limits, stop: Event) -> None:
        """Say which boxes will be read, in order: those of mounted files are fetched ahead, within the limits, and held
        until they were read. `reads` is not looked at when nothing is mounted; `stop` ends it."""
        if not anything_mounted():
            return
        self._stop = stop
        from .remote.ahead import ReadAhead

        self._ahead = ReadAhead(
            reads, budget=limits.ahead, connections=limits.connections, max_gap=limits.max_gap, stop=stop
        )

    @contextmanager
    def elsewhere(self, slot: Slot, box: Box) -> Iterator[Read]:
        """What reads the bytes of one box of a mounted file: from what was fetched ahead, or now."""
        expected = self._ahead.take(slot, box) if self._ahead is not None else None
        if expected is None:
            yield _fetched_now(self, slot, box, self._stop)
            return

        def read(name: str, offset: int, out: memoryview) -> None:
            if not expected.read(name, offset, out):
                self.read(name, offset, out)

        try:
            prove(slot, read)
            yield read
        finally:
            if self._ahead is not None:
                self._ahead.done(expected)

    def close(self) -> None:
        """Close everything; the threads that used this object must have ended."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        for held in self._all:
            while held:
                os.close(held.popitem()[1])


def read_exactly(fd: int, buffer: memoryview, offset: int, name: str) -> None:
    """Fill `buffer` from the file. Raises CorruptFile when the file ends before."""
    done = 0
    while done < len(buffer):
        try:
            got = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise SourceError(f"{name}: cannot be read at byte {offset + done}: {error.strerror}.") from error
        if got == 0:
            raise CorruptFile(f"{name}: the file ends at byte {offset + done}, {len(buffer) - done} bytes too early.")
        done += got


def write_exactly(fd: int, buffer: memoryview, offset: int) -> None:
    """Write all of `buffer`, in steps that end on multiples of STEP."""
    done, size = 0, len(buffer)
    while done < size:
        end = min(size, done + STEP - (offset + done) % STEP)
        done += os.pwrite(fd, buffer[done:end], offset + done)


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _window(fd: int, name: str, offset: int, span: int, *, write: bool) -> tuple[mmap.mmap, int]:
    """A mapping that holds `span` bytes from `offset`, and where in it they begin."""
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    size = os.fstat(fd).st_size
    if size < offset + span:
        raise CorruptFile(f"{name}: the file ends at byte {size}, {offset + span - size} bytes too early.")
    access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
    return mmap.mmap(fd, offset - start + span, access=access, offset=start), offset - start


def _strided(memory: Any, start: int, sizes: Ints, strides: Ints, itemsize: int) -> Array:
    return np.ndarray(sizes, bits(itemsize), memory, start, strides)


def read_box(files: Files, slot: Slot, box: Box, out: Array) -> None:
    """Copy one box of an atom from its slot into `out` (raw bits, the box's shape, any strides)."""
    if anything_mounted() and remote_file(slot.buffer.file) is not None:
        with files.elsewhere(slot, box) as read:
            if slot.scale is None:
                read_plain(read, slot, box, out)
                return
            raw = np.empty(box.sizes, bits(1))
            read_plain(read, slot, box, raw)
            _read_scaled(read, lambda _, part, to: np.copyto(to, _inside(raw, box, part)), slot, slot.scale, box, out)
        return
    if slot.scale is not None:
        _read_scaled(files.read, lambda *part: read_box(files, *part), slot, slot.scale, box, out)
        return
    itemsize = BY_NAME[slot.dtype].size
    sizes, offset, fd = box.sizes, slot.at(box.lo), files.fd(slot.buffer.file)
    run = runs(sizes, slot.strides, itemsize)
    if run.block < BLOCK and run.loops:
        if run.span <= SMALL:
            raw = bytearray(run.span)
            read_exactly(fd, memoryview(raw), offset, slot.buffer.file)
            np.copyto(out, _strided(raw, 0, sizes, slot.strides, itemsize))
            return
        memory, start = _window(fd, slot.buffer.file, offset, run.span, write=False)
        view = _strided(memory, start, sizes, slot.strides, itemsize)
        np.copyto(out, view)
        del view
        memory.close()
        return
    whole = out if out.flags.c_contiguous else np.empty(sizes, bits(itemsize))
    data = _bytes(whole)
    for n, start in enumerate(starts(run)):
        read_exactly(fd, data[n * run.block : (n + 1) * run.block], offset + start, slot.buffer.file)
    if whole is not out:
        np.copyto(out, whole)


def _read_scaled(
    read: Read, read_part: Callable[[Slot, Box, Array], None], slot: Slot, scale: Scale, box: Box, out: Array
) -> None:
    """The values of a block-scaled weight, a slab at a time."""
    stored = np.empty(scale.shape, bits(BY_NAME[scale.dtype].size))
    read(scale.buffer.file, scale.buffer.begin, _bytes(stored))
    factors = cast(stored, scale.dtype, "F32").view(np.float32)
    plain = replace(slot, dtype=scale.stored, scale=None)
    for part in slabs(box):
        raw = np.empty(part.sizes, bits(1))
        read_part(plain, part, raw)
        _inside(out, box, part)[...] = dequantise(raw, factors, scale, part)


def _inside(array: Array, outer: Box, part: Box) -> Array:
    return array[tuple(slice(a - o, b - o) for a, b, o in zip(part.lo, part.hi, outer.lo, strict=True))]


def _fetched_now(files: Files, slot: Slot, box: Box, stop: Event | None) -> Read:
    """For a box that nobody expected: its bytes are fetched at once."""
    by_file: dict[str, list[tuple[int, int]]] = {}
    for name, begin, end in (*wanted(slot, box), *to_prove(slot)):
        by_file.setdefault(name, []).append((begin, end))
    held: dict[str, list[tuple[int, bytearray]]] = {}
    for name, spans in by_file.items():
        place = remote_file(name)
        if place is not None:
            mirror, path = place
            held[name] = [(begin, mirror.fetcher.read(path, begin, end, stop)) for begin, end in requests(spans)]

    def read(name: str, offset: int, out: memoryview) -> None:
        if name not in held:
            files.read(name, offset, out)
            return
        n, done = bisect_right(held[name], offset, key=lambda part: part[0]) - 1, 0
        while done < len(out):
            begin, data = held[name][n]
            part = memoryview(data)[offset + done - begin :][: len(out) - done]
            out[done : done + len(part)] = part
            done, n = done + len(part), n + 1

    prove(slot, read)
    return read


def write_box(files: Files, slot: Slot, box: Box, data: Array) -> None:
    """Copy `data` (raw bits, the box's shape, any strides) to where the slot keeps this box."""
    itemsize = BY_NAME[slot.dtype].size
    sizes, offset, fd = box.sizes, slot.at(box.lo), files.fd(slot.buffer.file)
    run = runs(sizes, slot.strides, itemsize)
    if run.block < BLOCK and run.loops:
        memory, start = _window(fd, slot.buffer.file, offset, run.span, write=True)
        view = _strided(memory, start, sizes, slot.strides, itemsize)
        np.copyto(view, data)
        del view
        memory.close()
        return
    raw = _bytes(np.ascontiguousarray(data))
    for n, start in enumerate(starts(run)):
        write_exactly(fd, raw[n * run.block : (n + 1) * run.block], offset + start)


_SYNC_FILE_RANGE_WRITE = 2


@cache
def _sync_file_range() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), "sync_file_range", None)


class Writeback:
    """Has the disk begin to write while the conversion goes on, so that the sync at the end finds little to do.

    Linux's `sync_file_range`, which starts and does not wait; elsewhere nothing happens.
    """

    EVERY = 32 * 1024 * 1024

    def __init__(self, files: Files) -> None:
        self.files = files
        self._lock = Lock()
        self._bytes, self._names = 0, set[str]()

    def wrote(self, names: Iterable[str], count: int) -> None:
        """Note `count` bytes in these files, and start writing when enough has come together."""
        with self._lock:
            self._bytes += count
            self._names.update(names)
            if self._bytes < self.EVERY:
                return
            names, self._bytes, self._names = self._names, 0, set()
        call = _sync_file_range()
        if call is None:
            return
        for name in names:
            call(self.files.fd(name), ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)
