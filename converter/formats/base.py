"""What every format gives and takes.

Reading: `read(path, …) -> Found`, the tensors that a directory holds, each as boxes in files; headers only.
Writing: `lay_out(locals, …) -> Target`, the files to be made, with their headers and a place for every tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..dtypes import BY_NAME
from ..errors import Problems
from ..layout import Named, slots_in
from ..placement import Local, Piece
from ..slots import Buffer, Ints, Slot, row_major


@dataclass(frozen=True, slots=True)
class StoredBox:
    """The box `lo..hi` of a tensor, in a buffer; `strides` are bytes for each dimension (None: row-major)."""

    lo: Ints
    hi: Ints
    buffer: Buffer
    strides: Ints | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a directory holds it. `rank` tells per-rank tensors apart (`mp_rank`); `scale` is the tensor with a
    quantised one's block scales."""

    name: str
    dtype: str
    shape: Ints
    boxes: tuple[StoredBox, ...]
    rank: int = 0
    chunk: int = 0
    scale: Stored | None = None


@dataclass
class Found:
    """What reading the headers of a checkpoint gave.

    format   the format's name; `where` the directory that holds the weights (an `iter_*` of the root, say)
    tensors  all of them, by the names on disk
    hf       directory of the Hugging Face side files (config, tokenizer), or None
    args     Megatron's arguments, where the checkpoint has them
    others   entries that are no tensors (extra states, counters): name → what it is
    facts    what else `inspect` should tell
    notes    things worth a warning; `problems` what makes the checkpoint unusable
    files    every file that was looked at, with its size: the source's identity
    incomplete  a whole file could not be read; what it holds is not listed as missing once more
    """

    format: str
    root: Path
    where: Path
    tensors: list[Stored] = field(default_factory=list)
    hf: Path | None = None
    args: Mapping[str, Any] | None = None
    others: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    files: dict[str, int] = field(default_factory=dict)
    incomplete: bool = False


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to be made: `size` bytes, of which `segments` (offset, bytes) are known before any tensor is."""

    name: str
    size: int
    segments: Sequence[tuple[int, bytes]]
    rank: int = 0


Text = bytes | Callable[[], bytes]
"""The contents of a small file; an index of a million chunks is made only when it is written."""


@dataclass
class Target:
    """Everything that a format will write.

    files   with tensors in them; `texts` the small ones, whole, or what makes them
    slots   the home of every atom
    fills   bytes of declared fill (vocabulary padding), which read as zeros, by file
    """

    files: list[TargetFile] = field(default_factory=list)
    texts: dict[str, Text] = field(default_factory=dict)
    slots: dict[str, list[Slot]] = field(default_factory=dict)
    fills: Counter[str] = field(default_factory=Counter)

    @property
    def filled(self) -> int:
        """Bytes of declared fill in all files."""
        return self.fills.total()

    def place(self, local: Local, buffer: Buffer, dtype: str) -> None:
        """Give a local tensor its place: its atoms' slots lie in `buffer`, row-major."""
        itemsize = BY_NAME[dtype].size
        strides = row_major(local.shape, itemsize)
        used = 0
        for piece in local.pieces:
            offset = sum(a * s for a, s in zip(piece.at, strides, strict=True))
            used += self._box(local, piece, buffer, offset, strides, dtype)
        self.fills[buffer.file] += buffer.size - used * itemsize

    def place_piece(self, local: Local, piece: Piece, sizes: Ints, buffer: Buffer, dtype: str) -> None:
        """Give one piece of a local tensor a buffer of its own."""
        itemsize = BY_NAME[dtype].size
        used = self._box(local, piece, buffer, 0, row_major(sizes, itemsize), dtype)
        self.fills[buffer.file] += buffer.size - used * itemsize

    def _box(self, local: Local, piece: Piece, buffer: Buffer, offset: int, strides: Ints, dtype: str) -> int:
        """Slots of one piece; returns how many elements they hold (what is left is padding)."""
        lo, hi, used, slots = piece.lo, piece.hi, 0, self.slots
        if local.total != local.named.geometry.shape:
            hi = tuple(map(min, hi, local.named.geometry.shape))
            if any(a >= b for a, b in zip(lo, hi, strict=True)):
                return 0
        for atom, slot in slots_in(local.named, lo, hi, buffer, offset, strides, dtype, local.copy):
            homes = slots.get(atom)
            if homes is None:
                slots[atom] = [slot]
            else:
                homes.append(slot)
            used += slot.box.volume
        return used


DTypeOf = Callable[[Named], str]
"""The element type in which a tensor is written."""


class Format(Protocol):
    """One on-disk format. `read` raises SourceError only when it can go no further; the rest goes into `problems`."""

    name: str

    def detect(self, path: Path) -> Path | None:
        """The directory with this format's weights at or below `path`, or None."""
        ...

    def read(self, path: Path) -> Found:
        """Headers only: what is there, and where."""
        ...


def nbytes(local: Local, dtype: str) -> int:
    """Bytes of a local tensor."""
    size = BY_NAME[dtype].size
    for length in local.shape:
        size *= length
    return size


def by_rank(locals_: Iterable[Local]) -> Iterator[tuple[int, list[Local]]]:
    """Locals grouped by rank, ranks in order."""
    groups: dict[int, list[Local]] = {}
    for local in locals_:
        groups.setdefault(local.rank, []).append(local)
    return iter(sorted(groups.items()))
