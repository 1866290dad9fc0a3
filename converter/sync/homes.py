"""What a server's module holds, said in the family's atoms: which there are, and where in its memory each one lies.

A module is matched with the family's table as `load_into` does it, so fused experts, transposed matrices and tied
embeddings are only other strides. Nothing here reads or writes a value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import Checkpoint, family_of, sizes, wanted_name
from ..dtypes import BY_TORCH
from ..errors import PlanError, Problems
from ..formats.base import Found
from ..layout import View, atoms_of
from ..live_source import Own, slots_of
from ..loading_targets import Held, Matched, match, state_dicts
from ..mesh import Mesh
from ..naming import naming_for
from ..slots import Box, Slot, tiles
from .wire import Atom

if TYPE_CHECKING:
    import torch

    from ..loading_targets import StateDict


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """Where an atom, or a box of it, lies in one tensor. The slot counts elements from the tensor's first one."""

    tensor: str
    slot: Slot


@dataclass(frozen=True, slots=True)
class Kept:
    """How a tensor lay in memory when it was described: a twin must lie alike."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kept:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype))


@dataclass
class Layout:
    """A server's tensors, as far as a push concerns them.

    family  the table's name, and the model's sizes
    atoms   in the family's order, with the server's element types
    homes   atom → everywhere that it is stored (a tied head that has memory of its own: two places)
    ties    names that share one memory, or hold the same atoms
    kept    tensors → their shape, strides and type
    left    names that no push touches → why (buffers that are no weights)
    """

    family: str
    sizes: dict[str, int]
    atoms: dict[str, Atom]
    homes: dict[str, list[Home]]
    ties: list[list[str]] = field(default_factory=list)
    kept: dict[str, Kept] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As `GET /ws/layout` gives it."""
        return {
            "model": {"family": self.family, "sizes": self.sizes},
            "atoms": [[a.name, list(a.shape), a.dtype] for a in self.atoms.values()],
            "ties": self.ties,
        }


def state_of(target: Any) -> StateDict:
    """The state dict of a module, or the mapping itself."""
    return state_dicts(target)[0]


def describe_server(target: Any, config: Mapping[str, Any], keep: Sequence[str] = ()) -> Layout:
    """Match the tensors of a module or state dict (whole tensors, in any naming) with the family of its config.

    config  the model's config.json, as a dict
    keep    regular expressions of tensors that are no part of the model and stay as they are (a value head, say)

    Raises PlanError with every tensor that the family does not have, that it lacks, or that does not fit.
    """
    state = {name: value for name, value in state_of(target).items() if not _matches(name, keep)}
    where = str(config.get("_name_or_path") or "the server's config")
    family = family_of(config)
    dims = sizes(family, config, where)
    view = View(family.hf, dims)
    ckpt = Checkpoint(Found("live", Path(), Path()), dict(config), where, family, view, view.atoms())
    problems = Problems()
    matched = match(ckpt, [state], naming_for(ckpt, state), Mesh(), 0, problems)
    for name, why in matched.unknown.items():
        problems.add(name, f"is no tensor of the family {family.name}: {why}", "keep=[…] leaves it as it is")
    dims["mtp"] = dims.get("mtp", 0) if any(_layer(name) >= dims["layers"] for name in matched.meant) else 0
    atoms = {name: atom[1] for name, atom in View(family.hf, dims).atoms().items()}
    for name in sorted(atoms.keys() - matched.meant):
        problems.add(wanted_name(view, name), f"the server has no tensor for it (atom {name})")
    layout = Layout(family.name, dims, {}, {}, left=matched.skipped)
    _lay_down(layout, matched, atoms, problems)
    problems.raise_as(PlanError, f"The server's tensors are not those of {family.name}:")
    return layout


def _lay_down(layout: Layout, matched: Matched, atoms: Mapping[str, tuple[int, ...]], problems: Problems) -> None:
    """Fill in atoms, homes and ties, and prove that every atom is whole in each of its homes."""
    homes: dict[str, list[Home]] = {}
    firsts = _without_aliases(matched.held, problems)
    for held in firsts:
        if str(held.memory.dtype).removeprefix("torch.") not in BY_TORCH:
            problems.add(held.name, f"has the element type {held.memory.dtype}, which is not converted")
            continue
        layout.kept[held.name] = Kept.of(held.memory)
        for piece in held.pieces:
            hi = tuple(map(min, piece.hi, held.named.geometry.shape))
            for atom, slot in slots_of(Own(held.named, held.memory, piece), Box(tuple(piece.lo), hi)):
                homes.setdefault(atom, []).append(Home(held.name, slot))
    for name, shape in atoms.items():
        found = homes.get(name)
        if found is None:
            continue  # it was said above that nothing holds it
        types = sorted({home.slot.dtype for home in found})
        if len(types) > 1:
            problems.add(name, f"is stored as {' and '.join(types)} in {', '.join(sorted({h.tensor for h in found}))}")
        for tensor in dict.fromkeys(home.tensor for home in found):
            if not tiles([home.slot.box for home in found if home.tensor == tensor], shape):
                problems.add(tensor, f"holds a part of {name} only", "a server's tensors must be whole")
        layout.atoms[name], layout.homes[name] = Atom(name, shape, types[0]), found
    layout.ties = _ties(matched.held)


def _without_aliases(held: Sequence[Held], problems: Problems) -> list[Held]:
    """One of several names for the same memory; they must mean the same atoms."""
    first: dict[tuple[Any, ...], Held] = {}
    for one in held:
        known = first.setdefault(_memory(one), one)
        if known is not one and atoms_of(known.named) != atoms_of(one.named):
            what = f"shares its memory with {known.name}, which is another tensor of the model"
            problems.add(one.name, what, "is tie_word_embeddings in the config right?")
    return list(first.values())


def _memory(held: Held) -> tuple[Any, ...]:
    memory = held.memory
    key = (str(memory.device), memory.data_ptr(), tuple(memory.shape), tuple(memory.stride()))
    return key if memory.numel() else (id(held),)


def _ties(held: Sequence[Held]) -> list[list[str]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for one in held:
        groups.setdefault(tuple(atoms_of(one.named)), []).append(one.name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _layer(atom: str) -> int:
    found = re.match(r"layers\.(\d+)\.", atom)
    return int(found.group(1)) if found else -1
