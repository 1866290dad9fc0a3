"""Where one tensor comes from and goes to: every place, with indices along each axis, byte offsets and strides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..mappings.schema import Atom, Index, Row, skeleton
from .checkpoint import Checkpoint
from .codecs import exactness
from .convert import Planned, plan
from .dtypes import BY_NAME
from .errors import PlanError
from .mesh import Mesh, rank_at
from .naming import atoms_called
from .placement import Local
from .plan import AtomPlan
from .remote.mounts import shown
from .roots import unwrap
from .slots import Ints, Slot
from .target import Options

AXES: dict[str, str] = {
    "h": "hidden",
    "g": "KV group",
    "r": "query head in its group",
    "d": "head dim",
    "n": "query head",
    "f": "FFN",
    "m": "expert FFN",
    "s": "shared-expert FFN",
    "e": "expert",
    "v": "vocabulary",
    "u": "one row",
    "o": "MTP projection's output (hidden)",
    "x": "MTP projection's input (2 × hidden)",
    "k": "query head dim (nope + rope)",
    "w": "value head dim",
    "y": "nope + value head dim",
    "a": "query LoRA rank",
    "c": "KV LoRA rank",
    "j": "KV LoRA rank + rope dim",
    "i": "layer",
}
"""What the letters of the axes stand for (mappings/blocks.py)."""


_VARIABLES, _NUMBERS = re.compile(r"\{(\w)\}"), re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Place:
    """One home of one box of an atom.

    tensor   the name of the tensor there (a rank's own name, where layers and experts are counted locally)
    file     path, and `offset` of the box's first element in it, in bytes
    indices  axis → (first, end) of the box; `strides` axis → bytes between neighbours
    copy     0 for the tensor itself, others for replicas and repeats
    counted  which layer (`i`) or expert (`e`) it is in a tensor that holds several, counted from 0
    rank     who writes it, with coordinates as text (`tp 1 · pp 0`); None in a source and in a format without ranks
    shape    of the tensor there; `pattern` how atoms lie in it, in the notation of `mappings/schema.py`
    """

    tensor: str
    file: str
    offset: int
    bytes: int
    dtype: str
    indices: dict[str, tuple[int, int]]
    strides: dict[str, int]
    copy: int = 0
    counted: dict[str, int] = field(default_factory=dict)
    rank: int | None = None
    coordinates: str = ""
    shape: Ints | None = None
    pattern: str = ""

    def report(self) -> dict[str, Any]:
        """As plain data."""
        return vars(self) | {
            "indices": {axis: list(span) for axis, span in self.indices.items()},
            "shape": list(self.shape) if self.shape is not None else None,
        }


@dataclass(frozen=True)
class Way:
    """One atom's way from its source places to its target places."""

    atom: str
    axes: dict[str, int]
    exactness: str
    sources: list[Place]
    targets: list[Place]

    def report(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "atom": self.atom,
            "axes": self.axes,
            "exactness": self.exactness,
            "sources": [p.report() for p in self.sources],
            "targets": [p.report() for p in self.targets],
        }


@dataclass(frozen=True)
class Explanation:
    """All ways of what was asked for.

    kind  what the name is: an `atom`, a tensor of the `source` or of the `target`, or a `name` that the family has in
          another naming
    """

    name: str
    kind: str
    source: str
    target: str
    mesh: str
    ways: list[Way] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """As plain data."""
        letters = sorted({axis for way in self.ways for axis in way.axes})
        return {
            "name": self.name,
            "kind": self.kind,
            "source": self.source,
            "target": self.target,
            "mesh": self.mesh,
            "legend": {letter: AXES.get(letter, "") for letter in letters},
            "ways": [way.report() for way in self.ways],
        }


def explain(
    source: str | Path | Checkpoint | Planned,
    name: str,
    to: str = "",
    mesh: Mesh | None = None,
    options: Options | None = None,
    **opening: Any,
) -> Explanation:
    """Every place that a tensor comes from and goes to.

    name  an atom (`layers.3.attn.q`), a tensor of the source, or one of the target, by the name it has there
    to    the target's format; a Planned source has its target already

    Raises PlanError, with the nearest names, when there is no such tensor, and whatever `plan` raises.
    """
    planned = source if isinstance(source, Planned) else plan(source, to, mesh, options, **opening)
    kind, atoms = find(planned, name)
    ranks = {file.name: file.rank for file in planned.target.files}
    locals_ = _locals(planned, {s.buffer.name for a in atoms for s in a.target})
    ways = [_way(planned, a, ranks, locals_) for a in atoms]
    return Explanation(name, kind, planned.source.format, planned.format, str(planned.mesh), ways)


def find(planned: Planned, name: str) -> tuple[str, list[AtomPlan]]:
    """What a name stands for, and the atoms that it holds."""
    atoms = planned.plan.atoms
    exact = [a for a in atoms if a.name == name]
    if exact:
        return "atom", exact
    for kind in ("source", "target"):
        held = [a for a in atoms if any(s.buffer.name == name for s in _slots(a, kind))]
        if held:
            return kind, held
    called = set(atoms_called(planned.source, name))
    if called:
        return "name", [a for a in atoms if a.name in called]
    dropped = planned.source.drops.get(name)
    if dropped:
        raise PlanError(f"{name} goes nowhere: it is left behind ({dropped}).")
    raise PlanError(f"There is no atom and no tensor {name!r} in {planned.source.path}.", hint=_nearest(planned, name))


def _slots(atom: AtomPlan, kind: str) -> Iterable[Slot]:
    if kind == "target":
        return atom.target
    return (*atom.source, *(s for replica in atom.replicas for s in replica))


def _nearest(planned: Planned, name: str) -> str:
    known = {s.buffer.name: None for a in planned.plan.atoms for s in a.source} | {
        a.name: None for a in planned.plan.atoms
    }
    inside = [n for n in known if name in n]
    near = inside[:5] or get_close_matches(name, known, n=5, cutoff=0.5) or list(known)[:5]
    return "Names like it: " + ", ".join(near)


# ------------------------------------------------------------------------------------------------ places


def _locals(planned: Planned, names: set[str]) -> dict[tuple[str, int], Local]:
    """The target's local tensors of these names, by name and rank (a root is not part of a local's name)."""
    root = planned.options.root if planned.format == "dcp" else ""
    return {(root + x.name, x.rank): x for x in planned.locals if root + x.name in names}


def _way(planned: Planned, atom: AtomPlan, ranks: Mapping[str, int], locals_: Mapping[tuple[str, int], Local]) -> Way:
    schema, shape = planned.source.atoms[atom.name]
    axes = schema.axes.split()
    source = [_source_place(planned.source, slot, atom.name, schema) for slot in _slots(atom, "source")]
    target = [_target_place(planned, slot, atom.name, schema, ranks, locals_) for slot in atom.target]
    kind = exactness(atom.source_dtype, atom.target_dtype)
    return Way(atom.name, dict(zip(axes, shape, strict=True)), kind, source, target)


def _source_place(ckpt: Checkpoint, slot: Slot, name: str, atom: Atom) -> Place:
    key = skeleton(unwrap(slot.buffer.name).removeprefix(ckpt.dialect.get("root") or ""))[0]
    stored = next((row for row in ckpt.view.rows if row.key == key and atom in row.atoms), None)
    return _place(slot, name, atom, stored)


def _target_place(
    planned: Planned,
    slot: Slot,
    name: str,
    atom: Atom,
    ranks: Mapping[str, int],
    locals_: Mapping[tuple[str, int], Local],
) -> Place:
    number = ranks.get(slot.buffer.file, 0)
    local = locals_.get((slot.buffer.name, number))
    rank = None if planned.format == "hf" else number
    place = _place(slot, name, atom, local.named.row if local else None)
    where = "" if rank is None else coordinates(planned, rank)
    return replace(place, rank=rank, coordinates=where, shape=local.shape if local else None)


def _place(slot: Slot, name: str, atom: Atom, row: Row | None) -> Place:
    axes = atom.axes.split()
    counted = {f.name for dim in row.dims for f in dim if isinstance(f, Index)} if row else set()
    numbers = dict(zip(_VARIABLES.findall(atom.name), _NUMBERS.findall(name), strict=True))
    return Place(
        tensor=slot.buffer.name,
        file=shown(slot.buffer.file),
        offset=slot.buffer.begin + slot.offset,
        bytes=slot.box.volume * BY_NAME[slot.dtype].size,
        dtype=slot.dtype,
        indices={axis: (lo, hi) for axis, lo, hi in zip(axes, slot.box.lo, slot.box.hi, strict=True)},
        strides=dict(zip(axes, slot.strides, strict=True)),
        copy=slot.copy,
        counted={v: int(numbers[v]) for v in sorted(counted & numbers.keys())},
        pattern=row.pattern if row else "",
    )


def coordinates(planned: Planned, number: int) -> str:
    """A rank's place on the target's mesh, as text; the dimensions of size 1 are left out."""
    mesh = planned.mesh
    if planned.format in ("dcp", "archon"):
        pairs = [("dp", number // mesh.tp, mesh.dp_shard), ("tp", number % mesh.tp, mesh.tp)]
    else:
        at = rank_at(mesh, number)
        pairs = [("tp", at.tp, mesh.tp), ("pp", at.pp, mesh.pp), ("ep", at.ep, mesh.ep)]
        if mesh.expert_tp != mesh.tp:
            pairs.append(("etp", at.etp, mesh.expert_tp))
    return " · ".join(f"{name} {at}" for name, at, size in pairs if size > 1)
