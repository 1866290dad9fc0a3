"""The files of a push, one at a time: what will be sent, and how a file with tensors comes about.

A Hugging Face directory that needs no change is sent as its files are. Anything else is planned as a conversion to
Hugging Face, of which each file is carried out alone, in a scratch directory, when its turn comes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..carried import side_texts
from ..checkpoint import Checkpoint
from ..convert import Planned
from ..errors import PlanError, Problems, RemoteChanged, SourceError, VerifyError
from ..execute import Limits, Shared, atom_bytes, digest_all, run_all, transfer
from ..formats.base import TargetFile
from ..formats.hf import SINGLE
from ..formats.safetensors_file import read_header
from ..plan import AtomPlan, copies_of
from ..rawio import Files, write_exactly
from ..sidefiles import INDEX, read_index
from ..slots import Buffer, Slot
from ..source_state import check_unchanged
from ..target import Options
from ..verify import compare_segments
from .fetch import Stopped
from .mounts import remote_file

if TYPE_CHECKING:
    from .mirror import Mirror

STEP, PIECE = 1 << 20, 16 << 20
SAMPLE = 512
"""Bytes from a file's beginning that the Hub wants to see."""


@dataclass(frozen=True)
class Shard:
    """A file with tensors, as it will be called on the Hub.

    atoms   that it holds; their targets are those in this file
    source  the file that is sent as it is, or None where it has to be made as `made` says
    """

    path: str
    size: int
    atoms: tuple[AtomPlan, ...]
    source: Path | None = None
    made: TargetFile | None = None

    @property
    def bytes(self) -> int:
        """Bytes of tensors that have to be read for it."""
        return sum(atom_bytes(a.source) for a in self.atoms)


@dataclass(frozen=True)
class Cargo:
    """All that a push will send, but for the manifest and the card: files with tensors, small files, what stays."""

    planned: Planned
    shards: list[Shard]
    texts: dict[str, bytes]
    left_behind: list[str]
    as_is: bool

    @property
    def exactness(self) -> str:
        """The worst that happens to any value on the way."""
        return "bitwise" if self.as_is else self.planned.exactness()


def cargo_of(planned: Planned) -> Cargo:
    """What pushing this plan (to Hugging Face) sends. Raises PlanError for a file that nobody could load."""
    texts, left = side_texts(planned)
    files = as_they_are(planned.source, planned.options)
    if files is not None:
        index = read_index(planned.source.found.where)
        texts["config.json"] = (planned.source.found.hf / "config.json").read_bytes()  # that of FP8 says so
        texts |= {INDEX: index} if index is not None and SINGLE not in files else {}
        beside = {p.name for p in planned.source.found.where.iterdir() if p.suffix in (".safetensors", ".bin")}
        return Cargo(planned, _as_is(planned, files), texts, sorted({*left, *beside} - files.keys()), True)
    texts |= {name: text if isinstance(text, bytes) else text() for name, text in planned.target.texts.items()}
    return Cargo(planned, _to_make(planned), texts, left, False)


def as_they_are(ckpt: Checkpoint, options: Options) -> dict[str, Path] | None:
    """The weight files of a Hugging Face directory in which nothing has to change, by name; None when something has.

    They must be called as transformers looks for them, or the result could not be loaded.
    """
    found = ckpt.found
    # Who reads FP8 gets bfloat16 and a config that says so; the files themselves may stay what they are.
    read_as = {"quantization_config"} if "quantised" in ckpt.dialect else set[str]()
    changes = ckpt.dialect.get("config_changes", {}).keys() - read_as or ckpt.left_out
    plain = replace(options, allow_nan=False) == Options()
    if ckpt.format != "hf" or found.facts.get("container") != "safetensors" or changes or not plain:
        return None
    files = sorted({Path(b.buffer.file) for t in found.tensors for b in t.boxes})
    if any(f.parent != found.where for f in files):
        return None
    names = {f.name: f for f in files}
    return names if list(names) == [SINGLE] or read_index(found.where) is not None else None


def _as_is(planned: Planned, files: dict[str, Path]) -> list[Shard]:
    held: dict[str, list[AtomPlan]] = {str(path): [] for path in files.values()}
    for atom in planned.plan.atoms:
        held[atom.source[0].buffer.file].append(atom)
    sizes = planned.source.found.files
    return [Shard(name, sizes[str(path)], tuple(held[str(path)]), source=path) for name, path in files.items()]


def _to_make(planned: Planned) -> list[Shard]:
    held: dict[str, list[AtomPlan]] = {file.name: [] for file in planned.target.files}
    for atom in planned.plan.atoms:
        for name in dict.fromkeys(s.buffer.file for s in atom.target):
            held[name].append(replace(atom, target=tuple(s for s in atom.target if s.buffer.file == name)))
    empty = [name for name, atoms in held.items() if not atoms]
    if empty:
        raise PlanError(f"{', '.join(empty)} would hold no tensor.", hint="Please report this.")
    return [Shard(file.name, file.size, tuple(held[file.name]), made=file) for file in planned.target.files]


# ------------------------------------------------------------------------------------------------ making one


@dataclass(frozen=True)
class Made:
    """A file on this disk, ready to be sent. `temporary`: it lies in the scratch directory."""

    shard: Shard
    file: Path
    sha256: str
    sample: bytes
    digests: dict[str, str]
    temporary: bool

    def discard(self) -> None:
        """Give the room back."""
        if self.temporary:
            self.file.unlink(missing_ok=True)


