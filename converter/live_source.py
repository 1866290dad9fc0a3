"""A live model as a checkpoint: every rank says what its tensors hold, and all of it together is a source of slots.

The ranks exchange descriptions (which boxes of which tensors), never weights. Where several ranks hold the same box one
of them is chosen, so the slots of all ranks tile every atom once, and the plan's own proof applies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .checkpoint import ALTERNATE, Checkpoint, wanted_name
from .dtypes import BY_NAME, BY_TORCH
from .errors import PlanError, Problems
from .formats.base import Found
from .layout import Named, View, slots_in
from .loading_targets import Held, match, state_dicts
from .mesh import Mesh
from .naming import naming_for, view_of
from .peers import Peers, share_out
from .placement import Piece
from .slots import Box, Buffer, Slot, row_major

if TYPE_CHECKING:
    import torch

    from .loading_targets import Target

COPIES = frozenset({"stored_tie", "mtp_copy"})
"""Forms of rows that repeat another tensor: never the first choice of a source."""


class Key(NamedTuple):
    """One box of one tensor, said alike on every rank: the row's number in the naming, layer, expert, box."""

    row: int
    layer: int
    expert: int
    box: Box

    @property
    def tensor(self) -> tuple[int, int, int]:
        return self.row, self.layer, self.expert


@dataclass(frozen=True, eq=False)
class Own:
    """A box of a tensor in this rank's memory; `piece` says where in `memory` it begins."""

    named: Named
    memory: torch.Tensor
    piece: Piece


@dataclass
class Live:
    """The model on all ranks, and this rank's part of it.

    ckpt    slots of every atom; a slot's file is the rank that gives it (`rank 3`), its offsets mean nothing
    given   boxes that this rank gives, and `own` all that it holds
    naming  whose names the tensors have
    """

    ckpt: Checkpoint
    own: dict[Key, Own]
    given: set[Key]
    naming: str
    skipped: dict[str, str] = field(default_factory=dict)


def describe(
    base: Checkpoint, states: Target, peers: Peers, mesh: Mesh | None = None, rank: int = 0, naming: str | None = None
) -> Live:
    """Match this rank's tensors with the family's names, and put all ranks' together.

    base        gives the family, its sizes and the config: the checkpoint that the model was loaded from
    states      a module, a state dict, or a list of them: the virtual pipeline chunks of a Megatron rank
    mesh, rank  for tensors that are no DTensors and not whole, as `load_into` has them

    Raises PlanError with every tensor that the family does not have or that does not fit, on all ranks.
    """

    def say() -> tuple[str, dict[Key, str]]:
        nonlocal own, skipped
        parts = state_dicts(states)
        name = naming or naming_for(base, [key for part in parts for key in part])
        own, skipped = _own(base, parts, name, mesh or Mesh(), rank)
        return name, {key: dtype_name(one.memory) for key, one in own.items()}

    own: dict[Key, Own] = {}
    skipped: dict[str, str] = {}
    said = peers.together("Describing the model", say)
    name = said[peers.rank][0]
    peers.agree("The naming of the tensors", name)
    view = _without_mtp(view_of(base, name), [held for _, held in said])
    holders, dtypes = _holders([held for _, held in said])
    sizes = {key: (key.box.volume * BY_NAME[dtypes[key]].size, ranks) for key, ranks in holders.items()}
    chosen = share_out(sizes, peers.world)
    given = {key for key, rank in chosen.items() if rank == peers.rank}
    return Live(_checkpoint(base, view, chosen, dtypes), own, given, name, skipped)


def dtype_name(tensor: torch.Tensor) -> str:
    """The element type as safetensors calls it."""
    return BY_TORCH[str(tensor.dtype).removeprefix("torch.")].name


# ------------------------------------------------------------------------------------------------ this rank


def _own(
    base: Checkpoint, parts: Sequence[Mapping[str, Any]], naming: str, mesh: Mesh, rank: int
) -> tuple[dict[Key, Own], dict[str, str]]:
    problems = Problems()
    matched = match(base, parts, naming, mesh, rank, problems)
    for name, why in matched.unknown.items():
        problems.add(name, f"is no tensor of the family {base.table.name}: {why}")
    rows = {id(row): n for n, row in enumerate(view_of(base, naming).rows)}
    own: dict[Key, Own] = {}
    for held in matched.held:
        if str(held.memory.dtype).removeprefix("torch.") not in BY_TORCH:
            problems.add(held.name, f"has the element type {held.memory.dtype}, which is not converted")
            continue
        for piece in held.pieces:
            key = _key(rows, held, piece)
            if key.box.volume > 0 and all(n > 0 for n in key.box.sizes):
                own.setdefault(key, Own(held.named, held.memory, piece))
    problems.raise_as(PlanError, f"The model cannot be written as {base.table.name}:")
    return own, matched.skipped


