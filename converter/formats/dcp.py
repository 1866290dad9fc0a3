"""torch distributed checkpoints with Hugging Face's names (`dcp`, as FSDP2 saves them) or Archon's (`archon`).

Reading takes boxes as `.metadata` gives them, whatever mesh made them. Writing puts every rank's boxes into a file of
its own; `dcp.load` reads them at any world size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import sub
from pathlib import Path

from ..dtypes import BY_NAME
from ..placement import Local
from ..roots import group_of, unwrap
from ..sidefiles import find_hf
from ..slots import Buffer, Ints
from .base import DTypeOf, Found, Stored, StoredBox, Target, TargetFile, by_rank
from .dcp_heads import prepare
from .dcpfile import METADATA, DcpIndex, DcpTensor, encode_metadata, read
from .torchfile import TensorRef, blob, contiguous, locate


def detect(path: Path) -> Path | None:
    """The directory if it, or its only subdirectory with one, holds `.metadata`."""
    if not path.is_dir():
        return None
    if (path / METADATA).is_file() or any(path.glob("__*_*.distcp")):
        return path
    below = [p for p in sorted(path.iterdir()) if p.is_dir() and (p / METADATA).is_file()]
    return below[0] if len(below) == 1 else None


def read_checkpoint(path: Path, format_name: str, also: Sequence[Path] = ()) -> Found:
    """The index, and where in its file every box's bytes begin."""
    where = detect(path) or path
    found = Found(format_name, path, where, hf=find_hf(path, where))
    index = read(where, also, only=is_weight)
    found.others |= dict.fromkeys(index.skipped, "not a weight")
    found.notes += [str(warning) for warning in index.warnings]
    found.facts["files"] = len(index.files)
    found.files = files_of(index, where, also)
    found.others |= dict.fromkeys(index.objects, "object")
    locate_all(index, found)
    return found


def is_weight(name: str) -> bool:
    """Whether an entry may be a weight. Optimizer state and the like are not even looked at: they may be broken."""
    return group_of(unwrap(name)) is None or "common_state" in name


def files_of(index: DcpIndex, where: Path, also: Sequence[Path]) -> dict[str, int]:
    """Every file of a checkpoint with its size."""
    metadata = [p / METADATA for p in (where, *also) if (p / METADATA).is_file()][:1]
    return {str(p): p.stat().st_size for p in (*metadata, *index.files.values())}


def locate_all(index: DcpIndex, found: Found) -> None:
    """Turn every chunk of the index into a box with the exact place of its bytes."""
    fds: dict[str, int] = {}
    supposed = prepare(index)
    try:
        for name, tensor in index.tensors.items():
            boxes = tuple(
                box for n in range(len(tensor.chunks)) if (box := _box(name, tensor, n, fds, supposed, found))
            )
            if boxes:
                found.tensors.append(Stored(name, tensor.dtype, tensor.shape, boxes))
    finally:
        for fd in fds.values():
            os.close(fd)


Supposed = dict[tuple[str, int], TensorRef]
"""Tensors whose place is known without a look, by file and offset of their entry."""


def _box(
    name: str, tensor: DcpTensor, n: int, fds: dict[str, int], supposed: Supposed, found: Found
) -> StoredBox | None:
    chunk = tensor.chunks[n]
    file = str(chunk.file)
    if file not in fds:
        if len(fds) > 200:
            os.close(fds.pop(next(iter(fds))))
        fds[file] = os.open(file, os.O_RDONLY)
    ref = supposed.get((file, chunk.offset)) or locate(fds[file], chunk.offset, chunk.length, chunk.file)
    size = BY_NAME[tensor.dtype].size
    if ref.dtype != tensor.dtype:
        found.problems.add(name, f"{file} holds {ref.dtype}, .metadata says {tensor.dtype}")
        return None
    strides: Ints | None = tuple(s * size for s in ref.strides)
    if tuple(ref.shape) != tuple(chunk.sizes):
        if _count(ref.shape) != _count(chunk.sizes):
            found.problems.add(name, f"{file} holds shape {list(ref.shape)}, .metadata says {list(chunk.sizes)}")
            return None
        if tuple(ref.strides) != contiguous(tuple(ref.shape)):
            found.problems.add(name, f"{file} holds it flattened, but not row by row")
            return None
        strides = None
    hi = tuple(o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
    return StoredBox(tuple(chunk.offsets), hi, Buffer(file, ref.offset, _count(chunk.sizes) * size, name), strides)


def _count(shape: Ints) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


# ------------------------------------------------------------------------------------------------ writing

Chunks = dict[str, list[tuple[Ints, Ints, str, int, int]]]


def lay_out(
    locals_: Sequence[Local],
    dtype_of: DTypeOf,
    *,
    root: str = "",
    prefix: str = "",
    planner: bool = True,
    objects: Sequence[str] = (),
    blob_of_objects: bytes = b"",
) -> Target:
    """Every rank's boxes in `__{rank}_0.distcp`, each a torch file of its own, and `.metadata`.

    root     put before every name; prefix: the directory inside the target
    planner  note each name's path, as torch's own planner does (Megatron-Core does not)
    objects  entries that are no tensors; all of them name the same bytes, `blob_of_objects`
    """
    target = Target()
    chunks: Chunks = {}
    described: dict[str, tuple[str, Ints]] = {}
    entries: list[tuple[str, str, int, int]] = []
    # A module's state dict names a tied head beside the embedding, so `dcp.load` asks for both: two names, one range.
    stored: dict[tuple[str, int, Ints, Ints], tuple[Ints, Ints, str, int, int]] = {}
    for local in locals_:
        described.setdefault(root + local.name, (dtype_of(local.named), local.total))
    for rank, members in by_rank(locals_):
        file = f"__{rank}_0.distcp"
        at, segments = 0, []
        for local in members:
            name, dtype = root + local.name, dtype_of(local.named)
            places = chunks.setdefault(name, [])
            atom = local.named.row.atoms[0].name
            for piece in local.pieces:
                if local.named.row.form == "stored_tie":
                    places.append(stored[atom, rank, piece.lo, piece.hi])
                    continue
                sizes = tuple(map(sub, piece.hi, piece.lo))
                plan = blob(dtype, sizes)
                size, begin = plan.size, at + plan.data_offset
                segments += ((at, plan.head), (begin + plan.data_nbytes, plan.tail))
                target.place_piece(local, piece, sizes, Buffer(prefix + file, begin, plan.data_nbytes, name), dtype)
                stored[atom, rank, piece.lo, piece.hi] = (piece.lo, sizes, file, at, size)
                places.append((piece.lo, sizes, file, at, size))
                at += size
        if objects and not target.files:
            segments.append((at, blob_of_objects))
            entries = [(name, file, at, len(blob_of_objects)) for name in objects]
            at += len(blob_of_objects)
        target.files.append(TargetFile(prefix + file, at, segments, rank))

    def index() -> bytes:
        tensors = [(name, *described[name], places) for name, places in chunks.items()]
        steps = tuple(root.rstrip(".").split(".")) if root else ()
        paths = {name: (*steps, name.removeprefix(root)) for name in chunks}
        return encode_metadata(tensors, entries, paths if planner else None)

    target.texts[prefix + METADATA] = index
    return target
