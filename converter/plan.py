"""The plan: source slots joined with target slots on the atom, and the proof that the join is total.

A plan is pure data, linear in the number of tensors. Every element of every target tensor is written exactly once (or
is a declared fill), every element of the source is used or stands in the list of drops; what is not so is a PlanError
that lists all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash

from ..mappings.schema import Atom
from .dtypes import BY_NAME
from .errors import PlanError, Problems
from .slots import Ints, Slot, tiles


@dataclass(frozen=True, slots=True)
class AtomPlan:
    """One atom's way: `source` tiles it once, `replicas` are copies that must agree, `target` are all its homes."""

    name: str
    shape: Ints
    source: tuple[Slot, ...]
    replicas: tuple[tuple[Slot, ...], ...]
    target: tuple[Slot, ...]

    @property
    def source_dtype(self) -> str:
        return self.source[0].dtype

    @property
    def target_dtype(self) -> str:
        return self.target[0].dtype if self.target else self.source_dtype


@dataclass
class Plan:
    """All atoms' ways, in the order in which the source's files are read, and what an overview needs."""

    atoms: list[AtomPlan]
    drops: dict[str, str] = field(default_factory=dict)
    filled: int = 0

    @cached_property
    def digest(self) -> str:
        """The same for the same moves: what a resumed conversion, or every participant of a sync, compares."""
        h = xxhash.xxh3_128()
        for atom in self.atoms:
            slots = (*atom.source, *atom.target)
            text = [(s.buffer.file, s.buffer.begin + s.offset, s.strides, s.box, s.dtype) for s in slots]
            h.update(f"{atom.name}{atom.shape}{text}".encode())
        return h.hexdigest()

    def totals(self) -> dict[str, Any]:
        """Counts and bytes: atoms, copies, bytes read and written, casts by kind, fills, drops."""
        casts: Counter[str] = Counter()
        read = written = copies = elements = 0
        for atom in self.atoms:
            count = sum(s.box.volume for s in atom.source)
            elements += count
            read += sum(s.box.volume * BY_NAME[s.dtype].size for s in atom.source)
            written += sum(s.box.volume * BY_NAME[s.dtype].size for s in atom.target)
            copies += max(len(atom.source), len(atom.target))
            if atom.source_dtype != atom.target_dtype:
                casts[f"{atom.source_dtype} → {atom.target_dtype}"] += 1
        return {
            "atoms": len(self.atoms),
            "parameters": elements,
            "copies": copies,
            "bytes_read": read,
            "bytes_written": written,
            "bytes_filled": self.filled,
            "casts": dict(casts),
            "drops": len(self.drops),
        }


def copies_of(slots: Iterable[Slot]) -> dict[int, list[Slot]]:
    """Slots by the copy of the tensor that they belong to, lowest first."""
    found: dict[int, list[Slot]] = {}
    for slot in slots:
        found.setdefault(slot.copy, []).append(slot)
    return dict(sorted(found.items()))


def join(
    atoms: Mapping[str, tuple[Atom, Ints]], source: Mapping[str, list[Slot]], target: Mapping[str, list[Slot]]
) -> list[AtomPlan]:
    """Pair the homes of every atom. Raises PlanError with everything that is missing, doubled or incomplete."""
    problems, plans = Problems(), []
    for name, (_, shape) in atoms.items():
        found = copies_of(source.get(name, ()))
        homes = target.get(name, [])
        if not found:
            problems.add(name, "the source has nothing for it")
        for copy, slots in found.items():
            if not tiles([s.box for s in slots], shape):
                problems.add(name, _coverage(slots, shape, f"copy {copy} in the source" if copy else "the source"))
        for where, slots in (("source", [s for held in found.values() for s in held]), ("target", homes)):
            types = sorted({s.dtype for s in slots})
            if len(types) > 1:
                problems.add(name, f"the {where} holds it in several element types: {', '.join(types)}")
        if not homes:
            problems.add(name, "the target has no place for it", "the two tables disagree: please report this")
        for slots in copies_of(homes).values():
            if not tiles([s.box for s in slots], shape):
                problems.add(name, _coverage(slots, shape, "the target"))
        if found and homes:
            first, *others = found.values()
            plans.append(AtomPlan(name, shape, tuple(first), tuple(map(tuple, others)), tuple(homes)))
    for name in target.keys() - atoms.keys():
        problems.add(name, "the target wants it, the model does not have it")
    problems.raise_as(PlanError, "The plan is not total:")
    plans.sort(key=lambda p: (p.source[0].buffer.file, p.source[0].buffer.begin + p.source[0].offset))
    return plans


def _coverage(slots: list[Slot], shape: Ints, where: str) -> str:
    total = 1
    for length in shape:
        total *= length
    held = sum(s.box.volume for s in slots)
    names = ", ".join(sorted({s.buffer.name for s in slots})[:3])
    if held < total:
        return f"{where} holds {held} of its {total} elements ({names})"
    return f"{where} holds some of its {total} elements more than once ({names})"
