"""Where new weights come from: a checkpoint of any format, or a live model on the ranks of a job.

A source says which boxes of the family's atoms every sender rank has, and reads boxes of its own as raw bits in the
element type that the server wants. Nobody gathers: what a rank does not hold another one sends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..checkpoint import Checkpoint
from ..codecs import Array, bits, cast
from ..dtypes import BY_NAME
from ..errors import ConfigError, Problems, SourceError
from ..execute import Limits, gather
from ..mesh import Mesh
from ..opening import open_checkpoint
from ..peers import Peers, share_out
from ..plan import copies_of
from ..rawio import Files, read_box
from ..remote.urls import is_remote
from ..slots import Box, Ints, Slot, intersect, whole
from ..source_state import file_states

AtomBox = tuple[str, Box]
"""A box of an atom, by its name."""


class Source(Protocol):
    """What a push reads. All but `read` is the same on every rank, and may be a collective.

    family  the table's name, `sizes` the model's; `shapes` and `dtypes` of every atom that can be given
    config  the model's `config.json`
    label   for messages; `notes` what is worth knowing
    """

    label: str
    family: str
    config: Mapping[str, Any]
    sizes: Mapping[str, int]
    shapes: Mapping[str, Ints]
    dtypes: Mapping[str, str]
    notes: list[str]
    checkpoint: Checkpoint
    """Its atoms, slots and table, for whoever lays out tensors under other names (`feed`)."""

    def refresh(self) -> None:
        """Before each push: look again at what moves (tensors that were replaced, files that were written)."""
        ...

    def senders(self) -> list[list[AtomBox]]:
        """For every sender rank the boxes that it gives, in the order in which it reads them best."""
        ...

    def expect(self, wanted: Iterable[AtomBox]) -> None:
        """Which boxes `read` will be asked for, in order: for what is fetched ahead."""
        ...

    def read(self, atom: str, box: Box, dtype: str, out: Array) -> None:
        """Raw bits of a part of one of this rank's boxes, row-major, into `out` (uint8, exactly its size). From several
        threads. Raises SourceError."""
        ...

    def flat(self, atom: str, box: Box, dtype: str) -> Array | None:
        """The memory of one of this rank's boxes (uint8, row-major), if it lies there as it is to be sent; else None.
        It is only read."""
        ...

    def check_unchanged(self) -> None:
        """Raise SourceError when the files were written to since `refresh`."""
        ...

    def let_go(self) -> None:
        """The push is over: hold nothing that the trainer may want to give up before the next `refresh`."""
        ...

    def close(self) -> None: ...


def open_source(
    source: Any,
    *,
    base: str | Path | Checkpoint | None = None,
    mesh: Mesh | None = None,
    rank: int = 0,
    peers: Peers | None = None,
    limits: Limits | None = None,
    **opening: Any,
) -> Source:
    """A source from whatever the user has. Every rank calls it alike.

    source  a directory or URL, or an opened checkpoint (`opening` goes to `open_checkpoint`); or a module, a state
            dict, a list of them (virtual pipeline chunks), or a function that returns one of these (asked again before
            each push: what an engine keeps elsewhere between steps)
    base    (live) the checkpoint or model directory that gives the family; `mesh` and `rank` as `load_into` has them

    Raises ConfigError for what is none of this, and what opening and describing raise.
    """
    peers = peers or Peers()
    if isinstance(source, (str, Path, Checkpoint)):
        return CheckpointSource(source, peers, limits or Limits(), opening)
    live = callable(source) or isinstance(source, Mapping) or hasattr(source, "state_dict") or _is_parts(source)
    if not live:
        raise ConfigError(
            f"{type(source).__name__} is nothing to send weights from.",
            hint="Pass a checkpoint's directory or URL, a module, a state dict, or a list of them.",
        )
    if base is None:
        raise ConfigError(
            "A live model does not say of which family it is.",
            hint="Pass base=, the model directory (or checkpoint) that it was made from: its config.json is read.",
        )
    from .source_live import LiveSource

    return LiveSource(source, base, peers, mesh, rank)


def _is_parts(source: Any) -> bool:
    return isinstance(source, (list, tuple)) and all(isinstance(p, Mapping) or hasattr(p, "state_dict") for p in source)


def is_function(source: Any) -> bool:
    return callable(source) and not hasattr(source, "state_dict") and not isinstance(source, Mapping)


def inside(array: Array, outer: Box, box: Box) -> Array:
    """The part of a box's values that another box in it holds."""
    return array[tuple(slice(a - o, b - o) for a, b, o in zip(box.lo, box.hi, outer.lo, strict=True))]


# ------------------------------------------------------------------------------------------------ checkpoints


