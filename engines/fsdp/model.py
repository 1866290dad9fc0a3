"""transformers' model for training: built on the meta device, given memory, filled by the hub.

No rank ever builds the whole model: shapes come from config.json, memory from what is left after sharding, values from
the boxes of the checkpoint that this rank holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...converter.errors import ConfigError, Problems
from ..packed_attention import register


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
