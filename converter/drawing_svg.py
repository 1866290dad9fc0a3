"""The pictures of `drawing_tensors` as inline SVG. Hue is the rank, depth the tensor (query deep, value light)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from .convert import Planned
from .drawing_tensors import PARTS, Band, Figure, Part, Piece
from .explaining import coordinates

HUES = 8
WIDTH, HEIGHT = 960, 230
LEFT, MATRIX, RIGHT = 132, 168, 470
"""x of the whole matrices, their width, x of the parts (units of the view box)."""

FINE = 96
"""Parts that are told apart by colour in the whole matrices; where there are more, only those on the right are."""

DEPTH = (0.95, 0.62, 0.36)


@dataclass
class Placed:
    """A matrix on the paper: its corner, and the units of a row and a column."""

    x: float
    y: float
    row: float
    col: float
    rows: int
    cols: int


def svg(planned: Planned, figure: Figure) -> str:
    """One figure."""
    parts = figure.parts[:PARTS]
    across = figure.by_columns
    wholes, left_height = _place_wholes(figure)
    places, right_height = _across(parts, figure) if across else _down(parts, wholes)
    height = max(left_height, right_height)
    _shift(wholes, (height - left_height) / 2)
    _shift([p for part in places for p in part], (height - right_height) / 2)
    below = 42 if across else 8
    body = [
        *_wholes(figure, wholes),
        *([] if across else _ribbons(figure, parts, wholes, places)),
        *_parts(planned, figure, parts, places, across),
    ]
    if across:
        middle = height / 2
        body.append(f'<path class="arrow" d="M{LEFT + MATRIX + 50} {middle:.1f}h64m-10 -7l10 7l-10 7"/>')
        body.append(_caption(parts, height))
    return (
        f'<svg viewBox="0 -14 {WIDTH} {height + 14 + below:.0f}" role="img" aria-label="{escape(figure.title)}">'
        f"{''.join(body)}</svg>"
    )


# ------------------------------------------------------------------------------------------------ where things stand


def _place_wholes(figure: Figure) -> tuple[list[Placed], float]:
    rows = sum(a[2] for a in figure.atoms)
    placed, y = [], 0.0
    for _, _, count, cols in figure.atoms:
        height = max(14.0, HEIGHT * count / rows)
        placed.append(Placed(LEFT, y, height / count, MATRIX / cols, count, cols))
        y += height + 9
    return placed, y - 9


def _down(parts: Sequence[Part], wholes: Sequence[Placed]) -> tuple[list[list[Placed]], float]:
    """Parts below each other, at the scale of the wholes unless that would make them too small to see."""
    smallest = min((sum(_rows(p) for p in part.pieces.values()) for part in parts), default=1) or 1
    unit = max(max(w.row for w in wholes) if len(wholes) == 1 else min(w.row for w in wholes), 30 / smallest)
    places, y = [], 0.0
    for part in parts:
        mine = []
        for piece in part.pieces.values():
            width = max((w.col for w in wholes), default=1.0)
            mine.append(Placed(RIGHT, y, unit, width, _rows(piece), piece.cols))
            y += _rows(piece) * unit + 4
        places.append(mine)
        y += 12
    return places, y - 16


def _across(parts: Sequence[Part], figure: Figure) -> tuple[list[list[Placed]], float]:
    """Parts beside each other: each has all rows and some columns."""
    whole = figure.atoms[0][3]
    room = WIDTH - RIGHT - 10
    widest = sum(piece.cols for part in parts for piece in part.pieces.values())
    unit = min(MATRIX / whole, (room - 12 * len(parts)) / max(widest, 1))
    places, x, height = [], float(RIGHT), 0.0
    for part in parts:
        mine = []
        for piece in part.pieces.values():
            row = HEIGHT / max(piece.rows, 1)
            mine.append(Placed(x, 0, row, unit, piece.rows, piece.cols))
            height = max(height, piece.rows * row)
            x += piece.cols * unit + 4
        places.append(mine)
        x += 8
    return places, height


def _shift(placed: Sequence[Placed], by: float) -> None:
    for one in placed:
        one.y += by


def _rows(piece: Piece) -> int:
    return piece.rows + piece.pad


# ------------------------------------------------------------------------------------------------ drawing


def _wholes(figure: Figure, placed: Sequence[Placed]) -> Iterator[str]:
    paper = "blank" if len(figure.parts) <= FINE else "many"
    for at, (label, name, rows, cols) in zip(placed, figure.atoms, strict=True):
        height = at.rows * at.row
        yield f'<rect class="{paper}" x="{at.x}" y="{at.y:.2f}" width="{MATRIX}" height="{height:.2f}">'
        yield f"<title>{escape(name)}</title></rect>"
        middle = at.y + height / 2
        tall = height > 26
        yield f'<text class="end name" x="{LEFT - 10}" y="{middle + (0 if tall else 4):.1f}">{escape(label)}</text>'
        if tall:
            yield f'<text class="end small" x="{LEFT - 10}" y="{middle + 14:.1f}">{rows:,} × {cols:,}</text>'
    shown = figure.parts if len(figure.parts) <= FINE else figure.parts[:PARTS]
    for n, part in enumerate(shown):
        for piece in part.pieces.values():
            for band in piece.bands:
                at = placed[band.atom]
                yield _rect(at, band.whole, n, band, f"{_words(figure, band)} → {part.label}")


def _ribbons(
    figure: Figure, parts: Sequence[Part], wholes: Sequence[Placed], places: Sequence[Sequence[Placed]]
) -> Iterator[str]:
    """From every band's place in the whole to its place in the part; none where bands do not span the columns."""
    bands = [b for part in parts for piece in part.pieces.values() for b in piece.bands]
    if len(bands) > 160 or any(b.whole.cols < figure.atoms[b.atom][3] for b in bands):
        return
    x1, x2 = LEFT + MATRIX, RIGHT
    a, b = x1 + (x2 - x1) * 0.45, x1 + (x2 - x1) * 0.55
    for n, (part, mine) in enumerate(zip(parts, places, strict=True)):
        for piece, at in zip(part.pieces.values(), mine, strict=True):
            for band in piece.bands:
                whole = wholes[band.atom]
                y1, h1 = whole.y + band.whole.row * whole.row, band.whole.rows * whole.row
                y2, h2 = at.y + band.part.row * at.row, band.part.rows * at.row
                there = f"M{x1} {y1:.1f}C{b:.0f} {y1:.1f} {a:.0f} {y2:.1f} {x2} {y2:.1f}"
                back = f"v{h2:.1f}C{a:.0f} {y2 + h2:.1f} {b:.0f} {y1 + h1:.1f} {x1} {y1 + h1:.1f}z"
                yield f'<path class="ribbon c{n % HUES}" d="{there}{back}"/>'


