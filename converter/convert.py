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
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import xxhash

from ..mappings.megatron_args import args_from_config
from ..mappings.schema import Row
from ..mappings.torch_dist import always_indexed, extra_states, global_rows
from . import manifest
from .checkpoint import ALTERNATE, Checkpoint
from .codecs import exactness
from .dtypes import FLOATS, parse
from .errors import ConfigError, ConvertError, PlanError, Problems, SourceError, TargetError, VerifyError
from .execute import Limits, Shared, atom_bytes, run_all, transfer
from .formats import dcp, hf, mp_rank, torch_dist
from .formats.base import Target
from .layout import Named, View
from .mesh import Mesh, Pipeline, pipeline
from .opening import format_name, open_checkpoint
from .placement import FsdpPlacement, Local, MegatronPlacement, padded_vocab, undivided
from .plan import AtomPlan, Plan, copies_of, join
from .rawio import Files
from .sidefiles import HF, INDEX, MANIFEST, collect, read_json
from .verify import copies_digests
from .workdir import WorkDir, check_room, check_target, explained, settle_target

GB = 1_000_000_000


@dataclass(frozen=True)
class Options:
    """How a target is to be written.

    dtype       cast floating-point tensors to it (those that a table keeps in fp32 stay); None keeps every type
    max_shard   bytes in one safetensors file, at most
    experts     `per_expert` or `fused`: how Hugging Face names hold experts; None: as the source did, or as the format
                does
    spec        `te` or `local`: whose norm names per-rank Megatron files use
    megatron_experts  experts of per-rank Megatron files: `grouped` (`mlp.experts.linear_fc1.weight0`, TE's),
                `sequential` (`local_experts.0.…`) or `legacy` (`mlp.experts.weight1`); None: grouped with TE's spec,
                else sequential
    vocab_divisor  Megatron pads the vocabulary to a multiple of this × TP
    root        what to put before every name of a `dcp` (`model.`, say)
    allow_nan   convert a checkpoint that holds NaNs
    """

    dtype: str | None = None
    max_shard: int = 5 * GB
    experts: str | None = None
    spec: str = "te"
    megatron_experts: str | None = None
    vocab_divisor: int = 128
    root: str = ""
    allow_nan: bool = False


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
    seconds: float = 0.0

    @property
    def locals(self) -> list[Local]:
        """Every tensor as each rank of the target holds it."""
        return _place(self.source, self.format, self.mesh, self.options)[0]

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
    dtypes = target_dtypes(ckpt, options)
    locals_, pipe, vocab, dialect = _place(ckpt, name, mesh, options)
    dtype_of = _dtype_of(ckpt, dtypes, locals_)
    target = _lay_out(ckpt, name, mesh, options, locals_, dtype_of, vocab, pipe)
    joined = Plan(join(ckpt.atoms, ckpt.slots, target.slots), dict(ckpt.drops), target.filled)
    return Planned(ckpt, name, mesh, options, joined, target, dialect, time.perf_counter() - start)


def target_dtypes(ckpt: Checkpoint, options: Options) -> dict[str, str]:
    """The element type in which every atom is written."""
    try:
        wanted = parse(options.dtype).name if options.dtype else None
    except ValueError as error:
        raise ConfigError(f"--dtype: {error}") from None
    result = {}
    for name, dtype in ckpt.dtypes().items():
        atom, _ = ckpt.atoms[name]
        keep = wanted is None or dtype not in FLOATS or atom.exact
        result[name] = dtype if keep else wanted
    return result


# ------------------------------------------------------------------------------------------------ laying the target out


def _place(
    ckpt: Checkpoint, name: str, mesh: Mesh, options: Options
) -> tuple[list[Local], Pipeline | None, int | None, dict[str, Any]]:
    """Tensors of the target format on the mesh."""
    dims, t = ckpt.view.dims, ckpt.table
    if name in ("hf", "dcp"):
        experts = options.experts or _experts_form(ckpt, name)
        forms = {"", experts, "mtp_copy"}
        view = View(t.hf, dims)
        wanted = _forms(forms)
        dialect = {"experts": experts} if dims.get("e") else {}
        if name == "hf":
            _refuse_mesh(mesh, name)
            return undivided(_in_order(view, wanted)), None, None, dialect
        return FsdpPlacement(view, mesh).locals(wanted), None, None, dialect | {"mesh": str(mesh), "root": options.root}
    if name == "archon":
        if not t.archon:
            raise ConfigError(f"The family {t.name} has no Archon names.")
        placement = FsdpPlacement(View(t.archon, dims), mesh)
        return placement.locals(_forms({""})), None, None, {"mesh": str(mesh)}
    if mesh.dp_shard > 1:
        raise ConfigError(
            "--dp-shard concerns dcp and archon; Megatron's data-parallel ranks all hold the same weights."
        )
    pipe = pipeline(mesh, dims["layers"], dims["mtp"])
    vocab = padded_vocab(dims["v"], options.vocab_divisor, mesh.tp)
    dialect = {
        "mesh": str(mesh),
        "vocab": {"true": dims["v"], "stored": vocab},
        "pipeline": mesh.layout or str(mesh.pp),
    }
    if name == "mp_rank":
        experts = options.megatron_experts or ("grouped" if options.spec == "te" else "sequential")
        dialect |= {"spec": options.spec} | ({"experts": experts} if dims.get("e") else {})
        placed = MegatronPlacement(View(t.megatron, dims), mesh, pipe, vocab, per_rank=True).locals(
            _forms({"", options.spec, experts})
        )
        return placed, pipe, vocab, dialect
    stacked = not always_indexed(t.megatron, dims)
    dialect["layers"] = "stacked" if stacked else "indexed"
    view = View(global_rows(t.megatron, stacked=stacked), dims)
    return MegatronPlacement(view, mesh, pipe, vocab).locals(_forms({""})), pipe, vocab, dialect


