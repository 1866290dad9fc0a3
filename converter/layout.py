"""From a table's rows and a model's sizes to slots. Pure: no I/O, no torch, no global state.

A `View` is one naming of one model: which tensors there are, what a name on disk means, and, through `Geometry`, where
in a tensor every atom lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod

from ..mappings.schema import Atom, Axis, Concat, Dims, Factor, Index, Row, skeleton
from .slots import Box, Buffer, Ints, Slot, row_major, split_range


@dataclass(frozen=True, slots=True)
class AtomPlace:
    """Where one atom lies inside a tensor: axis `a` moves `stride[a]` along dimension `dim[a]`, from `base`."""

    atom: Atom
    shape: Ints
    dim: Ints
    stride: Ints
    base: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """A row with its sizes filled in. `index` maps an index variable to the dimension that counts it."""

    shape: Ints
    places: tuple[AtomPlace, ...]
    index: dict[str, int]
    pad_dim: int = -1


def factor_size(factor: Factor, dims: Dims) -> int:
    """Length of one factor of a dimension."""
    if isinstance(factor, Concat):
        return sum(1 if axis == "1" else dims[axis] for _, axis in factor.parts)
    if isinstance(factor, Index):
        return dims["e"] if factor.name == "e" else dims["layers"]
    return dims[factor.name]


def geometry(row: Row, dims: Dims) -> Geometry:
    """Fill the sizes of a model into a row's pattern."""
    shape: list[int] = []
    index: dict[str, int] = {}
    axes: dict[str, dict[str, tuple[int, int]]] = {a.alias: {} for a in row.atoms}
    base: dict[str, list[int]] = {a.alias: [0] * len(row.dims) for a in row.atoms}
    pad_dim = -1
    for n, factors in enumerate(row.dims):
        inner = 1
        for factor in reversed(factors):
            if isinstance(factor, Axis):
                for of_atom in axes.values():
                    of_atom[factor.name] = (n, inner)
                if factor.name == row.pad:
                    pad_dim = n
            elif isinstance(factor, Concat):
                start = 0
                for alias, axis in factor.parts:
                    base[alias][n] += start * inner
                    if axis != "1":
                        axes[alias][axis] = (n, inner)
                    start += 1 if axis == "1" else dims[axis]
            else:
                index[factor.name] = n
            inner *= factor_size(factor, dims)
        shape.append(inner)
    places = []
    for atom in row.atoms:
        where = [axes[atom.alias][axis] for axis in atom.axes.split()]
        sizes = tuple(dims[axis] for axis in atom.axes.split())
        dim, stride = tuple(d for d, _ in where), tuple(s for _, s in where)
        places.append(AtomPlace(atom, sizes, dim, stride, tuple(base[atom.alias])))
    return Geometry(tuple(shape), tuple(places), index, pad_dim)


@dataclass(frozen=True, slots=True)
class Named:
    """One tensor of one naming: a row at one layer and expert (`-1` where the name has none)."""

    name: str
    row: Row
    layer: int
    expert: int
    geometry: Geometry


@lru_cache(maxsize=16384)
def _place_slots(geo: Geometry, lo: Ints, hi: Ints, strides: Ints) -> tuple[tuple[int, Box, int, Ints], ...]:
    """The boxes of every atom inside one box of a tensor: (place, box, byte offset from the box's start, strides)."""
    found = []
    counted = set(geo.index.values())
    for n, place in enumerate(geo.places):
        per_dim: list[list[tuple[tuple[int, tuple[int, int]], ...]]] = []
        for d in range(len(geo.shape)):
            if d in counted:
                continue
            axes = sorted((a for a in range(len(place.dim)) if place.dim[a] == d), key=lambda a: -place.stride[a])
            sizes = tuple((place.shape[a], place.stride[a]) for a in axes)
            cuts = split_range(lo[d] - place.base[d], hi[d] - place.base[d], sizes)
            per_dim.append([tuple(zip(axes, cut, strict=True)) for cut in cuts])
        bytes_per_axis = tuple(s * strides[d] for s, d in zip(place.stride, place.dim, strict=True))
        origin = sum((place.base[d] - lo[d]) * strides[d] for d in range(len(geo.shape)) if d not in counted)
        for combination in product(*per_dim):
            ranges = dict(pair for dim in combination for pair in dim)
            box = Box(
                tuple(ranges[a][0] for a in range(len(place.dim))), tuple(ranges[a][1] for a in range(len(place.dim)))
            )
            offset = origin + sum(x * s for x, s in zip(box.lo, bytes_per_axis, strict=True))
            found.append((n, box, offset, bytes_per_axis))
    return tuple(found)


