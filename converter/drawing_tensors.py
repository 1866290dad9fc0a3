"""How representative tensors are cut: for each, the model's matrices on the left, what every rank holds on the right.

The geometry comes from the plan's slots alone, so the picture shows what will happen, not what should.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .checkpoint import ALTERNATE
from .convert import Planned
from .dtypes import BY_NAME
from .layout import View
from .plan import AtomPlan
from .slots import Box, Ints, Slot, row_major, runs

BANDS = 96
"""Bands of one box that are drawn apart; a finer interleave is drawn as one."""

PARTS = 8
"""Ranks (or files) that are drawn; further ones are counted."""


class Rect(NamedTuple):
    """Rows and columns of a matrix: first row, rows, first column, columns."""

    row: int
    rows: int
    col: int
    cols: int


class Band(NamedTuple):
    """One run of an atom: where it lies in the whole matrix and in the part's tensor."""

    atom: int
    whole: Rect
    part: Rect
    label: str


@dataclass
class Piece:
    """One tensor (or one of its boxes) in a part: its size, padding rows included, and what lies in it."""

    name: str
    rows: int = 0
    cols: int = 0
    pad: int = 0
    bands: list[Band] = field(default_factory=list)


@dataclass
class Part:
    """A participant of the cut side: a rank of the target, or a file of the source when the target is whole."""

    label: str
    number: int
    pieces: dict[tuple[str, int], Piece] = field(default_factory=dict)


@dataclass
class Figure:
    """One picture: `atoms` are (label, HF name, rows, columns) of whole matrices, `parts` tells who holds what."""

    title: str
    atoms: list[tuple[str, str, int, int]]
    parts: list[Part]
    replicas: int
    whole_is_target: bool

    @property
    def by_columns(self) -> bool:
        """Whether the cut runs through columns: every part then holds all rows."""
        bands = [b for part in self.parts for piece in part.pieces.values() for b in piece.bands]
        return (
            len(self.parts) > 1
            and bool(bands)
            and all(b.whole.rows == self.atoms[b.atom][2] and b.whole.cols < self.atoms[b.atom][3] for b in bands)
        )


_CHOICE = (
    ("Query, key and value", ("attn.q", "attn.k", "attn.v")),
    ("Query up-projection (MLA)", ("attn.q_b",)),
    ("Key-value up-projection (MLA)", ("attn.kv_b",)),
    ("Attention output", ("attn.o",)),
    ("MLP gate and up", ("mlp.gate", "mlp.up")),
    ("One expert's gate and up", ("experts.{e}.gate", "experts.{e}.up")),
)


def figures(planned: Planned) -> list[Figure]:
    """The representative tensors of a plan: embedding, attention, MLP, one expert."""
    atoms = {a.name: a for a in planned.plan.atoms}
    middle = planned.source.view.dims["layers"] // 2
    layers = [*range(middle, planned.source.view.dims["layers"]), *range(middle)]
    drawn = [_figure(planned, "Embedding", ["embed"], [atoms["embed"]])] if "embed" in atoms else []
    for title, words in _CHOICE:
        for layer in layers:
            names = [f"layers.{layer}.{word.format(e=0)}" for word in words]
            if all(name in atoms for name in names):
                labels = [word.rsplit(".", 1)[-1] for word in words]
                drawn.append(_figure(planned, f"{title}, layer {layer}", labels, [atoms[name] for name in names]))
                break
    return [figure for figure in drawn if figure.parts]


def _figure(planned: Planned, title: str, labels: Sequence[str], atoms: Sequence[AtomPlan]) -> Figure:
    whole_is_target = planned.format == "hf"
    ranks = {file.name: file.rank for file in planned.target.files}
    view = View(planned.source.table.hf, planned.source.view.dims)
    shapes: list[tuple[str, str, int, int]] = []
    parts: dict[str, Part] = {}
    replicas = 0
    for n, atom in enumerate(atoms):
        matrix = _matrix(view, atom)
        shapes.append((labels[n], matrix.name, matrix.rows, matrix.cols))
        slots = atom.source if whole_is_target else [s for s in atom.target if s.copy < ALTERNATE]
        replicas = max(replicas, *(s.copy for s in slots))
        for slot in (s for s in slots if s.copy == 0):
            number = 0 if whole_is_target else ranks[slot.buffer.file]
            key = slot.buffer.file if whole_is_target else str(number)
            part = parts.setdefault(key, Part(key if whole_is_target else f"rank {number}", number))
            piece = part.pieces.setdefault((slot.buffer.file, slot.buffer.begin), Piece(slot.buffer.name))
            piece.bands += _bands(n, slot, matrix)
    for part in parts.values():
        for piece in part.pieces.values():
            _settle(piece)
    if not whole_is_target:
        _pad(planned, atoms, parts)
    ordered = sorted(parts.values(), key=lambda p: (p.number, p.label))
    return Figure(title, shapes, ordered, replicas, whole_is_target)


# ------------------------------------------------------------------------------------------------ geometry


