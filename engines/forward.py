"""One micro-batch on this rank: padded, sliced for sequence parallelism; and log-probabilities from its logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..converter.errors import SourceError
from .collectives import join_slices
from .data.batches import STAND_IN, Batch, pad_tokens, position_ids
from .packed_attention import Packing
from .token_logprobs import Vocabulary, logprobs_and_entropy, next_tokens, without_ends


@dataclass(frozen=True)
class Rows:
    """A micro-batch on this rank. All tensors are on the device.

    batch   as it came, T tokens
    labels  (rows,) of this rank's slice, of the padded row of tokens
    total   tokens with padding, over all sequence-parallel ranks
    """

    batch: Batch
    ids: Tensor
    labels: Tensor
    positions: Tensor
    packing: Packing
    total: int

    @property
    def tokens(self) -> int:
        return int(self.batch["input_ids"].shape[0])


@dataclass(frozen=True, kw_only=True)
class Forward:
    """What this rank does with a micro-batch before and after the model.

    size        tokens that the model knows, of which `vocabulary` says what is here
    sp_group    ranks that have slices of the tokens; None: all are here
    unit        tokens are padded to a multiple: sequence-parallel ranks have equal slices
    maximum     tokens that every micro-batch is padded to; None: no more than needed
    stream      this rank's among those that share its batch; None: none does
    """

    device: torch.device
    attention: str
    size: int
    vocabulary: Vocabulary
    sp_group: dist.ProcessGroup | None = None
    unit: int = 1
    maximum: int | None = None
    temperature: float = 1.0
    chunk: int = 1024
    stream: int | None = None

    def padded(self, tokens: int) -> int:
        """How many tokens a micro-batch of so many has with padding."""
        return -(-max(tokens, self.maximum or 0) // self.unit) * self.unit

    def rows(self, batch: Batch, total: int | None = None) -> Rows:
        """Move a packed micro-batch to the device, pad it (to `total` tokens; None: as far as needed), and take this
        rank's slice.

        Raises SourceError for a token that the model does not have; a part of an embedding would give nothing for it.
        """
        check_tokens(batch["input_ids"], self.size)
        batch = {name: _moved(value, self.device) for name, value in batch.items()}
        ids = batch["input_ids"]
        total = self.padded(ids.shape[0]) if total is None else total
        inputs = pad_tokens({key: batch[key] for key in ("input_ids", "cu_seqlens", "max_seqlen")}, total)
        labels = next_tokens(inputs["input_ids"], inputs["cu_seqlens"])
        bounds = inputs["cu_seqlens"].tolist()
        count = 0 if batch.get(STAND_IN) else len(ids)
        real = None if total == count else self._slice(torch.arange(total, device=self.device) < count)
        packing = Packing(bounds, inputs["cu_seqlens"], self.attention, self.sp_group, self.stream, real)
        ids, labels, positions = (self._slice(x) for x in (inputs["input_ids"], labels, position_ids(inputs)))
        return Rows(batch, ids, labels, positions, packing, total)

    def logprobs(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """(T,) log-probability of the next token, 0 at the end of a sequence, and (T,) entropy; on every rank."""
        values = logprobs_and_entropy(
            logits, rows.labels, self.vocabulary, temperature=self.temperature, chunk=self.chunk
        )
        logprobs, entropy = (self._whole(x, rows) for x in values)
        return without_ends(logprobs, rows.batch["cu_seqlens"]), entropy

    def values(self, logits: Tensor, rows: Rows) -> Tensor:
        """(T,) what a critic says, in fp32."""
        return self._whole(logits[:, 0].float(), rows)

    def _whole(self, x: Tensor, rows: Rows) -> Tensor:
        return join_slices(x, 0, self.sp_group)[: rows.tokens]

    def _slice(self, x: Tensor) -> Tensor:
        if self.sp_group is None:
            return x
        return x.chunk(self.sp_group.size())[self.sp_group.rank()]


def check_tokens(ids: Tensor, size: int) -> None:
    """Raise SourceError unless all are in the vocabulary of a model that has so many."""
    odd = ids[(ids < 0) | (ids >= size)]
    if odd.numel():
        raise SourceError(
            f"input_ids: {odd.numel()} tokens are not in the model's vocabulary of {size}, {int(odd[0])} for one.",
            hint="The tokenizer is that of another model.",
        )


def resized(row: Tensor, length: int) -> Tensor:
    """Cut, or filled up with zeros."""
    return row[:length] if length <= len(row) else torch.cat([row, row.new_zeros(length - len(row))])


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def reshard(parts: Iterable[nn.Module]) -> None:
    """Give gathered parameters back: without a backward pass nobody does it for units that stay gathered."""
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()
