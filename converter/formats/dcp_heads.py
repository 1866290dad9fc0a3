"""Where the bytes of a remote DCP's entries begin, without asking for the first kilobyte of each of them.

Each entry is a torch file of its own, so each has a head, and a checkpoint of 64 ranks has tens of thousands. Entries
of one file that hold tensors of the same kind (`layers.3…`, `layers.4…`), type, shape and length have the same head:
one of them is read, and the others are supposed to be like it. A supposition is proved when the tensor is read: its
head, which lies right before its bytes, is fetched along, and whatever differs in it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CorruptFile
from ..remote.mirror import Unproved
from ..remote.mounts import ensure_all, remote_file, shown
from ..remote.windows import Span
from .torchfile import TensorRef, confirm, locate_in, probe

if TYPE_CHECKING:
    from .dcpfile import DcpChunk, DcpIndex

MANY = 256
"""Entries whose heads are simply fetched."""

_NUMBER = re.compile(r"\d+")


def prepare(index: DcpIndex) -> dict[tuple[str, int], TensorRef]:
    """Have the heads of all entries on this machine, or, where these are too many, those of one of each kind. Returns
    where the tensors of the others are supposed to be, by file and offset of the entry."""
    entries = [(name, str(chunk.file), chunk) for name, tensor in index.tensors.items() for chunk in tensor.chunks]
    away = {file for file in {file for _, file, _ in entries} if remote_file(file) is not None}
    wanted = [entry for entry in entries if entry[1] in away]
    if len(wanted) <= MANY:
        _fetch(wanted)
        return {}
    kinds: dict[tuple[object, ...], list[tuple[str, str, DcpChunk]]] = {}
    for name, file, chunk in wanted:
        key = (file, _NUMBER.sub("", name), index.tensors[name].dtype, chunk.sizes, chunk.length)
        kinds.setdefault(key, []).append((name, file, chunk))
    _fetch([members[0] for members in kinds.values()])
    return dict(found for members in kinds.values() for found in _supposed(members))


def _fetch(entries: list[tuple[str, str, DcpChunk]]) -> None:
    heads: dict[str | Path, list[Span | None]] = {}
    for _, file, chunk in entries:
        heads.setdefault(file, []).append(probe(chunk.offset, chunk.length))
    ensure_all(heads)


def _supposed(members: list[tuple[str, str, DcpChunk]]) -> Iterator[tuple[tuple[str, int], TensorRef]]:
    """The tensors of all entries of a kind but the first, as the first one's is."""
    (_, file, first), *others = members
    place = remote_file(file)
    if not others or place is None:
        return
    mirror, path = place
    known = locate_in(first.file, first.offset, first.length)
    data, nbytes = known.storage
    if not confirm(_head(first.file, first.offset, data), first.offset, known):
        _fetch(others)  # nothing that torch writes: each is looked at
        return
    for name, _, chunk in others:
        shift = chunk.offset - first.offset
        ref = replace(known, offset=known.offset + shift, storage=(data + shift, nbytes))
        mirror.suppose(path, ref.offset, _unproved(name, file, chunk, ref))
        yield (file, chunk.offset), ref


def _head(file: Path, begin: int, end: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(begin)
        return opened.read(end - begin)


def _unproved(name: str, file: str, chunk: DcpChunk, ref: TensorRef) -> Unproved:
    def prove(head: bytes) -> None:
        if not confirm(head, chunk.offset, ref):
            raise CorruptFile(
                f"{shown(file)}: the entry of {name} at byte {chunk.offset} is laid out otherwise than its like.",
                hint="Fetch the checkpoint as a whole, and convert the copy: then every entry is looked at.",
            )

    return Unproved(chunk.offset, ref.storage[0], prove)
