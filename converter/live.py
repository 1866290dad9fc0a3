"""Write a live, sharded model as a Hugging Face directory: every rank writes its own boxes, nobody gathers.

The live model is a source like any other (`live_source`), the files are laid out beforehand, the plan is proved total
on every rank alike, and each rank carries out its part of it. A rank that fails makes all fail, and nothing that looks
complete is left behind.

All ranks write into the same files at once: the file system must show one node what another one wrote (a local disk,
Lustre, GPFS; not NFS with several nodes, whose clients write back whole pages).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .carried import side_texts
from .checkpoint import Checkpoint, family_of, sizes
from .codecs import Array, bits, cast, has_nan
from .convert import Planned
from .dtypes import BY_NAME
from .errors import PlanError, Problems, VerifyError
from .execute import Limits, Shared, atom_bytes, chunks, content_digest, run_all
from .formats import hf
from .formats.base import Found
from .layout import View
from .live_source import Key, Live, describe, slots_of
from .manifest import build, encode
from .mesh import Mesh
from .opening import open_checkpoint
from .peers import Peers, share_out
from .plan import Plan, copies_of, join
from .rawio import Files, read_box, write_box, write_exactly
from .sidefiles import MANIFEST, find_hf, read_config
from .slots import Box, Slot, intersect, whole
from .target import Options, dtype_of, experts_form, lay_out, place
from .workdir import WorkDir, check_room, check_target, explained, refuse_overlap, settle_target, sync_file

if TYPE_CHECKING:
    import torch

    from .loading_targets import Target


@dataclass
class Exported:
    """What `export_hf` did.

    bytes_written  by this rank; `bytes_total` by all, of tensors
    casts          `F32 → BF16` → atoms
    skipped        names of the state dict that are no weights → why
    """

    path: Path
    bytes_written: int = 0
    bytes_total: int = 0
    seconds: float = 0.0
    casts: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def base_of(path: str | Path | Checkpoint) -> Checkpoint:
    """A checkpoint, or a directory with a `config.json` and no weights, as what a live model is written after."""
    if isinstance(path, Checkpoint):
        return path
    where = Path(path)
    if not where.is_dir() or find_hf(where) is None or hf.detect(where) is not None:
        return open_checkpoint(path).check()
    place_ = find_hf(where) or where
    config, origin = read_config(place_), str(place_ / "config.json")
    family = family_of(config)
    dims = sizes(family, config, origin) | {"mtp": 0}
    view = View(family.hf, dims)
    return Checkpoint(Found("live", where, where, hf=place_), config, origin, family, view, view.atoms())


def export_hf(
    states: Target,
    base: str | Path | Checkpoint,
    out: str | Path,
    *,
    peers: Peers | None = None,
    mesh: Mesh | None = None,
    rank: int = 0,
    naming: str | None = None,
    dtype: str | None = None,
    max_shard: int = Options.max_shard,
    experts: str | None = None,
    config_changes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    allow_nan: bool = False,
    verify: bool = True,
    replicas: bool = False,
    finish: Callable[[Path], None] | None = None,
    limits: Limits | None = None,
) -> Exported:
    """Write what the ranks hold together as a Hugging Face directory. Every rank calls it with the same options.

    states      a module, a state dict, or a list of them (virtual pipeline chunks); DTensors know their own part
    base        what the model was loaded from: it gives the family, config, side files, and the types of the tensors
    mesh, rank  (Megatron, plain shards) as `load_into` has them
    dtype       element type of the files; None: every tensor as in `base` (fp32 masters are rounded to that)
    experts     `per_expert` or `fused`; None: as `base` names them, else one tensor for each expert
    config_changes  fields of config.json to set, or to remove (None)
    verify      read back what this rank wrote; `replicas`: compare its other copies too (ranks that drifted apart)
    finish      called on rank 0 with the unfinished directory, before it appears (a tokenizer to be saved, say)

    Raises PlanError for a model that is not whole, TargetError for a directory that cannot be written, VerifyError
    when a box reads back otherwise, and RankError where another rank failed; the directory then does not appear.
    """
    start = time.perf_counter()
    peers = peers or Peers()

    def begin() -> None:
        nonlocal model, path
        with explained(Path(out)):
            model, path = base_of(base), settle_target(out)

    def plan() -> str:
        nonlocal planned
        options = Options(dtype=dtype, max_shard=max_shard, experts=experts or experts_form(model, "hf"))
        planned = _plan(live, model, options, dict(config_changes or {}))
        return planned.plan.digest

    model: Checkpoint = None  # type: ignore[assignment]
    path: Path = None  # type: ignore[assignment]
    planned: Planned = None  # type: ignore[assignment]
    peers.together("Opening the base model", begin)
    live = describe(model, states, peers, mesh, rank, naming)
    digest = peers.together("Planning the export", plan)[peers.rank]
    peers.agree("The plan of the export", digest)
    run = _Run(live, planned, path, peers, limits or Limits(), allow_nan, replicas)
    with ExitStack() as stack:
        work = _begin(run, stack, overwrite)
        run.step("Writing", run.write)
        if verify:
            run.step("Reading back", run.read_back)
        digests = run.digests()
        _finish(run, work, digests, finish)
    casts: dict[str, int] = {}
    for atom in planned.plan.atoms:
        if atom.source_dtype != atom.target_dtype:
            kind = f"{atom.source_dtype} → {atom.target_dtype}"
            casts[kind] = casts.get(kind, 0) + 1
    total = sum(atom_bytes(a.target) for a in planned.plan.atoms)
    seconds = time.perf_counter() - start
    return Exported(path, run.written, total, seconds, casts, live.skipped, list(live.ckpt.notes))


def _plan(live: Live, base: Checkpoint, options: Options, changes: dict[str, Any]) -> Planned:
    """The files, and the proof that every element of them is written once. The same on every rank."""
    ckpt = live.ckpt
    if options.dtype and not {"dtype", "torch_dtype"} & ckpt.config.keys():
        changes = {"dtype": options.dtype} | changes
    ckpt.dialect["config_changes"] = {**ckpt.dialect.get("config_changes", {}), **changes}
    placed = place(ckpt, "hf", Mesh(), options)
    typed, wanted = (base, options) if base.slots else (ckpt, replace(options, dtype=options.dtype or _said(ckpt)))
    target = lay_out(ckpt, "hf", Mesh(), options, placed, dtype_of(typed, wanted, placed.locals))
    joined = Plan(join(ckpt.atoms, ckpt.slots, target.slots), {}, target.filled)
    return Planned(ckpt, "hf", Mesh(), options, joined, target, placed.dialect, {})


def _said(ckpt: Checkpoint) -> str | None:
    """The element type that the config announces."""
    found = ckpt.config.get("dtype") or ckpt.config.get("torch_dtype")
    return found if isinstance(found, str) else None


def _begin(run: _Run, stack: ExitStack, overwrite: bool) -> WorkDir | None:
    """Rank 0 makes the directory and its files, at their full size, with their headers."""
    work: WorkDir | None = None

    def begin() -> None:
        nonlocal work
        refuse_overlap([run.planned.source.found.root], run.path)
        check_target(run.path, overwrite=overwrite, resume=True)  # what a killed export left is begun again
        check_room(run.path, sum(f.size for f in run.planned.target.files))
        work = stack.enter_context(WorkDir(run.path, run.planned.plan.digest, resume=False, overwrite=overwrite))
        for file in run.planned.target.files:
            work.allocate(file.name, file.size)
        files = Files(work.path, write=True)
        try:
            for file in run.planned.target.files:
                for offset, data in file.segments:
                    write_exactly(files.fd(file.name), memoryview(data), offset)
        finally:
            files.close()

    run.step("Making the directory", begin if run.peers.rank == 0 else lambda: None)
    run.partial = run.peers.exchange(str(work.path) if work is not None else "")[0]
    return work


def _finish(run: _Run, work: WorkDir | None, digests: Mapping[str, str], finish: Callable[[Path], None] | None) -> None:
    """Rank 0 adds the small files, opens the whole as a reader would, and lets it appear."""

    def act() -> None:
        if work is None:
            return
        planned = run.planned
        texts, _ = side_texts(planned)
        texts |= {name: text if isinstance(text, bytes) else text() for name, text in planned.target.texts.items()}
        for name, data in texts.items():
            work.write_text(name, data)
        if finish is not None:
            finish(work.path)
        types = {a.name: a.target_dtype for a in planned.plan.atoms}
        entries = {name: (types[name], digest) for name, digest in digests.items()}
        work.write_text(MANIFEST, encode(build(planned.source, "hf", planned.dialect, planned.plan.digest, entries)))
        written = open_checkpoint(work.path)
        written.problems.raise_as(VerifyError, "What was written is no checkpoint:")
        work.sync()
        work.publish()

    run.step("Finishing", act)


# ------------------------------------------------------------------------------------------------ one rank's part


Move = tuple[str, Slot, "torch.Tensor"]
"""An atom, its slot in memory (elements, not bytes), and the memory."""


class _Run:
    """What one rank writes and reads back."""

    def __init__(
        self,
        live: Live,
        planned: Planned,
        path: Path,
        peers: Peers,
        limits: Limits,
        allow_nan: bool,
        replicas: bool,
    ) -> None:
        self.live, self.planned, self.path, self.peers, self.limits = live, planned, path, peers, limits
        self.allow_nan, self.replicas = allow_nan, replicas
        self.partial, self.written = "", 0
        self.targets = {a.name: a.target for a in planned.plan.atoms}
        self.total = sum(f.size for f in planned.target.files)

    def step(self, what: str, action: Callable[[], Any]) -> list[Any]:
        def explained_action() -> Any:
            with explained(self.path, self.total):
                return action()

        return self.peers.together(f"{what} {self.path}", explained_action)

    def _moves(self, keys: Callable[[Key], bool]) -> Iterator[Move]:
        for key, own in self.live.own.items():
            if keys(key):
                for atom, slot in slots_of(own, key.box):
                    if atom in self.targets:
                        yield atom, slot, own.memory

    def write(self) -> None:
        """Write the boxes that this rank gives, and have them on disk: other ranks read them next."""
        files, problems, shared = Files(Path(self.partial), write=True), Problems(), Shared()
        moves = list(self._moves(lambda key: key in self.live.given and self._first(key)))
        try:
            jobs = ((atom_bytes([move[1]]), partial(self._write, files, problems, *move)) for move in moves)
            run_all(jobs, self.limits.workers, shared.stop)
        finally:
            files.close()
        names = {slot.buffer.file for atom, _, _ in moves for slot in self.targets[atom]}
        for name in sorted(names):
            sync_file(Path(self.partial) / name)
        problems.raise_as(PlanError, "The model is not exported:")
        self.written = sum(self._bytes(atom, slot) for atom, slot, _ in moves)

    def _bytes(self, atom: str, slot: Slot) -> int:
        return sum(
            common.volume * BY_NAME[home.dtype].size
            for home in self.targets[atom]
            if (common := intersect(home.box, slot.box)) is not None
        )

    def _first(self, key: Key) -> bool:
        """Whether a box stands in the plan's first copy of its atoms; others repeat it, and are only compared."""
        own = self.live.own[key]
        name = f"rank {self.peers.rank}"
        atom, slot = slots_of(own, key.box)[0]
        homes = self.live.ckpt.slots.get(atom, ())
        mine = (s for s in homes if s.box == slot.box and s.buffer.file == name)
        return any(s.copy == 0 and s.buffer.name == own.named.name for s in mine)

    def _write(self, files: Files, problems: Problems, atom: str, slot: Slot, memory: torch.Tensor) -> None:
        for box, data in self._chunks(slot, memory):
            if not self.allow_nan and has_nan(data, slot.dtype):
                problems.add(slot.buffer.name, f"holds NaN (in {atom})", "allow_nan=True writes it all the same")
                return
            for home in self.targets[atom]:
                common = intersect(home.box, box)
                if common is not None:
                    write_box(files, home, common, _inside(cast(data, slot.dtype, home.dtype), box, common))

    def _chunks(self, slot: Slot, memory: torch.Tensor) -> Iterator[tuple[Box, Array]]:
        """The elements of a slot, a chunk at a time: (box of the atom, raw bits)."""
        import torch

        view = torch.as_strided(memory, slot.box.sizes, slot.strides, memory.storage_offset() + slot.offset)
        for part in chunks(slot.box.sizes, BY_NAME[slot.dtype].size, self.limits.chunk):
            region = view[tuple(slice(a, b) for a, b in zip(part.lo, part.hi, strict=True))]
            lo = tuple(a + b for a, b in zip(part.lo, slot.box.lo, strict=True))
            hi = tuple(a + b for a, b in zip(part.hi, slot.box.lo, strict=True))
            yield Box(lo, hi), raw_bits(region)

    def read_back(self) -> None:
        """Compare the files with the boxes in memory: those that this rank gave, and with `replicas` all it holds."""
        files, problems, shared = Files(Path(self.partial)), Problems(), Shared()
        moves = self._moves(lambda key: self.replicas or key in self.live.given)
        try:
            jobs = ((atom_bytes([move[1]]), partial(self._compare, files, problems, *move)) for move in moves)
            run_all(jobs, self.limits.workers, shared.stop)
        finally:
            files.close()
        problems.raise_as(VerifyError, "What was written is not what this rank holds:")

    def _compare(self, files: Files, problems: Problems, atom: str, slot: Slot, memory: torch.Tensor) -> None:
        for box, data in self._chunks(slot, memory):
            for home in self.targets[atom]:
                common = intersect(home.box, box)
                if common is None:
                    continue
                found = np.empty(common.sizes, bits(BY_NAME[home.dtype].size))
                read_box(files, home, common, found)
                if not np.array_equal(found, _inside(cast(data, slot.dtype, home.dtype), box, common)):
                    what = f"differs from what is written for {atom}"
                    problems.add(slot.buffer.name, what, "its copies differ between ranks or names, or the disk fails")
                    return

    def digests(self) -> dict[str, str]:
        """Content digests of all atoms, the work spread over the ranks."""
        everyone = range(self.peers.world)
        held = {a.name: (atom_bytes(a.target), everyone) for a in self.planned.plan.atoms}
        chosen = share_out(held, self.peers.world)
        shapes = {a.name: a.shape for a in self.planned.plan.atoms}

        def act() -> dict[str, str]:
            files, found = Files(Path(self.partial)), dict[str, str]()
            try:
                for name, rank in chosen.items():
                    if rank == self.peers.rank:
                        first = next(iter(copies_of(self.targets[name]).values()))
                        found[name] = content_digest(files, first, whole(shapes[name]), self.limits.chunk)
            finally:
                files.close()
            return found

        return {name: digest for found in self.step("Digesting", act) for name, digest in found.items()}


def _inside(array: Array, outer: Box, box: Box) -> Array:
    return array[tuple(slice(a - o, b - o) for a, b, o in zip(box.lo, box.hi, outer.lo, strict=True))]


def raw_bits(tensor: torch.Tensor) -> Array:
    """The elements of a tensor on any device as raw bits, row-major, in the CPU's memory."""
    import torch

    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = tensor.detach().contiguous().cpu()
    return plain.view(signed[plain.element_size()]).numpy().view(bits(plain.element_size()))
