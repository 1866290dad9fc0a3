"""Where the experts of one layer are: a cell for each, in the colours of the ranks that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .checkpoint import ALTERNATE
from .convert import Planned
from .drawing_svg import HUES
from .human import plural, ranges_text

EXPERTS = 512
"""Experts that are drawn."""

GROUPS = 12
"""Groups of ranks whose experts the legend names."""


def experts_html(planned: Planned) -> str:
    """The figure; nothing for a model without experts and for a target without ranks."""
    holders = {} if planned.format == "hf" else _holders(planned)
    if not holders:
        return ""
    layer = _layer(planned)
    ranks = list(dict.fromkeys(r for held in holders.values() for r in held))
    hue = {rank: n % HUES for n, rank in enumerate(ranks)}
    cells = "".join(_cell(expert, held, hue) for expert, held in list(holders.items())[:EXPERTS])
    about = f"{plural(len(holders), 'expert')} on {plural(len(ranks), 'rank')}"
    if len(holders) > EXPERTS:
        about += f"; the first {EXPERTS} are drawn"
    if any(len(held) > 1 for held in holders.values()):
        about += "; a cell of several colours is an expert that several ranks share"
    return (
        f"<figure><figcaption>Where the experts of layer {layer} are<small>{about}</small></figcaption>"
        f'<div class="cells">{cells}</div><p class="legend">{_legend(holders, hue)}</p></figure>'
    )


def _layer(planned: Planned) -> int | None:
    """The first layer that has experts."""
    names = {a.name for a in planned.plan.atoms}
    return next((n for n in range(planned.source.view.dims["layers"]) if f"layers.{n}.experts.0.gate" in names), None)


def _holders(planned: Planned) -> dict[int, tuple[int, ...]]:
    """Expert → ranks that hold a part of it."""
    layer, ranks = _layer(planned), {file.name: file.rank for file in planned.target.files}
    atoms = {a.name: a for a in planned.plan.atoms} if layer is not None else {}
    found = {}
    for expert in range(planned.source.view.dims.get("e", 0) if atoms else 0):
        slots = [s for s in atoms[f"layers.{layer}.experts.{expert}.gate"].target if s.copy < ALTERNATE]
        found[expert] = tuple(dict.fromkeys(ranks[s.buffer.file] for s in slots))
    return found


def _cell(expert: int, held: Sequence[int], hue: dict[int, int]) -> str:
    stripes = [f'<b class="b{hue[rank]}"></b>' for rank in held[:HUES]]
    title = escape(f"expert {expert}: {'rank' if len(held) == 1 else 'ranks'} {ranges_text(held)}")
    return f'<span title="{title}">{"".join(stripes)}<em>{expert}</em></span>'


def _legend(holders: dict[int, tuple[int, ...]], hue: dict[int, int]) -> str:
    groups: dict[tuple[int, ...], list[int]] = {}
    for expert, held in holders.items():
        groups.setdefault(held, []).append(expert)
    entries = []
    for held, experts in list(groups.items())[:GROUPS]:
        keys = "".join(f'<i class="k b{hue[rank]}"></i>' for rank in held[:HUES])
        word = "rank" if len(held) == 1 else "ranks"
        entries.append(f"<span>{keys}{word} {ranges_text(held)}: experts {ranges_text(experts)}</span>")
    if len(groups) > GROUPS:
        entries.append(f"<span>… and {len(groups) - GROUPS:,} more groups</span>")
    return "".join(entries)
