"""A model on the meta device → sharded: tensor parallelism, compiled blocks, FSDP units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ...converter.errors import ConfigError
from ..api.configs import FSDPEngineConfig
from ..dropout import own_masks
from ..tensor_parallel import TensorParallel, parallelize
from .lora_styles import with_adapters
from .mesh import FsdpMesh
from .tp_plans import plan_for


def shard_model(
    model: nn.Module,
    hf_config: Any,
    mesh: FsdpMesh,
    config: FSDPEngineConfig,
    *,
    compute: torch.dtype,
    reduce: torch.dtype,
    device: torch.device,
) -> TensorParallel | None:
    """Shard in place; the model stays on the meta device. Returns the tensor parallelism, if any.

    Units: every block; embedding, and final norm with the head; the rest. A tied embedding stays with the rest, since a
    parameter can only be in one unit.
    """
    tp = TensorParallel(mesh.tp_mesh) if mesh.tp > 1 else None
    blocks = [module for _, module in named_blocks(model, config)]
    if tp is not None:
        parallelize(model, with_adapters(model, plan_for(model, hf_config, tp.size)), tp)
    if mesh.stream is not None:
        own_masks(model, mesh.stream)
    if config.enable_compile:
        for block in blocks:
            block.forward = torch.compile(block.forward)  # below FSDP's hooks, and without a name in the state dict
    stored = {parameter.dtype for parameter in model.parameters()}  # frozen ones may have another one than masters
    if mesh.root.size() == 1 and stored == {compute} and not config.offload_params:
        return tp  # nothing to shard, cast or move: FSDP would only copy every parameter several times a step
    policy = MixedPrecisionPolicy(param_dtype=None if stored == {compute} else compute, reduce_dtype=reduce)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.offload_params else OffloadPolicy()
    common: dict[str, Any] = {"mesh": mesh.fsdp, "mp_policy": policy, "offload_policy": offload}
    for block in blocks:
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **common)
    _shard_ends(model, config, common)
    fully_shard(model, reshard_after_forward=False, **common)
    return tp


def _shard_ends(model: Any, config: FSDPEngineConfig, common: dict[str, Any]) -> None:
    base = model.model
    head = getattr(model, "lm_head", None)
    if head is not None and head.weight is base.embed_tokens.weight:
        return
    fully_shard(base.embed_tokens, reshard_after_forward=config.reshard_after_forward, **common)
    if head is not None:
        # Wanted again as the backward pass begins.
        fully_shard([base.norm, head], reshard_after_forward=False, **common)


def named_blocks(model: Any, config: FSDPEngineConfig) -> list[tuple[str, nn.Module]]:
    """The modules that become units: those of the classes that the wrap policy names, else the model's own choice.

    Raises ConfigError when there is none of them.
    """
    given = config.wrap_policy.transformer_layer_cls_to_wrap if config.wrap_policy is not None else None
    classes: Sequence[str] = given or list(model._no_split_modules or ())
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in classes]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no module of the classes {', '.join(classes) or '(none named)'}.",
            hint="Name the class of its layers in fsdp.wrap_policy.transformer_layer_cls_to_wrap.",
        )
    return found
