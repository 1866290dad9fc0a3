"""Forward and backward through Megatron-Core's schedules, and what a micro-batch's logits are made into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import join_slices
from ..data.batches import STAND_IN
from ..together import nothing_of
from ..token_logprobs import Vocabulary, logprobs_and_entropy, without_ends
from .batches import Rows
from .groups import Groups
from .routers import has_losses

__all__ = ["Process", "Steps"]

Process = Callable[[Tensor, Rows], Tensor | None]
"""Logits of a micro-batch on this rank (tokens, vocabulary) → what is backpropagated, if anything."""

Deeper = Callable[[Sequence[Tensor], Rows], Tensor]
"""Such logits of every depth of multi-token prediction → what is backpropagated besides."""


@dataclass(frozen=True)
class Steps:
    """How this rank runs micro-batches.

    chunks        the model's chunks, in DDP when they are trained
    vocabulary    this rank's columns, without padding
    mask_routers  routers are told what is padding
    """

    chunks: Sequence[nn.Module]
    config: Any
    groups: Groups
    vocabulary: Vocabulary
    mask_routers: bool = False
    temperature: float = 1.0
    chunk: int = 1024
    entropy_requires_grad: bool = False

    def run(self, rows: Sequence[Rows], process: Process, *, forward_only: bool, deeper: Deeper | None = None) -> None:
        """All micro-batches through the pipeline; `process` is called on its last stage, in their order, and after it
        `deeper`, which a model that trains multi-token prediction needs for going backward.

        Gradients are the sum over micro-batches (Megatron-Core divides each loss by their number, so that what
        `process` returns is multiplied by it) and the mean over data parallel ranks, as DDP makes it.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        number = len(rows)
        several = len(self.chunks) > 1

        def loss_of(rows: Rows, output: Tensor | tuple[Tensor, ...], non_loss_data: bool = False) -> Any:
            first, *rest = output if isinstance(output, tuple) else (output,)
            loss = process(first[0], rows)
            if rest and deeper is not None:
                more = deeper([logits[0] for logits in rest], rows)
                loss = more if loss is None else loss + more
            if loss is None:
                # Part of the graph, so that there is something to go backward from, which leaves no gradient.
                return nothing_of(first[0]) if not forward_only else first.new_zeros(()), {}
            # Megatron-Core works on it in place: never hand out the tensor that somebody else reads.
            return loss * number, {}

        def step(iterator: Iterator[Rows], model: Any) -> tuple[Tensor, Any]:
            rows = next(iterator)
            extra = {"padding_mask": self._mask(rows, model)} if self.mask_routers else {}
            output = model(rows.ids, rows.positions, None, packed_seq_params=rows.packed(), **extra)
            return output, lambda out, non_loss_data=False: loss_of(rows, out, non_loss_data)

        iterators = [iter(rows) for _ in self.chunks]
        run: Any = get_forward_backward_func()
        with torch.set_grad_enabled(not forward_only):
            run(
                forward_step_func=step,
                data_iterator=iterators if several else iterators[0],
                model=list(self.chunks) if several else self.chunks[0],
                num_microbatches=number,
                seq_length=rows[0].length * self.groups.cp.size(),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _mask(self, rows: Rows, model: Any) -> Tensor:
        """Megatron-Core (0.16) cuts it for sequence parallelism where the embedding is, and nowhere else.

        No token of a stand-in is anybody's. Where routers have losses it keeps one, as a mean needs.
        """
        stands_in = rows.batch.get(STAND_IN) and not has_losses(self.config)
        mask = torch.ones_like(rows.padding) if stands_in else rows.padding
        first = getattr(model, "module", model).pre_process
        if first or not self.config.sequence_parallel:
            return mask
        return mask.chunk(self.groups.tp.size(), 1)[self.groups.tp.rank()]

    def logprobs(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """(T,) log-probability of the next token, 0 at the end of a sequence, and (T,) entropy; on every rank of the
        last stage."""
        true = logits[:, : self.vocabulary.size] if logits.shape[1] != self.vocabulary.size else logits
        values = logprobs_and_entropy(
            true, rows.labels[0], self.vocabulary, temperature=self.temperature, chunk=self.chunk
        )
        logprobs, entropy = (self._whole(x, rows) for x in values)
        if not self.entropy_requires_grad:
            entropy = entropy.detach()
        return without_ends(logprobs, rows.batch["cu_seqlens"]), entropy

    def logprobs_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(T,) log-probability of other tokens than the next: `labels` (T,) are one for each of the batch. Without
        context parallelism, and at temperature 1."""
        true = logits[: len(labels), : self.vocabulary.size]
        return logprobs_and_entropy(true, labels, self.vocabulary, chunk=self.chunk)[0]

    def _whole(self, x: Tensor, rows: Rows) -> Tensor:
        group = self.groups.cp if self.groups.cp.size() > 1 else None
        return join_slices(x, 0, group)[rows.place]


def vocabulary(true: int, padded: int, groups: Groups) -> Vocabulary:
    """This rank's columns of the logits that stand for tokens."""
    width = padded // groups.tp.size()
    start = groups.tp.rank() * width
    size = min(width, true - start)
    return Vocabulary(start, size, groups.tp if groups.tp.size() > 1 else None, width)
