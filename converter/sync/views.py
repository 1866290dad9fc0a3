"""Boxes of atoms in and out of a module's memory, as raw bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from ..codecs import Array, bits
from ..dtypes import BY_NAME
from ..execute import chunks
from ..slots import Box, Ints, intersect
from .homes import Home
from .ledger import DIGEST
from .wire import Manifest

if TYPE_CHECKING:
    import torch

    from .blocks import Blocks

CHUNK = 1 << 20
"""Bytes that are read at a time to be hashed: they stay in a core's cache."""

_SIGNED = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""torch knows the unsigned types of these sizes only in part; the bits are the same."""


class _View(Protocol):
    """One home of an atom: raw bits with the atom's own axes."""

    def put(self, part: tuple[slice, ...], data: Array) -> None: ...
    def get(self, part: tuple[slice, ...]) -> Array: ...
    def flat(self, part: tuple[slice, ...]) -> Array | None: ...


class _HostView:
    """In the CPU's memory: numpy moves it without the interpreter's lock, and with little ado for each block."""

    def __init__(self, tensor: torch.Tensor, home: Home) -> None:
        import torch

        storage = tensor.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy()
        size = tensor.element_size()
        offset = (tensor.storage_offset() + home.slot.offset) * size
        strides = tuple(stride * size for stride in home.slot.strides)
        self.array: Array = np.ndarray(home.slot.box.sizes, bits(size), raw, offset, strides)

    def put(self, part: tuple[slice, ...], data: Array) -> None:
        self.array[part] = data

    def get(self, part: tuple[slice, ...]) -> Array:
        return np.ascontiguousarray(self.array[part])

    def flat(self, part: tuple[slice, ...]) -> Array | None:
        found = self.array[part]
        return found.reshape(-1).view(np.uint8) if found.flags.c_contiguous else None


class _DeviceView:
    """In a GPU's memory."""

    def __init__(self, tensor: torch.Tensor, home: Home) -> None:
        import torch

        size = tensor.element_size()
        raw = tensor.detach().view(getattr(torch, _SIGNED[size]))
        offset = raw.storage_offset() + home.slot.offset
        self.array = torch.as_strided(raw, home.slot.box.sizes, home.slot.strides, offset)

    def put(self, part: tuple[slice, ...], data: Array) -> None:
        import torch

        aligned = np.require(data, requirements=["C", "A", "W"])
        self.array[part].copy_(torch.from_numpy(aligned.view(_SIGNED[aligned.itemsize])))

    def get(self, part: tuple[slice, ...]) -> Array:
        found = self.array[part].contiguous().cpu().numpy()
        return found.view(bits(found.itemsize))

    def flat(self, part: tuple[slice, ...]) -> Array | None:
        """None: the CPU cannot write there."""


class Memory:
    """The tensors of one copy of a server's weights. Several threads may write different boxes at once."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], homes: Mapping[str, Sequence[Home]]) -> None:
        self._tensors, self._homes = tensors, homes
        self._views: dict[str, list[tuple[Box, _View]]] = {}

    def _of(self, atom: str) -> list[tuple[Box, _View]]:
        views = self._views.get(atom)
        if views is None:
            views = self._views[atom] = [(home.slot.box, self._view(home)) for home in self._homes[atom]]
        return views

    def _view(self, home: Home) -> _View:
        tensor = self._tensors[home.tensor].detach()
        return _HostView(tensor, home) if tensor.device.type == "cpu" else _DeviceView(tensor, home)

    def put(self, atom: str, lo: Ints, hi: Ints, data: Array) -> None:
        """Write a box of an atom, to all its homes.

        data  its bytes in row-major order, uint8; they may be unaligned
        """
        box = Box(lo, hi)
        for outer, view in self._of(atom):
            common = intersect(outer, box)
            if common is None:
                continue
            values = data.view(_dtype(self._homes[atom])).reshape(box.sizes)
            view.put(_part(common, outer), values if common == box else values[_part(common, box)])

    def flat(self, atom: str, lo: Ints, hi: Ints) -> Array | None:
        """The memory of a box of an atom (uint8, row-major) where it is in one piece, and in one place only."""
        box = Box(lo, hi)
        held = [(outer, view) for outer, view in self._of(atom) if intersect(outer, box) is not None]
        if len(held) != 1 or intersect(held[0][0], box) != box:
            return None
        return held[0][1].flat(_part(box, held[0][0]))

    def get(self, atom: str, lo: Ints, hi: Ints) -> Array:
        """A box of an atom, from its first home: bytes in row-major order, uint8."""
        box, size = Box(lo, hi), _dtype(self._homes[atom])
        views = self._of(atom)
        if intersect(views[0][0], box) == box:
            return views[0][1].get(_part(box, views[0][0])).reshape(-1).view(np.uint8)
        out = np.empty(box.sizes, size)
        first = self._homes[atom][0].tensor
        for home, (outer, view) in zip(self._homes[atom], views, strict=True):
            common = intersect(outer, box) if home.tensor == first else None
            if common is not None:
                out[_part(common, box)] = view.get(_part(common, outer))
        return out.reshape(-1).view(np.uint8)

    def digests(self, manifest: Manifest, blocks: Blocks, numbers: Array) -> Array:
        """Of blocks of a manifest: a row of 16 bytes each. What lies in one piece is not copied."""
        found: list[bytes] = []
        lengths = blocks.lengths(numbers)
        for run in blocks.runs(numbers, lengths):
            name, at = manifest.atoms[run.atom].name, run.begin
            flat = self.flat(name, run.lo, run.hi)
            for n in range(run.at, run.at + run.blocks):
                size = int(lengths[n])
                data = flat[at : at + size] if flat is not None else self.get(name, *blocks.box(int(numbers[n]))[1:])
                found.append(xxhash.xxh3_128_digest(data.data))
                at += size
        return np.frombuffer(b"".join(found), np.uint8).reshape(-1, DIGEST)

    def digest(self, atom: str, shape: Ints) -> str:
        """xxh3_128 of an atom's bytes in its own order: what `execute.content_digest` gives for a checkpoint."""
        h = xxhash.xxh3_128()
        for part in chunks(shape, _dtype(self._homes[atom]).itemsize, CHUNK):
            h.update(self.get(atom, part.lo, part.hi).data)
        return h.hexdigest()

    def differing(self, atom: str, shape: Ints) -> Iterator[str]:
        """Other homes of an atom whose values are not those of the first (an untied twin of a tied tensor)."""
        homes = self._homes[atom]
        for tensor in dict.fromkeys(home.tensor for home in homes[1:]):
            other = Memory(self._tensors, {atom: [home for home in homes if home.tensor == tensor]})
            if tensor != homes[0].tensor and other.digest(atom, shape) != self.digest(atom, shape):
                yield tensor


def _part(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(box.lo, box.hi, outer.lo, strict=True))


def _dtype(homes: Sequence[Home]) -> np.dtype[Any]:
    return bits(BY_NAME[homes[0].slot.dtype].size)
