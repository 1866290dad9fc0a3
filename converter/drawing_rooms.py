"""Who holds what: for every rank (or file) of a plan's target the bytes by kind, the layers and the experts.

Many ranks are shown as few: those that hold the same amounts stand together, and so do neighbouring stages that are
alike.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from .convert import Planned
from .dtypes import BY_NAME
from .explaining import coordinates
from .human import plural, ranges_text, size_text
from .mesh import Chunk, pipeline

KINDS = ("embedding", "attention", "MLP", "experts", "shared expert", "router", "norms", "MTP", "head")
"""What bars are made of, in their order."""

ROWS = 16
"""Ranks, or groups of equal ones, shown for a stage."""

STAGES = 12
"""Stages that are shown one by one."""

_LAYER, _EXPERT = re.compile(r"layers\.(\d+)\."), re.compile(r"\.experts\.(\d+)\.")


def kind_of(atom: str) -> str:
    """The part of the model to which an atom belongs."""
    if atom == "embed":
        return "embedding"
    if atom == "head":
        return "head"
    for mark, kind in (
        (".attn.", "attention"),
        (".experts.", "experts"),
        (".shared.", "shared expert"),
        (".mlp.", "MLP"),
        (".mtp.", "MTP"),
        (".router", "router"),
        (".expert_bias", "router"),
    ):
        if mark in atom:
            return kind
    return "norms"


@dataclass
class Room:
    """What one rank or file holds: bytes by kind, layers and experts."""

    name: str
    number: int
    where: str = ""
    held: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    layers: set[int] = field(default_factory=set)
    experts: set[int] = field(default_factory=set)

    @property
    def total(self) -> int:
        return sum(self.held.values())

    @property
    def amounts(self) -> tuple[tuple[str, int], ...]:
        """What makes two rooms alike."""
        return tuple(sorted(self.held.items()))


def rooms(planned: Planned) -> list[Room]:
    """The target's ranks, or its files where it has no ranks."""
    by_file = planned.format == "hf"
    found: dict[str, Room] = {}
    for file in planned.target.files:
        key = file.name if by_file else f"rank {file.rank}"
        where = "" if by_file else coordinates(planned, file.rank)
        found.setdefault(key, Room(key, len(found) if by_file else file.rank, where))
    key_of = {f.name: f.name if by_file else f"rank {f.rank}" for f in planned.target.files}
    for atom in planned.plan.atoms:
        kind, layer, expert = kind_of(atom.name), _LAYER.match(atom.name), _EXPERT.search(atom.name)
        for slot in atom.target:
            room = found[key_of[slot.buffer.file]]
            room.held[kind] += slot.box.volume * BY_NAME[slot.dtype].size
            if layer:
                room.layers.add(int(layer.group(1)))
            if expert:
                room.experts.add(int(expert.group(1)))
    return sorted(found.values(), key=lambda r: r.number)


# ------------------------------------------------------------------------------------------------ as HTML


def rooms_html(planned: Planned) -> str:
    """The section that shows all ranks, stage by stage."""
    found = rooms(planned)
    most = max((r.total for r in found), default=1) or 1
    kinds = [k for k in KINDS if any(k in r.held for r in found)]
    legend = "".join(f'<span><i class="k {_css(k)}"></i>{k}</span>' for k in kinds)
    if planned.format in ("torch_dist", "mp_rank"):
        body, lead = _stages(planned, found, most), _megatron_lead(planned)
    elif planned.format == "hf":
        body, lead = _house("Files", "", found, most), "Files without ranks; each holds whole tensors."
    else:
        body, lead = _house("Ranks", "", found, most), "Every rank holds its rows of every tensor; there are no stages."
    return f'<p class="lead">{lead}</p><p class="legend">{legend}</p><div class="stages">{body}</div>'


def _megatron_lead(planned: Planned) -> str:
    if planned.format == "mp_rank":
        return "Every file holds all that its rank needs, copies of what ranks share included."
    return "Every rank's file; what ranks share (norms, routers) is stored once, by the first of them."


