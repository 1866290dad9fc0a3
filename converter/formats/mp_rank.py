"""Megatron's per-rank files: `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`, virtual chunks as `model0`, `model1`, ….

Names: megatron/training/checkpointing.py, `get_checkpoint_name`. Layer and expert numbers are local to the file; which
tensors a rank holds, and which rows of them, is `placement.MegatronPlacement`, the same for reading and writing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from ...mappings.blocks import MEGATRON_ENDS
from ...mappings.schema import skeleton, stored_shape
from ..dtypes import BY_NAME
from ..errors import SourceError
from ..layout import View
from ..mesh import LARGEST, Mesh, Pipeline, from_counts, rank_at
from ..placement import Local, MegatronPlacement
from ..roots import unwrap
from ..sidefiles import above, find_hf
from ..slots import Buffer, row_major
from .base import DTypeOf, Found, Stored, StoredBox, Target, TargetFile, by_rank
from .hf import stored_ref
from .torch_dist import RELEASE, TRACKER, arguments, common_state, iteration_directory
from .torchfile import TensorRef, TensorSpec, plan, read

name = "mp_rank"
FILE = "model_optim_rng.pt"
_DIRECTORY = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
Coordinates = tuple[int, int, int]
"""TP, PP and EP rank of a file."""


def _holds(path: Path) -> bool:
    return path.is_dir() and any(_DIRECTORY.fullmatch(p.name) and (p / FILE).exists() for p in path.iterdir())


def detect(path: Path) -> Path | None:
    """The directory with the `mp_rank_*` ones: `path`, the one its tracker names, or its newest `iter_*`."""
    return iteration_directory(path, _holds)


def read_checkpoint(path: Path) -> Found:
    """The pickles of all ranks; tensors are only located."""
    where = detect(path) or path
    found = Found(name, path, where, hf=find_hf(path, where, *above(where)))
    files = {p.name: p / FILE for p in sorted(where.iterdir()) if _DIRECTORY.fullmatch(p.name)}
    trees: dict[str, Any] = {}
    for directory, file in files.items():
        try:
            trees[directory] = read(file)
            found.files[str(file)] = file.stat().st_size
        except SourceError as error:
            found.incomplete = True
            found.problems.found.extend(error.problems)
            if not error.problems:
                found.problems.add(str(file), error.what, error.hint)
        except OSError as error:
            found.incomplete = True
            found.problems.add(str(file), f"cannot be read: {error.strerror or error}")
    first = next(iter(trees.values()), {})
    found.args = arguments(first.get("args")) if isinstance(first, Mapping) else None
    if isinstance(first, Mapping) and isinstance(first.get("iteration"), int):
        found.facts["iteration"] = first["iteration"]
    for rank, (directory, tree) in enumerate(trees.items()):
        _collect(tree, rank, files[directory], found)
    found.facts["coordinates"] = _coordinates(list(trees), found)
    return found


def _coordinates(directories: Sequence[str], found: Found) -> list[Coordinates]:
    """TP, PP and EP rank from every directory's name. One suffix alone is PP, or, where every file holds both ends of
    the model, EP."""
    result = []
    for rank, directory in enumerate(directories):
        match = _DIRECTORY.fullmatch(directory)
        assert match is not None
        tp, second, third = (int(g) if g else 0 for g in match.groups())
        held = {skeleton(unwrap(t.name))[0] for t in found.tensors if t.rank == rank}
        result.append((tp, second, third, match.group(3) is None and held >= MEGATRON_ENDS))
    only_ep = all(both for *_, both in result) and any(second for _, second, _, _ in result)
    return [(tp, 0, second) if only_ep else (tp, second, third) for tp, second, third, _ in result]


def _collect(tree: Any, rank: int, file: Path, found: Found) -> None:
    if not isinstance(tree, Mapping):
        found.problems.add(str(file), f"holds a {type(tree).__name__}, not a dictionary")
        return
    chunks = sorted((k for k in tree if re.fullmatch(r"model\d{0,4}", str(k))), key=lambda k: int(str(k)[5:] or 0))
    if not chunks:
        found.problems.add(str(file), "has no 'model' in it", f"it holds {', '.join(map(str, list(tree)[:6]))}")
    for chunk, key in enumerate(chunks):
        if not isinstance(tree[key], Mapping):
            found.problems.add(str(file), f"its {key!r} is a {type(tree[key]).__name__}, not a dictionary of tensors")
            found.incomplete = True
        for tensor, value in _flat(tree[key], ""):
            if isinstance(value, TensorRef):
                found.tensors.append(stored_ref(tensor, value, rank, chunk))
            else:
                found.others[tensor] = type(value).__name__
    for key in tree.keys() - set(chunks) - common_state({}).keys():
        found.others[str(key)] = "no weights"


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Nested dictionaries of older versions as dotted names."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


# ------------------------------------------------------------------------------------------------ what it means


def mesh_of(found: Found, view: View) -> tuple[Mesh, Pipeline, int | None]:
    """The mesh, the pipeline and the padded vocabulary that these files were written with: counted, not believed."""
    coordinates: list[Coordinates] = found.facts["coordinates"]
    tp, pp, ep = (max((c[axis] for c in coordinates), default=0) + 1 for axis in range(3))
    _check_count(found, tp, pp, ep)
    vpp = max((t.chunk for t in found.tensors), default=0) + 1
    counts = [[0] * vpp for _ in range(pp)]
    mtp_at: tuple[int, int] | None = None
    vocab: int | None = None
    parts: Counter[int] = Counter()
    for stored in found.tensors:
        key, numbers = skeleton(unwrap(stored.name))
        stage = coordinates[stored.rank][1]
        for row in view.rows_of(key)[:1]:
            if row.place == "layer" and numbers:
                counts[stage][stored.chunk] = max(counts[stage][stored.chunk], numbers[0] + 1)
            if row.place == "mtp":
                mtp_at = (stage, stored.chunk)
            if row.pad and stored.shape:
                vocab = max(vocab or 0, stored.shape[0] * tp)
            if row.expert and row.cut and prod(stored.shape):
                geo = view.geometry(row)
                full = prod(geo.shape) // (ep if geo.index else 1)
                parts[full // prod(stored.shape)] += 1
    etp = parts.most_common(1)[0][0] if parts else 1
    mesh = Mesh(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=max(1, etp) if view.dims.get("e") else None)
    return mesh, from_counts(counts, mtp=mtp_at is not None, mtp_at=mtp_at), vocab


def _check_count(found: Found, tp: int, pp: int, ep: int) -> None:
    """Refuse a set of files that cannot be whole, before anything as large as the numbers in their names is made."""
    present = len(found.facts["coordinates"])
    args = found.args or {}
    if max(tp, pp, ep) > LARGEST:
        raise SourceError(f"{found.where}: a directory's name speaks of rank {max(tp, pp, ep) - 1}.", hint="Is it one?")
    said = {}
    for axis, seen, key in (
        ("TP", tp, "tensor_model_parallel_size"),
        ("PP", pp, "pipeline_model_parallel_size"),
    ):
        said[axis] = args[key] if isinstance(args.get(key), int) and seen < args[key] <= LARGEST else seen
        if said[axis] > seen:
            raise SourceError(
                f"{found.where}: its arguments say {axis} {args[key]}; there are files for {axis} {seen} only"
                f"{_absent(found, said['TP'], said.get('PP', pp))}.",
                hint="Fetch the missing mp_rank_* directories.",
            )
    # Every (TP, PP) pair has a file; with experts several, but not always one for every EP rank (ETP 1).
    if present < tp * pp or present > tp * pp * ep:
        shape = f"TP {tp} × PP {pp}" + (f" × EP {ep}" if ep > 1 else "")
        raise SourceError(
            f"{found.where}: {present} mp_rank_* directories cannot be all of {shape}{_absent(found, tp, pp)}.",
            hint="Every rank's file is needed.",
        )


def _absent(found: Found, tp: int, pp: int) -> str:
    """The first few directories that are not there, for a message."""
    seen = {(t, p) for t, p, _ in found.facts["coordinates"]}
    pairs = ((t, p) for p in range(min(pp, 512)) for t in range(min(tp, 512)) if (t, p) not in seen)
    mesh = Mesh(tp=tp, pp=pp)
    names = [directory_name(mesh, (t, p, 0)) for t, p in islice(pairs, 4)]
    return f"; missing: {', '.join(names)}" if names else ""


def match(found: Found, view: View) -> tuple[list[tuple[Any, Stored, int]], list[tuple[Stored, str]], Mesh]:
    """Give every stored tensor its place in the whole. Returns matches, the unmatched with the reason, and the mesh."""
    mesh, pipe, vocab = mesh_of(found, view)
    total = sum(len(chunk.layers) for stage in pipe.chunks for chunk in stage)
    if total != view.dims["layers"]:
        found.problems.add(str(found.where), f"its files hold {total} layers, the config says {view.dims['layers']}")
        return [], [], mesh
    _check_files(found, mesh)
    if found.problems:
        return [], [], mesh
    placement = MegatronPlacement(view, mesh, pipe, vocab, per_rank=True)
    wanted: dict[tuple[Coordinates, int, str], list[Local]] = {}
    for local in placement.locals(lambda row: True, check=False):
        rank = rank_at(mesh, local.rank)
        wanted.setdefault(((rank.tp, rank.pp, rank.ep), local.chunk, local.name), []).append(local)
    matched, unmatched = [], []
    for stored in found.tensors:
        place = found.facts["coordinates"][stored.rank]
        candidates = wanted.get((place, stored.chunk, unwrap(stored.name)), [])
        fits = next((c for c in candidates if stored_shape(c.named.row, c.shape) == stored.shape), None)
        if fits is not None:
            matched.append((fits.named, _boxes(stored, fits), fits.copy))
        elif candidates:
            unmatched.append(
                (stored, f"has shape {list(stored.shape)}, the config makes it {list(candidates[0].shape)}")
            )
        else:
            unmatched.append((stored, ""))
    return matched, unmatched, mesh


def _check_files(found: Found, mesh: Mesh) -> None:
    """Every rank of the mesh must have its file."""
    present = set(found.facts["coordinates"])
    stage = MegatronFiles(mesh)
    for number in stage.numbers():
        rank = rank_at(mesh, number)
        if (rank.tp, rank.pp, rank.ep) not in present:
            found.problems.add(
                directory_name(mesh, (rank.tp, rank.pp, rank.ep)), "is missing; every rank's file is needed"
            )


class MegatronFiles:
    """The ranks whose files exist: one for each TP, PP and EP rank."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def numbers(self) -> Iterator[int]:
        seen = set()
        for number in range(self.mesh.world):
            rank = rank_at(self.mesh, number)
            if (rank.tp, rank.pp, rank.ep) not in seen:
                seen.add((rank.tp, rank.pp, rank.ep))
                yield number


