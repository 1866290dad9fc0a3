"""Adapters alone: a LoRA adapter goes to servers that hold the base model, and is installed beside it under a name.

Its tensors travel as atoms under the names that PEFT's files have. A server checks rank, alpha and targets against its
own modules before any byte moves, puts the tensors together aside, and replaces the adapter of that name by one
assignment: a request keeps the adapter that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from ...codecs import Array, bits
from ...dtypes import BY_NAME
from ...errors import ConfigError, Problems
from ..ledger import Ledger
from ..refusals import Refused
from ..wire import Manifest

if TYPE_CHECKING:
    import torch

    from ..blocks import Blocks, Run

MATTER = ("r", "lora_alpha", "target_modules", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias")
"""Fields of an adapter_config.json that change what its tensors mean."""


class Adapters(Protocol):
    """Where a server keeps its adapters (`server.adapters.Adapters`)."""

    def check(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, Any], version: int | None) -> Any:
        """The adapter, checked against the model, not installed. Raises ConfigError with all that does not fit."""
        ...

    def install(self, adapter: Any) -> Any:
        """Let a checked adapter serve; returns the one of that name before it, or None."""
        ...

    def get(self, name: str) -> Any: ...

    def remove(self, name: str) -> bool: ...


@dataclass(eq=False)
class _Push:
    manifest: Manifest
    blocks: Blocks
    name: str
    config: Mapping[str, Any]
    memory: dict[str, Array]
    remove: bool
    root: str | None = None
    adapter: Any = None
    before: Any = None
    installed: bool = False
    version: int = 0


class AdapterStage:
    """The `Staging` of adapter pushes. Versions count for all adapters of a server together."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self.version, self.root = 0, None
        self._push: _Push | None = None
        self._known: dict[str, dict[str, str]] = {}

    def check(self, manifest: Manifest, problems: Problems) -> None:
        """Whether the adapter fits this model, seen from names and shapes alone."""
        try:
            name, config, remove = _said(manifest)
        except ConfigError as error:
            problems.add("lora", str(error))
            return
        if remove:
            if self._adapters.get(name) is None:
                problems.add(name, "there is no adapter of this name to be removed")
            if manifest.atoms:
                problems.add(name, "an adapter that is removed has no tensors")
            return
        try:
            self._adapters.check(name, config, _tensors(manifest, _memory(manifest)), manifest.version)
        except ConfigError as error:
            problems.found += list(error.problems) or []
            if not error.problems:
                problems.add(name, str(error))

    def begin(self, manifest: Manifest, blocks: Blocks, timeout: float) -> Ledger:
        """Memory for the tensors."""
        name, config, remove = _said(manifest)
        self._push = _Push(manifest, blocks, name, config, _memory(manifest), remove)
        return Ledger(blocks)

    def where(self, run: Run) -> Array | None:
        """None: adapters are small, and every push has memory of its own."""

    def put(self, number: int, data: Array) -> None:
        push = self._push
        if push is None:
            raise Refused("no_push", "There is no push to put a block into.")
        atom, lo, hi = push.blocks.box(number)
        own = push.manifest.atoms[atom]
        values = push.memory[own.name]
        part = tuple(map(slice, lo, hi))
        values[part] = data.view(values.dtype).reshape(values[part].shape)

    def wait(self, timeout: float) -> bool:
        return True

    def finish(self, root: str) -> None:
        """Everything has come: the values are looked at once more with the model's eyes."""
        push = self._push
        if push is None:
            return
        if not push.remove:
            tensors = _tensors(push.manifest, push.memory)
            allowed = bool((push.manifest.lora or {}).get("allow_nan", False))
            for name, tensor in tensors.items():
                if not allowed and not bool(tensor.float().isfinite().all()):
                    what = f"{name} of the adapter {push.name!r} holds NaN or infinity."
                    raise Refused("mismatch", what, hint="--allow-nan or allow_nan=True installs it all the same.")
            push.adapter = self._adapters.check(push.name, push.config, tensors, push.manifest.version)
        push.root = root

    def install(self) -> None:
        push = self._push
        if push is None or push.root is None:
            raise Refused("not_staged", "Nothing is staged.")
        push.before, push.version = self._adapters.get(push.name), self.version
        if push.remove:
            self._adapters.remove(push.name)
        else:
            self._adapters.install(push.adapter)
        push.installed = True
        self.version, self.root = push.manifest.version, push.root
        self._known[push.name] = _digests(push.memory)

    def undo(self) -> None:
        push = self._push
        if push is None or not push.installed:
            raise Refused("not_staged", "Nothing was installed.")
        if push.before is None:
            self._adapters.remove(push.name)
        else:
            self._adapters.install(push.before)
        self.version, push.installed = push.version, False

    def drop(self, settled: Callable[[float], bool] | None = None) -> None:
        self._push = None

    def digests(self, staged: bool = False) -> dict[str, str]:
        if staged:
            if self._push is None or self._push.root is None:
                raise Refused("not_staged", "Nothing is staged.")
            return _digests(self._push.memory)
        return {f"{name}:{tensor}": d for name, found in self._known.items() for tensor, d in found.items()}


def _said(manifest: Manifest) -> tuple[str, Mapping[str, Any], bool]:
    """Name, config, and whether it is to be removed. Raises ConfigError."""
    lora = manifest.lora or {}
    name, config, remove = lora.get("name"), lora.get("config") or {}, bool(lora.get("remove", False))
    if not isinstance(name, str) or not name:
        raise ConfigError("The manifest of an adapter push names no adapter.")
    if not isinstance(config, Mapping) or not (remove or isinstance(config.get("r"), int)):
        raise ConfigError(f"The adapter {name!r} has no config with a rank (`r`).")
    return name, config, remove


def _memory(manifest: Manifest) -> dict[str, Array]:
    return {a.name: np.zeros(a.shape, bits(BY_NAME[a.dtype].size)) for a in manifest.atoms}


_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def _tensors(manifest: Manifest, memory: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    import torch

    return {
        a.name: torch.from_numpy(memory[a.name].view(_SIGNED[BY_NAME[a.dtype].size])).view(
            getattr(torch, BY_NAME[a.dtype].torch)
        )
        for a in manifest.atoms
    }


def _digests(memory: Mapping[str, Array]) -> dict[str, str]:
    return {name: xxhash.xxh3_128_hexdigest(values.data) for name, values in memory.items()}
