"""The plan: source slots joined with target slots on the atom, and the proof that the join is total.

A plan is pure data, linear in the number of tensors. Every element of every target tensor is written exactly once (or
is a declared fill), every element of the source is used or stands in the list of drops; what is not so is a PlanError
that lists all of it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import xxhash

from ..mappings.schema import Atom
from .dtypes import BY_NAME
from .errors import PlanError, Problems
from .slots import Box, Ints, Slot, intersect, tiles, whole


@dataclass(frozen=True, slots=True)
class AtomPlan:
    """One atom's way: `source` tiles it once, `replicas` are copies that must agree, `target` are all its homes.

    box   what of the atom is moved: all of it, or, where only some ranks' files are made, the box that they hold
    """

    name: str
    shape: Ints
    source: tuple[Slot, ...]
    replicas: tuple[tuple[Slot, ...], ...]
    target: tuple[Slot, ...]
    box: Box

    @property
    def key(self) -> str:
        """The atom's name, with the indices where only a box of it is moved: `layers.0.attn.o[0:64,128:256]`."""
        if self.box == whole(self.shape):
            return self.name
        return f"{self.name}[{','.join(f'{a}:{b}' for a, b in zip(*self.box, strict=True))}]"

    @property
    def nbytes(self) -> int:
        """Bytes of what is moved, in the source's element type."""
        return self.box.volume * BY_NAME[self.source_dtype].size

    def reads(self) -> Iterator[tuple[Slot, Box]]:
        """Every slot of the source that is read, replicas included, and which box of the atom from it."""
        for slot in (*self.source, *(s for replica in self.replicas for s in replica)):
            common = intersect(slot.box, self.box)
            if common is not None:
                yield slot, common

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
        """The same for the same moves: what a resumed conversion, or every participant of a sync, compares. Where the
        source lies does not count: another node has it elsewhere."""
        h = xxhash.xxh3_128()
        root = len(_common({s.buffer.file for atom in self.atoms for s in atom.source}))
        for atom in self.atoms:
            slots = [(s.buffer.file[root:], s) for s in atom.source] + [(s.buffer.file, s) for s in atom.target]
            text = [(file, s.buffer.begin + s.offset, s.strides, s.box, s.dtype) for file, s in slots]
            h.update(f"{atom.name}{atom.shape}{text}".encode(errors="surrogateescape"))
        return h.hexdigest()

    @property
    def bytes_read(self) -> int:
        """Bytes of the source that are moved; replicas are read besides, to be compared."""
        return sum(atom.nbytes for atom in self.atoms)

    def totals(self) -> dict[str, Any]:
        """Counts and bytes: atoms, copies, bytes read and written, casts by kind, fills, drops."""
        casts: dict[str, set[str]] = {}
        written = copies = elements = 0
        for atom in self.atoms:
            elements += atom.box.volume
            written += sum(s.box.volume * BY_NAME[s.dtype].size for s in atom.target)
            copies += max(len(atom.source), len(atom.target))
            if atom.source_dtype != atom.target_dtype:
                casts.setdefault(f"{atom.source_dtype} → {atom.target_dtype}", set()).add(atom.name)
        return {
            "atoms": len({atom.name for atom in self.atoms}),
            "parameters": elements,
            "copies": copies,
            "bytes_read": self.bytes_read,
            "bytes_written": written,
            "bytes_filled": self.filled,
            "casts": {kind: len(names) for kind, names in casts.items()},
            "drops": len(self.drops),
        }


def _common(files: Iterable[str]) -> str:
    """The directory that all of these files lie in, with its slash."""
    prefix = os.path.commonprefix(list(files))  # noqa: RUF071 - character by character, then back to the last slash
    return prefix[: prefix.rfind("/") + 1]


def share(plan: Plan, files: Collection[str], filled: int) -> Plan:
    """What of a plan fills these files of the target: each atom cut to the boxes that they hold, every box once.

    filled   bytes of padding in these files
    """
    pieces = []
    for atom in plan.atoms:
        homes: dict[Box, list[Slot]] = {}
        for slot in atom.target:
            if slot.buffer.file in files:
                homes.setdefault(slot.box, []).append(slot)
        pieces += [_piece(atom, box, slots) for box, slots in homes.items()]
    pieces.sort(key=_first_byte)
    return Plan(pieces, plan.drops, filled)


def _piece(atom: AtomPlan, box: Box, homes: Iterable[Slot]) -> AtomPlan:
    source, *replicas = (
        tuple(s for s in slots if intersect(s.box, box) is not None) for slots in (atom.source, *atom.replicas)
    )
    return replace(atom, source=source, replicas=tuple(replicas), target=tuple(homes), box=box)


def _first_byte(atom: AtomPlan) -> tuple[str, int]:
    slot, box = next(atom.reads())
    return slot.buffer.file, slot.at(box.lo)


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
            plans.append(AtomPlan(name, shape, tuple(first), tuple(map(tuple, others)), tuple(homes), whole(shape)))
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