def _boxes(stored: Stored, local: Local) -> Stored:
    """The stored local tensor as boxes of the whole one."""
    source = stored.boxes[0]
    strides = source.strides
    if local.named.row.flat:
        strides = row_major(local.shape, BY_NAME[stored.dtype].size)
    assert strides is not None
    boxes = []
    for piece in local.pieces:
        shift = sum(a * s for a, s in zip(piece.at, strides, strict=True))
        buffer = Buffer(source.buffer.file, source.buffer.begin + shift, source.buffer.size - shift, stored.name)
        boxes.append(StoredBox(piece.lo, piece.hi, buffer, strides))
    return Stored(stored.name, stored.dtype, local.total, tuple(boxes), stored.rank, stored.chunk)


# ------------------------------------------------------------------------------------------------ writing


def directory_name(mesh: Mesh, at: Coordinates) -> str:
    """`mp_rank_TT[_PPP][_EEE]`."""
    tp, pp, ep = at
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if mesh.pp > 1 else "") + (f"_{ep:03d}" if mesh.ep > 1 else "")


def lay_out(locals_: Sequence[Local], dtype_of: DTypeOf, args: Mapping[str, Any], mesh: Mesh) -> Target:
    """A root with `release/` and a file for every rank."""
    target = Target()
    grouped = dict(by_rank(locals_))
    for number in MegatronFiles(mesh).numbers():
        rank = rank_at(mesh, number)
        file = f"{RELEASE}/{directory_name(mesh, (rank.tp, rank.pp, rank.ep))}/{FILE}"
        members = grouped.get(number, [])
        tree = common_state(args)
        for chunk in range(mesh.vpp):
            key = "model" if mesh.vpp == 1 else f"model{chunk}"
            tree[key] = {
                x.name: TensorSpec(dtype_of(x.named), stored_shape(x.named.row, x.shape), (chunk, x.name))
                for x in members
                if x.chunk == chunk
            }
        torch_file = plan(tree, archive="model_optim_rng")
        for local in members:
            key = (local.chunk, local.name)
            buffer = Buffer(file, torch_file.tensors[key], torch_file.nbytes[key], local.name)
            target.place(local, buffer, dtype_of(local.named))
        target.files.append(TargetFile(file, torch_file.size, tuple(torch_file.segments), number))
    target.texts[TRACKER] = RELEASE.encode()
    return target