def slots_in(
    named: Named, lo: Ints, hi: Ints, buffer: Buffer, offset: int, strides: Ints, dtype: str, copy: int = 0
) -> Iterator[tuple[str, Slot]]:
    """Slots of all atoms that lie in the box `lo..hi` of a tensor, where that box begins `offset` bytes into `buffer`
    and its dimensions are `strides` bytes apart. Yields (atom name, slot)."""
    geo = named.geometry
    if not geo.index:
        for n, box, at, per_axis in _place_slots(geo, lo, hi, strides):
            name = geo.places[n].atom.name.format(i=named.layer, e=named.expert)
            yield name, Slot(box, buffer, offset + at, per_axis, dtype, copy)
        return
    variables, counted = list(geo.index), list(geo.index.values())
    inner = _place_slots(geo, *_without(counted, lo, hi), strides)
    ids = {"i": named.layer, "e": named.expert}
    for values in product(*(range(lo[d], hi[d]) for d in counted)):
        shift = offset
        for variable, d, x in zip(variables, counted, values, strict=True):
            ids[variable] = x
            shift += (x - lo[d]) * strides[d]
        for n, box, at, per_axis in inner:
            yield geo.places[n].atom.name.format(**ids), Slot(box, buffer, shift + at, per_axis, dtype, copy)


