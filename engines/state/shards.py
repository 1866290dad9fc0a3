"""Boxes of tensors as torch's distributed checkpoint (DCP): laid out by all ranks alike, written and read by each.

A rank's boxes go into one file, `__{rank}_0.distcp`, one after the other, so that a save is one stream; a box that
several ranks hold is written by one of them. Reading goes by box: whatever ranks wrote them, a rank finds what it
holds now, and reads no more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from ...converter.codecs import bits
from ...converter.dtypes import BY_NAME, BY_TORCH
from ...converter.errors import PlanError, Problems, SourceError
from ...converter.execute import Limits, Shared, run_all
from ...converter.formats.dcpfile import DcpChunk, DcpTensor, encode_metadata
from ...converter.formats.torchfile import locate
from ...converter.formats.torchfile_write import BlobPlan, blob
from ...converter.live import raw_bits
from ...converter.peers import share_out
from ...converter.rawio import Files, read_box, write_exactly
from ...converter.slots import Box, Buffer, Slot, intersect, tiles
from .entries import Entry


class Key(NamedTuple):
    """One box of one tensor."""

    name: str
    box: Box


@dataclass(frozen=True)
class Said:
    """What one rank holds: (element type, whole shape) of every box, and its aliases."""

    boxes: dict[Key, tuple[str, tuple[int, ...]]]
    aliases: dict[str, str]


@dataclass
class Layout:
    """Who writes what where. `mine` are this rank's boxes with their places; `index` makes `.metadata`."""

    mine: list[tuple[Key, BlobPlan, int]] = field(default_factory=list)
    tensors: list[tuple[str, str, tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], str, int, int]]]] = (
        field(default_factory=list)
    )
    size: int = 0
    total: int = 0

    def index(self) -> bytes:
        paths = {name: tuple(name.split(".", 2 if name.startswith("optim.") else 1)) for name, *_ in self.tensors}
        return encode_metadata(self.tensors, (), paths)


def file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def say(entries: Mapping[str, Entry], aliases: Mapping[str, str]) -> Said:
    """What this rank holds. Raises PlanError for an element type that is not saved."""
    problems, boxes = Problems(), dict[Key, tuple[str, tuple[int, ...]]]()
    for name, entry in entries.items():
        dtype = BY_TORCH.get(str(entry.memory.dtype).removeprefix("torch."))
        if dtype is None:
            problems.add(name, f"has the element type {entry.memory.dtype}, which is not saved")
            continue
        boxes |= {Key(name, box): (dtype.name, entry.shape) for box, _ in entry.regions()}
    problems.raise_as(PlanError, "The training state cannot be saved:")
    return Said(boxes, dict(aliases))


def lay_out(said: Sequence[Said], rank: int) -> Layout:
    """Choose a writer for every box and give it a place.

    Raises PlanError for a tensor that the ranks do not hold whole, or hold in two ways.
    """
    holders: dict[Key, list[int]] = {}
    known: dict[str, tuple[str, tuple[int, ...]]] = {}
    problems = Problems()
    for number, one in enumerate(said):
        for key, what in one.boxes.items():
            holders.setdefault(key, []).append(number)
            if known.setdefault(key.name, what) != what:
                problems.add(key.name, f"is {what} on rank {number}, {known[key.name]} elsewhere")
    keys = sorted(holders)
    sizes = {k: (k.box.volume * BY_NAME[known[k.name][0]].size, holders[k]) for k in keys}
    chosen = share_out(sizes, len(said))
    layout, at = Layout(), [0] * len(said)
    places: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], str, int, int]]] = {}
    for key in keys:
        writer, dtype = chosen[key], known[key.name][0]
        plan = blob(dtype, key.box.sizes)
        if writer == rank:
            layout.mine.append((key, plan, at[writer]))
        places.setdefault(key.name, []).append((key.box.lo, key.box.sizes, file_of(writer), at[writer], plan.size))
        at[writer] += plan.size
    for name, found in places.items():
        dtype, shape = known[name]
        boxes = [Box(lo, tuple(a + b for a, b in zip(lo, size, strict=True))) for lo, size, *_ in found]
        if not tiles(boxes, shape):
            held = sum(box.volume for box in boxes)
            problems.add(name, f"the ranks hold {held} elements of its shape {list(shape)}, not each one once")
        layout.tensors.append((name, dtype, shape, found))
    for alias, name in {k: v for one in said for k, v in one.aliases.items()}.items():
        layout.tensors.append((alias, *known[name], places[name]))
    problems.raise_as(PlanError, "The ranks do not hold a whole training state:")
    layout.size, layout.total = at[rank], sum(at)
    return layout


