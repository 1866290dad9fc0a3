"""Which rank holds which box of which tensor: the meshes of Megatron, FSDP2 and Archon applied to a view. Pure.

The result is a list of `Local`s, tensors as one participant holds them. A format then gives each a place in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ..mappings.schema import Axis, Dims, Row
from .errors import MeshError, Problems
from .layout import Geometry, Named, View, factor_size
from .mesh import Mesh, Pipeline, Rank, ranks, share, shares
from .slots import Ints


class Piece(NamedTuple):
    """The box `lo..hi` of a whole tensor, lying at `at` inside a local one."""

    lo: Ints
    hi: Ints
    at: Ints


@dataclass(frozen=True, slots=True)
class Local:
    """A tensor as one participant holds it.

    name    what this participant calls it (layer and expert numbers may be local)
    shape   of the local tensor; `total` of the whole one, padding included
    pieces  where its elements come from
    rank    the participant; `chunk` the virtual pipeline stage there
    copy    0 for the tensor itself, others for replicas
    """

    named: Named
    name: str
    shape: Ints
    total: Ints
    pieces: tuple[Piece, ...]
    rank: int = 0
    chunk: int = 0
    copy: int = 0


def one_piece(named: Named, lo: Ints, hi: Ints, total: Ints, *, rank: int = 0, copy: int = 0) -> Local:
    """A local tensor that is simply one box of the whole."""
    shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
    return Local(named, named.name, shape, total, (Piece(lo, hi, (0,) * len(lo)),), rank, 0, copy)


def undivided(tensors: Iterable[Named]) -> list[Local]:
    """Every tensor whole, on one participant: Hugging Face's files."""
    return [one_piece(n, (0,) * len(n.geometry.shape), n.geometry.shape, n.geometry.shape) for n in tensors]


# ------------------------------------------------------------------------------------------------ cutting


@dataclass(frozen=True, slots=True)
class Cut:
    """How a row's `cut` axis divides one dimension: `outer` blocks of `unit` rows, each cut in `parts`."""

    dim: int
    outer: int
    unit: int

    def piece(self, part: int, parts: int) -> list[tuple[int, int, int]]:
        """(lo, hi, local start) along the dimension for one of `parts`."""
        step = self.unit // parts
        return [(b * self.unit + part * step, b * self.unit + (part + 1) * step, b * step) for b in range(self.outer)]


