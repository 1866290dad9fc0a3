"""Micro-batches through the stages of a pipeline: all ranks of a pp group call with the same ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.batches import Batch
from ..forward import Forward, Rows
from ..together import nothing_of
from .dims import ArchonParallelDims
from .model import Decoder
from .schedules import Pipeline, Shapes, forward_of, run_schedule, schedule_of, stage_of

Process = Callable[[int, Tensor, Rows], Tensor | None]
"""(number of the micro-batch, logits (rows, vocabulary), its rows) → what is backpropagated, if anything."""


@dataclass(frozen=True)
class Pipelined:
    """The stages of this rank.

    parts    the stages, in the order of `pipeline.stages_of` this rank
    compute  dtype of hidden states and logits
    width    of the last stage's result: columns of the logits here, or 1
    """

    pipeline: Pipeline
    parts: Sequence[Decoder]
    dims: ArchonParallelDims
    forward: Forward
    compute: torch.dtype
    width: int

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is here."""
        return self.dims.rank("pp") == self.pipeline.last_rank

    def number(self, wanted: int, divisor: int) -> int:
        """The least number of micro-batches of at least `wanted` that the schedule takes and `divisor` divides.

        Raises ConfigError where a CSV file is for fewer.
        """
        number = self.pipeline.micro_batches(wanted)
        while number % divisor:
            number = self.pipeline.micro_batches(number + 1)
        return number

    def rows(self, batches: Sequence[Batch], *, forward_only: bool) -> list[Rows]:
        """Micro-batches, padded to the length of the longest. Raises ConfigError, unless going forward only, when the
        schedule does not run with so many."""
        if batches and not forward_only:
            self.pipeline.check(len(batches))
        total = max((self.forward.padded(len(batch["input_ids"])) for batch in batches), default=0)
        return [self.forward.rows(batch, total) for batch in batches]

    def run(self, rows: Sequence[Rows], process: Process, *, forward_only: bool) -> None:
        """All micro-batches, of one length; `process` is called where the last stage is."""
        if not rows:
            return
        stages = self._stages(rows[0].total)
        inputs = [one.ids[None] for one in rows]
        settings = [{"packing": one.packing, "positions": one.positions} for one in rows]
        if forward_only:

            def look(output: Tensor, number: int) -> None:
                process(number, output.squeeze(0), rows[number])

            with torch.no_grad():
                run_schedule(forward_of(self.pipeline, stages, len(rows), look), inputs, settings)
            return

        def loss_of(output: Tensor, number: int) -> Tensor:
            loss = process(number, output.squeeze(0), rows[number])
            # Something to go backward from, which leaves no gradient.
            return nothing_of(output) if loss is None else loss

        run_schedule(schedule_of(self.pipeline, stages, len(rows), loss_of), inputs, settings, range(len(rows)))

    def _stages(self, total: int) -> list[Any]:
        """torch's stage objects for micro-batches of so many tokens: they are told the shapes beforehand."""
        dims, hidden = self.dims, self.parts[0].args.hidden
        tokens = total // dims.cp
        shapes = Shapes((1, tokens), (1, tokens // dims.tp, hidden), (1, tokens, self.width), self.compute)
        numbers = self.pipeline.stages_of(dims.rank("pp"))
        device, group = self.forward.device, dims.group("pp")
        return [
            stage_of(self.pipeline, number, part, shapes, device, group)
            for number, part in zip(numbers, self.parts, strict=True)
        ]

    # -------------------------------------------------------------------------------------------- on all stages

    def everywhere(self, found: Mapping[int, Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """What the last stage has found for each micro-batch (fp32, `sizes` long), on every stage. Collective."""
        device = self.forward.device
        whole = torch.empty(sum(sizes), device=device)
        if self.has_loss:
            whole = torch.cat([found[number] for number in range(len(sizes))])
        self._tell(whole)
        return list(whole.split(list(sizes)))

    def told(self, value: float) -> float:
        """The last stage's number, on every stage. Collective."""
        number = torch.tensor(value, dtype=torch.float64, device=self.forward.device)
        self._tell(number)
        return float(number)

    def _tell(self, value: Tensor) -> None:
        group = self.dims.group("pp")
        dist.broadcast(value, dist.get_global_rank(group, self.pipeline.last_rank), group=group)