def write(path: Path, layout: Layout, data_of: Callable[[Key], torch.Tensor]) -> tuple[int, str]:
    """Write this rank's file and have it on disk; returns its size and digest. `data_of` gives a box's elements."""
    h, at = xxhash.xxh3_128(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for key, plan, _ in layout.mine:
            data = raw_bits(data_of(key)).reshape(-1).view(np.uint8)
            for part in (memoryview(plan.head), data.data, memoryview(plan.tail)):
                write_exactly(fd, part, at)
                h.update(part)
                at += len(part)
        os.fsync(fd)
    finally:
        os.close(fd)
    return at, h.hexdigest()


# ------------------------------------------------------------------------------------------------ reading


def check_against(stored: Mapping[str, DcpTensor], entries: Iterable[Entry], problems: Problems) -> None:
    """Every entry must be stored, with its shape and element type."""
    for entry in entries:
        found, dtype = stored.get(entry.name), BY_TORCH[str(entry.memory.dtype).removeprefix("torch.")].name
        if found is None:
            problems.add(entry.name, "is not in the saved state")
        elif found.shape != entry.shape:
            problems.add(entry.name, f"was saved with shape {list(found.shape)}, is {list(entry.shape)} here")
        elif found.dtype != dtype:
            problems.add(entry.name, f"was saved as {found.dtype}, is {dtype} here", "use the dtypes of that run")


def fill(stored: Mapping[str, DcpTensor], entries: Iterable[Entry], limits: Limits | None = None) -> int:
    """Read this rank's boxes of every entry from wherever they lie; returns the bytes."""
    limits, files, shared = limits or Limits(), Files(), Shared()
    jobs, total = [], 0
    for entry in entries:
        for box, region in entry.regions():
            for chunk in stored[entry.name].chunks:
                end = tuple(a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=True))
                common = intersect(Box(tuple(chunk.offsets), end), box)
                if common is not None:
                    size = common.volume * region.element_size()
                    inside = _inside(region, box, common)
                    jobs.append((size, lambda c=chunk, n=entry.name, b=common, r=inside: _read(files, n, c, b, r)))
                    total += size
    try:
        run_all(jobs, limits.workers, shared.stop)
    finally:
        files.close()
    return total


def _inside(region: torch.Tensor, outer: Box, box: Box) -> torch.Tensor:
    return region[tuple(slice(a - o, b - o) for a, b, o in zip(box.lo, box.hi, outer.lo, strict=True))]


def _read(files: Files, name: str, chunk: DcpChunk, box: Box, region: torch.Tensor) -> None:
    file = str(chunk.file)
    ref = locate(files.fd(file), chunk.offset, chunk.length, chunk.file)
    dtype = BY_TORCH[str(region.dtype).removeprefix("torch.")]
    if ref.dtype != dtype.name or tuple(ref.shape) != tuple(chunk.sizes):
        raise SourceError(
            f"{file}: holds {ref.dtype} {list(ref.shape)} where {name} should be {dtype} {list(chunk.sizes)}."
        )
    whole = Box(tuple(chunk.offsets), tuple(a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=True)))
    strides = tuple(s * dtype.size for s in ref.strides)
    slot = Slot(whole, Buffer(file, ref.offset, whole.volume * dtype.size, name), 0, strides, dtype.name)
    data = np.empty(box.sizes, bits(dtype.size))
    read_box(files, slot, box, data)
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[dtype.size]
    region.copy_(torch.from_numpy(data.view(signed)).view(region.dtype))
