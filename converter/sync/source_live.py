"""A live model as a push's source: tensors in memory, of whatever engine, sharded over the ranks in whatever way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint import Checkpoint
from ..codecs import Array, bits
from ..dtypes import BY_NAME
from ..errors import SourceError
from ..live import base_of
from ..live_source import Live, describe, slots_of
from ..loading_targets import state_dicts
from ..mesh import Mesh
from ..peers import Peers
from ..plan import copies_of
from ..slots import Box, Ints
from .source import AtomBox, inside, is_function

if TYPE_CHECKING:
    import torch


class LiveSource:
    """A module or state dict on every rank of a job, sharded in whatever way; each rank sends its own boxes."""

    label: str
    family: str
    config: Mapping[str, Any]
    sizes: Mapping[str, int]
    shapes: Mapping[str, Ints]
    dtypes: Mapping[str, str]
    notes: list[str]
    checkpoint: Checkpoint

    def __init__(self, source: Any, base: str | Path | Checkpoint, peers: Peers, mesh: Mesh | None, rank: int) -> None:
        self._source, self._peers, self._mesh, self._rank = source, peers, mesh, rank
        self._base: Checkpoint
        self.label = "the live model"
        self.notes = []
        self._seen: list[Any] | None = None
        self._open_base(base)
        self.refresh()

    def _open_base(self, base: str | Path | Checkpoint) -> None:
        def act() -> None:
            self._base = base_of(base)

        self._peers.together("Opening the base model", act)

    def refresh(self) -> None:
        """Describe the tensors again: an optimiser or an offload may have put others in their place."""
        states: Any = None
        seen: list[Any] = []

        def take() -> None:  # not a value of the step: weights are not sent round
            nonlocal states, seen
            states = self.states()
            seen = _seen(states)

        self._peers.together("Taking the weights", take)
        if all(self._peers.exchange(seen == self._seen)):
            return
        live = describe(self._base, states, self._peers, self._mesh, self._rank)
        ckpt = self.checkpoint = live.ckpt
        self.family, self.sizes, self.config = ckpt.table.name, ckpt.view.dims, ckpt.config
        self._first = {name: next(iter(copies_of(ckpt.slots[name]).values())) for name in ckpt.atoms}
        self.shapes = {name: ckpt.atoms[name][1] for name in self._first}
        self.dtypes = {name: slots[0].dtype for name, slots in self._first.items()}
        self._own = self._views(live)
        self._seen = seen

    def states(self) -> Any:
        """The module, state dict or list as it is now."""
        return self._source() if is_function(self._source) else self._source

    def _views(self, live: Live) -> dict[str, list[tuple[Box, torch.Tensor, Array | None]]]:
        """This rank's part of the first copy of every atom: boxes, and strided views of the memory; in the CPU's memory
        the raw bits of it, too, which numpy copies on one core: torch's threads would fight the wire's for cores."""
        import torch

        me = f"rank {self._peers.rank}"
        mine = {
            (name, slot.box, slot.buffer.name)
            for name, slots in self._first.items()
            for slot in slots
            if slot.buffer.file == me
        }
        found: dict[str, list[tuple[Box, torch.Tensor, Array | None]]] = {}
        for key in live.given:
            own = live.own[key]
            for name, slot in slots_of(own, key.box):
                if (name, slot.box, own.named.name) in mine:
                    at = own.memory.storage_offset() + slot.offset
                    view = torch.as_strided(own.memory, slot.box.sizes, slot.strides, at)
                    raw = _raw(view) if slot.dtype == self.dtypes[name] else None
                    found.setdefault(name, []).append((slot.box, view, raw))
        return found

    def senders(self) -> list[list[AtomBox]]:
        found: list[list[AtomBox]] = [[] for _ in range(self._peers.world)]
        for name, slots in self._first.items():
            for slot in slots:
                found[int(slot.buffer.file.removeprefix("rank "))].append((name, slot.box))
        return found

    def expect(self, wanted: Iterable[AtomBox]) -> None: ...

    def read(self, atom: str, box: Box, dtype: str, out: Array) -> None:
        import torch

        for outer, view, raw in self._own.get(atom, ()):
            if _holds(outer, box):
                if raw is not None and dtype == self.dtypes[atom]:
                    part = raw if outer == box else inside(raw, outer, box)
                    out.view(raw.dtype).reshape(box.sizes)[...] = part
                    return
                target = torch.from_numpy(out).view(getattr(torch, BY_NAME[dtype].torch)).view(box.sizes)
                target.copy_(view if outer == box else _part(view, outer, box))
                return
        raise SourceError(f"{atom}: rank {self._peers.rank} does not hold {list(box.lo)}..{list(box.hi)} of it.")

    def flat(self, atom: str, box: Box, dtype: str) -> Array | None:
        for outer, _, raw in self._own.get(atom, ()):
            if _holds(outer, box) and raw is not None and dtype == self.dtypes[atom]:
                part = raw if outer == box else inside(raw, outer, box)
                return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None
        return None

    def check_unchanged(self) -> None: ...

    def let_go(self) -> None:
        """A GPU's memory: an engine that is offloaded between two pushes would free none of it while we hold views. The
        CPU's is kept, so that tensors which stay where they are need not be described again."""
        if any(view.device.type != "cpu" for views in self._own.values() for _, view, _ in views):
            self.close()

    def close(self) -> None:
        self._own, self._seen = {}, None


def _seen(states: Any) -> list[Any]:
    """What tells a rank's tensors from others: names, and where each lies in which form. While we hold their storages
    nothing else can be one of them; an address may come back, since a storage can be emptied by who else has it."""

    def of(value: Any) -> Any:
        local = getattr(value, "_local_tensor", value)  # of a DTensor, without autograd's ado
        if not hasattr(local, "data_ptr"):
            return id(value)
        address = local.data_ptr()
        if not address and local.numel():  # it wraps others, and does not say where they are
            return object()
        placed = getattr(value, "placements", None), getattr(value, "device_mesh", None)
        storage = local.untyped_storage()._cdata
        where = local.device, storage, address, tuple(local.shape), local.stride(), local.dtype
        return type(value), tuple(value.shape), placed, where

    return [(name, of(value)) for part in state_dicts(states) for name, value in part.items()]


def _raw(view: torch.Tensor) -> Array | None:
    """The bits of a tensor in the CPU's memory, without a copy; None where they are elsewhere."""
    import torch

    if view.device.type != "cpu":
        return None
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return view.detach().view(signed[view.element_size()]).numpy().view(bits(view.element_size()))


def _holds(outer: Box, box: Box) -> bool:
    return all(a <= b for a, b in zip(outer.lo, box.lo, strict=True)) and all(
        a >= b for a, b in zip(outer.hi, box.hi, strict=True)
    )


def _part(view: torch.Tensor, outer: Box, box: Box) -> torch.Tensor:
    return view[tuple(slice(a - o, b - o) for a, b, o in zip(box.lo, box.hi, outer.lo, strict=True))]
