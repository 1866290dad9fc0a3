"""`plan` and `convert`: a source in any format, a target in any other, on any mesh.

The steps: open the source (headers only), lay the target out, join the two, prove the plan total, move the bytes into a
directory beside the target, read them back, rename.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .carried import side_texts
from .checkpoint import Checkpoint
from .codecs import exactness
from .errors import SourceError
from .execute import Limits, Shared, atom_bytes, reads, run_all, transfer
from .formats.base import Target, TargetFile
from .manifest import manifests, read_beside
from .mesh import Mesh
from .opening import format_name, open_checkpoint
from .placement import Local
from .plan import AtomPlan, Plan, join, share
from .ranks import check_wanted, files_of, without_files
from .rawio import Files, Writeback, write_exactly
from .remote.mounts import note_of
from .remote.urls import as_begun, is_remote
from .sidefiles import MANIFEST
from .source_state import check_unchanged, file_states, identity
from .target import Options, dtype_of, lay_out, place
from .verify import read_back
from .workdir import WorkDir, begun_from, check_room, check_target, explained, refuse_overlap, settle_target

__all__ = ["Mesh", "Options", "Planned", "Result", "convert", "plan", "run"]


@dataclass
class Planned:
    """A plan with both of its ends, ready to run.

    ranks   those whose files are made; empty: all
    moves   the plan's part that fills these files (all of it, where all are made); `files` are they
    """

    source: Checkpoint
    format: str
    mesh: Mesh
    options: Options
    plan: Plan
    target: Target
    dialect: dict[str, Any]
    states: dict[str, str]
    seconds: float = 0.0
    ranks: tuple[int, ...] = ()

    @cached_property
    def files(self) -> list[TargetFile]:
        return files_of(self.ranks, self.target.files) if self.ranks else self.target.files

    @cached_property
    def moves(self) -> Plan:
        names = {file.name for file in self.files}
        return share(self.plan, names, sum(self.target.fills[n] for n in names)) if self.ranks else self.plan

    @property
    def locals(self) -> list[Local]:
        """Every tensor as each rank of the target holds it."""
        return place(self.source, self.format, self.mesh, self.options).locals

    def report(self) -> dict[str, Any]:
        """What moves where, as plain data."""
        totals = self.moves.totals()
        files = sorted(self.files, key=lambda f: -f.size)
        per_rank: dict[int, int] = {}
        for file in self.files:
            per_rank[file.rank] = per_rank.get(file.rank, 0) + file.size
        return totals | {
            "source": {"path": str(self.source.path), "format": self.source.format},
            "target": {"format": self.format, "mesh": str(self.mesh)},
            "family": self.source.table.name,
            "exactness": self.exactness(),
            "files": len(files),
            "largest_files": [{"name": f.name, "bytes": f.size} for f in files[:5]],
            "ranks": len(per_rank),
            "only_ranks": list(self.ranks) or None,
            "whole": {"bytes_read": self.plan.bytes_read, "files": len(self.target.files)} if self.ranks else None,
            "bytes_per_rank": {"min": min(per_rank.values(), default=0), "max": max(per_rank.values(), default=0)},
            "dropped": dict(sorted(self.source.drops.items())[:50]),
            "notes": self.source.notes,
            "dialect": self.dialect,
            "planning_seconds": round(self.seconds, 3),
        }

    def exactness(self) -> str:
        """The worst that happens to any value: `bitwise`, `widen`, `dequant` or `narrow`."""
        kinds = {exactness(a.source_dtype, a.target_dtype) for a in self.moves.atoms}
        if any(a.source[0].scale is not None for a in self.moves.atoms):
            kinds.add("dequant")
        return max(kinds, key=("bitwise", "widen", "dequant", "narrow").index, default="bitwise")


def plan(
    source: str | Path | Checkpoint,
    to: str,
    mesh: Mesh | None = None,
    options: Options | None = None,
    *,
    ranks: Sequence[int] | None = None,
    **opening: Any,
) -> Planned:
    """Plan a conversion: headers are read, nothing is written. `opening` goes to `open_checkpoint`; `ranks` are those
    of the target whose files are wanted, None means all.

    Raises SourceError, MeshError or PlanError with every reason why it cannot be.
    """
    with _without_gc():
        return _plan(source, to, mesh, options, ranks, opening)


@contextmanager
def _without_gc() -> Iterator[None]:
    """A plan makes millions of objects and drops none: looking for garbage among them takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _plan(
    source: str | Path | Checkpoint,
    to: str,
    mesh: Mesh | None,
    options: Options | None,
    ranks: Sequence[int] | None,
    opening: Mapping[str, Any],
) -> Planned:
    start = time.perf_counter()
    name, mesh, options = format_name(to), mesh or Mesh(), options or Options()
    wanted = check_wanted(ranks, name, mesh) if ranks is not None else ()
    ckpt = source if isinstance(source, Checkpoint) else open_checkpoint(source, **opening)
    ckpt.check()
    states = file_states(ckpt)
    placed = place(ckpt, name, mesh, options)
    target = lay_out(ckpt, name, mesh, options, placed, dtype_of(ckpt, options, placed.locals))
    joined = Plan(join(ckpt.atoms, ckpt.slots, target.slots), dict(ckpt.drops), target.filled)
    note = without_files(wanted, target.files)
    if note and note not in ckpt.notes:
        ckpt.notes.append(note)
    seconds = time.perf_counter() - start
    return Planned(ckpt, name, mesh, options, joined, target, placed.dialect, states, seconds, wanted)