def _forms(forms: set[str]) -> Callable[[Row], bool]:
    return lambda row: row.form in forms


def _refuse_mesh(mesh: Mesh, name: str) -> None:
    if mesh.world > 1 or mesh.dp_shard > 1:
        raise ConfigError(
            f"{name} has no ranks; the mesh ({mesh}) does not apply to it.", hint="Drop the mesh options."
        )


def _in_order(view: View, wanted: Callable[[Row], bool]) -> list[Named]:
    """Hugging Face's order: embedding, layers, norm, head."""
    tensors = list(view.all_named(wanted))
    order = {"first": 0, "layer": 1, "mtp": 1, "last": 2}
    return sorted(tensors, key=lambda n: order.get(n.row.place, 2))


def _experts_form(ckpt: Checkpoint, name: str) -> str:
    """How to name experts when nobody says: a DCP as transformers 5 holds them in memory, files as the source's did."""
    if name == "dcp":
        return "fused"
    for dialect in (ckpt.dialect, *_earlier_dialects(ckpt)):
        forms = dialect.get("forms")
        forms = forms if isinstance(forms, list) else []
        if ckpt.format in ("hf",) or dialect is not ckpt.dialect:
            for form in ("fused", "per_expert"):
                if form in forms:
                    return form
    return "per_expert"


def _earlier_dialects(ckpt: Checkpoint) -> Iterator[Mapping[str, Any]]:
    """Dialects of the Hugging Face checkpoint from which this one once came, by its manifest."""
    source = (manifest.read(ckpt.path) or {}).get("source")
    while isinstance(source, Mapping):
        if source.get("format") == "hf":
            dialect = source.get("dialect")
            yield dialect if isinstance(dialect, Mapping) else {}
        source = source.get("origin")


def atoms_of(named: Named, view_dims: Mapping[str, int]) -> list[str]:
    """Names of all atoms that a tensor holds."""
    spans = {v: range(named.geometry.shape[d]) for v, d in named.geometry.index.items()}
    names = []
    for values in product(*spans.values()):
        ids = {"i": named.layer, "e": named.expert} | dict(zip(spans, values, strict=True))
        names += [place.atom.name.format(**ids) for place in named.geometry.places]
    return names


def _dtype_of(ckpt: Checkpoint, dtypes: Mapping[str, str], locals_: Sequence[Local]) -> Callable[[Named], str]:
    """The type of every target tensor. Raises PlanError where one tensor would need two."""
    found: dict[str, str] = {}
    problems = Problems()
    for local in locals_:
        named = local.named
        if named.name in found:
            continue
        held: dict[str, str] = {}
        for atom in atoms_of(named, ckpt.view.dims):
            if atom in dtypes:
                held.setdefault(dtypes[atom], atom)
        if len(held) > 1:
            mixed = ", ".join(f"{atom} is {dtype}" for dtype, atom in held.items())
            problems.add(named.name, f"would hold several element types: {mixed}", "choose one with --dtype")
        found[named.name] = next(iter(held), "F32")
    problems.raise_as(PlanError, "Mixed element types:")
    return lambda named: found[named.name]


def _lay_out(
    ckpt: Checkpoint,
    name: str,
    mesh: Mesh,
    options: Options,
    locals_: list[Local],
    dtype_of: Callable[[Named], str],
    vocab: int | None,
    pipe: Pipeline | None,
) -> Target:
    """Files and places for all local tensors. Repeats of an atom under another name become numbered copies."""
    locals_ = _number_copies(locals_)
    if name == "hf":
        target = hf.lay_out(locals_, dtype_of, max_shard=options.max_shard, weight_map=_weight_map(ckpt, options))
    elif name in ("dcp", "archon"):
        target = dcp.lay_out(locals_, dtype_of, root=options.root)
    else:
        config = side_config(ckpt, options) or ckpt.config
        args = args_from_config(config, ckpt.view.dims, mesh, vocab or 0, dtype=_main_dtype(ckpt, options))
        if name == "torch_dist":
            rows, dims = ckpt.table.megatron, ckpt.view.dims
            states = extra_states(rows, dims, stacked=not always_indexed(rows, dims))
            target = torch_dist.lay_out(locals_, dtype_of, args, list(states))
        else:
            target = mp_rank.lay_out(locals_, dtype_of, args, mesh)
    return target


