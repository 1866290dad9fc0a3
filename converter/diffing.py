"""What differs between two checkpoints, of any formats: config fields, names, shapes, element types, and values.

`verify` answers whether two checkpoints are the same; `diff` says by how much they are not. Both are read whole, a
chunk at a time, so memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .codecs import Array, numpy_dtype
from .dtypes import BY_NAME, FLOATS
from .errors import Problem
from .execute import Limits, Shared, atom_bytes, chunks, gather, reads, run_all
from .opening import open_checkpoint
from .plan import copies_of
from .rawio import Files
from .slots import Box, Ints, Slot, tiles, whole

CHUNK = 4 << 20
"""Bytes of one chunk of either side, at most."""

SLICE = 1 << 16
"""Elements that are compared at once: few enough to stay in a core's cache with all that is computed of them."""

ABOUT_THE_FILE = frozenset({"transformers_version", "_name_or_path", "torch_dtype"})
"""Fields of a config that tell who wrote it, not what the model is (`torch_dtype` is compared as `dtype`)."""


@dataclass
class Values:
    """How far one atom's values are apart.

    bits     elements whose bits (or values, where the element types differ) are not the same
    values   elements that differ in value: -0 and 0 do not, NaN and NaN do not
    max_abs, max_rel   of |a - b| and |a - b| / max(|a|, |b|); inf where one is infinite, None where no values differ
    nan      elements that are NaN on one side only; they are not in max_abs and max_rel
    at       index of the largest absolute difference, axis by axis
    """

    elements: int = 0
    bits: int = 0
    values: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    nan: int = 0
    at: tuple[int, ...] | None = None


@dataclass
class Difference:
    """What `diff` found between A and B.

    config     field (dotted where nested) → its values, None where it is absent; `about_file` those that do not count
    names_a, names_b   stored names that only one has, where both are of one format
    only_a, only_b     atoms that only one has whole
    shapes, dtypes     atom → both
    values     atom → how far apart, for those that differ in any bit
    equal      atoms with equal type and bits
    problems_a, problems_b   what is wrong with either, as `inspect` lists it
    """

    a: Checkpoint
    b: Checkpoint
    config: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    about_file: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    names_a: list[str] = field(default_factory=list)
    names_b: list[str] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[Ints, Ints]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, Values] = field(default_factory=dict)
    equal: int = 0
    problems_a: list[Problem] = field(default_factory=list)
    problems_b: list[Problem] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing differs that says something about the model."""
        found = (
            self.config,
            self.names_a,
            self.names_b,
            self.only_a,
            self.only_b,
            self.shapes,
            self.dtypes,
            self.values,
        )
        return not any(found)

    @property
    def sure(self) -> bool:
        """Whether both could be compared whole."""
        return not (self.problems_a or self.problems_b)

    def report(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "same": self.same,
            "sure": self.sure,
            "a": {"path": str(self.a.path), "format": self.a.format},
            "b": {"path": str(self.b.path), "format": self.b.format},
            "config": {k: list(v) for k, v in self.config.items()},
            "config_about_the_file": {k: list(v) for k, v in self.about_file.items()},
            "names": {"only_a": self.names_a, "only_b": self.names_b},
            "only_a": self.only_a,
            "only_b": self.only_b,
            "shapes": {k: [list(x) for x in v] for k, v in self.shapes.items()},
            "dtypes": {k: list(v) for k, v in self.dtypes.items()},
            "values": {k: vars(v) for k, v in self.values.items()},
            "equal": self.equal,
            "problems_a": [str(p) for p in self.problems_a],
            "problems_b": [str(p) for p in self.problems_b],
        }


def diff(
    a: str | Path | Checkpoint,
    b: str | Path | Checkpoint,
    *,
    values: bool = True,
    limits: Limits | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    hf_config: str | Path | None = None,
) -> Difference:
    """Compare two checkpoints, field by field and atom by atom. With `values=False` no tensor is read.

    A checkpoint with problems is compared as far as it goes; `sure` is False then. Raises a ConvertError when one of
    the two cannot be opened at all.
    """
    left, right = (x if isinstance(x, Checkpoint) else open_checkpoint(x, hf_config=hf_config) for x in (a, b))
    result = Difference(left, right, problems_a=list(left.problems.found), problems_b=list(right.problems.found))
    _configs(result)
    if left.format == right.format != "mp_rank":
        names = [{s.name for s in c.found.tensors} - c.drops.keys() for c in (left, right)]
        result.names_a, result.names_b = sorted(names[0] - names[1]), sorted(names[1] - names[0])
    homes = _whole(left), _whole(right)
    result.only_a, result.only_b = sorted(homes[0].keys() - homes[1].keys()), sorted(homes[1].keys() - homes[0].keys())
    pairs = {name: (homes[0][name], homes[1][name]) for name in homes[0] if name in homes[1]}
    comparable = _describe(result, pairs)
    if values:
        _compare_all(result, comparable, limits or Limits(), progress)
    return result


def _whole(ckpt: Checkpoint) -> dict[str, list[Slot]]:
    """The first complete copy of every atom that has one."""
    found = {}
    for name, (_, shape) in ckpt.atoms.items():
        for slots in copies_of(ckpt.slots.get(name, ())).values():
            if tiles([s.box for s in slots], shape):
                found[name] = slots
                break
    return found


def _configs(result: Difference) -> None:
    a, b = (_flat(_spelled(c.config)) for c in (result.a, result.b))
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            where = result.about_file if key in ABOUT_THE_FILE else result.config
            where[key] = (a.get(key), b.get(key))


def _spelled(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 renamed `torch_dtype` to `dtype`: the same field."""
    plain = dict(config)
    if "torch_dtype" in plain:
        plain.setdefault("dtype", plain["torch_dtype"])
    return plain


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            fields |= _flat(item, f"{prefix}{key}.")
        else:
            fields[prefix + str(key)] = item
    return fields


