"""Rotary position embedding: frequencies of every kind, angles of the given positions, and the rotation itself.

t tokens · n heads · d rotary dimensions of a head
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .args import RopeArgs


class Rotary(nn.Module):
    """Positions → (cos, sin). Frequencies are a buffer that no checkpoint has: `reset` computes it, on any device."""

    inv_freq: Tensor

    def __init__(self, args: RopeArgs) -> None:
        super().__init__()
        self.args = args
        self.register_buffer("inv_freq", torch.empty(args.dim // 2, dtype=torch.float32), persistent=False)
        self.reset()

    def reset(self) -> None:
        """The right values, where memory is; nothing on the meta device."""
        if not self.inv_freq.is_meta:
            with torch.device("cpu"):
                self.inv_freq.copy_(frequencies(self.args))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(t,) → (t, 1, d) twice: both halves have the same angles."""
        angles = positions[:, None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], -1)[:, None]
        factor = self.args.attention_factor
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(t, n, d) with the dimensions i and i + d/2 as a pair."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(t, n, d) with the dimensions 2i and 2i + 1 as a pair, as DeepSeek stores them. The result has the pairs as
    halves: an order that queries and keys share."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


# ------------------------------------------------------------------------------------------------ frequencies


def frequencies(args: RopeArgs) -> Tensor:
    """(d/2,) in fp32, by the formulas of transformers' modeling_rope_utils.py in their order of operations."""
    powers = args.theta ** (torch.arange(0, args.dim, 2).float() / args.dim)
    if args.kind == "yarn":
        return _yarn(args, powers)
    plain = 1.0 / powers
    if args.kind == "llama3":
        return _llama3(args, plain)
    return plain / args.factor if args.kind == "linear" else plain


def _llama3(args: RopeArgs, plain: Tensor) -> Tensor:
    """Long waves are stretched, short ones are not, those in between in proportion."""
    longest, shortest = args.original_length / args.low_freq_factor, args.original_length / args.high_freq_factor
    waves = 2 * math.pi / plain
    stretched = torch.where(waves > longest, plain / args.factor, plain)
    share = (args.original_length / waves - args.low_freq_factor) / (args.high_freq_factor - args.low_freq_factor)
    between = (1 - share) * stretched / args.factor + share * stretched
    return torch.where((waves >= shortest) & (waves <= longest), between, stretched)


def _yarn(args: RopeArgs, powers: Tensor) -> Tensor:
    """Extrapolation of the fast dimensions, interpolation of the slow ones, and a ramp between the two."""

    def turning(rotations: float) -> float:
        """The dimension that turns so many times over the original length."""
        length = args.original_length / (rotations * 2 * math.pi)
        return args.dim * math.log(length) / (2 * math.log(args.theta))

    low, high = turning(args.beta_fast), turning(args.beta_slow)
    if args.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, args.dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(args.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    fast = 1 - ramp
    return 1.0 / (args.factor * powers) * (1 - fast) + 1.0 / powers * fast


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """What attention is scaled by when positions are stretched `factor` times."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