def _main_dtype(ckpt: Checkpoint, options: Options) -> str:
    dtypes = list(target_dtypes(ckpt, options).values())
    return max(set(dtypes), key=dtypes.count, default="BF16")


def _number_copies(locals_: list[Local]) -> list[Local]:
    """A tensor that repeats another's atoms under a second name or in a second place becomes a numbered copy of it."""
    homes: dict[tuple[str, int, int], list[tuple[str, str]]] = {}
    result = []
    for local in locals_:
        named = local.named
        key = (named.name, named.row.place)
        known = homes.setdefault((named.row.atoms[0].name, named.layer, named.expert), [key])
        if key not in known:
            known.append(key)
        base = known.index(key) * ALTERNATE
        result.append(replace(local, copy=base + local.copy) if base else local)
    return result


def _weight_map(ckpt: Checkpoint, options: Options) -> dict[str, str] | None:
    """The shards of the Hugging Face checkpoint from which this one came, unless the user sets a size."""
    if options.max_shard != Options.max_shard or ckpt.found.hf is None or not (ckpt.found.hf / INDEX).is_file():
        return None
    try:
        weights = read_json(ckpt.found.hf / INDEX)["weight_map"]
        return {str(k): str(v) for k, v in weights.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


# ------------------------------------------------------------------------------------------------ side files


def side_config(ckpt: Checkpoint, options: Options) -> dict[str, Any] | None:
    """The config with what this conversion changes, or None when it changes nothing."""
    changes = dict(ckpt.dialect.get("config_changes", {}))
    if options.dtype:
        wanted = parse(options.dtype).torch
        for key in ("dtype", "torch_dtype"):
            if key in ckpt.config and ckpt.config[key] != wanted:
                changes[key] = wanted
    derived = not ckpt.config_from.endswith("config.json")
    if not changes and not derived:
        return None
    return {k: v for k, v in {**ckpt.config, **changes}.items() if k not in changes or changes[k] is not None}


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
        texts[prefix + "config.json"] = (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()
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
    for name in sorted(planned.source.found.files):
        stat = os.stat(name)
        h.update(f"{name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}".encode(errors="surrogateescape"))
    return h.hexdigest()


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
        built = manifest.build(planned.source, planned.format, planned.dialect, planned.plan.digest, entries)
        work.write_text(MANIFEST, manifest.encode(built))
        result.seconds["move"] = time.perf_counter() - start
        if verify:
            start = time.perf_counter()
            _read_back(planned, work.path, result, limits, progress)
            result.verified = True
            result.seconds["verify"] = time.perf_counter() - start
        start = time.perf_counter()
        work.sync()
        work.publish()
        result.seconds["sync"] = time.perf_counter() - start
    return result


def _move(planned: Planned, work: WorkDir, limits: Limits, progress: Progress | None, result: Result) -> None:
    source, out = Files(), Files(work.path, write=True)
    todo = [a for a in planned.plan.atoms if a.name not in work.done]
    total = sum(atom_bytes(a.source) for a in planned.plan.atoms)
    shared = Shared(advance=_counter("convert", total, progress))
    shared.advance(total - sum(atom_bytes(a.source) for a in todo))
    result.digests.update(work.done)

    def job(atom: AtomPlan) -> Callable[[], None]:
        def action() -> None:
            digest = transfer(atom, source, out, limits.chunk, shared, allow_nan=planned.options.allow_nan)
            result.digests[atom.name] = digest
            if not shared.problems:
                work.finished(atom.name, digest, {s.buffer.file for s in atom.target})

        return action

    try:
        for file in planned.target.files:
            fd = out.fd(file.name)
            for offset, data in file.segments:
                _write(fd, data, offset)
        run_all(((atom_bytes(a.source), job(a)) for a in todo), limits.workers, shared.stop)
    finally:
        source.close()
        out.close()
    shared.problems.raise_as(SourceError, f"{planned.source.path} cannot be converted as it is:")


def _write(fd: int, data: bytes, offset: int) -> None:
    from .rawio import write_exactly

    write_exactly(fd, memoryview(data), offset)


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
    written = open_checkpoint(path, hf_config=None, family=planned.source.table.name)
    problems = Problems(list(written.problems.found))
    total = sum(atom_bytes(s) for s in written.slots.values())
    digests = copies_digests(written, limits, _counter("verify", total, progress))
    for name, digest in result.digests.items():
        found = digests.get(name, [])
        wanted = len(copies_of(planned.target.slots[name]))
        if len(found) != wanted:
            problems.add(name, f"{len(found)} copies were read back, {wanted} were written")
        if any(d != digest for d in found):
            problems.add(name, "reads back with another content than was written", "check the disk; please report this")
    problems.raise_as(VerifyError, "What was written is not what was read:")


__all__ = ["ConvertError", "Mesh", "Options", "Planned", "Result", "convert", "plan", "run"]
