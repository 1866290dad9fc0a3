"""Attention over packed sequences: block-diagonal for every implementation, with Ulysses sequence parallelism.

transformers asks for an attention function by name (`AttentionInterface`); the one registered here gets the boundaries
of the sequences as the keyword `packing`, which models hand through. transformers makes no mask for a name that it has
no mask function for: none is built, and none has to be right.

Under Ulysses every rank has a slice of the tokens and all heads outside attention, and all tokens and a part of the
heads inside: an all-to-all before, and its reverse after.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..converter.errors import ConfigError
from .collectives import swap_shards
from .dropout import own_stream

NAME = "areal_packed"
"""Under which transformers finds the function."""


@dataclass(eq=False)
class Packing:
    """The sequences of one micro-batch.

    bounds      begin of each sequence, and the end of the last: all tokens of all sequence-parallel ranks
    cu_seqlens  the same on the device, int32
    impl        sdpa, eager, flex_attention or flash_attention_2/3
    group       the ranks that have slices of the tokens; None: all tokens are here
    stream      this rank's among those that share the batch, for dropout; None: no rank shares it
    real        (tokens of this rank's slice,) which are no padding; None: all
    """

    bounds: list[int]
    cu_seqlens: Tensor
    impl: str
    group: dist.ProcessGroup | None = None
    stream: int | None = None
    real: Tensor | None = None
    cached: dict[Any, Any] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        return max(b - a for a, b in pairwise(self.bounds))


def register() -> str:
    """Make the function known to transformers; returns the name to give as `attn_implementation`."""
    from transformers import AttentionInterface

    # The boundaries differ from batch to batch: a compiled block leaves its graph here instead of compiling anew.
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
    return NAME


def check_available(impl: str, device: torch.device) -> None:
    """Raises ConfigError when this attention cannot run here, before anything is built."""
    if impl in ("sdpa", "eager"):
        return
    if device.type != "cuda":  # flex_attention has a forward pass there, and no backward pass
        raise ConfigError(
            f"attn_impl={impl} needs a CUDA device; this is {device.type}.",
            hint="Use attn_impl=sdpa: packed sequences stay apart with it too.",
        )
    if impl != "flex_attention":
        _flash_function(impl)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, heads, T, d) each → (1, T, heads, d).

    Raises ConfigError for what it does not know (sinks, soft caps, position biases): leaving them out would be silent.
    """
    unknown = [k for k in ("softcap", "s_aux", "position_bias") if kwargs.get(k) is not None]
    if unknown or packing is None or query.shape[0] != 1:
        found = f"{type(module).__name__}: {', '.join(unknown)}" if unknown else "no packed row of sequences was given"
        raise ConfigError(f"Packed attention cannot do this: {found}.")
    group = packing.group
    if group is not None:
        key, value = (_repeated(x, query.shape[1], group.size()) for x in (key, value))
        query, key, value = (swap_shards(x, 1, 2, group) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with own_stream(packing.stream if dropout else None, query.device):
        out = _ATTENTION[packing.impl](query, key, value, packing, dropout, scale, sliding_window)
    return (swap_shards(out, 1, 2, group) if group is not None else out), None


def _repeated(x: Tensor, heads: int, parts: int) -> Tensor:
    """KV heads, each repeated as often as it takes for all ranks to get the same number."""
    times = parts // math.gcd(x.shape[1], parts)
    if heads % (x.shape[1] * times):
        raise ConfigError(
            f"{heads} query heads and {x.shape[1]} KV heads cannot be dealt to {parts} sequence-parallel ranks.",
            hint="Use a context_parallel_size that divides the heads (per tensor-parallel rank).",
        )
    return x.repeat_interleave(times, 1) if times > 1 else x


# ------------------------------------------------------------------------------------------------ implementations


def _each(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, packing: Packing, *rest: Any) -> Tensor:
    """One sequence after the other, or all at once where they are equally long; (1, T, heads, d). Split and not sliced:
    each slice's gradient would be as long as the whole row."""
    lengths = [b - a for a, b in pairwise(packing.bounds) if b > a]
    if len(set(lengths)) == 1:
        rows = (x.transpose(1, 2).unflatten(1, (-1, lengths[0])).squeeze(0).transpose(1, 2) for x in (q, k, v))
        return attend(*rows, *rest).transpose(1, 2).flatten(0, 1)[None]
    parts = [attend(*one, *rest) for one in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)]
    return torch.cat([part.transpose(1, 2) for part in parts], 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, packing: Packing, *rest: Any) -> Tensor:
    return _each(_sdpa_one, q, k, v, packing, *rest)


def _sdpa_one(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, window: int | None) -> Tensor:
    mask = _band(q, window)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=mask is None, enable_gqa=grouped
    )