def _describe(
    result: Difference, pairs: Mapping[str, tuple[list[Slot], list[Slot]]]
) -> dict[str, tuple[list[Slot], list[Slot]]]:
    """Note differing shapes and types; return what can be compared value by value."""
    comparable = {}
    for name, (left, right) in pairs.items():
        shapes = result.a.atoms[name][1], result.b.atoms[name][1]
        if left[0].dtype != right[0].dtype:
            result.dtypes[name] = (left[0].dtype, right[0].dtype)
        if shapes[0] != shapes[1]:
            result.shapes[name] = shapes
        else:
            comparable[name] = (left, right)
    return comparable


# ------------------------------------------------------------------------------------------------ values


def _compare_all(
    result: Difference,
    pairs: Mapping[str, tuple[list[Slot], list[Slot]]],
    limits: Limits,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    total = sum(atom_bytes(slots) for pair in pairs.values() for slots in pair)
    found: dict[str, Values] = {}
    files, shared, lock, done = Files(), Shared(), Lock(), 0

    def job(name: str, left: list[Slot], right: list[Slot]) -> Callable[[], None]:
        def action() -> None:
            nonlocal done
            found[name] = compare_values(files, left, right, result.a.atoms[name][1], min(CHUNK, limits.chunk))
            with lock:
                done += atom_bytes(left) + atom_bytes(right)
                if progress is not None:
                    progress("diff", done, total)

        return action

    order = sorted(pairs.items(), key=lambda item: (item[1][0][0].buffer.file, item[1][0][0].buffer.begin))
    wide = [(name, sorted(pair, key=lambda slots: -BY_NAME[slots[0].dtype].size)) for name, pair in order]
    expected = (
        pair for name, sides in wide for pair in reads(sides, whole(result.a.atoms[name][1]), min(CHUNK, limits.chunk))
    )
    try:
        files.expect(expected, limits, shared.stop)
        run_all(
            ((atom_bytes(x) + atom_bytes(y), job(name, x, y)) for name, (x, y) in order), limits.workers, shared.stop
        )
    finally:
        files.close()
    result.values = {name: found[name] for name in pairs if found[name].bits}
    result.equal = sum(not found[name].bits and name not in result.dtypes for name in pairs)


def compare_values(files: Files, a: list[Slot], b: list[Slot], shape: Ints, limit: int) -> Values:
    """Compare one atom, `limit` bytes at a time."""
    result = Values()
    types = a[0].dtype, b[0].dtype
    for box in chunks(shape, max(BY_NAME[t].size for t in types), limit):
        left, right = gather(files, a, box), gather(files, b, box, "second")
        result.elements += left.size
        if types[0] == types[1] and np.array_equal(left, right):
            continue
        flat = left.reshape(-1).view(numpy_dtype(types[0])), right.reshape(-1).view(numpy_dtype(types[1]))
        exact = np.float64 if {"F32", "F64"} & set(types) or not FLOATS.issuperset(types) else np.float32
        for first in range(0, left.size, SLICE):
            x, y = (side[first : first + SLICE].astype(exact) for side in flat)
            _compare_slice(result, x, y, lambda at, first=first, box=box: _index(first + at, box))
        if types[0] == types[1]:
            result.bits += int(np.count_nonzero(left != right))
    if types[0] != types[1]:
        result.bits = result.values
    return result


def _index(flat: int, box: Box) -> Ints:
    """The element of an atom that is the `flat`th of a box."""
    inside = np.unravel_index(flat, box.sizes)
    return tuple(int(i) + o for i, o in zip(inside, box.lo, strict=True))


def _compare_slice(result: Values, x: Array, y: Array, index: Callable[[int], Ints]) -> None:
    """Add the differences of some values to the result. `index`: of an element of these in the whole atom."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        apart = np.abs(x - y)
        largest = np.maximum(np.abs(x), np.abs(y))
        relative = apart / largest
    if not np.isfinite(apart.max()):  # NaN and infinities: the rare case, so it may take longer
        both = np.isnan(x) & np.isnan(y)
        one = np.isnan(x) ^ np.isnan(y)
        result.nan += int(np.count_nonzero(one))
        result.values += int(np.count_nonzero(one))
        apart[both | one | (x == y)] = 0
        relative[np.isinf(apart)] = np.inf
    count = int(np.count_nonzero(apart))
    if not count:
        return
    result.values += count
    most = int(apart.argmax())
    if result.max_abs is None or apart[most] > result.max_abs:
        result.max_abs, result.at = float(apart[most]), index(most)
    relative[apart == 0] = 0  # 0 / 0
    result.max_rel = max(result.max_rel or 0.0, float(relative.max()))
