"""A micro-batch through a decoder, and what attention it runs with."""

from __future__ import annotations

import torch

from ..api.configs import TrainEngineConfig
from ..forward import Forward
from .args import ModelArgs
from .parallelize import Parallel

_KERNELS = ("flash_attention_2", "flash_attention_3", "flex_attention")


def attention_of(config: TrainEngineConfig) -> str:
    """The attention of packed rows: `archon.attn_type` says which kind, `attn_impl` which kernel of it (varlen), so
    that `attn_impl=flex_attention` is FlexAttention."""
    if config.archon.attn_type == "sdpa":
        return "sdpa"
    return config.attn_impl if config.attn_impl in _KERNELS else _KERNELS[0]


def forward_with(args: ModelArgs, parallel: Parallel, config: TrainEngineConfig, device: torch.device) -> Forward:
    """What this rank does with micro-batches, before and after the model."""
    return Forward(
        device=device,
        attention=attention_of(config),
        size=args.vocab,
        vocabulary=parallel.vocabulary,
        sp_group=parallel.cp_group,
        unit=parallel.unit,
        maximum=config.mb_spec.max_tokens_per_mb if config.pad_to_maximum else None,
        temperature=config.temperature,
        chunk=config.logprobs_chunk_size,
        stream=parallel.stream,
    )
