"""Which tensors a training state holds: parameters, buffers and the optimizer's moments, under the tables' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from ...converter.checkpoint import Checkpoint
from ...converter.errors import PlanError, Problems
from ...converter.loading_targets import local_pieces, match
from ...converter.mesh import Mesh
from ...converter.naming import naming_for
from ...converter.placement import Piece
from ...converter.roots import unwrap
from ...converter.slots import Box

MODEL, OPTIM, EXTRA = "model.", "optim.", "trainer_extra."


@dataclass
class TrainState:
    """What an engine offers to be saved, and takes back.

    parts       modules, or mappings from names to tensors: one, or a rank's virtual pipeline chunks
    base        what the model was loaded from: the family, the config, the small files
    optimizers  whose parameters are those of `parts` and `extra`
    extra       tensors beside the parts' (adapters), under their own names
    copies      tensors of the parts that are another's equal copy (a tied head on a pipeline stage of its own) → that
                one, in the names of `naming`: a state holds it once, and another topology finds it where it looks
    topology    sizes of the mesh, as the engine calls its dimensions; random states belong to one topology
    mesh, rank  for tensors that are no DTensors and not whole (Megatron), as `load_into` has them
    rng         further random states (a tracker's): name → uint8 tensor; they come back in `Restored.rng`
    stream      which random numbers this rank draws when it is seeded anew: ranks that share a batch draw the same.
                None: those of its own rank
    group       a gloo group of all ranks; None: the default one
    """

    parts: Sequence[torch.nn.Module | Mapping[str, torch.Tensor]]
    base: Checkpoint
    optimizers: Sequence[Optimizer] = ()
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    topology: Mapping[str, int] = field(default_factory=dict)
    naming: str | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    mesh: Mesh | None = None
    rank: int = 0
    rng: Mapping[str, torch.Tensor] = field(default_factory=dict)
    stream: int | None = None
    group: Any = None


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor: its name in the state, the whole shape, and which boxes of it lie where in this rank's memory."""

    name: str
    shape: tuple[int, ...]
    memory: torch.Tensor
    pieces: tuple[Piece, ...]

    def regions(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Every box of this rank, and its memory."""
        for piece in self.pieces:
            region = self.memory
            for d, (a, n) in enumerate(
                zip(piece.at, (b - a for a, b in zip(piece.lo, piece.hi, strict=True)), strict=True)
            ):
                region = region.narrow(d, a, n)
            if region.numel():
                yield Box(tuple(piece.lo), tuple(piece.hi)), region


@dataclass
class Collected:
    """Entries by name; `aliases` are second names of the same memory (a tied head). `names` tells parameters by id.
    `again` are further memories of this rank for the same tensors: read like the entries, written by none."""

    entries: dict[str, Entry] = field(default_factory=dict)
    again: list[Entry] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)


def collect(state: TrainState, *, optimizer: bool = True) -> Collected:
    """All tensors of a state; what the family has no name for is kept under its own, as `extra`.

    Raises PlanError with every one that does not fit the config, or cannot be saved.
    """
    problems, found = Problems(), Collected()
    parts = [_tensors(part) for part in state.parts]
    naming = state.naming or naming_for(state.base, [name for part in parts for name in part])
    for n, part in enumerate(parts):
        alone = [part if k == n else {} for k in range(len(parts))]
        matched = match(state.base, alone, naming, state.mesh or Mesh(), state.rank, problems)
        for name in matched.unknown:  # a critic's head, say: no weight of the family, but part of this training
            entry = Entry(EXTRA + unwrap(name), tuple(part[name].shape), local(part[name]), pieces_of(part[name]))
            _add(found, entry, part[name], problems)
        for held in matched.held:
            value = part[held.name]
            shape = tuple(value.shape) if _is_dtensor(value) or state.mesh is None else held.named.geometry.shape
            entry = Entry(MODEL + held.named.name, shape, held.memory, tuple(held.pieces))
            _add(found, entry, value, problems, state.copies.get(held.named.name))
    for name, value in state.extra.items():
        _add(found, Entry(EXTRA + name, tuple(value.shape), local(value), pieces_of(value)), value, problems)
    if optimizer:
        _moments(state, found, problems)
    problems.raise_as(PlanError, "The training state cannot be described:")
    return found


def _tensors(part: torch.nn.Module | Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
    """Parameters themselves, not detached: the optimizer knows them by identity."""
    return part.state_dict(keep_vars=True) if isinstance(part, torch.nn.Module) else part


def _add(found: Collected, entry: Entry, value: torch.Tensor, problems: Problems, copy_of: str | None = None) -> None:
    if copy_of is not None and id(value) not in found.names:
        original = found.names[id(value)] = found.aliases[entry.name] = MODEL + copy_of
        _again(found, replace(entry, name=original))
        return
    first = found.names.setdefault(id(value), entry.name)
    if first != entry.name:
        found.aliases[entry.name] = first
    elif entry.name in found.entries:
        problems.add(entry.name, "is there twice")
    else:
        found.entries[entry.name] = entry


def _again(found: Collected, entry: Entry) -> None:
    """An entry that may be there already, on another rank or in another part."""
    if entry.name in found.entries:
        found.again.append(entry)
    else:
        found.entries[entry.name] = entry


def _moments(state: TrainState, found: Collected, problems: Problems) -> None:
    for optimizer in state.optimizers:
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = found.names.get(id(parameter))
            if name is None:
                problems.add(f"parameter {number} of the optimizer", f"(shape {list(parameter.shape)}) is in no part")
                continue
            home = found.entries[name]
            for key, value in optimizer.state.get(parameter, {}).items():
                if value is None or is_scalar(value):
                    continue
                if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                    what = f"{type(value).__name__} {list(getattr(value, 'shape', []))}"
                    problems.add(f"{name}: {key}", f"is {what}; a tensor like the parameter was expected")
                    continue
                _again(found, Entry(moment(key, name), home.shape, local(value), home.pieces))


def moment(key: str, name: str) -> str:
    """`optim.exp_avg.model.norm.weight` for the moment of `model.model.norm.weight`."""
    return f"{OPTIM}{key}.{name.removeprefix(MODEL)}"


def is_scalar(value: Any) -> bool:
    """Whether a value of an optimizer's state is one number (a step)."""
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "placements") and hasattr(value, "device_mesh")


def local(value: Any) -> torch.Tensor:
    """This rank's memory of a tensor."""
    return value.detach().to_local() if _is_dtensor(value) else value.detach()


def pieces_of(value: Any) -> tuple[Piece, ...]:
    """Which boxes of a tensor this rank holds."""
    if _is_dtensor(value):
        return tuple(local_pieces(value))
    shape = tuple(value.shape)
    return (Piece((0,) * len(shape), shape, (0,) * len(shape)),)