def _parts(
    planned: Planned, figure: Figure, parts: Sequence[Part], places: Sequence[Sequence[Placed]], across: bool
) -> Iterator[str]:
    for n, (part, mine) in enumerate(zip(parts, places, strict=True)):
        for piece, at in zip(part.pieces.values(), mine, strict=True):
            for band in piece.bands:
                yield _rect(at, band.part, n, band, f"{_words(figure, band)} in {piece.name} of {part.label}")
                height = band.part.rows * at.row
                if height >= 11 and not across:
                    x = at.x + (band.part.col + band.part.cols / 2) * at.col
                    y = at.y + band.part.row * at.row + height / 2 + 3.5
                    yield f'<text class="in" x="{x:.1f}" y="{y:.1f}">{escape(figure.atoms[band.atom][0])}</text>'
            if piece.pad:
                y, height = at.y + piece.rows * at.row, piece.pad * at.row
                words = f"{piece.pad:,} rows of padding, zeros"
                yield _titled("pad", at.x, y, at.cols * at.col, height, words)
        yield from _label(planned, figure, part, mine, across)


def _label(planned: Planned, figure: Figure, part: Part, mine: Sequence[Placed], across: bool) -> Iterator[str]:
    first, last = mine[0], mine[-1]
    piece = next(iter(part.pieces.values()))
    name = part.label.rsplit("/", 1)[-1]
    if across:
        x = (first.x + last.x + last.cols * last.col) / 2
        y = first.y + first.rows * first.row
        yield f'<text class="mid name" x="{x:.1f}" y="{y + 16:.1f}">{escape(name.removeprefix("rank "))}</text>'
        return
    where = "" if figure.whole_is_target else coordinates(planned, part.number)
    sizes = f"{piece.rows + piece.pad:,} × {piece.cols:,}"
    x = max(p.x + p.cols * p.col for p in mine) + 14
    middle = (first.y + last.y + last.rows * last.row) / 2
    yield (
        f'<text class="name" x="{x:.1f}" y="{middle - 2:.1f}">{escape(name)}'
        f'<tspan class="small" dx="8">{escape(where)}</tspan></text>'
    )
    more = f" and {len(part.pieces) - 1} more" if len({p.name for p in part.pieces.values()}) > 1 else ""
    yield f'<text class="small" x="{x:.1f}" y="{middle + 12:.1f}">{escape(_short(piece.name))}{more} [{sizes}]</text>'


def _caption(parts: Sequence[Part], height: float) -> str:
    """Below parts that stand beside each other: what they are."""
    piece = next(iter(parts[0].pieces.values()))
    words = f"{_short(piece.name)} [{piece.rows:,} × {piece.cols:,}] on the ranks named above"
    return f'<text class="small" x="{RIGHT}" y="{height + 34:.1f}">{escape(words)}</text>'


def _short(name: str) -> str:
    """The last words of a tensor's name."""
    parts = name.split(".")
    return name if len(name) < 34 else "…" + ".".join(parts[-2:])


def _rect(at: Placed, box: tuple[int, int, int, int], hue: int, band: Band, words: str) -> str:
    row, rows, col, cols = box
    x, y, w, h = at.x + col * at.col, at.y + row * at.row, cols * at.col, max(rows * at.row, 0.8)
    depth = DEPTH[min(band.atom, len(DEPTH) - 1)]
    thin = " thin" if min(w, h) < 4 else ""  # a line around it would be all that one sees
    return _titled(f"c{hue % HUES}{thin}", x, y, w, h, words, f' fill-opacity="{depth}"')


def _titled(kind: str, x: float, y: float, width: float, height: float, words: str, more: str = "") -> str:
    """A rectangle that tells what it is when one points at it."""
    size = f'width="{width:.2f}" height="{height:.2f}"'
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" {size}{more}><title>{escape(words)}</title></rect>'


def _words(figure: Figure, band: Band) -> str:
    label = figure.atoms[band.atom][0]
    last = band.whole.row + band.whole.rows - 1
    return f"{label} ({band.label}): rows {band.whole.row:,}–{last:,}"
