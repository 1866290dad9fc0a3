"""`plan` and `convert`: a source in any format, a target in any other, on any mesh.

The steps: open the source (headers only), lay the target out, join the two, prove the plan total, move the bytes into a
directory beside the target, read them back, rename.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from .checkpoint import Checkpoint
from .codecs import exactness
from .errors import Problems, SourceError, TargetError, VerifyError
from .execute import Limits, Shared, atom_bytes, run_all, transfer
from .formats.base import Target
from .manifest import build, encode, read_beside
from .mesh import Mesh
from .opening import format_name, open_checkpoint
from .placement import Local
from .plan import AtomPlan, Plan, copies_of, join
from .rawio import Files, Writeback, write_exactly
from .sidefiles import HF, INDEX, MANIFEST, collect
from .target import Options, dtype_of, lay_out, place, side_config
from .verify import copies_digests
from .workdir import WorkDir, check_room, check_target, explained, settle_target

__all__ = ["Mesh", "Options", "Planned", "Result", "convert", "plan", "run"]


@dataclass
class Planned:
    """A plan with both of its ends, ready to run."""

    source: Checkpoint
    format: str
    mesh: Mesh
    options: Options
    plan: Plan
    target: Target
    dialect: dict[str, Any]
    states: dict[str, str]
    seconds: float = 0.0

    @property
    def locals(self) -> list[Local]:
        """Every tensor as each rank of the target holds it."""
        return place(self.source, self.format, self.mesh, self.options).locals

    def report(self) -> dict[str, Any]:
        """What moves where, as plain data."""
        totals = self.plan.totals()
        files = sorted(self.target.files, key=lambda f: -f.size)
        per_rank: dict[int, int] = {}
        for file in self.target.files:
            per_rank[file.rank] = per_rank.get(file.rank, 0) + file.size
        return totals | {
            "source": {"path": str(self.source.path), "format": self.source.format},
            "target": {"format": self.format, "mesh": str(self.mesh)},
            "family": self.source.table.name,
            "exactness": self.exactness(),
            "files": len(files),
            "largest_files": [{"name": f.name, "bytes": f.size} for f in files[:5]],
            "ranks": len(per_rank),
            "bytes_per_rank": {"min": min(per_rank.values(), default=0), "max": max(per_rank.values(), default=0)},
            "dropped": dict(sorted(self.source.drops.items())[:50]),
            "notes": self.source.notes,
            "dialect": self.dialect,
            "planning_seconds": round(self.seconds, 3),
        }

    def exactness(self) -> str:
        """The worst that happens to any value: `bitwise`, `widen`, `dequant` or `narrow`."""
        kinds = {exactness(a.source_dtype, a.target_dtype) for a in self.plan.atoms}
        if any(a.source[0].scale is not None for a in self.plan.atoms):
            kinds.add("dequant")
        return max(kinds, key=("bitwise", "widen", "dequant", "narrow").index, default="bitwise")


def plan(
    source: str | Path | Checkpoint, to: str, mesh: Mesh | None = None, options: Options | None = None, **opening: Any
) -> Planned:
    """Plan a conversion: headers are read, nothing is written. `opening` goes to `open_checkpoint`.

    Raises SourceError, MeshError or PlanError with every reason why it cannot be.
    """
    with _without_gc():
        return _plan(source, to, mesh, options, opening)


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
    source: str | Path | Checkpoint, to: str, mesh: Mesh | None, options: Options | None, opening: Mapping[str, Any]
) -> Planned:
    start = time.perf_counter()
    name, mesh, options = format_name(to), mesh or Mesh(), options or Options()
    ckpt = source if isinstance(source, Checkpoint) else open_checkpoint(source, **opening)
    ckpt.check()
    states = file_states(ckpt)
    placed = place(ckpt, name, mesh, options)
    target = lay_out(ckpt, name, mesh, options, placed, dtype_of(ckpt, options, placed.locals))
    joined = Plan(join(ckpt.atoms, ckpt.slots, target.slots), dict(ckpt.drops), target.filled)
    return Planned(ckpt, name, mesh, options, joined, target, placed.dialect, states, time.perf_counter() - start)


def _json(value: Mapping[str, Any]) -> bytes:
    """As transformers writes it. What UTF-8 cannot say stays escaped."""
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(value, indent=2) + "\n").encode()


def _side_files(planned: Planned) -> tuple[dict[str, bytes], list[str]]:
    """Small files for the target, by their path there, and what is left behind."""
    ckpt = planned.source
    files, left = collect(ckpt.found.hf) if ckpt.found.hf else ({}, [])
    prefix = "" if planned.format == "hf" else f"{HF}/"
    texts = {}
    for name, path in files.items():
        if name == INDEX and planned.format == "hf":
            continue
        try:
            texts[prefix + name] = path.read_bytes()
        except OSError as error:
            raise SourceError(f"{path}: cannot be read: {error.strerror}.") from error
    changed = side_config(ckpt, planned.options)
    if changed is not None:
        texts[prefix + "config.json"] = _json(changed)
    return texts, left


# ------------------------------------------------------------------------------------------------ running it

Progress = Callable[[str, int, int], None]
"""Called with (phase, bytes done, bytes in all)."""


@dataclass
class Result:
    """What a conversion did: the plan's report, seconds and bytes for each phase, digests."""

    planned: Planned
    path: Path
    seconds: dict[str, float] = field(default_factory=dict)
    verified: bool = False
    resumed: int = 0
    left_behind: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """As plain data."""
        return self.planned.report() | {
            "path": str(self.path),
            "seconds": {k: round(v, 3) for k, v in self.seconds.items()},
            "verified": self.verified,
            "resumed_atoms": self.resumed,
            "left_behind": self.left_behind,
        }