class Maker:
    """Makes the files of a push in `scratch`, each read back and digested. `stop` ends the work soon."""

    def __init__(
        self, planned: Planned, scratch: Path, limits: Limits, advance: Callable[[int], None] = lambda n: None
    ) -> None:
        self.planned, self.scratch, self.limits = planned, scratch, limits
        self.advance, self.stop = advance, threading.Event()

    def make(self, shard: Shard) -> Made:
        """Raises SourceError for what is wrong with the source's values, VerifyError for a disk that lies."""
        remote = shard.source is not None and remote_file(shard.source)
        here = shard.source is not None and not remote
        file = shard.source if here and shard.source else self.scratch / shard.path
        try:
            if remote:
                self._fetch(shard, *remote)
            digests = self._write(shard) if shard.made is not None else {}
            with ThreadPoolExecutor(1) as pool:
                hashed = pool.submit(sha256_of, file, self.stop)
                if shard.made is not None:
                    self._read_back(shard, digests)
                else:
                    digests = self._transfer([read_from(a, str(shard.source), file) for a in shard.atoms], None)
                sha256, sample = hashed.result()
            if remote and remote[0].entry(remote[1]).sha256 not in (None, sha256):
                raise RemoteChanged(f"{shard.path}: its content is not what its digest says.", hint="Try again.")
        except BaseException:
            self.stop.set()
            if not here:
                file.unlink(missing_ok=True)
            raise
        return Made(shard, file, sha256, sample, digests, temporary=not here)

    def _fetch(self, shard: Shard, mirror: Mirror, path: str) -> None:
        """A file that lies elsewhere, byte for byte."""
        fd = os.open(self.scratch / shard.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

        def job(begin: int) -> None:
            data = mirror.fetcher.read(path, begin, min(begin + PIECE, shard.size), self.stop)
            write_exactly(fd, memoryview(data), begin)

        try:
            os.ftruncate(fd, shard.size)
            _reserve(fd, shard.size)
            run_all(((PIECE, partial(job, n)) for n in range(0, shard.size, PIECE)), self.limits.workers, self.stop)
        finally:
            os.close(fd)

    def _write(self, shard: Shard) -> dict[str, str]:
        assert shard.made is not None
        file = self.scratch / shard.path
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(fd, shard.size)
            _reserve(fd, shard.size)
            for offset, data in shard.made.segments:
                write_exactly(fd, memoryview(data), offset)
        finally:
            os.close(fd)
        return self._transfer(shard.atoms, self.scratch)

    def _transfer(self, atoms: Sequence[AtomPlan], root: Path | None) -> dict[str, str]:
        """Digests of these atoms, moved into the files below `root` (None: only read)."""
        source, out = Files(), Files(root, write=True) if root is not None else None
        shared, digests = Shared(stop=self.stop, advance=self.advance), dict[str, str]()
        nan = self.planned.options.allow_nan

        def job(atom: AtomPlan) -> Callable[[], None]:
            def action() -> None:
                digests[atom.name] = transfer(atom, source, out, self.limits.chunk, shared, allow_nan=nan)

            return action

        try:
            run_all(((atom_bytes(a.source), job(a)) for a in atoms), self.limits.workers, self.stop)
        finally:
            source.close()
            if out is not None:
                out.close()
        if shared.problems:
            check_unchanged(self.planned)
        shared.problems.raise_as(SourceError, f"{self.planned.source.path} cannot be pushed as it is:")
        if self.stop.is_set():
            raise Stopped
        return digests

    def _read_back(self, shard: Shard, digests: dict[str, str]) -> None:
        """The file must be sound, and every copy of every atom in it what was put there."""
        read_header(self.scratch / shard.path)
        lone = replace(self.planned, target=replace(self.planned.target, files=[shard.made]))
        compare_segments(lone, self.scratch)
        problems, atoms = Problems(), {a.name: a for a in shard.atoms}
        copies = {name: list(copies_of(a.target).values()) for name, a in atoms.items()}
        boxes = {name: a.box for name, a in atoms.items()}
        for name, found in digest_all(copies, boxes, self.limits, Shared(stop=self.stop), self.scratch).items():
            if set(found) != {digests[name]}:
                problems.add(name, f"reads back otherwise than it was written ({shard.path})")
        problems.raise_as(VerifyError, "What was made is not what was read:", hint="Check the disk; nothing was sent.")


def read_from(atom: AtomPlan, old: str, new: Path) -> AtomPlan:
    """The plan of an atom, with one file of its source in another place."""

    def moved(slots: Sequence[Slot]) -> tuple[Slot, ...]:
        return tuple(
            replace(s, buffer=at(s.buffer), scale=s.scale and replace(s.scale, buffer=at(s.scale.buffer)))
            for s in slots
        )

    def at(buffer: Buffer) -> Buffer:
        return replace(buffer, file=str(new)) if buffer.file == old else buffer

    if str(new) == old:
        return atom
    return replace(atom, source=moved(atom.source), replicas=tuple(map(moved, atom.replicas)))


def _reserve(fd: int, size: int) -> None:
    """Give a file its blocks: a full disk shows now, where it can be said, and not through a mapping."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as problem:
        if problem.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def sha256_of(file: Path, stop: threading.Event | None = None) -> tuple[str, bytes]:
    """A file's sha256, and its first bytes."""
    h, sample, at = hashlib.sha256(), b"", 0
    fd = os.open(file, os.O_RDONLY)
    try:
        with suppress(AttributeError, OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while chunk := os.pread(fd, STEP, at):
            if stop is not None and stop.is_set():
                raise Stopped
            sample = sample or chunk[:SAMPLE]
            h.update(chunk)
            at += len(chunk)
    finally:
        os.close(fd)
    return h.hexdigest(), sample
