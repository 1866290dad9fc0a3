"""Draws a plan as one web page: totals, who holds what, and how tensors are cut. No network, no scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from .convert import Planned
from .drawing_experts import experts_html
from .drawing_rooms import rooms_html
from .drawing_svg import svg
from .drawing_tensors import PARTS, Figure, figures
from .explaining import AXES
from .human import count_text, plural, seconds_text, size_text

CSS = Path(__file__).with_name("drawing.css")
PATTERNS = (
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="hatch" d="M0 0v6"/></pattern>'
    '<pattern id="lines" width="8" height="3" patternUnits="userSpaceOnUse"><path class="line" d="M0 0h8"/></pattern>'
    "</defs></svg>"
)


def draw(planned: Planned) -> str:
    """The page, as text. It grows with the number of figures, not with the number of ranks."""
    report = planned.report()
    title = f"{report['family']}: {report['source']['format']} to {planned.format}, {planned.mesh}"
    body = "".join(
        [
            _header(report),
            _totals(report),
            f"<h2>Who holds what</h2>{rooms_html(planned)}",
            _tensors(planned),
            _left_behind(planned),
            f"<footer>Drawn by areal-convert; planned in {seconds_text(planned.seconds)}.</footer>",
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS.read_text(encoding='utf-8')}</style></head>"
        f"<body>{PATTERNS}<main>{body}</main></body></html>\n"
    )


# ------------------------------------------------------------------------------------------------ totals

_EXACT = {
    "bitwise": "Every value keeps its bits",
    "widen": "Values are cast to a wider type; each stays equal",
    "dequant": "Quantised values are read as the values they stand for",
    "narrow": "Values are rounded to a narrower type",
}


def _header(report: Mapping[str, Any]) -> str:
    mesh = re.sub(r"(\w+?)(\d+)", lambda m: f"{m.group(1).upper()} {m.group(2)}", report["target"]["mesh"])
    on = "" if mesh == "one rank" else f' <small class="to">on {escape(mesh.replace("_", "-"))}</small>'
    return (
        f'<h1>{escape(report["family"])}: {report["source"]["format"]}<span class="to">→</span>'
        f'{report["target"]["format"]}{on}</h1><p class="path">{escape(report["source"]["path"])}</p>'
        f'<span class="badge {report["exactness"]}">{_EXACT[report["exactness"]]}</span>'
    )


def _totals(report: Mapping[str, Any]) -> str:
    each = report["bytes_per_rank"]
    casts = sum(report["casts"].values())
    vocab = report["dialect"].get("vocab")
    padded = f"vocabulary {vocab['true']:,} → {vocab['stored']:,}" if vocab and vocab["true"] != vocab["stored"] else ""
    per_rank = f"{size_text(each['min'])} to {size_text(each['max'])} each" if report["ranks"] > 1 else ""
    largest = f"largest {size_text(report['largest_files'][0]['bytes'])}" if report["largest_files"] else ""
    cards = [
        ("Parameters", count_text(report["parameters"]), plural(report["atoms"], "atom")),
        ("Read", size_text(report["bytes_read"]), ""),
        ("Written", size_text(report["bytes_written"]), plural(report["copies"], "box").replace("boxs", "boxes")),
        ("Padding", size_text(report["bytes_filled"]), padded),
        ("Casts", f"{casts:,}" if casts else "none", ", ".join(report["casts"])),
        (
            "Left behind",
            f"{report['drops']:,}" if report["drops"] else "nothing",
            "stored names" if report["drops"] else "",
        ),
        ("Ranks", f"{report['ranks']:,}" if report["target"]["format"] != "hf" else "none", per_rank),
        ("Files", f"{report['files']:,}", largest),
    ]
    items = (f"<div><dt>{name}</dt><dd>{value}<small>{escape(more)}</small></dd></div>" for name, value, more in cards)
    return f'<dl class="totals">{"".join(items)}</dl>'


def _left_behind(planned: Planned) -> str:
    reasons: dict[str, list[str]] = {}
    for name, reason in planned.source.drops.items():
        reasons.setdefault(reason, []).append(name)
    rows = [
        f"<tr><td>{escape(reason)}</td><td>{len(names):,}</td><td>{escape(', '.join(names[:2]))}</td></tr>"
        for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    rows += [f'<tr><td colspan="3">{escape(note)}</td></tr>' for note in planned.source.notes]
    return f"<h2>Left behind, and notes</h2><table>{''.join(rows)}</table>" if rows else ""


# ------------------------------------------------------------------------------------------------ tensors


def _tensors(planned: Planned) -> str:
    drawn = figures(planned)
    if not drawn:
        return ""
    side = "the files of the source" if planned.format == "hf" else "the ranks of the target"
    lead = (
        f"Left: the model's own matrices. Right: what {side} hold of them, in the order in which it lies there. "
        "A colour is one of them; the deeper shade is the first tensor of a group. Point at a piece for its indices."
    )
    shown = "".join(_figure(planned, f) for f in drawn)
    return f'<h2>How tensors are cut</h2><p class="lead">{lead}</p>{shown}{experts_html(planned)}{_axes(planned)}'


def _figure(planned: Planned, figure: Figure) -> str:
    parts = len(figure.parts)
    notes = []
    if parts > PARTS:
        notes.append(f"cut into {parts:,} parts, {PARTS} of which are drawn")
    if figure.replicas:
        notes.append(f"held {figure.replicas + 1:,} times; one is drawn")
    if parts == 1:
        notes.append("whole, in one place")
    about = f"<small>{'; '.join(notes)}</small>" if notes else ""
    return f"<figure><figcaption>{escape(figure.title)}{about}</figcaption>{svg(planned, figure)}</figure>"


def _axes(planned: Planned) -> str:
    """The legend of the axes, with the sizes of this model."""
    dims = planned.source.view.dims
    used = {letter for atom, _ in planned.source.atoms.values() for letter in atom.axes.split()}
    items = "".join(_axis(letter, dims[letter]) for letter in AXES if letter in used)
    lead = '<p class="lead">The letters of the indices, and their sizes here.</p>'
    return f'<h2>Axes</h2>{lead}<dl class="axes">{items}</dl>'


def _axis(letter: str, size: int) -> str:
    return f"<div><dt>{letter}</dt><dd>{escape(AXES[letter])}<small>{size:,}</small></dd></div>"
