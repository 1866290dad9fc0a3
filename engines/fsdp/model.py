"""transformers' model for training: built on the meta device, given memory, filled by the hub.

No rank ever builds the whole model: shapes come from config.json, memory from what is left after sharding, values from
the boxes of the checkpoint that this rank holds.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from ...converter.checkpoint import Checkpoint
from ...converter.errors import ConfigError, PlanError, Problems
from ...converter.live import base_of
from ...converter.loading import Loaded
from ...converter.loading_targets import local_pieces
from ...converter.opening import open_checkpoint
from ..packed_attention import register

VALUE_HEAD = "score"
"""The module of transformers' token classifiers that a critic trains: hidden → 1."""

_BLOCK = 1 << 20
"""Elements of a parameter that are drawn at a time."""


def open_model(path: str, *, with_weights: bool = True) -> Checkpoint:
    """The checkpoint that a model comes from; `with_weights` False: a directory with a config.json will do.

    Raises ConfigError or SourceError when the hub finds nothing that it can read.
    """
    return open_checkpoint(path) if with_weights else base_of(path)


def parse_config(raw: dict[str, Any]) -> Any:
    """transformers' configuration object. Raises ConfigError for a `model_type` that it does not know."""
    from transformers import CONFIG_MAPPING

    kind = raw.get("model_type", "")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"model_type: transformers has no model {kind!r}.", hint="A newer transformers may have it.")
    return CONFIG_MAPPING[kind].from_dict(dict(raw))


def build(config: Any, dtype: torch.dtype, *, critic: bool = False) -> nn.Module:
    """The model on the meta device, packed attention in it, ready for training.

    Experts run one by one on the CPU, where grouped kernels gain nothing.
    """
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    config.use_cache = False
    if critic:
        config.num_labels = 1
    if not torch.cuda.is_available():
        config._experts_implementation = "eager"
    kind: Any = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = kind.from_config(config, dtype=dtype, attn_implementation=register())
    return model


def without_dropout(model: nn.Module) -> None:
    """Every dropout of the model, also those that are numbers in attention modules, to 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def checkpoint_activations(model: Any) -> None:
    """Keep only what goes into each block and compute the rest again in the backward pass (not reentrant)."""
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # transformers 5.2x; the older name warns there
        model.activation_checkpointing_enable(how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def materialize(model: nn.Module, device: torch.device, *, on_cpu: bool = False) -> None:
    """Memory for a sharded model, and the right values in the buffers that no checkpoint has.

    `on_cpu`: parameters get host memory (FSDP's CPU offload), buffers the device's.
    Parameters and persistent buffers are uninitialised. Raises ConfigError for a module whose buffers cannot be made
    again from its configuration.
    """
    shared = _shared_parameters(model)
    model.to_empty(device="cpu" if on_cpu else device)
    for (owner, key), *others in shared:  # a model that FSDP does not wrap has lost its ties (a head on the embedding)
        for module, name in others:
            module._parameters[name] = owner._parameters[key]
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    problems = Problems()
    for name, module in model.named_modules():
        lost = module._non_persistent_buffers_set & {k for k, b in module._buffers.items() if b is not None}
        if not lost:
            continue
        config = getattr(module, "config", None)
        if config is None:
            problems.add(name, f"{type(module).__name__} has buffers ({', '.join(sorted(lost))}) and no configuration")
            continue
        twin: Any = type(module)(config=config)
        for key in lost:
            module._buffers[key] = twin.get_buffer(key).to(device)
    problems.raise_as(ConfigError, "These buffers of the model are in no checkpoint and cannot be computed:")


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where each parameter stands that stands in several places: `to_empty` makes a new one for each of them."""
    places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def load(model: nn.Module, checkpoint: Checkpoint, *, critic: bool = False, seed: int = 0) -> Loaded:
    """Fill the model from a checkpoint of any format; every rank reads what it holds. Returns the hub's report.

    bf16 values are widened into fp32 masters; fp32 values are rounded only into parameters that are meant to be bf16.
    A critic's value head is drawn (`seed`) when the checkpoint has none.
    """
    narrow = any(p.dtype == torch.bfloat16 for p in model.parameters())
    if not critic:
        return checkpoint.load_into(model, allow_cast=narrow)
    found = checkpoint.load_into(model, allow_cast=narrow, strict=False)
    problems = Problems()
    heads = {f"{VALUE_HEAD}.weight", f"{VALUE_HEAD}.bias"}
    for name in set(found.unknown) - heads:
        problems.add(name, f"nothing in the checkpoint is this tensor: {found.unknown[name]}")
    for name in found.missing:
        if name.startswith("layers."):
            problems.add(name, "the critic has no tensor for it")
    problems.raise_as(PlanError, f"{checkpoint.path} does not fit the critic:")
    spread = getattr(model.config, "initializer_range", 0.02)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in found.unknown:
                _draw(name, parameter, seed, 0.0 if name.endswith("bias") else spread)
    return found


@torch.no_grad()
def init_from_scratch(model: nn.Module, config: Any, seed: int) -> None:
    """Random weights: normal with `initializer_range`, norms 1, biases 0. The same model on every layout.

    Each tensor is drawn from its own name and the seed, in blocks of rows, so that a rank draws only those it holds.
    """
    spread = getattr(config, "initializer_range", 0.02)
    for owner, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{owner}.{key}"
            if "norm" in type(module).__name__.lower():
                parameter.fill_(0.0 if key == "bias" else 1.0)
            else:
                _draw(name, parameter, seed, 0.0 if key == "bias" else spread)
                _zero_padding_row(module, key, parameter)


def _draw(name: str, parameter: Tensor, seed: int, spread: float) -> None:
    given: Any = parameter
    memory = given.to_local() if hasattr(given, "device_mesh") else parameter
    if spread == 0.0:
        memory.zero_()
        return
    shape = tuple(parameter.shape)
    width = parameter[:1].numel() if shape[0] else 1
    step = max(1, _BLOCK // max(1, width))
    for lo, hi, at in _pieces(parameter):
        for begin in range(lo[0] - lo[0] % step, hi[0], step):
            end = min(begin + step, shape[0])
            source = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}/{begin}".encode()))
            block = torch.randn((end - begin, *shape[1:]), generator=source) * spread
            first, last = max(begin, lo[0]), min(end, hi[0])
            inside = [slice(first - begin, last - begin), *map(slice, lo[1:], hi[1:])]
            there = at[0] + first - lo[0]
            place = [slice(there, there + last - first)]
            place += [slice(a, a + h - low) for a, low, h in zip(at[1:], lo[1:], hi[1:], strict=True)]
            memory[tuple(place)].copy_(block[tuple(inside)])


def _pieces(parameter: Tensor) -> list[tuple[Any, Any, Any]]:
    if hasattr(parameter, "device_mesh"):
        return [(piece.lo, piece.hi, piece.at) for piece in local_pieces(parameter)]
    zero = (0,) * parameter.dim()
    return [(zero, tuple(parameter.shape), zero)]


def _zero_padding_row(module: nn.Module, key: str, parameter: Tensor) -> None:
    """An embedding's padding row is 0, wherever it is."""
    row = getattr(module, "padding_idx", None)
    if key != "weight" or row is None:
        return
    given: Any = parameter
    memory = given.to_local() if hasattr(given, "device_mesh") else parameter
    for lo, hi, at in _pieces(parameter):
        if lo[0] <= row < hi[0]:
            memory[at[0] + row - lo[0]].zero_()
