"""What a push will send: the source joined with what the servers hold, and the proof that it is all of it, and no more.

Everything that can be known before a byte moves is said here, all at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint import wanted_name
from ..errors import PlanError, Problems
from ..explaining import AXES
from .blocks import check_tiling
from .sink import SinkLayout
from .source import Source, check_types
from .wire import Atom, Box, Manifest


@dataclass
class Planned:
    """Atoms as they travel, every sender's boxes, and the casts made on the way. `lora`: what a manifest says of
    an adapter, where these are an adapter's tensors."""

    atoms: list[Atom]
    senders: list[list[Box]]
    model: dict[str, Any]
    casts: dict[str, int]
    notes: list[str] = field(default_factory=list)
    lora: dict[str, Any] | None = None


_FIELDS = {
    "layers": "num_hidden_layers",
    "tied": "tie_word_embeddings",
    "v": "vocab_size",
    "h": "hidden_size",
    "n": "num_attention_heads",
    "g": "num_key_value_heads",
    "d": "head_dim",
    "f": "intermediate_size",
    "m": "the experts' intermediate_size",
    "s": "the shared experts' intermediate_size",
}
"""What users call a size: the fields of a config that most families have."""


def one_layout(layouts: Mapping[str, SinkLayout]) -> SinkLayout:
    """What all servers hold alike. Raises PlanError with every atom in which one differs from the first."""
    problems = Problems()
    (first_url, first), *others = layouts.items()
    ours = {a.name: a for a in first.atoms}
    for url, layout in others:
        if layout.model.get("family") != first.model.get("family"):
            problems.add(url, f"holds {layout.model.get('family')}, {first_url} {first.model.get('family')}")
            continue
        theirs = {a.name: a for a in layout.atoms}
        differ = [(a.dtype, b.dtype) for a in first.atoms if (b := theirs.get(a.name)) and a.dtype != b.dtype]
        shapes = [{(n, tuple(a.shape)) for n, a in held.items()} for held in (ours, theirs)]
        if shapes[0] == shapes[1] and len(set(differ)) == 1:  # one line says it as well as one for each atom
            what = f"holds {differ[0][1]} where {first_url} has {differ[0][0]} ({len(differ)} of {len(ours)} atoms)"
            problems.add(url, what, "start them with the same --dtype")
            continue
        for name in [*ours, *(n for n in theirs if n not in ours)]:
            a, b = ours.get(name), theirs.get(name)
            if a != b:
                problems.add(f"{url} {name}", f"is {_said(b)}, at {first_url} {_said(a)}")
    hint = "One push sends the same bytes to all servers: serve those that differ with a WeightSync of their own."
    problems.raise_as(PlanError, "The servers do not hold the same tensors:", hint)
    return first


def _said(atom: Atom | None) -> str:
    return "missing" if atom is None else f"{atom.dtype} {list(atom.shape)}"


def plan(source: Source, layout: SinkLayout) -> Planned:
    """Join a source with a layout. The same on every rank.

    Raises PlanError with everything that does not fit: the family, its sizes, atoms that one side lacks, shapes, types,
    boxes that overlap or leave holes.
    """
    problems = Problems()
    _check_model(source, layout, problems)
    atoms = list(layout.atoms) or [Atom(n, s, source.dtypes[n]) for n, s in source.shapes.items()]
    notes: list[str] = []
    if not problems:
        _check_atoms(source, atoms, problems, notes)
    casts = check_types(source, {a.name: a.dtype for a in atoms}, problems)
    problems.raise_as(
        PlanError,
        f"{source.label} does not fit what the servers hold:",
        "Nothing was sent. Is it the same model as the servers'?",
    )
    numbers = {a.name: n for n, a in enumerate(atoms)}
    senders: list[list[Box]] = [
        [(numbers[name], box.lo, box.hi) for name, box in boxes if name in numbers] for boxes in source.senders()
    ]
    planned = Planned(atoms, senders, dict(layout.model), casts, notes)
    probe = Manifest("", 0, 0, "full", atoms, senders, 1, 1)
    check_tiling(probe, PlanError, f"{source.label} is not whole:")
    return planned


def _check_model(source: Source, layout: SinkLayout, problems: Problems) -> None:
    """Family and sizes, one by one. MTP layers that only the source has are left behind."""
    family = layout.model.get("family")
    if not family:
        return
    if family != source.family:
        problems.add("model_type", f"is {source.family} in {source.label}, and {family} on the servers")
        return
    theirs = layout.model.get("sizes") or {}
    for name in sorted({*source.sizes, *theirs} - {"mtp", "o", "x"}):  # the last two follow from others
        a, b = source.sizes.get(name), theirs.get(name)
        if a != b:
            field_ = _FIELDS.get(name) or str(AXES.get(name, name))
            problems.add(field_, f"is {a} in {source.label}, and {b} on the servers")


def _check_atoms(source: Source, atoms: Sequence[Atom], problems: Problems, notes: list[str]) -> None:
    wanted = {a.name for a in atoms}
    view = source.checkpoint.view
    for atom in atoms:
        shape = source.shapes.get(atom.name)
        if shape is None:
            problems.add(wanted_name(view, atom.name), f"the servers hold it, {source.label} does not ({atom.name})")
        elif tuple(shape) != tuple(atom.shape):
            problems.add(atom.name, f"has shape {list(shape)} in {source.label}, {list(atom.shape)} on the servers")
    beyond = 0
    for name in source.shapes:
        if name in wanted:
            continue
        if _layer(name) >= source.sizes["layers"]:
            beyond += 1
        else:
            problems.add(wanted_name(view, name), f"{source.label} has it, the servers do not ({name})")
    if beyond:
        notes.append(f"the servers have no MTP layers: {beyond} atoms are left behind")


def _layer(atom: str) -> int:
    found = re.match(r"layers\.(\d+)\.", atom)
    return int(found.group(1)) if found else -1