class CheckpointSource:
    """A checkpoint of any format, wherever it lies. Several sender ranks share its atoms out among themselves."""

    label: str
    family: str
    config: Mapping[str, Any]
    sizes: Mapping[str, int]
    shapes: Mapping[str, Ints]
    dtypes: Mapping[str, str]
    notes: list[str]
    checkpoint: Checkpoint

    def __init__(
        self, source: str | Path | Checkpoint, peers: Peers, limits: Limits, opening: Mapping[str, Any]
    ) -> None:
        self._peers, self._limits = peers, limits
        self.checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, **opening)
        self.checkpoint.check()
        self._reopen = None if isinstance(source, Checkpoint) else (source, dict(opening))
        self._remote = is_remote(str(self.checkpoint.path))
        self._describe()
        self._files = Files()
        self._stop = threading.Event()
        self._states = file_states(self.checkpoint)

    def _describe(self) -> None:
        ckpt = self.checkpoint
        self.label, self.family, self.sizes = f"{ckpt.path} ({ckpt.format})", ckpt.table.name, ckpt.view.dims
        self.config = ckpt.config
        self.notes = list(ckpt.notes)
        self._slots: dict[str, Sequence[Slot]] = {
            name: next(iter(copies_of(ckpt.slots[name]).values())) for name in ckpt.atoms if name in ckpt.slots
        }
        self.shapes = {name: ckpt.atoms[name][1] for name in self._slots}
        self.dtypes = {name: slots[0].dtype for name, slots in self._slots.items()}

    def refresh(self) -> None:
        """A directory that was written over since is opened again; what else lies at the same place is not known."""
        try:
            same = file_states(self.checkpoint) == self._states
        except SourceError:
            same = False
        if same:
            return
        if self._reopen is None:
            raise SourceError(
                f"{self.label} was changed since it was opened.", hint="Open it again, or pass its path instead."
            )
        self._files.close()
        source, opening = self._reopen
        self.checkpoint = open_checkpoint(source, **opening).check()
        self._describe()
        self._files = Files()
        self._states = file_states(self.checkpoint)

    def senders(self) -> list[list[AtomBox]]:
        sizes = {
            n: (BY_NAME[self.dtypes[n]].size * whole(s).volume, range(self._peers.world)) for n, s in self._order()
        }
        chosen = share_out(sizes, self._peers.world) if self._peers.world > 1 else dict.fromkeys(sizes, 0)
        found: list[list[AtomBox]] = [[] for _ in range(self._peers.world)]
        for name, shape in self._order():
            found[chosen[name]].append((name, whole(shape)))
        return found

    def _order(self) -> list[tuple[str, Ints]]:
        """Atoms as their bytes lie in the files."""

        def place(name: str) -> tuple[str, int]:
            first = self._slots[name][0]
            return first.buffer.file, first.buffer.begin + first.offset

        return [(name, self.shapes[name]) for name in sorted(self._slots, key=place)]

    def expect(self, wanted: Iterable[AtomBox]) -> None:
        if not self._remote:
            return
        reads = (
            (slot, common)
            for atom, box in wanted
            for slot in self._slots[atom]
            if (common := intersect(slot.box, box)) is not None
        )
        self._files.expect(reads, self._limits, self._stop)

    def read(self, atom: str, box: Box, dtype: str, out: Array) -> None:
        slots = self._slots[atom]
        have = slots[0].dtype
        if have != dtype:
            data = cast(gather(self._files, slots, box), have, dtype)
            out.view(bits(BY_NAME[dtype].size))[:] = data.reshape(-1)
            return
        target = out.view(bits(BY_NAME[dtype].size)).reshape(box.sizes)
        for slot in slots:
            common = intersect(slot.box, box)
            if common is not None:
                read_box(self._files, slot, common, target if common == box else inside(target, box, common))

    def flat(self, atom: str, box: Box, dtype: str) -> Array | None:
        """None: files are read, not mapped, since a mapping of one that is cut short kills the process."""

    def check_unchanged(self) -> None:
        if file_states(self.checkpoint) != self._states:
            raise SourceError(f"{self.label} was changed while it was sent.", hint="Push it when nothing writes to it.")

    def let_go(self) -> None:
        """Nothing but open files."""

    def close(self) -> None:
        self._stop.set()
        self._files.close()


# ------------------------------------------------------------------------------------------------ against a server


def check_types(source: Source, atoms: Mapping[str, str], problems: Problems) -> dict[str, int]:
    """Which casts a push makes (`F32 → BF16` → atoms). Those that would be another model join the problems."""
    from ..target import CASTS

    casts: dict[str, int] = {}
    for name, wanted in atoms.items():
        have = source.dtypes.get(name)
        if have is None or have == wanted:
            continue
        if have not in CASTS or wanted not in CASTS:
            hint = "a server that holds FP8 is served by its own dialect, which quantises" if "F8" in wanted else ""
            problems.add(name, f"is {have} in {source.label}, and the server holds {wanted}", hint)
        kind = f"{have} → {wanted}"
        casts[kind] = casts.get(kind, 0) + 1
    return casts


def empty_like(box: Box, dtype: str) -> Array:
    """Memory for a box, as `Source.read` fills it."""
    return np.empty(box.volume * BY_NAME[dtype].size, np.uint8)
