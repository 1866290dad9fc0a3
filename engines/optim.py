"""The optimizer of an engine with sharded parameters, from the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .api.configs import OptimizerConfig, TrainEngineConfig
from .sharded_optim import SGD, AdamW, AdamWKahan, ShardedOptimizer, Streaming


def stored_dtype(config: TrainEngineConfig) -> torch.dtype:
    """Of the parameters between steps: `optimizer_dtype`, or bfloat16 for the optimizer that is made for it."""
    if config.optimizer is not None and config.optimizer.type == "adam_bf16":
        return torch.bfloat16
    return getattr(torch, config.optimizer_dtype)


def make_optimizer(
    config: OptimizerConfig,
    named: Mapping[str, Tensor],
    blocks: Sequence[str] = (),
    streaming: Streaming | None = None,
) -> ShardedOptimizer:
    """All trainable parameters, one group. `blocks` are the names of the layers that `streaming` goes by."""
    named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if config.type == "sgd":
        return SGD(named, lr=config.lr, momentum=config.beta1, weight_decay=config.weight_decay)
    kind = AdamWKahan if config.type == "adam_bf16" else AdamW
    return kind(
        named,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        blocks=blocks,
        streaming=streaming,
    )