def _stages(planned: Planned, found: Sequence[Room], most: int) -> str:
    dims, mesh = planned.source.view.dims, planned.mesh
    pipe = pipeline(mesh, dims["layers"], dims["mtp"])
    by_stage: dict[int, list[Room]] = defaultdict(list)
    for room in found:
        by_stage[room.number // mesh.stage_ranks].append(room)
    groups: list[list[int]] = []
    for stage in range(mesh.pp):
        alike = groups and mesh.pp > STAGES and _alike(by_stage, groups[-1][0], stage)
        if alike:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    parts = []
    for group in groups:
        title = f"Stage {group[0]}" if len(group) == 1 else f"Stages {group[0]}–{group[-1]}"
        chunks = [c for stage in group for c in pipe.chunks[stage]]
        parts.append(_house(title, _holds(chunks, len(group)), by_stage[group[0]], most, stages=len(group)))
    return "".join(parts)


def _alike(by_stage: dict[int, list[Room]], a: int, b: int) -> bool:
    return [r.amounts for r in by_stage[a]] == [r.amounts for r in by_stage[b]]


def _holds(chunks: Sequence[Chunk], stages: int) -> str:
    """The layers of a stage, chunk by chunk, and the ends of the model that are there."""
    layers = [n for c in chunks for n in c.layers]
    ends = [text for text, there in (("embedding", chunks[0].embedding), ("MTP", any(c.mtp for c in chunks))) if there]
    if any(c.loss for c in chunks):
        ends.append("head")
    if not layers:
        text = "no layers"
    elif stages > 1:
        text = f"{plural(len(layers) // stages, 'layer')} each, layers {ranges_text(layers)}"
    elif len(chunks) > 1:
        text = "; ".join(f"chunk {n}: layers {ranges_text(c.layers) or 'none'}" for n, c in enumerate(chunks))
    else:
        text = f"layers {ranges_text(layers)}"
    return " · ".join([text, *ends])


def _house(title: str, holds: str, members: Sequence[Room], most: int, stages: int = 1) -> str:
    total = sum(r.total for r in members)
    groups = _groups(members)
    rows = "".join(_row(group, most) for group in groups[:ROWS])
    rest = f'<p class="more">… and {len(groups) - ROWS:,} more</p>' if len(groups) > ROWS else ""
    about = f'<p class="holds">{escape(holds)}</p>' if holds else ""
    size = f"{size_text(total)} {'in all' if stages == 1 else 'each'}" if len(members) > 1 else ""
    return f'<article><h3>{title}<small>{size}</small></h3>{about}<div class="rows">{rows}</div>{rest}</article>'


def _groups(members: Sequence[Room]) -> list[list[Room]]:
    """Each room for itself while they are few; else those with equal amounts together."""
    if len(members) <= ROWS:
        return [[r] for r in members]
    groups: dict[tuple[tuple[str, int], ...], list[Room]] = {}
    for room in members:
        groups.setdefault(room.amounts, []).append(room)
    return sorted(groups.values(), key=lambda g: g[0].number)


def _row(group: Sequence[Room], most: int) -> str:
    first = group[0]
    name, where = first.name, first.where
    if len(group) > 1:
        shown = ranges_text(r.number for r in group)
        name = f"ranks {shown}" if len(shown) < 24 else f"{len(group):,} ranks"
        where = (
            plural(len(group), "rank") + ", each"
            if name.startswith("ranks")
            else f"rank {first.number} and others, each"
        )
    experts = f"experts {_shown(first.experts)}" if first.experts and len(group) == 1 else ""
    if first.experts and len(group) > 1:
        experts = plural(len(first.experts), "expert") + " on each"
    if not where and first.layers:
        where = f"layers {ranges_text(first.layers)}" if first.name.startswith("model") else ""
    segments = "".join(
        f'<i class="{_css(kind)}" style="flex:{first.held[kind]}" title="{kind}: {size_text(first.held[kind])}"></i>'
        for kind in KINDS
        if first.held.get(kind)
    )
    about = " · ".join(x for x in (where, experts) if x)
    width = 100 * first.total / most
    return (
        f'<div class="who">{escape(name)}<small>{escape(about)}</small></div>'
        f'<div class="track"><div class="bar" style="width:{width:.2f}%">{segments}</div></div>'
        f'<div class="bytes">{size_text(first.total)}</div>'
    )


def _shown(numbers: Iterable[int]) -> str:
    text = ranges_text(numbers)
    return text if len(text) < 30 else f"{text[:28]}…"


def _css(kind: str) -> str:
    return "k-" + kind.lower().replace(" ", "-")
