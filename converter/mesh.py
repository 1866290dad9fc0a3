"""Meshes, ranks and pipeline stages. All rank and stage arithmetic of the project lives here.

Rank order within a pipeline stage is Megatron's default, `tp-cp-ep-dp-pp`: TP varies fastest, then DP; the expert grid
of the same ranks is ETP fastest, then EP (megatron/core/parallel_state.py, `RankGenerator`). A stage has as many ranks
as both grids need: the least common multiple of TP and ETP·EP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

from .errors import MeshError, Problems

LARGEST = 65536
"""Ranks along one axis. Nobody has more, and a slip of the keyboard must not fill the memory."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the parallel dimensions.

    tp, pp, vpp, ep   tensor, pipeline, virtual pipeline (chunks on each stage) and expert parallel sizes
    etp               tensor parallel size inside an expert; None means TP, as in Megatron
    dp_shard          FSDP shards (`dcp` and `archon` only)
    first, last       layers on the first and last stage, where they differ from the others
    layout            an explicit pipeline layout, `E|t*2|t*2|L` (E embedding, t layer, m MTP, L loss)
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    dp_shard: int = 1
    first: int | None = None
    last: int | None = None
    layout: str | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        for name in ("tp", "pp", "vpp", "ep", "etp", "dp_shard", "first", "last"):
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or not 1 <= size <= LARGEST):
                problems.add(name, f"must be a whole number from 1 to {LARGEST}, not {size!r}")
        if self.layout is not None and (self.first is not None or self.last is not None):
            problems.add("layout", "excludes a count for the first or last stage", "the layout says it all")
        problems.raise_as(MeshError, "This mesh cannot be:")

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def stage_ranks(self) -> int:
        """Ranks that one pipeline stage needs: the dense grid (TP × DP) and the experts' (ETP × EP) share them."""
        experts = self.expert_tp * self.ep
        return self.tp * experts // gcd(self.tp, experts)

    @property
    def world(self) -> int:
        return self.stage_ranks * self.pp

    @property
    def fsdp_world(self) -> int:
        """Ranks of a `dcp` or `archon` mesh, where experts lie on the ranks that the dense weights are on."""
        return self.dp_shard * self.tp

    def __str__(self) -> str:
        sizes = [("tp", self.tp), ("pp", self.pp), ("vpp", self.vpp), ("ep", self.ep), ("dp_shard", self.dp_shard)]
        if self.etp is not None and (self.etp != self.tp or self.etp == 1):
            sizes.append(("etp", self.expert_tp))
        shown = [f"{name}{size}" for name, size in sizes if size > 1 or (name == "etp" and self.tp > 1)]
        return " ".join(shown) or "one rank"


class Rank(NamedTuple):
    """The coordinates of one rank. `dp` counts the dense replicas within a stage, `edp` those of the experts."""

    number: int
    tp: int
    pp: int
    dp: int
    ep: int
    etp: int
    edp: int


def ranks(mesh: Mesh) -> Iterator[Rank]:
    """Every rank of the mesh, in order of its number."""
    return (rank_at(mesh, number) for number in range(mesh.world))