# ------------------------------------------------------------------------------------------------ running it

Progress = Callable[[str, int, int], None]
"""Called with (phase, bytes done, bytes in all)."""


@dataclass
class Result:
    """What a conversion did: the plan's report, seconds and bytes for each phase, digests. `fetched`: bytes, requests
    and retries since the source was opened, where it lies elsewhere."""

    planned: Planned
    path: Path | str
    seconds: dict[str, float] = field(default_factory=dict)
    verified: bool = False
    resumed: int = 0
    left_behind: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """As plain data."""
        return self.planned.report() | {
            "path": str(self.path),
            "seconds": {k: round(v, 3) for k, v in self.seconds.items()},
            "verified": self.verified,
            "resumed_atoms": self.resumed,
            "left_behind": self.left_behind,
            "fetched": self.fetched,
        }


def convert(
    source: str | Path | Checkpoint,
    target: str | Path,
    to: str,
    mesh: Mesh | None = None,
    options: Options | None = None,
    *,
    ranks: Sequence[int] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = True,
    limits: Limits | None = None,
    progress: Progress | None = None,
    **opening: Any,
) -> Result:
    """Convert a checkpoint into another format, mesh or element type.

    The target appears only when it is whole and on disk. `verify` reads everything back and compares content digests.
    With `ranks`, only what these ranks of the target hold is read and written: the directory becomes a checkpoint when
    the other ranks' ones were copied into it.
    Raises a ConvertError of the kind that fits; the source is never modified.
    """
    if is_remote(target):
        from .remote.fs_target import convert_to

        how = {"ranks": ranks, "overwrite": overwrite, "resume": resume, "verify": verify}
        return convert_to(source, target, to, mesh, options, limits=limits, progress=progress, **how, **opening)
    with explained(Path(target)):
        path = settle_target(target)
        inputs = [source.found.root if isinstance(source, Checkpoint) else source, *opening.get("also", ())]
        local = [Path(p) for p in (*inputs, opening.get("hf_config")) if p is not None and not is_remote(p)]
        refuse_overlap(local, path)
        check_target(path, overwrite=overwrite, resume=resume)
    if resume and not isinstance(source, Checkpoint):
        source = as_begun(source, begun_from(path))
    planned = plan(source, to, mesh, options, ranks=ranks, **opening)
    refuse_overlap([Path(p).parent for p in planned.source.found.files], path)
    return run(planned, path, resume=resume, overwrite=overwrite, verify=verify, limits=limits, progress=progress)


