"""Micro-batches as Megatron-Core takes them: padded, cut for context parallelism, sequences kept apart by `thd`.

Under context parallelism every sequence is padded to 2·cp equal parts, of which rank r has the r-th from the front and
the r-th from the back (Megatron's zigzag: causal attention is then the same work on every rank). The parts of all
sequences make up a rank's row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..api.configs import MicroBatchSpec
from ..data.batches import Batch
from ..token_logprobs import next_tokens

__all__ = ["Layout", "Rows", "cut", "padded_length", "same_lengths", "spec_for"]


@dataclass(frozen=True)
class Rows:
    """A micro-batch on this rank, on the device.

    batch      as it came, T tokens
    ids, labels, positions  (1, tokens of this context-parallel rank), padding included
    padding    (1, tokens of this rank) bool: no token of the batch
    cu_seqlens begin of every padded sequence and the end of the last, over all context-parallel ranks
    place      where each of the T tokens is in the rows of all context-parallel ranks one after the other
    """

    batch: Batch
    ids: Tensor
    labels: Tensor
    positions: Tensor
    padding: Tensor
    cu_seqlens: Tensor
    longest: int
    place: Tensor

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def packed(self) -> Any:
        """What attention and rotary embedding have to know of the sequences."""
        from megatron.core.packed_seq_params import PackedSeqParams

        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
        )


@dataclass(frozen=True)
class Layout:
    """How this rank cuts micro-batches.

    unit     tokens of a context-parallel rank are a multiple of it (tensor-parallel ranks have even parts)
    maximum  tokens that every micro-batch is padded to; None: no more than needed
    """

    device: torch.device
    cp: int = 1
    cp_rank: int = 0
    unit: int = 1
    maximum: int | None = None

    @property
    def granule(self) -> int:
        """Tokens of a whole padded micro-batch are a multiple of it."""
        return self.cp * (2 if self.cp > 1 else 1) * self.unit


def spec_for(spec: Any, pp: int) -> Any:
    """Under pipelining at least one micro-batch for each stage, and a multiple of them."""
    if pp == 1:
        return spec
    return MicroBatchSpec(
        n_mbs=max(spec.n_mbs or 1, pp),
        granularity=spec.granularity,
        max_tokens_per_mb=spec.max_tokens_per_mb,
        n_mbs_divisor=lcm(spec.n_mbs_divisor, pp),
        packing_algorithm=spec.packing_algorithm,
    )


def padded_length(batch: Batch, layout: Layout) -> int:
    """Tokens of the whole micro-batch when it is padded as much as this rank's layout needs."""
    part = 2 * layout.cp if layout.cp > 1 else 1
    tokens = sum(-(-n // part) * part for n in batch["cu_seqlens"].diff().tolist())
    return -(-max(tokens, layout.maximum or 0) // layout.granule) * layout.granule


def same_lengths(lengths: list[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The longest of all ranks' n-th micro-batches: experts' tokens are gathered from rows of one length."""
    found = torch.tensor(lengths, dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.tolist()


def cut(batch: Batch, layout: Layout, total: int) -> Rows:
    """Pad a micro-batch to `total` tokens, move it to the device, and take this rank's part."""
    batch = {name: _moved(value, layout.device) for name, value in batch.items()}
    lengths = batch["cu_seqlens"].diff().tolist()
    part = 2 * layout.cp if layout.cp > 1 else 1
    padded = [-(-n // part) * part for n in lengths]
    if (rest := total - sum(padded)) > 0:
        padded.append(rest)
    bounds = torch.tensor([0, *padded]).cumsum(0).tolist()
    device = layout.device
    # Where each token of the batch is in the padded row, and what each place of the padded row has.
    at = torch.cat([torch.arange(a, a + n) for a, n in zip(bounds, lengths, strict=False)]).to(device)
    order = torch.cat([_zigzag(bounds, layout.cp, r) for r in range(layout.cp)]).to(device)
    mine = order.view(layout.cp, -1)[layout.cp_rank]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=device)

    def row(values: Tensor, fill: int) -> Tensor:
        whole = values.new_full((total,), fill)
        whole[at] = values
        return whole[mine][None]

    cu = torch.tensor(bounds, dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(n) for n in padded]).to(device)
    return Rows(
        batch,
        row(batch["input_ids"].long(), 0),
        row(next_tokens(batch["input_ids"], batch["cu_seqlens"]).long(), 0),
        positions[mine][None],
        row(torch.zeros(len(at), dtype=torch.bool, device=device), 1),
        cu,
        max(padded),
        inverse[at],
    )


def _zigzag(bounds: list[int], cp: int, rank: int) -> Tensor:
    """Places in the padded row that this rank has."""
    if cp == 1:
        return torch.arange(bounds[-1])
    parts = []
    for a, b in pairwise(bounds):
        size = (b - a) // (2 * cp)
        parts.append(torch.arange(a + rank * size, a + (rank + 1) * size))
        parts.append(torch.arange(b - (rank + 1) * size, b - rank * size))
    return torch.cat(parts)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
