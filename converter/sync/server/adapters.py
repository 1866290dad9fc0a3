"""LoRA adapters as models of their own: `{"model": "<adapter>"}` answers with the base weights plus the adapter's.

An adapter is added to the outputs of the linear layers that it names, so base weights stay as they are, adapters come
and go without touching them, and a request keeps the adapter that it began with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, Problems

if TYPE_CHECKING:
    import torch

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.[^.]+)?\.weight")
_REFUSED = {"use_dora": False, "fan_in_fan_out": False, "bias": "none", "modules_to_save": None, "lora_bias": False}
"""Fields of an adapter_config.json that change the arithmetic, and the values with which they do not."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter as it was loaded; a later push of the same name makes a new one.

    pairs  module → (A: rank × in, B: out × rank, scale)
    """

    name: str
    version: int | None
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]] = field(repr=False)


class Adapters:
    """Which adapters there are. All but `active`, which is the worker's, may be called from any thread."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.reserved: tuple[str, ...] = ()
        self._known: dict[str, Adapter] = {}
        self._active: Adapter | None = None
        # On every linear layer, from the beginning: copies that are made of the module have the same hooks, and none
        # comes or goes while somebody makes one.
        import torch

        for name, layer in module.named_modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(self._hook(name))

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._known.values()))

    def get(self, name: str) -> Adapter | None:
        return self._known.get(name)

    def install(self, adapter: Adapter) -> Adapter | None:
        """Let a checked adapter answer requests that come from now on; returns the one of its name before it."""
        before = self._known.get(adapter.name)
        self._known[adapter.name] = adapter
        return before

    def remove(self, name: str) -> bool:
        """Forget an adapter; requests that use it are finished with it. False: there was none."""
        return self._known.pop(name, None) is not None

    def check(
        self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], version: int | None = None
    ) -> Adapter:
        """An adapter, checked against this model and not installed.

        config, tensors  as PEFT writes them: adapter_config.json, adapter_model.safetensors. The tensors are copied
        Raises ConfigError with everything that does not fit.
        """
        problems = Problems()
        if name in self.reserved:
            problems.add(name, "is the base model's name", "give the adapter another")
        for key, plain in _REFUSED.items():
            if config.get(key, plain) not in (plain, None, []):
                problems.add(key, f"{config[key]!r} is not supported", f"expected {plain!r}")
        halves: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            match = _TENSOR.fullmatch(key)
            if match is None:
                problems.add(key, "is no half of a LoRA pair (….lora_A.weight, ….lora_B.weight)")
                continue
            halves.setdefault(match["module"], {})[match["half"]] = tensor
        pairs = {}
        for module, pair in halves.items():
            found = self._pair(module, pair, config, problems)
            if found is not None:
                pairs[module] = found
        if not halves and not problems:
            problems.add(name, "has no tensors")
        problems.raise_as(ConfigError, f"The adapter {name!r} does not fit this model:")
        return Adapter(name, version, pairs)

    def _pair(
        self, module: str, pair: Mapping[str, torch.Tensor], config: Mapping[str, Any], problems: Problems
    ) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        import torch

        try:
            layer = self._module.get_submodule(module)
        except AttributeError:
            problems.add(module, "this model has no such module")
            return None
        if not isinstance(layer, torch.nn.Linear):
            problems.add(module, f"is a {type(layer).__name__}; only linear layers take an adapter")
            return None
        if pair.keys() != {"A", "B"}:
            problems.add(module, f"has lora_{next(iter(pair))} only")
            return None
        a, b = pair["A"], pair["B"]
        out, into = layer.weight.shape
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != into or b.shape[0] != out or a.shape[0] != b.shape[1]:
            what = f"lora_A is {tuple(a.shape)} and lora_B {tuple(b.shape)}"
            problems.add(module, what, f"expected (rank, {into}) and ({out}, rank)")
            return None
        scale = _scale(module, a.shape[0], config, problems)
        like = layer.weight
        return a.to(like.device, like.dtype, copy=True), b.to(like.device, like.dtype, copy=True), scale

    def _hook(self, module: str) -> Any:
        def add(_: Any, inputs: tuple[Any, ...], output: Any) -> Any:
            pair = self._active.pairs.get(module) if self._active is not None else None
            if pair is None:
                return None
            a, b, scale = pair
            return output + ((inputs[0] @ a.T) @ b.T) * scale

        return add

    @contextmanager
    def active(self, adapter: Adapter | None) -> Iterator[None]:
        """What runs in here runs with this adapter, or with none."""
        self._active = adapter
        try:
            yield
        finally:
            self._active = None


def _scale(module: str, rank: int, config: Mapping[str, Any], problems: Problems) -> float:
    """alpha / rank, or alpha / √rank (rslora), with the patterns that single modules out, as PEFT applies them."""
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    said = _by_pattern(module, ranks, config.get("r"))
    if said is not None and said != rank:
        problems.add(module, f"has rank {rank}, its config says {said}")
    alpha = _by_pattern(module, alphas, config.get("lora_alpha", rank))
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _by_pattern(module: str, patterns: Mapping[str, Any], default: Any) -> Any:
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default
