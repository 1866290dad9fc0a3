"""Layer specs: which module computes what. Transformer Engine's on CUDA, where it is installed; else torch's own.

The local spec of Megatron-Core (0.16, 0.19) has an attention without packed sequences and without context parallelism,
and a norm without sequence parallelism. What stands here takes packed sequences in the form that Transformer Engine
takes (`packed_seq_params`, thd): the engine feeds both alike. Nothing of it is used where Transformer Engine is.
"""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...converter.errors import ConfigError
from ..collectives import copy_to
from ..packed_attention import Packing, packed_attention
from .zigzag import zigzag_attention

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

__all__ = ["adapt", "has_transformer_engine"]


def has_transformer_engine(device: torch.device) -> bool:
    """Whether layers are Transformer Engine's: it needs a GPU."""
    return device.type == "cuda" and find_spec("transformer_engine") is not None


def adapt(block: Any, layers: list[Any], core: TransformerConfig, *, attention: str) -> None:
    """Put our modules into the local spec, before the model is built.

    block      TransformerBlockSubmodules of this chunk; `block.layer_norm` is the final norm
    layers     every layer's spec, those of multi-token prediction too
    attention  sdpa, eager, flex_attention or flash_attention_2
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if core.context_parallel_size > 1 and attention not in ("sdpa", "eager"):
        raise ConfigError(
            f"attn_impl={attention}: without Transformer Engine a cut sequence is attended to by sdpa only.",
            hint="attn_impl=sdpa, or install transformer-engine.",
        )
    stand_ins = {DotProductAttention: packed_core_attention(attention), WrappedTorchNorm: torch_norm()}
    for spec in (block, *layers):
        _replace(spec, stand_ins)


def _replace(spec: Any, stand_ins: dict[type, type]) -> None:
    """Every module of a spec, of its submodules and their specs, that has a stand-in."""
    if isinstance(spec, list | tuple):
        for one in spec:
            _replace(one, stand_ins)
    if isinstance(spec, partial):  # later versions build some modules so
        _replace(list(spec.keywords.values()), stand_ins)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, type) and value in stand_ins:
            setattr(spec, field.name, stand_ins[value])
        elif not isinstance(value, type):
            _replace(value, stand_ins)


@cache
def torch_norm() -> type:
    """torch's norms, as Megatron-Core wraps them, but for sequence parallelism too: each rank then has a part of the
    tokens, so that the weights' gradients are summed over the tensor parallel ranks; this is how it is told to."""

    class TorchNorm:
        def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_other: Any) -> Any:
            kinds = {"RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm}
            if config.normalization not in kinds or config.layernorm_zero_centered_gamma:
                raise ConfigError(
                    f"normalization={config.normalization}, zero centred: {config.layernorm_zero_centered_gamma}: "
                    f"without Transformer Engine there are {' and '.join(kinds)}, not centred."
                )
            norm = kinds[config.normalization](hidden_size, eps=eps)
            for parameter in norm.parameters():
                parameter.sequence_parallel = config.sequence_parallel
            return norm

    return TorchNorm


@cache
def packed_core_attention(impl: str) -> type:
    """The core attention: (T, heads, d) three times → (T, heads·d), sequence by sequence.

    Under context parallelism T are the tokens of this rank, `cu_seqlens_q` the whole padded sequences.
    """
    from megatron.core import tensor_parallel
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.utils import is_layer_window_attention

    class PackedDotProductAttention(MegatronModule):
        def __init__(
            self,
            config: TransformerConfig,
            layer_number: int,
            attn_mask_type: Any = None,
            attention_type: str = "self",
            attention_dropout: float | None = None,
            softmax_scale: float | None = None,
            pg_collection: Any = None,
            **_other: Any,
        ) -> None:
            super().__init__(config=config)
            pattern: Any = config.window_attn_skip_freq
            near = is_layer_window_attention(config.window_size, pattern, layer_number)
            # Megatron counts the tokens to the left, packed attention the token itself too.
            self.window = config.window_size[0] + 1 if near and config.window_size else None
            self.scale = softmax_scale
            self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
            tp, cp = _groups(pg_collection)
            self.cp = cp if cp.size() > 1 else None
            self.shared_key = tp if config.multi_latent_attention and tp.size() > 1 else None
            self.rotary: int = getattr(config, "qk_pos_emb_head_dim", 0)

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None = None,
            attn_mask_type: Any = None,
            attention_bias: Tensor | None = None,
            packed_seq_params: Any = None,
        ) -> Tensor:
            if self.shared_key is not None:
                key = _of_all_heads(key, self.rotary, self.shared_key)
            cu = packed_seq_params.cu_seqlens_q
            dropout = self.dropout if self.training else 0.0
            if not dropout:
                return self._attend(query, key, value, cu, 0.0)
            tracker: Any = tensor_parallel.get_cuda_rng_tracker()
            with tracker.fork():
                return self._attend(query, key, value, cu, dropout)

        def _attend(self, query: Tensor, key: Tensor, value: Tensor, cu: Tensor, dropout: float) -> Tensor:
            if self.cp is not None:
                scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
                return zigzag_attention(query, key, value, cu.tolist(), self.cp, scale, self.window, dropout).flatten(1)
            q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
            rest = {"scaling": self.scale, "sliding_window": self.window, "dropout": dropout}
            out, _ = packed_attention(self, q, k, v, None, packing=Packing(cu.tolist(), cu, impl), **rest)
            return out[0].flatten(1)

    return PackedDotProductAttention


def _groups(collection: Any) -> tuple[Any, Any]:
    """The tensor and context parallel groups that a module is built for."""
    from megatron.core import parallel_state as ps

    tp, cp = getattr(collection, "tp", None), getattr(collection, "cp", None)
    return tp or ps.get_tensor_model_parallel_group(), cp or ps.get_context_parallel_group()


def _of_all_heads(key: Tensor, rotary: int, group: Any) -> Tensor:
    """Multi-head latent attention has one rotary key for all heads, of which this rank has some: its gradient is the
    sum over all. The local spec cuts the projection that makes it, and leaves that sum out (0.16, 0.19)."""
    own, shared = key.split([key.shape[-1] - rotary, rotary], -1)
    return torch.cat([own, copy_to(shared, group)], -1)
