"""Adapters as something to send: PEFT's files, tensors, or an engine's adapters in parts on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...codecs import Array, bits
from ...dtypes import BY_NAME, BY_TORCH
from ...errors import ConfigError, NotACheckpoint, SourceError
from ...formats.safetensors_file import read_header
from ...live import raw_bits
from ...peers import Peers, share_out
from ...rawio import Files, read_box
from ...sidefiles import read_json
from ...slots import Box, Buffer, Ints, Slot, intersect, row_major, whole
from ..source import AtomBox

if TYPE_CHECKING:
    import torch

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""Of the names in PEFT's files."""


class Part(Protocol):
    """One tensor of an engine's adapters (`engines.state.entries.Entry`)."""

    shape: tuple[int, ...]
    memory: torch.Tensor

    def regions(self) -> Iterable[tuple[Box, torch.Tensor]]:
        """The boxes that this rank holds, and their memory."""
        ...


class AdapterSource:
    """A `Source` of adapter tensors; `config` is what their adapter_config.json says. See `adapter_source`."""

    checkpoint: Any = None
    family = ""

    def __init__(self, label: str, config: Mapping[str, Any], peers: Peers) -> None:
        if not isinstance(config.get("r"), int):
            raise ConfigError(f"{label}: the adapter's config has no rank (`r`).")
        self.label, self.peers = label, peers
        self.config: Mapping[str, Any] = dict(config)
        self.sizes: Mapping[str, int] = {}
        self.shapes: Mapping[str, Ints] = {}
        self.dtypes: Mapping[str, str] = {}
        self.notes: list[str] = []
        self._senders: list[list[AtomBox]] = [[] for _ in range(peers.world)]

    def _add(self, name: str, shape: Ints, dtype: str) -> None:
        self.shapes, self.dtypes = {**self.shapes, name: shape}, {**self.dtypes, name: dtype}

    def refresh(self) -> None: ...

    def senders(self) -> list[list[AtomBox]]:
        return self._senders

    def expect(self, wanted: Iterable[AtomBox]) -> None: ...

    def read(self, atom: str, box: Box, dtype: str, out: Array) -> None:
        """Raw bits of a box. Adapters travel in their own element types: the server casts, it has its own anyway."""
        if dtype != self.dtypes[atom]:
            raise SourceError(f"{atom} is {self.dtypes[atom]}, and was asked for as {dtype}.")
        self._read(atom, box, out.view(bits(BY_NAME[dtype].size)).reshape(box.sizes))

    def _read(self, atom: str, box: Box, out: Array) -> None:
        raise NotImplementedError

    def flat(self, atom: str, box: Box, dtype: str) -> Array | None:
        """None: adapters are small."""

    def check_unchanged(self) -> None: ...

    def let_go(self) -> None: ...

    def close(self) -> None: ...


class AdapterFiles(AdapterSource):
    """A directory in PEFT's form. Rank 0 sends it."""

    def __init__(self, path: str | Path, peers: Peers) -> None:
        folder = Path(path)
        if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
            raise NotACheckpoint(
                f"{folder} is no adapter: it has no {CONFIG}, or no {WEIGHTS}.",
                hint="Give a directory that PEFT wrote.",
            )
        try:
            config = read_json(folder / CONFIG)
        except ValueError as error:
            raise SourceError(f"{folder / CONFIG}: cannot be read as JSON: {error}.") from None
        super().__init__(str(folder), config, peers)
        self._files = Files(folder)
        self._slots: dict[str, Slot] = {}
        for name, tensor in read_header(folder / WEIGHTS).tensors.items():
            shape = tuple(tensor.shape)
            buffer = Buffer(WEIGHTS, tensor.begin, whole(shape).volume * BY_NAME[tensor.dtype].size, name)
            strides = row_major(shape, BY_NAME[tensor.dtype].size)
            self._slots[name] = Slot(whole(shape), buffer, 0, strides, tensor.dtype)
            self._add(name, shape, tensor.dtype)
            self._senders[0].append((name, whole(shape)))

    def _read(self, atom: str, box: Box, out: Array) -> None:
        read_box(self._files, self._slots[atom], box, out)

    def close(self) -> None:
        self._files.close()


class AdapterTensors(AdapterSource):
    """Live tensors, whole on rank 0 or in parts on all ranks (`Part`s). Collective where there are several."""

    def __init__(self, config: Mapping[str, Any], parts: Mapping[str, Any], peers: Peers) -> None:
        super().__init__("the live adapter", config, peers)
        self._regions: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        mine: dict[str, tuple[Ints, str, list[Box]]] = {}
        for key, part in parts.items():
            name = key if key.startswith(PREFIX) else PREFIX + key
            entry = hasattr(part, "regions")
            tensor = part.memory if entry else part
            dtype = BY_TORCH.get(str(tensor.dtype).removeprefix("torch."))
            if dtype is None:
                raise ConfigError(f"{name} has the element type {tensor.dtype}, which is not sent.")
            shape = tuple(part.shape)
            regions = list(part.regions()) if entry else [(whole(shape), part.detach())]
            self._regions[name] = regions
            mine[name] = (shape, dtype.name, [box for box, _ in regions])
        holders: dict[tuple[str, Box], tuple[int, list[int]]] = {}
        for rank, said in enumerate(peers.exchange(mine)):
            for name, (shape, dtype_name, boxes) in said.items():
                self._add(name, shape, dtype_name)
                for box in boxes:
                    holders.setdefault((name, box), (box.volume * BY_NAME[dtype_name].size, []))[1].append(rank)
        for (name, box), rank in share_out(dict(sorted(holders.items())), peers.world).items():
            self._senders[rank].append((name, box))

    def _read(self, atom: str, box: Box, out: Array) -> None:
        for outer, region in self._regions[atom]:
            if intersect(outer, box) == box:
                part = tuple(slice(a - o, b - o) for a, b, o in zip(box.lo, box.hi, outer.lo, strict=True))
                np.copyto(out, raw_bits(region[part]))
                return
        raise SourceError(f"{atom}: rank {self.peers.rank} does not hold {list(box.lo)}..{list(box.hi)} of it.")


def no_adapter(peers: Peers) -> AdapterSource:
    """Nothing to send, which removes an adapter."""
    return AdapterTensors({"r": 0}, {}, peers)


def adapter_source(source: Any, peers: Peers | None = None) -> AdapterSource:
    """A directory in PEFT's form, or (config, {name: tensor or `Part`}): what adapter_config.json says, and tensors.

    Raises NotACheckpoint, SourceError, or ConfigError for what is none of these.
    """
    peers = peers or Peers()
    if isinstance(source, (str, Path)):
        return AdapterFiles(source, peers)
    if isinstance(source, tuple) and len(source) == 2 and all(isinstance(x, Mapping) for x in source):
        return AdapterTensors(source[0], source[1], peers)
    raise ConfigError(
        f"{type(source).__name__} is no adapter.", hint="Pass PEFT's directory, or (config, {name: tensor})."
    )
