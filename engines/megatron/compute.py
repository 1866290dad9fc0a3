"""From batches to losses and log-probabilities: split, pad, run, weigh, and tell every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..api.configs import MicroBatchSpec
from ..data.batches import Batch, MicroBatches, fewest, joined, split_into
from ..forward import check_tokens
from ..together import Together, check_weight
from . import batches, mtp
from .batches import Layout, Rows
from .groups import Groups
from .routers import KeptBiases
from .steps import Process, Steps

if TYPE_CHECKING:
    from ..api.base import LossFn, LossWeightFn

__all__ = ["Compute"]


@dataclass(frozen=True)
class MtpLoss:
    """The loss of multi-token prediction: the mean over depths of the mean over a depth's targets.

    counts  targets of every depth in the global batch
    scale   of what is backpropagated
    total   this rank's part of the loss so far, where it `speaks` for those with the same data
    """

    steps: Steps
    counts: list[float]
    scale: float
    total: Tensor
    speaks: bool

    def __call__(self, logits: Sequence[Tensor], rows: Rows) -> Tensor:
        batch, depths = rows.batch, len(self.counts)
        masks = mtp.targets(batch, depths)
        losses = []
        for depth, (own, mask, count) in enumerate(zip(logits, masks, self.counts, strict=True), 1):
            labels = mtp.future(batch["input_ids"].long(), batch["cu_seqlens"], depth)
            logprobs = self.steps.logprobs_of(own, labels)
            # No target in the whole batch: nothing but zeros, divided by anything.
            losses.append(-torch.where(mask, logprobs, 0.0).sum() / (max(count, 1.0) * depths))
        loss = torch.stack(losses).sum()
        if self.speaks:
            self.total.add_(loss.detach().double())
        return loss * self.scale


@dataclass(frozen=True)
class Compute:
    """What a rank needs to compute with batches; `core` is Megatron-Core's TransformerConfig, `vocabulary` the number
    of tokens that the model knows."""

    steps: Steps
    layout: Layout
    groups: Groups
    core: Any
    spec: MicroBatchSpec
    together: Together
    vocabulary: int
    biases: KeptBiases

    def split(self, input_: list[Batch] | Batch) -> MicroBatches:
        """Micro-batches, as many as on the data-parallel rank that needs most. Collective."""
        place, spec = self.groups, batches.spec_for(self.spec, self.groups.pp.size())
        batch, wanted = {}, 0
        with self.together.holding():
            batch = joined(input_)
            wanted = fewest(batch, spec)
        (most,) = self.together.meet(wanted)
        self.together.same_batch(batch, place.model)
        return split_into(batch, spec, int(most))

    def run(self, parts: Iterable[Batch], process: Process, *, forward_only: bool, deeper: Any = None) -> None:
        """Micro-batches through the model, with a `process` that holds back what its user raises. Collective.

        Raises on every rank what went wrong on any; of no use are the gradients then.
        """
        lengths: list[int] = []
        with self.together.holding():
            parts = list(parts)
            for part in parts:
                check_tokens(part["input_ids"], self.vocabulary)
            lengths = [batches.padded_length(part, self.layout) for part in parts]
        self.together.same_number(len(lengths))
        if not forward_only:
            self.biases.keep()
        self.steps.run(self._rows(list(parts), lengths), process, forward_only=forward_only, deeper=deeper)
        try:
            self.together.meet()
        except Exception:
            if not forward_only:
                self.biases.settle(taken=False)
            raise

    def _rows(self, parts: list[Batch], lengths: list[int]) -> list[Rows]:
        """Of one length where Megatron-Core needs that: stages told beforehand, experts that gather all tokens."""
        core, place = self.core, self.groups
        gathered = core.num_moe_experts is not None and core.moe_token_dispatcher_type == "allgather"
        if gathered and place.ep.size() > 1:
            lengths = batches.same_lengths(lengths, place.dp, self.layout.device)
        if place.pp.size() > 1 and not core.variable_seq_lengths:
            lengths = [max(lengths)] * len(lengths)
        return [batches.cut(part, self.layout, length) for part, length in zip(parts, lengths, strict=True)]

    def loss(
        self, parts: MicroBatches, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, forward_only: bool
    ) -> dict[str, float]:
        """Forward (and backward) of all micro-batches; `loss`, the weighted one of the global batch, and where it is
        trained `mtp_loss`, on every rank.

        Raises SourceError when nothing in the global batch counts, or a weight is not finite.
        """
        weights = [0.0]
        with self.together.holding():
            weights = [float(loss_weight_fn(part)) for part in parts.parts]
        # Those with the same data count once.
        first = self.groups.model.rank() == 0
        (total,) = self.together.meet(sum(weights) if first else 0.0, op=dist.ReduceOp.SUM)
        check_weight(total)
        todo, losses = iter(weights), [torch.zeros((), dtype=torch.float64, device=self.layout.device)]

        def process(logits: Tensor, rows: Rows) -> Tensor:
            share = next(todo) / total
            loss = self.together.loss(loss_fn, *self.steps.logprobs(logits, rows), rows.batch)
            if self.groups.speaks:
                losses.append(loss.detach().double() * share)
            return loss * (share * self.groups.dp.size())  # DDP averages over them

        deeper = None if forward_only or not self.core.mtp_num_layers else self._mtp_loss(parts.parts)
        self.run(parts.parts, process, forward_only=forward_only, deeper=deeper)
        found = {"loss": torch.stack(losses).sum()}
        if deeper is not None:
            found["mtp_loss"] = deeper.total
        for value in found.values():
            dist.all_reduce(value)
        return {name: float(value) for name, value in found.items()}

    def _mtp_loss(self, parts: list[Batch]) -> MtpLoss:
        """Weighed by the targets of each depth in the global batch."""
        depths = self.core.mtp_num_layers
        counts = [[float(mask.sum()) for mask in mtp.targets(part, depths)] for part in parts]
        totals = [self._reduced(sum(of_depth)) for of_depth in zip(*counts, strict=True)]
        scale = self.core.mtp_loss_scaling_factor * self.groups.dp.size()  # DDP averages over them
        zero = torch.zeros((), dtype=torch.float64, device=self.layout.device)
        return MtpLoss(self.steps, totals, scale, zero, speaks=self.groups.speaks)

    def logprobs(self, parts: MicroBatches, output_seqlens: list[int] | None = None) -> list[Tensor]:
        """Of every sequence, in the order of the batch; on every rank, those of other stages too.

        output_seqlens  lengths that they are cut or filled up to; None: as they are
        """
        found: list[Tensor] = []

        def keep(logits: Tensor, rows: Rows) -> None:
            found.append(self.steps.logprobs(logits, rows)[0])

        self.run(parts.parts, keep, forward_only=True)
        sizes = [int(part["cu_seqlens"][-1]) for part in parts.parts]
        if not self.groups.is_last_stage:
            found = [torch.empty(n, device=self.layout.device) for n in sizes]
        packed = torch.cat(found)
        if self.groups.pp.size() > 1:
            dist.broadcast(packed, self.groups.last_stage, group=self.groups.pp)
        lengths = {item: length for part, order in zip(parts.parts, parts.order, strict=True)
                   for item, length in zip(order, part["cu_seqlens"].diff().tolist(), strict=False)}  # fmt: skip
        rows = parts.restore(list(packed.split(sizes))).split([lengths[i] for i in sorted(lengths)])
        if output_seqlens is None:
            return list(rows)
        return [_resized(row, length) for row, length in zip(rows, output_seqlens, strict=True)]

    def _reduced(self, value: float, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> float:
        if self.groups.dp.size() == 1:
            return value
        number = torch.tensor(value, dtype=torch.float64, device=self.layout.device)
        dist.all_reduce(number, op, group=self.groups.dp)
        return float(number)


def _resized(row: Tensor, length: int) -> Tensor:
    """Cut, or filled up with zeros."""
    return row[:length] if length <= len(row) else torch.cat([row, row.new_zeros(length - len(row))])
