"""Attention over one row of packed sequences: grouped-query, and DeepSeek's multi-head latent attention.

    t tokens · n query heads · g KV heads · d head dim · w value head dim · h hidden

How many heads there are is read off the projections' results: under tensor parallelism it is this rank's part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..packed_attention import Packing, packed_attention
from .args import GqaArgs, MlaArgs
from .norms import RMSNorm
from .rotary import rotate, rotate_interleaved

Angles = tuple[Tensor, Tensor]

# The boundaries differ from batch to batch: a compiled block leaves its graph here instead of compiling anew.
_packed: Any = torch.compiler.disable(packed_attention)


class Attention(nn.Module):
    """What the two kinds share: queries, keys and values come from `project`, and `wo` follows."""

    wo: nn.Linear

    def __init__(self, scale: float, dropout: float, window: int | None) -> None:
        super().__init__()
        self.scale, self.dropout, self.window = scale, dropout, window

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """(t, h) → queries (t, n, d), keys (t, g, d), values (t, g, w), rotated."""
        raise NotImplementedError

    def forward(self, x: Tensor, angles: Angles, packing: Packing) -> Tensor:
        """(1, t, h) → (1, t, h)"""
        q, k, v = (y.transpose(0, 1)[None] for y in self.project(x[0], angles))
        dropout = self.dropout if self.training else 0.0
        out, _ = _packed(self, q, k, v, None, dropout, self.scale, self.window, packing=packing)
        return self.wo(out.flatten(2))


class GroupedQueryAttention(Attention):
    """Llama, Mistral, Qwen; with a norm on every query and key head for Qwen3."""

    def __init__(self, args: GqaArgs, hidden: int, eps: float, window: int | None) -> None:
        super().__init__(args.head_dim**-0.5, args.dropout, window)
        self.head_dim = args.head_dim
        self.wq = nn.Linear(hidden, args.heads * args.head_dim, bias=args.qkv_bias)
        self.wk = nn.Linear(hidden, args.kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wv = nn.Linear(hidden, args.kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wo = nn.Linear(args.heads * args.head_dim, hidden, bias=args.o_bias)
        self.q_norm = RMSNorm(args.head_dim, eps) if args.qk_norm else None
        self.k_norm = RMSNorm(args.head_dim, eps) if args.qk_norm else None

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *angles), rotate(k, *angles), v


class LatentAttention(Attention):
    """DeepSeek V3's: keys and values from a latent vector, one rotated key part shared by all heads.

    `wq_a`, `wkv_a` and their norms are whole on every tensor-parallel rank; `wq_b`, `wkv_b`, `wo` are cut by heads.
    """

    LATENT_EPS = 1e-6
    """transformers gives the norms inside attention no `rms_norm_eps`."""

    def __init__(self, args: MlaArgs, hidden: int, window: int | None) -> None:
        super().__init__(args.scale, args.dropout, window)
        self.args = args
        self.rotate = rotate_interleaved if args.interleaved else rotate
        width = args.heads * (args.nope_dim + args.rope_dim)
        if args.q_rank is None:
            self.wq = nn.Linear(hidden, width, bias=False)
        else:
            self.wq_a = nn.Linear(hidden, args.q_rank, bias=False)
            self.q_norm = RMSNorm(args.q_rank, self.LATENT_EPS)
            self.wq_b = nn.Linear(args.q_rank, width, bias=False)
        self.wkv_a = nn.Linear(hidden, args.kv_rank + args.rope_dim, bias=False)
        self.kv_norm = RMSNorm(args.kv_rank, self.LATENT_EPS)
        self.wkv_b = nn.Linear(args.kv_rank, args.heads * (args.nope_dim + args.value_dim), bias=False)
        self.wo = nn.Linear(args.heads * args.value_dim, hidden, bias=False)

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        a = self.args
        q = self.wq(x) if a.q_rank is None else self.wq_b(self.q_norm(self.wq_a(x)))
        q_nope, q_rope = q.unflatten(-1, (-1, a.nope_dim + a.rope_dim)).split([a.nope_dim, a.rope_dim], -1)
        latent, k_rope = self.wkv_a(x).split([a.kv_rank, a.rope_dim], -1)
        kv = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, a.nope_dim + a.value_dim))
        k_nope, v = kv.split([a.nope_dim, a.value_dim], -1)
        k_rope = self.rotate(k_rope[:, None], *angles).expand(-1, k_nope.shape[1], -1)
        q = torch.cat([q_nope, self.rotate(q_rope, *angles)], -1)
        return q, torch.cat([k_nope, k_rope], -1), v