def _band(q: Tensor, window: int | None) -> Tensor | None:
    """Which of a sequence's tokens see which; None for plain causal."""
    length = q.shape[2]
    if window is None or window >= length:
        return None
    place = torch.arange(length, device=q.device)
    distance = place[:, None] - place[None, :]
    return (distance >= 0) & (distance < window)


def _eager(q: Tensor, k: Tensor, v: Tensor, packing: Packing, *rest: Any) -> Tensor:
    return _each(_eager_one, q, k, v, packing, *rest)


def _eager_one(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, window: int | None) -> Tensor:
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    mask = _band(q, q.shape[2] if window is None else window)
    if mask is None:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~mask, float("-inf"))
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(q.dtype), dropout)
    return weights @ v


def _flex(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, dropout: float, scale: float, window: int | None
) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if dropout:
        raise ConfigError("attn_impl=flex_attention has no dropout.", hint="Set disable_dropout, or use sdpa.")
    if window not in packing.cached:
        lengths = packing.cu_seqlens.long().diff()
        owner = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths)

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            near = (i >= j) & (owner[i] == owner[j])
            return near if window is None else near & (i - j < window)

        total = packing.bounds[-1]
        packing.cached[window] = create_block_mask(seen, None, None, total, total, device=str(q.device))
    run = _compiled_flex() if q.is_cuda else flex_attention
    out: Any = run(q, k, v, block_mask=packing.cached[window], scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous()


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, dropout: float, scale: float, window: int | None
) -> Tensor:
    run = _flash_function(packing.impl)
    rows = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    cu, longest = packing.cu_seqlens, packing.longest
    return run(*rows, cu, longest, dropout, scale, -1 if window is None else window - 1)[None]


def _flash_function(impl: str) -> Callable[..., Tensor]:
    """The kernel: of the package that brings it, or, for flash_attention_2, the one that torch has (2.10 and later).

    It is called with (T, heads, d) three times, cu_seqlens, longest, dropout, scale, tokens seen to the left (-1: all).
    """
    home = "flash_attn" if impl == "flash_attention_2" else "flash_attn_interface"
    try:
        return partial(_flash_package, import_module(home).flash_attn_varlen_func)
    except ImportError as error:
        if impl == "flash_attention_2" and find_spec("torch.nn.attention.varlen"):
            return _flash_torch
        raise ConfigError(
            f"attn_impl={impl} needs the package {home}, which is not installed.", hint="Install it, or use sdpa."
        ) from error


def _flash_package(
    run: Any, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, dropout: float, scale: float, left: int
) -> Tensor:
    extra = {"dropout_p": dropout} if dropout else {}
    sizes = (left, -1 if left < 0 else 0)
    out = run(q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=True, window_size=sizes, **extra)
    return out[0] if isinstance(out, tuple) else out


def _flash_torch(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, dropout: float, scale: float, left: int
) -> Tensor:
    varlen: Any = import_module("torch.nn.attention.varlen")
    if dropout:
        raise ConfigError("torch's flash attention has no dropout.", hint="Set disable_dropout, or use sdpa.")
    grouped = q.shape[1] != k.shape[1]
    return varlen.varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(left, 0), enable_gqa=grouped)


_ATTENTION: dict[str, Callable[..., Tensor]] = {
    "sdpa": _sdpa,
    "eager": _eager,
    "flex_attention": _flex,
    "flash_attention_2": _flash,
    "flash_attention_3": _flash,
}
