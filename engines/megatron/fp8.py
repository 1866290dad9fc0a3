"""FP8: what was asked for, what the checkpoint is, and what this machine can run, checked against one another.

An FP8 checkpoint (128 × 128 block scales, as DeepSeek-V3 stores it) is read as the values that it stands for, into
bfloat16 parameters. With `fp8_config` Transformer Engine quantises them anew for its matrix products; without, the
model is trained in bfloat16.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from ...converter.errors import ConfigError, Problems
from ..api.configs import FP8EngineConfig
from .fields import FP8, To

__all__ = ["Machine", "check", "machine", "token_multiple", "transformer_fields"]


@dataclass(frozen=True)
class Machine:
    """What can run FP8: the device's compute capability (None: no GPU), Transformer Engine's version (None: none)."""

    capability: tuple[int, int] | None = None
    engine: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Recipe:
    """What a recipe needs: compute capability, Transformer Engine; tokens of a rank are a multiple of `tokens`."""

    capability: tuple[int, int]
    engine: tuple[int, ...]
    tokens: int = 16


_RECIPES: Mapping[str, _Recipe] = {
    "delayed": _Recipe((8, 9), (1, 0)),
    "tensorwise": _Recipe((8, 9), (2, 2)),
    "blockwise": _Recipe((9, 0), (2, 3)),
    "mxfp8": _Recipe((10, 0), (2, 1), 32),
}
"""As Megatron-Core 0.16 has it (`fp8_utils.get_fp8_recipe`, `get_fp8_align_size`); `tokens` are the multiples that its
matrix products take."""

BLOCK = (128, 128)


def machine(device: torch.device) -> Machine:
    """This one."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Machine()
    capability: tuple[int, int] = torch.cuda.get_device_capability(device)
    if find_spec("transformer_engine") is None:
        return Machine(capability)
    text = str(importlib.import_module("transformer_engine").__version__)
    return Machine(capability, tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit()))


def token_multiple(config: FP8EngineConfig | None) -> int:
    """Tokens of every rank (after sequence parallelism) are padded to a multiple of it."""
    return 1 if config is None else _RECIPES[config.recipe].tokens


def transformer_fields(
    config: FP8EngineConfig, hf_config: Mapping[str, Any], device: torch.device, *, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """The fields of TransformerConfig. Raises ConfigError with all that contradicts or cannot run."""
    check(config, hf_config, machine(device), dtype=dtype)
    return _fields(config, experts=_has_experts(hf_config))


def _fields(config: FP8EngineConfig, *, experts: bool) -> dict[str, Any]:
    found = {entry.field: getattr(config, name) for name, entry in FP8.items() if isinstance(entry, To)}
    # An expert has as many tokens as come to it.
    return found | ({"moe_router_padding_for_fp8": True} if experts else {})


def _has_experts(hf_config: Mapping[str, Any]) -> bool:
    return any(hf_config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def check(config: FP8EngineConfig, hf_config: Mapping[str, Any], here: Machine, *, dtype: str = "bfloat16") -> None:
    """Raises ConfigError with everything in which configuration, checkpoint and machine do not agree."""
    problems = Problems()
    _alone(config, hf_config, problems)
    if dtype != "bfloat16":
        problems.add("dtype", f"{dtype}: FP8 is computed beside bfloat16", "dtype=bfloat16")
    given = hf_config.get("quantization_config")
    if given is not None:
        _checkpoint(config, given, problems)
    _can_run(config, here, problems)
    problems.raise_as(ConfigError, "FP8 cannot be used so.")


def _alone(config: FP8EngineConfig, hf_config: Mapping[str, Any], problems: Problems) -> None:
    name = "megatron.fp8_config"
    if config.first_last_layers_bf16:
        if config.recipe == "delayed":
            problems.add(
                f"{name}.first_last_layers_bf16", "delayed scaling cannot leave layers out", "recipe=blockwise"
            )
        layers = hf_config.get("num_hidden_layers")
        outside = config.num_layers_at_start_in_bf16 + config.num_layers_at_end_in_bf16
        if layers is not None and outside >= layers:
            what = f"{outside} layers at the ends, and num_hidden_layers={layers}: none is left for FP8"
            problems.add(f"{name}.num_layers_at_start_in_bf16", what)
    if config.recipe != "delayed":
        for field, plain in (("margin", 0), ("amax_history_len", 1), ("amax_compute_algo", "most_recent")):
            if (value := getattr(config, field)) != plain:
                what = f"{value!r}: only delayed scaling has a history, and recipe is {config.recipe}"
                problems.add(f"{name}.{field}", what, f"{field}={plain}, or recipe=delayed")


def _checkpoint(config: FP8EngineConfig, given: Mapping[str, Any], problems: Problems) -> None:
    """The checkpoint's `quantization_config`."""
    name, method = "quantization_config", given.get("quant_method")
    if method != "fp8":
        problems.add(f"{name}.quant_method", f"{method!r}: FP8 training starts from fp8 or from unquantised weights")
        return
    block = given.get("weight_block_size")
    if block is None or tuple(block) != BLOCK:
        what = f"{block}: recipes here have scales for blocks of {BLOCK[0]} × {BLOCK[1]}"
        problems.add(f"{name}.weight_block_size", what, "convert the checkpoint to bfloat16 first")
    elif config.recipe != "blockwise":
        what = f"{config.recipe}, and the checkpoint's weights have block scales"
        problems.add("megatron.fp8_config.recipe", what, "recipe=blockwise, or convert the checkpoint to bfloat16")
    if (form := given.get("fmt", "e4m3")) != "e4m3":
        problems.add(f"{name}.fmt", f"{form!r}: weights in {config.mode} are e4m3")
    if (scheme := given.get("activation_scheme", "dynamic")) != "dynamic":
        problems.add(f"{name}.activation_scheme", f"{scheme!r}: its fixed scales would not be used", "dynamic")


def _can_run(config: FP8EngineConfig, here: Machine, problems: Problems) -> None:
    name, needs = "megatron.fp8_config", _RECIPES[config.recipe]
    if here.capability is None:
        problems.add(name, "FP8 needs a GPU", "fp8_config=null")
        return
    if here.capability < needs.capability:
        fits = [recipe for recipe, other in _RECIPES.items() if here.capability >= other.capability]
        what = f"{config.recipe} needs compute capability {_dots(needs.capability)}, this GPU has"
        hint = f"recipes that it runs: {', '.join(fits)}" if fits else "fp8_config=null"
        problems.add(f"{name}.recipe", f"{what} {_dots(here.capability)}", hint)
    if here.engine is None:
        problems.add(name, "FP8 needs Transformer Engine, which is not installed", "pip install transformer-engine")
    elif here.engine < needs.engine:
        what = f"{config.recipe} needs Transformer Engine {_dots(needs.engine)}, {_dots(here.engine)} is installed"
        problems.add(f"{name}.recipe", what)


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
