"""What a live state dict holds, said as boxes of the family's tensors: the target side of `load_into`.

Plain tensors are whole, or what the mesh gives to the rank; a DTensor knows its own boxes. torch is imported only where
a DTensor is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from ..mappings.schema import Row
from .checkpoint import Checkpoint, dropped
from .errors import MeshError, Problems
from .layout import Named, View, atoms_of
from .mesh import Mesh, Part, pipeline, rank_at, shares
from .naming import root_of, view_of
from .placement import FsdpPlacement, Local, MegatronPlacement, Piece
from .roots import group_of, unwrap
from .slots import Ints

if TYPE_CHECKING:
    import torch

    StateDict = Mapping[str, Any]
    Target = StateDict | torch.nn.Module | Sequence[StateDict | torch.nn.Module]


@dataclass(frozen=True, eq=False)
class Held:
    """One tensor of the target: what it is, the memory of its local part, and which boxes of the whole lie in it."""

    name: str
    named: Named
    memory: torch.Tensor
    pieces: Sequence[Piece]


@dataclass
class Matched:
    """A target's tensors with their meaning.

    held      tensors to be filled; `meant` the atoms of these and of those that do not fit
    expected  the atoms that this rank should hold
    skipped   names that are no weights → why; `unknown` names that the family does not have → why
    """

    held: list[Held] = field(default_factory=list)
    meant: set[str] = field(default_factory=set)
    expected: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def state_dicts(target: Target) -> list[Mapping[str, Any]]:
    """The state dict of every virtual pipeline chunk; just one for everything but a list of modules."""
    if isinstance(target, Mapping):
        return [target]
    if hasattr(target, "state_dict"):
        return [target.state_dict()]  # type: ignore[union-attr]
    return [part if isinstance(part, Mapping) else part.state_dict() for part in target]  # type: ignore[union-attr]


def match(
    ckpt: Checkpoint, parts: Sequence[Mapping[str, Any]], naming: str, mesh: Mesh, rank: int, problems: Problems
) -> Matched:
    """Give every tensor of the target its meaning. What does not fit, or has no memory, joins the problems."""
    view = view_of(ckpt, naming)
    root = root_of(view, [name for part in parts for name in part])
    names = {name: inside for part in parts for name in part if (inside := unwrap(name)).startswith(root)}
    result = Matched()
    mine = _locals(ckpt, view, naming, mesh, rank, parts)
    if mine is None:
        result.expected = set(ckpt.atoms)
    else:
        locals_ = (local for candidates in mine.values() for local in candidates)
        result.expected = {a for x in locals_ for a in _atoms_in(x.named, x.pieces) if a in ckpt.atoms}
    for chunk, part in enumerate(parts):
        for name, value in part.items():
            inside = names.get(name, name).removeprefix(root)
            if not _is_tensor(value):
                result.skipped[name] = group_of(name) or f"no tensor ({type(value).__name__})"
                continue
            found, fault = _meaning(view, mine, chunk, inside, value)
            if found is None:
                reason = group_of(name) or dropped(ckpt.table, inside)
                (result.skipped if reason else result.unknown)[name] = reason or fault
                continue
            own = mine is not None and found[1]
            result.meant |= _atoms_in(*found) if own else set(atoms_of(found[0]))
            _hold(result, name, value, *found, fault, problems)
    return result


def _atoms_in(named: Named, pieces: Sequence[Piece]) -> set[str]:
    """The atoms of which some of these boxes hold a part: of a tensor with all experts, a rank has its own."""
    index = named.geometry.index
    found: set[str] = set()
    for piece in pieces:
        spans = [range(piece.lo[d], piece.hi[d]) for d in index.values()]
        for values in product(*spans):
            ids = {"i": named.layer, "e": named.expert} | dict(zip(index, values, strict=True))
            found |= {place.atom.name.format(**ids) for place in named.geometry.places}
    return found


def _hold(
    result: Matched, name: str, value: Any, named: Named, pieces: Sequence[Piece], fault: str, problems: Problems
) -> None:
    if value.is_meta:
        problems.add(name, "is on the meta device, without memory", "call module.to_empty(device=…) first")
    elif fault:
        problems.add(name, fault)
    else:
        memory = value.detach()
        result.held.append(Held(name, named, memory.to_local() if _is_dtensor(value) else memory, pieces))


Mine = dict[tuple[int, str], list[Local]]
"""(chunk, name) → what the mesh gives to one rank under this name; several where rows share a name."""


def _locals(
    ckpt: Checkpoint, view: View, naming: str, mesh: Mesh, rank: int, parts: Sequence[Mapping[str, Any]]
) -> Mine | None:
    """What the mesh gives to the rank, or None when tensors are whole or know their own part (DTensors)."""
    if naming != "megatron":
        dtensors = any(_is_dtensor(value) for part in parts for value in part.values())
        if dtensors or mesh.dp_shard * mesh.world == 1:
            return None
        _check_rank(rank, mesh.dp_shard * mesh.tp)
        return _by_name(x for x in FsdpPlacement(view, mesh).locals(_any_row) if x.rank == rank)
    _check_rank(rank, mesh.world)
    pipe = pipeline(mesh, view.dims["layers"], view.dims["mtp"])
    placement = MegatronPlacement(view, mesh, pipe, _stored_vocab(view, mesh, parts), per_rank=True)
    at = rank_at(mesh, rank)
    twin = next(r for r in placement.files if (r.tp, r.ep) == (at.tp, at.ep))
    number = at.pp * mesh.stage_ranks + twin.number
    return _by_name(x for x in placement.locals(_any_row) if x.rank == number)


def _any_row(row: Row) -> bool:
    return True


def _by_name(locals_: Iterable[Local]) -> Mine:
    found: Mine = {}
    for local in locals_:
        found.setdefault((local.chunk, local.name), []).append(local)
    return found


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise MeshError(
            f"There is no rank {rank} in this mesh of {world}.",
            hint="Data-parallel replicas count once: pass the rank of the replica that the mesh describes.",
        )


def _stored_vocab(view: View, mesh: Mesh, parts: Sequence[Mapping[str, Any]]) -> int:
    """Rows of the whole padded embedding, from what the rank holds of it; the true number on a stage without one."""
    keys = {row.name for row in view.rows if row.pad}
    for part in parts:
        for name, value in part.items():
            if _is_tensor(value) and any(unwrap(name).endswith(key) for key in keys):
                return int(value.shape[0]) * mesh.tp
    unit = mesh.tp
    return -(-view.dims["v"] // unit) * unit


def _meaning(
    view: View, mine: Mine | None, chunk: int, name: str, value: Any
) -> tuple[tuple[Named, Sequence[Piece]] | None, str]:
    """What a tensor is, and its pieces; or None and why it is nothing; or both a meaning and what does not fit."""
    shape = tuple(value.shape)
    if mine is None:
        named, fault = view.resolve(name, shape)
        if named is None:
            return None, fault
        if fault:
            return (named, ()), fault
        return (named, tuple(local_pieces(value)) if _is_dtensor(value) else (_all_of(shape),)), ""
    candidates = mine.get((chunk, name), [])
    fits = next((c for c in candidates if c.shape == shape), None)
    if fits is not None:
        return (fits.named, fits.pieces), ""
    if candidates:
        return (candidates[0].named, ()), f"has shape {list(shape)}, the mesh makes it {list(candidates[0].shape)}"
    named, fault = view.resolve(name, shape)
    if named is not None and not value.numel():
        return (named, ()), ""  # an FSDP rank beyond the last row
    return None, fault if named is None else "is not on this rank of this mesh"


def _all_of(shape: Ints) -> Piece:
    return Piece((0,) * len(shape), shape, (0,) * len(shape))


# ------------------------------------------------------------------------------------------------ torch


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "placements") and hasattr(value, "device_mesh")


def local_pieces(value: Any) -> Iterator[Piece]:
    """Boxes of the whole tensor that a DTensor holds on this rank, and where in its local part they lie.

    The cuts are made again on the row numbers of every dimension: this is exact for uneven and strided shards (FSDP
    over TP), which one offset and one shape do not describe. Raises MeshError when no order of the cuts gives the local
    shape.
    """
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return
    cuts: dict[int, list[Cut]] = {}
    for d, placement in enumerate(value.placements):
        if placement.is_partial():
            raise MeshError("A DTensor holds partial sums; only whole values can be loaded into.")
        if hasattr(placement, "dim"):
            factor = getattr(placement, "split_factor", 0)
            cuts.setdefault(placement.dim, []).append((factor, value.device_mesh.size(d), coordinate[d]))
    local = tuple(value.detach().to_local().shape)
    runs = [_rows(size, local[d], tuple(cuts.get(d, ()))) for d, size in enumerate(value.shape)]
    for combination in product(*runs):
        lo, hi, at = zip(*combination, strict=True)
        yield Piece(lo, hi, at)


Cut = tuple[int, int, int]
"""(split factor of a strided shard, 0 for a plain one; parts; which of them is here), in the order of the mesh."""

Run = tuple[int, int, int]
"""(first, end, local start) of neighbouring rows."""


@lru_cache(maxsize=4096)
def _rows(size: int, local: int, cuts: tuple[Cut, ...]) -> tuple[Run, ...]:
    """The rows of a dimension that are here, `local` of them.

    A strided shard says that the cuts to its right were made before: FSDP cuts what TP has left. Where that does not
    give the local size, the cuts were made from left to right, as torch's own arithmetic has them.
    """
    plain, strided = [c for c in cuts if not c[0]], [c for c in cuts if c[0]]
    for order in ([*((0, *c[1:]) for c in plain), *((0, *c[1:]) for c in reversed(strided))], cuts):
        rows: list[range] = [range(size)]
        for cut in order:
            rows = _cut(rows, *cut)
        if sum(map(len, rows)) == local:
            return _joined(rows)
    raise MeshError(f"A DTensor holds {local} of {size} rows; its placements {cuts} do not explain which.")


def _cut(rows: list[range], factor: int, parts: int, part: int) -> list[range]:
    """One of `parts` of the rows, as `torch.chunk` cuts; of every one of `factor` blocks where the cut is strided."""
    count = sum(map(len, rows))
    found: list[range] = []
    for block in shares(count, factor) if factor else [Part(0, count)]:
        share = shares(block.hi - block.lo, parts)[part]
        found += _window(rows, block.lo + share.lo, block.lo + share.hi)
    return found


def _window(rows: list[range], lo: int, hi: int) -> list[range]:
    """The `lo`th to `hi`th of the rows."""
    found, seen = [], 0
    for run in rows:
        piece = run[max(lo - seen, 0) : max(hi - seen, 0)]
        if piece:
            found.append(piece)
        seen += len(run)
    return found


def _joined(rows: Iterable[range]) -> tuple[Run, ...]:
    found: list[Run] = []
    at = 0
    for run in rows:
        if found and found[-1][1] == run.start:
            found[-1] = (found[-1][0], run.stop, found[-1][2])
        else:
            found.append((run.start, run.stop, at))
        at += len(run)
    return tuple(found)