def _key(rows: Mapping[int, int], held: Held, piece: Piece) -> Key:
    """Rows beyond the true vocabulary are padding, which is not written."""
    named = held.named
    hi = tuple(map(min, piece.hi, named.geometry.shape))
    return Key(rows[id(named.row)], named.layer, named.expert, Box(tuple(piece.lo), hi))


def slots_of(own: Own, box: Box) -> list[tuple[str, Slot]]:
    """Where the atoms of a box lie in this rank's memory. Offsets and strides count elements, not bytes."""
    strides = tuple(own.memory.stride())
    offset = sum(a * s for a, s in zip(own.piece.at, strides, strict=True))
    buffer = Buffer("", 0, own.memory.numel(), own.named.name)
    return list(slots_in(own.named, *box, buffer, offset, strides, dtype_name(own.memory)))


# ------------------------------------------------------------------------------------------------ all ranks


def _holders(said: Sequence[Mapping[Key, str]]) -> tuple[dict[Key, list[int]], dict[Key, str]]:
    """The ranks that hold each box, boxes in one order on all ranks, and the boxes' element types."""
    holders: dict[Key, list[int]] = {}
    dtypes: dict[Key, str] = {}
    problems = Problems()
    for rank, held in enumerate(said):
        for key, dtype in held.items():
            holders.setdefault(key, []).append(rank)
            if dtypes.setdefault(key, dtype) != dtype:
                problems.add(f"tensor {key.tensor}", f"is {dtype} on rank {rank}, {dtypes[key]} elsewhere")
    problems.raise_as(PlanError, "Ranks hold the same box in several element types:")
    return {key: holders[key] for key in sorted(holders)}, dtypes


def _without_mtp(view: View, said: Sequence[Mapping[Key, str]]) -> View:
    """transformers builds no MTP layers: a model without any is written without them."""
    layers = view.dims["layers"]
    if not view.dims.get("mtp") or any(key.layer >= layers for held in said for key in held):
        return view
    return View(view.rows, {**view.dims, "mtp": 0})


def _checkpoint(base: Checkpoint, view: View, chosen: Mapping[Key, int], dtypes: Mapping[Key, str]) -> Checkpoint:
    """Slots from the chosen boxes. A tensor whose atoms another one has already is a numbered copy of it."""
    found = Found("live", base.found.root, base.found.where, hf=base.found.hf)
    ckpt = Checkpoint(found, base.config, base.config_from, base.table, View(base.table.hf, view.dims))
    ckpt.dialect = {k: v for k, v in base.dialect.items() if k == "config_changes"}
    ckpt.atoms = {name: atom for name, atom in ckpt.view.atoms().items() if name not in base.left_out}
    ckpt.left_out = frozenset(base.left_out & ckpt.view.atoms().keys())
    homes: dict[str, list[tuple[int, int, int]]] = {}
    for key in sorted(chosen, key=lambda k: (view.rows[k.row].form in COPIES, k)):
        named = view.named(view.rows[key.row], key.layer, key.expert)
        size = BY_NAME[dtypes[key]].size
        buffer = Buffer(f"rank {chosen[key]}", 0, key.box.volume * size, named.name)
        strides = row_major(key.box.sizes, size)
        for atom, slot in slots_in(named, *key.box, buffer, 0, strides, dtypes[key]):
            known = homes.setdefault(atom, [key.tensor])
            if key.tensor not in known:
                known.append(key.tensor)
            copy = known.index(key.tensor) * ALTERNATE
            ckpt.slots.setdefault(atom, []).append(replace(slot, copy=copy) if copy else slot)
    _check_present(ckpt)
    return ckpt


def _check_present(ckpt: Checkpoint) -> None:
    problems = Problems()
    for name in ckpt.atoms:
        if name not in ckpt.slots:
            problems.add(wanted_name(ckpt.view, name), f"no rank holds it (atom {name})")
    problems.raise_as(PlanError, "The model is not whole:", "Pass the state dicts of all parts, on all ranks.")