def run(
    planned: Planned,
    path: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Result:
    """Move the bytes of a plan into `path`."""
    limits = limits or Limits()
    texts, left = side_texts(planned)
    target = planned.target
    texts |= {name: text if isinstance(text, bytes) else text() for name, text in target.texts.items()}
    total = sum(f.size for f in planned.files) + sum(map(len, texts.values()))
    check_room(path, total if not resume else 0)
    result = Result(planned, path, left_behind=left)
    with explained(path, total), unfinished(planned, path, resume, overwrite) as work:
        start = time.perf_counter()
        work.keep_only({f.name for f in planned.files})
        new = {file.name for file in planned.files if work.allocate(file.name, file.size)}
        work.forget_all_but({a.key for a in planned.moves.atoms if not any(s.buffer.file in new for s in a.target)})
        result.resumed = len(work.done)
        _move(planned, work, limits, progress, result)
        for name, data in texts.items():
            work.write_text(name, data)
        for name, data in manifests(planned, result.digests).items():
            work.write_text(name, data)
        result.seconds["move"] = time.perf_counter() - start
        if verify:
            start = time.perf_counter()
            read_back(planned, work.path, result.digests, limits, lambda total: _counter("verify", total, progress))
            result.verified = True
            result.seconds["verify"] = time.perf_counter() - start
        start = time.perf_counter()
        work.sync()
        check_unchanged(planned)
        work.publish()
        result.seconds["sync"] = time.perf_counter() - start
    result.fetched = planned.source.fetched()
    if note := note_of(result.fetched):
        planned.source.notes.append(note)
    return result


def unfinished(planned: Planned, path: Path, resume: bool, overwrite: bool) -> WorkDir:
    """Where a plan writes until it is whole."""
    source = str(planned.source.path)
    return WorkDir(path, identity(planned), resume=resume, overwrite=overwrite, source=source)


def _move(planned: Planned, work: WorkDir, limits: Limits, progress: Progress | None, result: Result) -> None:
    source, out = Files(), Files(work.path, write=True)
    written = Writeback(out)
    todo = [a for a in planned.moves.atoms if a.key not in work.done]
    total = sum(a.nbytes for a in planned.moves.atoms)
    shared = Shared(advance=_counter("convert", total, progress))
    shared.advance(total - sum(a.nbytes for a in todo))
    result.digests.update(work.done)

    def job(atom: AtomPlan) -> Callable[[], None]:
        def action() -> None:
            digest = transfer(atom, source, out, limits.chunk, shared, allow_nan=planned.options.allow_nan)
            result.digests[atom.key] = digest
            written.wrote((s.buffer.file for s in atom.target), atom_bytes(atom.target))
            if not shared.problems:
                work.finished(atom.key, digest, {s.buffer.file for s in atom.target})

        return action

    try:
        for file in planned.files:
            fd = out.fd(file.name)
            for offset, data in file.segments:
                write_exactly(fd, memoryview(data), offset)
        expected = (pair for a in todo for pair in reads((a.source, *a.replicas), a.box, limits.chunk))
        source.expect(expected, limits, shared.stop)
        run_all(((a.nbytes, job(a)) for a in todo), limits.workers, shared.stop)
    finally:
        source.close()
        out.close()
    if shared.problems:
        check_unchanged(planned)  # first: what somebody writes over meanwhile looks broken in other ways, too
    shared.problems.raise_as(SourceError, f"{planned.source.path} cannot be converted as it is:")
    _compare_with_manifest(planned, result.digests)


def _compare_with_manifest(planned: Planned, digests: Mapping[str, str]) -> None:
    """A source that was ours once says what its atoms were; the digests are here anyway."""
    source = planned.source
    known = read_beside(source.found.where, source.format)
    for atom in planned.moves.atoms if known is not None else ():
        said = known.get(atom.key) if known else None
        if said and atom.source_dtype == atom.target_dtype == said[0] and digests[atom.key] != said[1]:
            note = f"{atom.name} is not what {MANIFEST} says that it was: the weights were changed since"
            source.notes.append(note)


def _counter(phase: str, total: int, progress: Progress | None) -> Callable[[int], None]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(phase, done, total)

    return advance
