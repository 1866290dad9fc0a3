"""Strided boxes in and out of files: the only place that reads and writes tensor bytes.

A box whose rows are long is moved with `preadv` and `pwrite`; one that is fine-grained (a bias interleaved by head, a
transposed expert) through a mapping of just its span. Nothing larger than the caller's chunk is ever held.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock, local
from typing import Any

import numpy as np

from .codecs import Array, bits, cast
from .dtypes import BY_NAME
from .errors import CorruptFile, SourceError
from .scaled import dequantise, slabs
from .slots import Box, Ints, Scale, Slot, runs, starts

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

    def close(self) -> None:
        """Close everything; the threads that used this object must have ended."""
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
    if slot.scale is not None:
        _read_scaled(files, slot, slot.scale, box, out)
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


def _read_scaled(files: Files, slot: Slot, scale: Scale, box: Box, out: Array) -> None:
    """The values of a block-scaled weight, a slab at a time."""
    stored = np.empty(scale.shape, bits(BY_NAME[scale.dtype].size))
    read_exactly(files.fd(scale.buffer.file), _bytes(stored), scale.buffer.begin, scale.buffer.file)
    factors = cast(stored, scale.dtype, "F32").view(np.float32)
    plain = replace(slot, dtype=scale.stored, scale=None)
    for part in slabs(box):
        raw = np.empty(part.sizes, bits(1))
        read_box(files, plain, part, raw)
        inside = tuple(slice(a - o, b - o) for a, b, o in zip(part.lo, part.hi, box.lo, strict=True))
        out[inside] = dequantise(raw, factors, scale, part)


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