class Matrix(NamedTuple):
    """An atom as Hugging Face's matrix. `dim` and `stride`: for each axis, whether it runs through rows (0) or columns
    (1), and by how many."""

    name: str
    rows: int
    cols: int
    dim: Ints
    stride: Ints
    letters: tuple[str, ...]


def _matrix(view: View, atom: AtomPlan) -> Matrix:
    """The row that holds this atom alone. A family without one has it as a matrix of the first axis by the others."""
    schema = next(a for r in view.rows for a in r.atoms if _fits(a.name, atom.name))
    letters = tuple(schema.axes.split())
    numbers = [int(x) for x in atom.name.split(".") if x.isdigit()] + [-1, -1]
    for row in view.rows:
        geo = view.geometry(row) if schema in row.atoms else None
        if geo is not None and len(row.atoms) == 1 and not geo.index:
            name = row.name.format(i=numbers[0], e=numbers[1], j=numbers[0])
            rows, cols = (*geo.shape, 1)[:2]
            return Matrix(name, rows, cols, geo.places[0].dim, geo.places[0].stride, letters)
    first, *others = row_major(atom.shape, 1)
    dim = (0, *(1 for _ in others))
    return Matrix(atom.name, atom.shape[0], first, dim, (1, *others), letters)


def _fits(template: str, name: str) -> bool:
    a, b = template.split("."), name.split(".")
    return len(a) == len(b) and all(x == y or (x.startswith("{") and y.isdigit()) for x, y in zip(a, b, strict=True))


def _bands(atom: int, slot: Slot, whole: Matrix) -> Iterator[Band]:
    """Cut a slot's box, axis by axis, until every piece is one rectangle both in the whole matrix and in the part."""
    size = BY_NAME[slot.dtype].size
    # Tensors are row-major and the innermost axis of the rows has stride one row.
    pitch = min(s for s, d in zip(slot.strides, whole.dim, strict=True) if d == 0)
    inside = tuple(s // (size if d else pitch) for s, d in zip(slot.strides, whole.dim, strict=True))
    boxes = [slot.box]
    for axis in range(len(whole.dim)):
        if all(_is_rectangle(boxes[0].sizes, strides, whole.dim) for strides in (whole.stride, inside)):
            break
        finer = [
            Box((*b.lo[:axis], i, *b.lo[axis + 1 :]), (*b.hi[:axis], i + 1, *b.hi[axis + 1 :]))
            for b in boxes
            for i in range(b.lo[axis], b.hi[axis])
        ]
        if len(finer) > BANDS:
            break
        boxes = finer
    start = (slot.offset // pitch, slot.offset % pitch // size)
    for box in boxes:
        shift = tuple(x - o for x, o in zip(box.lo, slot.box.lo, strict=True))
        yield Band(
            atom,
            _rectangle(box.lo, box.sizes, whole.stride, whole.dim, (0, 0)),
            _rectangle(shift, box.sizes, inside, whole.dim, start),
            _indices(box, whole.letters),
        )


def _is_rectangle(sizes: Ints, strides: Ints, dim: Ints) -> bool:
    """Whether the box's rows are one run, and its columns too."""
    for d in (0, 1):
        axes = sorted((a for a in range(len(dim)) if dim[a] == d), key=lambda a: -strides[a])
        if runs(tuple(sizes[a] for a in axes), tuple(strides[a] for a in axes), 1).loops:
            return False
    return True


def _rectangle(at: Ints, sizes: Ints, strides: Ints, dim: Ints, start: tuple[int, int]) -> Rect:
    first, count = list(start), [1, 1]
    for i, n, s, d in zip(at, sizes, strides, dim, strict=True):
        first[d] += i * s
        count[d] += (n - 1) * s
    return Rect(first[0], count[0], first[1], count[1])


def _indices(box: Box, letters: Sequence[str]) -> str:
    spans = zip(letters, box.lo, box.hi, strict=True)
    return ", ".join(f"{x} {a}" if b - a == 1 else f"{x} {a}–{b - 1}" for x, a, b in spans)


def _settle(piece: Piece) -> None:
    """Count rows from the first one that belongs to these atoms: a tensor may hold other layers and experts before."""
    first = min(b.part.row for b in piece.bands)
    piece.bands = [b._replace(part=b.part._replace(row=b.part.row - first)) for b in piece.bands]
    piece.rows = max(b.part.row + b.part.rows for b in piece.bands)
    piece.cols = max(b.part.col + b.part.cols for b in piece.bands)


def _pad(planned: Planned, atoms: Sequence[AtomPlan], parts: dict[str, Part]) -> None:
    """Padding rows, and ranks that hold nothing but padding."""
    if [a.name for a in atoms] != ["embed"] or "vocab" not in planned.dialect:
        return
    for local in planned.locals:
        if local.copy or local.named.row.place not in ("first", "layer") or local.named.row.atoms[0].name != "embed":
            continue
        part = parts.setdefault(str(local.rank), Part(f"rank {local.rank}", local.rank))
        for piece in part.pieces.values():
            piece.pad = max(0, local.shape[0] - piece.rows)
        if not part.pieces:
            part.pieces["", 0] = Piece(local.name, 0, local.shape[1], local.shape[0])