def rank_at(mesh: Mesh, number: int) -> Rank:
    """The coordinates of a rank from its number."""
    pp, s = divmod(number, mesh.stage_ranks)
    etp = mesh.expert_tp
    return Rank(number, s % mesh.tp, pp, s // mesh.tp, s // etp % mesh.ep, s % etp, s // (etp * mesh.ep))


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one virtual stage holds: global layer ids, MTP layers, and whether the ends of the model are here."""

    layers: range
    embedding: bool = False
    loss: bool = False
    mtp: bool = False


@dataclass(frozen=True)
class Pipeline:
    """`chunks[pp][vpp]`: the whole model cut into virtual stages."""

    chunks: tuple[tuple[Chunk, ...], ...]
    text: str = field(default="", compare=False)

    @property
    def pp(self) -> int:
        return len(self.chunks)

    @property
    def vpp(self) -> int:
        return len(self.chunks[0])

    def where(self) -> dict[int, tuple[int, int, int]]:
        """Global layer id → (stage, virtual chunk, index inside it)."""
        return {
            layer: (pp, vpp, n)
            for pp, stage in enumerate(self.chunks)
            for vpp, chunk in enumerate(stage)
            for n, layer in enumerate(chunk.layers)
        }

    def find(self, what: str) -> tuple[int, int]:
        """Stage and chunk of the `embedding`, the `loss` or the `mtp` block."""
        for pp, stage in enumerate(self.chunks):
            for vpp, chunk in enumerate(stage):
                if getattr(chunk, what):
                    return pp, vpp
        raise MeshError(f"The pipeline has no stage for the {what}.")


def pipeline(mesh: Mesh, layers: int, mtp: int = 0) -> Pipeline:
    """Cut `layers` decoder layers (and the MTP block, if any) into stages as Megatron does.

    Raises MeshError when the layers do not divide, saying which sizes would.
    """
    if mesh.layout is not None:
        return _from_text(mesh.layout, mesh.pp, mesh.vpp, layers, mtp)
    counts = _even(mesh, layers)
    return from_counts([[count // mesh.vpp] * mesh.vpp for count in counts], mtp=bool(mtp))


def from_counts(counts: list[list[int]], *, mtp: bool = False, mtp_at: tuple[int, int] | None = None) -> Pipeline:
    """A pipeline from the number of layers of each stage and chunk; ids run chunk by chunk, then stage by stage.

    The MTP block, if any, is on the last stage unless `mtp_at` says where.
    """
    pp, vpp = len(counts), len(counts[0])
    where_mtp = mtp_at or (pp - 1, vpp - 1)
    start, ranges = 0, {}
    for v in range(vpp):
        for p in range(pp):
            ranges[p, v] = range(start, start + counts[p][v])
            start += counts[p][v]
    chunks = tuple(
        tuple(
            Chunk(
                ranges[p, v],
                embedding=(p, v) == (0, 0),
                loss=(p, v) == (pp - 1, vpp - 1),
                mtp=mtp and (p, v) == where_mtp,
            )
            for v in range(vpp)
        )
        for p in range(pp)
    )
    return Pipeline(chunks)


def _even(mesh: Mesh, layers: int) -> list[int]:
    """Layers on each stage, as `get_num_layers_to_build` of Megatron-Core counts them."""
    fixed = {0: mesh.first, mesh.pp - 1: mesh.last if mesh.pp > 1 or mesh.first is None else mesh.first}
    fixed = {stage: count for stage, count in fixed.items() if count is not None}
    left, stages = layers - sum(fixed.values()), mesh.pp - len(fixed)
    problems = Problems()
    if left < 0 or (stages == 0 and left):
        problems.add("pp", f"{sum(fixed.values())} layers are placed by hand, the model has {layers}")
    elif stages and left % stages:
        fits = [n for n in range(1, layers + 1) if layers % n == 0]
        problems.add(
            "pp",
            f"{left} layers do not divide over {stages} stages",
            f"{layers} layers divide over pp {', '.join(map(str, fits))}; or give --first-stage-layers, "
            "--last-stage-layers or --pipeline-layout",
        )
    else:
        counts = [fixed.get(stage, left // max(stages, 1)) for stage in range(mesh.pp)]
        for stage, count in enumerate(counts):
            if count % mesh.vpp:
                problems.add("vpp", f"stage {stage} has {count} layers, which {mesh.vpp} chunks do not divide")
        if mesh.vpp > 1 and mesh.pp == 1:
            problems.add("vpp", "virtual stages need at least two pipeline stages", "drop --vpp or raise --pp")
        if not problems:
            return counts
    problems.raise_as(MeshError, f"{layers} layers cannot be cut over {mesh}:")
    raise AssertionError("unreachable")


def expand_layout(text: str) -> list[str]:
    """A layout string as one string of letters for each virtual stage, by Megatron's rules.

    >>> expand_layout("E|t*2|(t|)*2L")
    ['E', 'tt', 't', 't', 'L']
    """
    plain = re.sub(r"[,\s]", "", text)
    if re.search(r"\d{5}", plain):
        raise MeshError(f"Pipeline layout {text[:80]!r}: a repetition of more than 9999 means nothing here.")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(pattern, lambda m: m.group(1) * int(m.group(2)), plain)
    bad = sorted(set(plain) - set("EtmL|"))
    if bad:
        raise MeshError(
            f"Pipeline layout {text!r}: {', '.join(map(repr, bad))} means nothing here.",
            hint="Letters are E (embedding), t (layer), m (MTP) and L (loss); `|` ends a stage, `*n` repeats.",
        )
    return plain.split("|")


def _from_text(text: str, pp: int, vpp: int, layers: int, mtp: int) -> Pipeline:
    stages = expand_layout(text)
    flat = "".join(stages)
    problems = Problems()
    if pp * vpp != len(stages):
        problems.add("layout", f"has {len(stages)} stages, the mesh pp {pp} × vpp {vpp} = {pp * vpp}")
    for letter, wanted, what in (
        ("t", layers, "decoder layers"),
        ("m", mtp, "MTP layers"),
        ("E", 1, "E"),
        ("L", 1, "L"),
    ):
        if flat.count(letter) != wanted:
            problems.add("layout", f"names {flat.count(letter)} {what}, the model has {wanted}")
    if not flat.startswith("E") or not flat.endswith("L"):
        problems.add("layout", "must begin with E and end with L")
    if "t" in flat[flat.find("m") :] and "m" in flat:
        problems.add("layout", "has a decoder layer after an MTP layer")
    if sum("m" in stage for stage in stages) > 1:
        problems.add("layout", "spreads the MTP layers over several stages", "Megatron keeps them on one")
    if "m" in flat and pp * vpp == len(stages) and not any("m" in stage for stage in stages[(vpp - 1) * pp :]):
        problems.add("layout", "has MTP layers that are not in the last chunk of their stage")
    if vpp > 1 and pp == 1:
        problems.add("vpp", "virtual stages need at least two pipeline stages")
    problems.raise_as(MeshError, f"Pipeline layout {text!r} does not fit:")
    start, cut = 0, []
    for letters in stages:
        count = letters.count("t")
        cut.append(Chunk(range(start, start + count), "E" in letters, "L" in letters, "m" in letters))
        start += count
    return Pipeline(tuple(tuple(cut[v * pp + p] for v in range(vpp)) for p in range(pp)), text)


class Part(NamedTuple):
    """One rank's range of a dimension that several ranks share."""

    lo: int
    hi: int


def share(size: int, parts: int, part: int) -> Part:
    """One rank's rows of `size`, as `torch.chunk` cuts them: equal pieces, the last ones shorter or empty."""
    step = -(-size // parts)
    return Part(min(part * step, size), min((part + 1) * step, size))


def shares(size: int, parts: int) -> list[Part]:
    """Every rank's rows, in order."""
    return [share(size, parts, part) for part in range(parts)]