def convert(
    source: str | Path | Checkpoint,
    target: str | Path,
    to: str,
    mesh: Mesh | None = None,
    options: Options | None = None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = True,
    limits: Limits | None = None,
    progress: Progress | None = None,
    **opening: Any,
) -> Result:
    """Convert a checkpoint into another format, mesh or element type.

    The target appears only when it is whole and on disk. `verify` reads everything back and compares content digests.
    Raises a ConvertError of the kind that fits; the source is never modified.
    """
    with explained(Path(target)):
        path = settle_target(target)
        inputs = [source.path if isinstance(source, Checkpoint) else source, *opening.get("also", ())]
        _refuse_overlap([Path(p) for p in (*inputs, opening.get("hf_config")) if p is not None], path)
        check_target(path, overwrite=overwrite, resume=resume)
    planned = plan(source, to, mesh, options, **opening)
    _refuse_overlap([Path(p).parent for p in planned.source.found.files], path)
    return run(planned, path, resume=resume, overwrite=overwrite, verify=verify, limits=limits, progress=progress)


def _refuse_overlap(inputs: Sequence[Path], target: Path) -> None:
    b = target.resolve()
    for source in dict.fromkeys(inputs):
        a = source.resolve()
        if a == b or a in b.parents or b in a.parents:
            raise TargetError(f"{target} and the source {source} lie inside each other.", hint="Choose another target.")


def identity(planned: Planned) -> str:
    """What a resumed conversion must find unchanged: the plan, and the source's files with sizes and times."""
    h = xxhash.xxh3_128(planned.plan.digest.encode())
    for name, state in planned.states.items():
        h.update(f"{name} {state}".encode(errors="surrogateescape"))
    return h.hexdigest()


def file_states(ckpt: Checkpoint) -> dict[str, str]:
    """Size, time and inode of every file of the source. Raises SourceError when one is gone, or has another size than
    it had when its header was read."""
    states = {}
    for name, size in sorted(ckpt.found.files.items()):
        try:
            stat = os.stat(name)
        except OSError as error:
            raise SourceError(f"{name}: cannot be read: {error.strerror}.") from error
        if stat.st_size != size:
            raise SourceError(
                f"{name}: has {stat.st_size} bytes, it had {size} a moment ago.", hint="Something writes to it."
            )
        states[name] = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
    return states