def cut_of(row: Row, dims: Dims, total: Ints) -> Cut | None:
    """Where the row's cut axis lies. None when the tensor is replicated over TP."""
    if not row.cut:
        return None
    for d, factors in enumerate(row.dims):
        outer = 1
        for factor in factors:
            if isinstance(factor, Axis) and factor.name == row.cut:
                return Cut(d, outer, total[d] // outer)
            outer *= factor_size(factor, dims)
    raise ValueError(f"row {row.name!r}: the cut {row.cut!r} is none of its axes")


def padded(named: Named, vocab: int | None) -> Ints:
    """The whole tensor's shape with its padded dimension at `vocab` rows."""
    geo = named.geometry
    if geo.pad_dim < 0 or vocab is None:
        return geo.shape
    return tuple(vocab if d == geo.pad_dim else s for d, s in enumerate(geo.shape))


def padded_vocab(true: int, divisor: int, tp: int) -> int:
    """Megatron's padded vocabulary: the next multiple of divisor × TP (megatron/training, `_vocab_size_with_padding`).

    >>> padded_vocab(1003, 128, 4)
    1024
    """
    unit = divisor * tp
    return -(-true // unit) * unit


# ------------------------------------------------------------------------------------------------ Megatron


@dataclass
class MegatronPlacement:
    """Places the rows of Megatron's naming on a mesh.

    vocab      rows of the embedding and the head, padding included; None for the true number
    per_rank   True: every rank's own tensors with local layer and expert numbers, replicas included (`mp_rank`).
               False: each box once, by its global name (`torch_dist`).
    """

    view: View
    mesh: Mesh
    pipeline: Pipeline
    vocab: int | None = None
    per_rank: bool = False
    files: list[Rank] = field(init=False)
    _where: dict[int, tuple[int, int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._where = self.pipeline.where()
        self.files = self._stage_files()

    def _stage_files(self) -> list[Rank]:
        """One rank for each (TP, EP) pair of a stage: Megatron's per-rank files are named by these alone."""
        found: dict[tuple[int, int], Rank] = {}
        for rank in ranks(self.mesh):
            if rank.pp:
                break
            first = found.setdefault((rank.tp, rank.ep), rank)
            if self.per_rank and first.etp != rank.etp:
                raise MeshError(
                    "Per-rank files are named by TP and EP rank; with "
                    f"TP {self.mesh.tp} and ETP {self.mesh.expert_tp} two different ranks would share one name.",
                    hint="Choose an ETP that divides TP, or write torch_dist.",
                )
        return list(found.values())

    def locals(self, wanted: Callable[[Row], bool], *, check: bool = True) -> list[Local]:
        """Every local tensor. Raises MeshError, with all reasons, when the mesh cannot hold the model (a reader, whose
        files exist, does not `check`)."""
        tensors = list(self.view.all_named(wanted))
        if check:
            self._check(tensors)
        return [local for named in tensors for local in self._place(named)]

    def _check(self, tensors: Sequence[Named]) -> None:
        problems, mesh, dims = Problems(), self.mesh, self.view.dims
        heads, groups, e = dims["n"], dims["g"], dims.get("e", 0)
        if heads % mesh.tp:
            problems.add("tp", f"{heads} attention heads do not divide by {mesh.tp}", _divisors(heads))
        elif groups % mesh.tp and mesh.tp % groups and any(n.row.cut == "g" for n in tensors):
            problems.add("tp", f"{groups} KV groups and TP {mesh.tp}: neither divides the other", _divisors(groups))
        if e and e % mesh.ep:
            problems.add("ep", f"{e} experts do not divide by {mesh.ep}", _divisors(e))
        if not e and mesh.ep > 1:
            problems.add("ep", f"this model has no experts to spread over {mesh.ep} ranks", "drop --ep")
        hard = [n for n in tensors if self.per_rank or not n.row.soft]
        _check_cuts(hard, dims, self.vocab, lambda row: mesh.expert_tp if row.expert else mesh.tp, problems)
        problems.raise_as(MeshError, f"The mesh ({mesh}) cannot hold this model:")

    def _cut(self, named: Named, total: Ints) -> Cut | None:
        """The row's cut, or None where a soft one does not divide and whole tensors will do."""
        cut = cut_of(named.row, self.view.dims, total)
        whole = named.row.soft and not self.per_rank
        return None if cut and whole and cut.unit % self.mesh.tp else cut

    def _place(self, named: Named) -> Iterator[Local]:
        if "i" in named.geometry.index:
            for layer in range(self.view.dims["layers"]):
                pp, vpp, _ = self._where[layer]
                yield from self._on_stage(named, pp, vpp, 0, layer)
            return
        for pp, vpp, layer in self._stages(named):
            yield from self._on_stage(named, pp, vpp, layer, -1)

    def _stages(self, named: Named) -> list[tuple[int, int, int]]:
        """(stage, chunk, local layer) of the tensor; empty when this mesh has no such copy."""
        place, pipe = named.row.place, self.pipeline
        if place == "layer":
            return [self._where[named.layer]]
        ends = {"first": "embedding", "last": "loss", "last_copy": "loss", "mtp": "mtp", "mtp_first": "mtp"}
        pp, vpp = pipe.find(ends[place])
        if place in ("last_copy", "mtp_first") and (not self.per_rank or (pp, vpp) == pipe.find("embedding")):
            return []
        return [(pp, vpp, named.layer - self.view.dims["layers"] if place == "mtp" else 0)]

    def _on_stage(self, named: Named, pp: int, vpp: int, layer: int, stacked: int) -> Iterator[Local]:
        """The tensor (or its box at the `stacked` layer) on every TP, or EP and ETP, rank of one stage."""
        row, dims, mesh = named.row, self.view.dims, self.mesh
        total = padded(named, self.vocab)
        cut = self._cut(named, total)
        per_ep = dims.get("e", 0) // mesh.ep
        expert = named.expert % per_ep if named.expert >= 0 else -1
        # Stacked experts are one chunk each, as Megatron writes them: its reader loads a whole chunk for every request.
        if not row.expert:
            spans = [(0, range(0))]
        elif named.expert >= 0:
            spans = [(named.expert // per_ep, range(0))]
        elif self.per_rank:
            spans = [(ep, range(ep * per_ep, (ep + 1) * per_ep)) for ep in range(mesh.ep)]
        else:
            spans = [(e // per_ep, range(e, e + 1)) for e in range(dims["e"])]
        parts = (mesh.expert_tp if row.expert else mesh.tp) if cut else 1
        base = pp * mesh.stage_ranks
        for ep, span in spans:
            for part in range(parts):
                pieces, shape = _pieces(named.geometry, total, cut, part, parts, stacked, span)
                if not self.per_rank:
                    number = base + (ep * mesh.expert_tp + part if row.expert else part)
                    yield Local(named, named.name, shape, total, pieces, number, vpp)
                    continue
                name = row.name.format(i=layer, j=layer, e=expert)
                holders = [r for r in self.files if _holds(r, row, cut is not None, ep, part)]
                for copy, rank in enumerate(holders):
                    yield Local(named, name, shape, total, pieces, base + rank.number, vpp, copy)


def _holds(rank: Rank, row: Row, is_cut: bool, ep: int, part: int) -> bool:
    if row.expert:
        return rank.ep == ep and (rank.etp == part or not is_cut)
    return rank.tp == part or not is_cut


@lru_cache(maxsize=65536)
def _pieces(
    geo: Geometry, total: Ints, cut: Cut | None, part: int, parts: int, stacked: int, experts: range
) -> tuple[tuple[Piece, ...], Ints]:
    """The boxes of one rank's local tensor, and its shape."""
    lo, hi = [0] * len(total), list(total)
    for variable, d in geo.index.items():
        lo[d], hi[d] = (stacked, stacked + 1) if variable == "i" else (experts.start, experts.stop)
    at = [0] * len(total)
    shape = [b - a for a, b in zip(lo, hi, strict=True)]
    if cut is None:
        return (Piece(tuple(lo), tuple(hi), tuple(at)),), tuple(shape)
    pieces = []
    if cut.outer == 1:
        mine = share(cut.unit, parts, part)
        lo[cut.dim], hi[cut.dim], shape[cut.dim] = mine.lo, mine.hi, mine.hi - mine.lo
        return (Piece(tuple(lo), tuple(hi), tuple(at)),), tuple(shape)
    for start, stop, local in cut.piece(part, parts):
        lo[cut.dim], hi[cut.dim], at[cut.dim] = start, stop, local
        pieces.append(Piece(tuple(lo), tuple(hi), tuple(at)))
    shape[cut.dim] = cut.outer * (cut.unit // parts)
    return tuple(pieces), tuple(shape)


def _check_cuts(
    tensors: Iterable[Named], dims: Dims, vocab: int | None, parts_of: Callable[[Row], int], problems: Problems
) -> None:
    """Every cut dimension must divide; each axis is reported once."""
    seen: set[tuple[str, int]] = set()
    for named in tensors:
        row, parts = named.row, parts_of(named.row)
        cut = cut_of(row, dims, padded(named, vocab))
        if cut and cut.unit % parts and (row.cut, parts) not in seen:
            seen.add((row.cut, parts))
            problems.add(
                "etp" if row.expert else "tp",
                f"{named.name}: {cut.unit} rows do not divide by {parts}",
                "pad the vocabulary (--make-vocab-size-divisible-by)" if row.pad else _divisors(cut.unit),
            )


def _divisors(size: int) -> str:
    fits = [n for n in range(1, min(size, 1024) + 1) if size % n == 0]
    return f"{size} divides by {', '.join(map(str, fits[:16]))}"


# ------------------------------------------------------------------------------------------------ FSDP2, Archon


@dataclass
class FsdpPlacement:
    """FSDP2 shards, TP and EP as DTensor lays them out: TP (and EP) first, then `fully_shard` cuts dimension 0 of
    what is left, as `torch.chunk` does; rank = dp · TP + tp.

    Experts stacked in one tensor are cut over EP on dimension 0 and over the rest of the FSDP ranks as Archon does:
    on dimension 0 again, or 1 where there are more ranks than experts.
    """

    view: View
    mesh: Mesh

    def locals(self, wanted: Callable[[Row], bool]) -> list[Local]:
        """Every local tensor that is not empty. Raises MeshError when the mesh cannot hold the model."""
        tensors = list(self.view.all_named(wanted))
        self._check(tensors)
        return [local for named in tensors for local in self._place(named)]

    def _check(self, tensors: Sequence[Named]) -> None:
        problems, mesh, e = Problems(), self.mesh, self.view.dims.get("e", 0)
        if (mesh.pp, mesh.vpp, mesh.first, mesh.last, mesh.layout) != (1, 1, None, None, None):
            problems.add("pp", "these checkpoints name tensors globally, without stages", "drop the pipeline options")
        if mesh.ep > 1 and (not e or e % mesh.ep):
            problems.add("ep", f"{e} experts do not divide by {mesh.ep}", _divisors(e) if e else "drop --ep")
        if mesh.expert_tp not in (1, mesh.tp):
            problems.add("etp", f"must be 1 or TP ({mesh.tp}), not {mesh.expert_tp}")
        inside = mesh.ep // mesh.tp if mesh.expert_tp == 1 and mesh.tp > 1 and mesh.ep > 1 else mesh.ep
        if inside == 0 or mesh.dp_shard % inside or (mesh.ep > 1 and mesh.expert_tp == 1 and mesh.ep % mesh.tp):
            problems.add("ep", f"EP {mesh.ep} does not fit into dp_shard {mesh.dp_shard} × tp {mesh.tp}")
        told: set[str] = set()
        for named in tensors:
            fsdp, dim = self._fsdp(named)
            if dim == 1 and self._rows(named) % fsdp and named.row.name not in told:
                told.add(named.row.name)
                problems.add(
                    "dp_shard",
                    f"{named.name}: {self._rows(named)} rows of an expert do not divide by {fsdp}",
                    "with more ranks than experts, FSDP cuts dimension 1, and that evenly only",
                )
        cut = [n for n in tensors if not n.row.pad]  # a vocabulary that does not divide leaves the last rank fewer rows
        _check_cuts(cut, self.view.dims, None, self._tp, problems)
        problems.raise_as(MeshError, f"The mesh ({mesh}) cannot hold this model:")

    def _tp(self, row: Row) -> int:
        return self.mesh.expert_tp if row.expert and self.mesh.ep > 1 else self.mesh.tp

    def _grid(self, named: Named) -> tuple[Cut | None, int, int]:
        """How a tensor is cut before FSDP: the TP cut, the EP size, and the TP size."""
        cut = cut_of(named.row, self.view.dims, named.geometry.shape)
        stacked = named.row.expert and "e" in named.geometry.index
        return cut, self.mesh.ep if stacked else 1, self._tp(named.row) if cut else 1

    def _fsdp(self, named: Named) -> tuple[int, int]:
        """Over how many ranks FSDP shards a tensor, and on which dimension."""
        _, ep, parts = self._grid(named)
        fsdp = self.mesh.dp_shard * self.mesh.tp // (ep * parts) if ep > 1 else self.mesh.dp_shard
        return fsdp, 1 if ep > 1 and fsdp * ep > named.geometry.shape[0] else 0

    def _rows(self, named: Named) -> int:
        """Rows of one expert on one TP rank."""
        cut, _, parts = self._grid(named)
        rows = named.geometry.shape[1]
        return rows // parts if cut and cut.dim == 1 else rows

    def _place(self, named: Named) -> Iterator[Local]:
        row, mesh, total = named.row, self.mesh, named.geometry.shape
        stacked = row.expert and "e" in named.geometry.index
        cut, ep, parts = self._grid(named)
        fsdp, dim = self._fsdp(named)
        for e, part in ((e, p) for e in range(ep) for p in range(parts)):
            span = range(e * total[0] // ep, (e + 1) * total[0] // ep)
            pieces, shape = _pieces(named.geometry, total, cut, part, parts, 0, span if stacked else range(0))
            for n, rows in enumerate(shares(shape[dim], fsdp)):
                kept = tuple(p for piece in pieces if (p := _narrow(piece, dim, rows.lo, rows.hi)))
                if rows.lo < rows.hi:
                    local = tuple(rows.hi - rows.lo if d == dim else s for d, s in enumerate(shape))
                    yield Local(
                        named,
                        named.name,
                        local,
                        total,
                        kept,
                        (n * ep + e) * parts + part if ep > 1 else n * mesh.tp + part,
                    )


def _narrow(piece: Piece, dim: int, lo: int, hi: int) -> Piece | None:
    """The part of a piece that falls into the rows `lo..hi` of the local tensor."""
    length = piece.hi[dim] - piece.lo[dim]
    start, stop = max(lo, piece.at[dim]), min(hi, piece.at[dim] + length)
    if start >= stop:
        return None
    shift = start - piece.at[dim]

    def put(values: Ints, value: int) -> Ints:
        return tuple(value if d == dim else x for d, x in enumerate(values))

    first = piece.lo[dim] + shift
    return Piece(put(piece.lo, first), put(piece.hi, first + stop - start), put(piece.at, start - lo))