def _without(counted: list[int], lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """The box with its counting dimensions set aside, so that the same layer's or expert's pieces are computed once."""
    first, last = list(lo), list(hi)
    for d in counted:
        first[d], last[d] = 0, 1
    return tuple(first), tuple(last)


@dataclass
class View:
    """One naming of one model.

    rows   the rows of the naming
    dims   the model's sizes
    """

    rows: Sequence[Row]
    dims: Dims
    _geometry: dict[int, Geometry] = field(default_factory=dict, repr=False)
    _by_key: dict[str, list[Row]] = field(default_factory=dict, repr=False)
    _meanings: dict[str, tuple[Named | None, str]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for r in self.rows:
            self._by_key.setdefault(r.key, []).append(r)

    @property
    def layers(self) -> int:
        """Decoder and MTP layers together."""
        return self.dims["layers"] + self.dims.get("mtp", 0)

    def rows_of(self, key: str) -> list[Row]:
        """The rows whose names look like this, numbers aside (see `skeleton`)."""
        return self._by_key.get(key, [])

    def geometry(self, row: Row) -> Geometry:
        geo = self._geometry.get(id(row))
        if geo is None:
            geo = self._geometry[id(row)] = geometry(row, self.dims)
        return geo

    def exists(self, row: Row, layer: int) -> bool:
        """Whether this model has this tensor at this layer."""
        return row.when(self.dims, layer) and all(a.when(self.dims, layer) for a in row.atoms)

    def named(self, row: Row, layer: int = -1, expert: int = -1) -> Named:
        """The tensor of a row at a layer and an expert, by its global name."""
        name = row.name.format(i=layer, j=layer - self.dims["layers"], e=expert)
        return Named(name, row, layer, expert, self.geometry(row))

    def layers_of(self, row: Row) -> list[int]:
        """The layers at which the row names a tensor of its own; `[-1]` when it stands outside the layers, or holds
        all layers in one dimension."""
        if not ({"i", "j"} & set(row.indices)):
            stacked = any(isinstance(f, Index) and f.name == "i" for dim in row.dims for f in dim)
            return [-1] if self.exists(row, 0 if stacked else -1) else []
        return [i for i in range(self.layers) if self.exists(row, i)]

    def all_named(self, wanted: Callable[[Row], bool]) -> Iterator[Named]:
        """Every tensor of the model in this naming, for the rows that are `wanted`, layer by layer."""
        outside = [r for r in self.rows if wanted(r) and not ({"i", "j"} & set(r.indices))]
        inside = [r for r in self.rows if wanted(r) and {"i", "j"} & set(r.indices)]
        for r in outside:
            if self.layers_of(r):
                yield from self._experts(r, -1)
        for layer in range(self.layers):
            for r in inside:
                if self.exists(r, layer):
                    yield from self._experts(r, layer)

    def _experts(self, row: Row, layer: int) -> Iterator[Named]:
        if "e" in row.indices:
            for expert in range(self.dims["e"]):
                yield self.named(row, layer, expert)
        else:
            yield self.named(row, layer)

    def resolve(self, name: str, shape: Ints) -> tuple[Named | None, str]:
        """What a name found on disk means. Returns the tensor and "", or None and why not.

        Where several rows share a name (a norm that one spec or another writes) the one that this model has wins.
        """
        meaning = self._meanings.get(name)
        if meaning is None:
            meaning = self._meanings[name] = self._meaning(name)
        named, why = meaning
        return named, self._shape_fault(named.geometry, shape) if named is not None else why

    def _meaning(self, name: str) -> tuple[Named | None, str]:
        key, numbers = skeleton(name)
        rows = self._by_key.get(key)
        if rows is None:
            return None, "the family's table has no tensor of this name"
        why = ""
        for r in rows:
            ids = dict(zip(r.indices, numbers, strict=False))
            layer = ids.get("i", ids["j"] + self.dims["layers"] if "j" in ids else -1)
            expert = ids.get("e", -1)
            if layer >= self.layers:
                why = f"the config has {self.layers} layers"
            elif expert >= self.dims.get("e", 0) and expert != -1:
                why = f"the config has {self.dims.get('e', 0)} experts"
            elif (layer == -1 and not self.layers_of(r)) or (layer != -1 and not self.exists(r, layer)):
                why = why or "the config says that this model has no such tensor here"
            else:
                return Named(name, r, layer, expert, self.geometry(r)), ""
        return None, why

    @staticmethod
    def _shape_fault(geo: Geometry, shape: Ints) -> str:
        """Why a shape does not fit, or "". The padded dimension may be longer."""
        fits = len(shape) == len(geo.shape) and all(
            s == w or (d == geo.pad_dim and s > w) for d, (s, w) in enumerate(zip(shape, geo.shape, strict=True))
        )
        return "" if fits else f"has shape {list(shape)}, the config makes it {list(geo.shape)}"

    def atoms(self) -> dict[str, tuple[Atom, Ints]]:
        """Every atom of the model: name → (atom, shape)."""
        found: dict[str, tuple[Atom, Ints]] = {}
        templates: dict[str, Atom] = {a.name: a for r in self.rows for a in r.atoms}
        shapes = {n: tuple(self.dims[x] for x in a.axes.split()) for n, a in templates.items() if self._possible(a)}
        for layer in range(-1, self.layers):
            for template, atom in templates.items():
                if atom.per_layer != (layer >= 0) or not atom.when(self.dims, layer):
                    continue
                for expert in range(self.dims["e"]) if atom.per_expert else (-1,):
                    found[template.format(i=layer, e=expert)] = (atom, shapes[template])
        return found

    def _possible(self, atom: Atom) -> bool:
        return all(axis in self.dims for axis in atom.axes.split())


def atoms_of(named: Named) -> list[str]:
    """Names of all atoms that a tensor holds."""
    spans = {v: range(named.geometry.shape[d]) for v, d in named.geometry.index.items()}
    names = []
    for values in product(*spans.values()):
        ids = {"i": named.layer, "e": named.expert} | dict(zip(spans, values, strict=True))
        names += [place.atom.name.format(**ids) for place in named.geometry.places]
    return names


def contiguous(
    named: Named, shape: Ints, buffer: Buffer, itemsize: int, dtype: str, copy: int = 0
) -> Iterator[tuple[str, Slot]]:
    """Slots of a whole tensor that lies row-major in its buffer. `shape` is the stored one: its padding is skipped."""
    hi = tuple(map(min, shape, named.geometry.shape))
    return slots_in(named, (0,) * len(shape), hi, buffer, 0, row_major(shape, itemsize), dtype, copy)


def elements(shape: Ints) -> int:
    """How many elements a shape has."""
    return prod(shape)