def _check_unchanged(planned: Planned) -> None:
    """A source that was written since it was planned gave half old and half new weights, whatever the digests say."""
    changed = [name for name, state in file_states(planned.source).items() if planned.states[name] != state]
    if changed:
        raise SourceError(
            f"{planned.source.path} was changed while it was converted: {', '.join(changed[:4])}",
            hint="Convert it when nothing writes to it.",
        )


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
    texts, left = _side_files(planned)
    target = planned.target
    texts |= {name: text if isinstance(text, bytes) else text() for name, text in target.texts.items()}
    total = sum(f.size for f in target.files) + sum(map(len, texts.values()))
    check_room(path, total if not resume else 0)
    result = Result(planned, path, left_behind=left)
    with explained(path, total), WorkDir(path, identity(planned), resume=resume, overwrite=overwrite) as work:
        start = time.perf_counter()
        work.keep_only({f.name for f in target.files})
        new = {file.name for file in target.files if work.allocate(file.name, file.size)}
        work.forget_all_but({a.name for a in planned.plan.atoms if not any(s.buffer.file in new for s in a.target)})
        result.resumed = len(work.done)
        _move(planned, work, limits, progress, result)
        for name, data in texts.items():
            work.write_text(name, data)
        dtypes = {a.name: a.target_dtype for a in planned.plan.atoms}
        entries = {name: (dtypes[name], digest) for name, digest in result.digests.items()}
        built = build(planned.source, planned.format, planned.dialect, planned.plan.digest, entries)
        work.write_text(MANIFEST, encode(built))
        result.seconds["move"] = time.perf_counter() - start
        if verify:
            start = time.perf_counter()
            _read_back(planned, work.path, result, limits, progress)
            result.verified = True
            result.seconds["verify"] = time.perf_counter() - start
        start = time.perf_counter()
        work.sync()
        _check_unchanged(planned)
        work.publish()
        result.seconds["sync"] = time.perf_counter() - start
    return result


def _move(planned: Planned, work: WorkDir, limits: Limits, progress: Progress | None, result: Result) -> None:
    source, out = Files(), Files(work.path, write=True)
    written = Writeback(out)
    todo = [a for a in planned.plan.atoms if a.name not in work.done]
    total = sum(atom_bytes(a.source) for a in planned.plan.atoms)
    shared = Shared(advance=_counter("convert", total, progress))
    shared.advance(total - sum(atom_bytes(a.source) for a in todo))
    result.digests.update(work.done)

    def job(atom: AtomPlan) -> Callable[[], None]:
        def action() -> None:
            digest = transfer(atom, source, out, limits.chunk, shared, allow_nan=planned.options.allow_nan)
            result.digests[atom.name] = digest
            written.wrote((s.buffer.file for s in atom.target), atom_bytes(atom.target))
            if not shared.problems:
                work.finished(atom.name, digest, {s.buffer.file for s in atom.target})

        return action

    try:
        for file in planned.target.files:
            fd = out.fd(file.name)
            for offset, data in file.segments:
                write_exactly(fd, memoryview(data), offset)
        run_all(((atom_bytes(a.source), job(a)) for a in todo), limits.workers, shared.stop)
    finally:
        source.close()
        out.close()
    shared.problems.raise_as(SourceError, f"{planned.source.path} cannot be converted as it is:")
    _compare_with_manifest(planned, result.digests)


def _compare_with_manifest(planned: Planned, digests: Mapping[str, str]) -> None:
    """A source that was ours once says what its atoms were; the digests are here anyway."""
    source = planned.source
    known = read_beside(source.found.where, source.format)
    for atom in planned.plan.atoms if known is not None else ():
        said = known.get(atom.name) if known else None
        if said and atom.source_dtype == atom.target_dtype == said[0] and digests[atom.name] != said[1]:
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


def _read_back(planned: Planned, path: Path, result: Result, limits: Limits, progress: Progress | None) -> None:
    """Open what was written with the format's own reader, and compare the content of every copy of every atom."""
    written = open_checkpoint(path, family=planned.source.table.name)
    problems = Problems(list(written.problems.found))
    problems.raise_as(VerifyError, "What was written cannot be read back:")
    _compare_segments(planned, path)
    total = sum(atom_bytes(s) for s in written.slots.values())
    digests = copies_digests(written, limits, _counter("verify", total, progress))
    for name, digest in result.digests.items():
        found = digests.get(name, [])
        wanted = len(copies_of(planned.target.slots[name]))
        if len(found) < wanted:
            problems.add(name, f"{len(found)} copies were read back, {wanted} were written")
        if any(d != digest for d in found):
            problems.add(name, "reads back with another content than was written", "check the disk; please report this")
    problems.raise_as(VerifyError, "What was written is not what was read:")


def _compare_segments(planned: Planned, path: Path) -> None:
    """What stands between the tensors (headers, pickles) must be as it was laid out, too."""
    files, problems = Files(path), Problems()
    try:
        for file in planned.target.files:
            fd = files.fd(file.name)
            if any(os.pread(fd, len(data), offset) != data for offset, data in file.segments):
                problems.add(file.name, "its header reads back otherwise than it was written", "check the disk")
    finally:
        files.close()
    problems.raise_as(VerifyError, "What was written is not what was read:")
