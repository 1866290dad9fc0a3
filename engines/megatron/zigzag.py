"""Causal attention where each rank has a part of the front and one of the back of every sequence (Megatron's zigzag).

A sequence is cut into 2·cp equal chunks, rank r has chunks r and 2·cp-1-r. Keys and values of all ranks are gathered,
and come back as a sum of gradients; every query chunk sees the keys up to its own end. Memory is that of the gathered
keys and values: this is what runs where Transformer Engine's ring is not.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..collectives import gather_rows


def zigzag_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: list[int],
    group: dist.ProcessGroup,
    scale: float,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """(T/cp, heads, d) three times → (T/cp, heads, d of value).

    bounds  begin of every sequence and the end of the last, over all ranks; lengths are multiples of 2·cp
    window  tokens that a query sees, itself included; None: all before it
    """
    cp, rank = group.size(), group.rank()
    width = key.shape[-1]
    gathered = gather_rows(torch.cat([key, value], -1), 0, group).unflatten(0, (cp, -1))
    keys, values = gathered[..., :width], gathered[..., width:]
    outs = []
    for a, b in pairwise(bounds):
        size = (b - a) // (2 * cp)
        if not size:
            continue
        k, v = (_in_order(x, a // cp, size) for x in (keys, values))
        for half, chunk in enumerate((rank, 2 * cp - 1 - rank)):
            at = a // cp + half * size
            end = (chunk + 1) * size
            seen = _seen(chunk * size, end, window, query.device)
            q, k_, v_ = (x.transpose(0, 1)[None] for x in (query[at : at + size], k[:end], v[:end]))
            grouped = q.shape[1] != k_.shape[1]
            out = F.scaled_dot_product_attention(
                q, k_, v_, attn_mask=seen, dropout_p=dropout, scale=scale, enable_gqa=grouped
            )
            outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def _in_order(x: Tensor, at: int, size: int) -> Tensor:
    """The whole sequence that lies at `at` in the rows of all ranks (cp, T/cp, heads, d): chunks in order."""
    fronts = x[:, at : at + size].flatten(0, 1)
    backs = x[:, at + size : at + 2 * size].flip(0).flatten(0, 1)
    return torch.cat([fronts, backs])


def _seen(begin: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """(queries from `begin` to `end`, keys from 0 to `end`): which of them see which."""
    places = torch.arange(end, device=device)
    distance = places[begin:, None] - places[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
