"""An embedding whose tied head is on another pipeline stage: two copies that are trained as one parameter.

Both copies get the sum of their gradients, which is the one parameter's gradient; they start equal and every step is
elementwise, so that they stay equal to the bit. The gradient norm counts it once, where the embedding is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..sharded_optim import local
from .dims import ArchonParallelDims
from .model import Decoder
from .schedules import Pipeline


@dataclass(frozen=True)
class TiedCopies:
    """The copies of this rank.

    embedding, head  None where it is on another rank
    group            the two ranks with the same part of the two; None: both are here, or none is
    """

    embedding: Tensor | None
    head: Tensor | None
    group: dist.ProcessGroup | None

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Collective over the two ranks."""
        here = [p.grad for p in (self.embedding, self.head) if p is not None and p.grad is not None]
        if len(here) == 2:
            first, second = map(local, here)
            second.copy_(first.add_(second))
        elif here and self.group is not None:
            dist.all_reduce(local(here[0]), group=self.group)

    def counted(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Without the head's, which is the embedding's."""
        again = None if self.head is None else self.head.grad
        return [gradient for gradient in gradients if gradient is not again]


def tied_copies(pipeline: Pipeline, parts: Sequence[Decoder], dims: ArchonParallelDims) -> TiedCopies | None:
    """The copies of a tied embedding; None where there is just one parameter, or nothing is tied. Collective."""
    args = parts[0].args
    if not args.tied or len(pipeline.parts) == 1:
        return None
    embeddings = [part.tok_embeddings.weight for part in parts if part.tok_embeddings is not None]
    heads = [part.output.weight for part in parts if part.output is not None]
    group: dist.ProcessGroup | None = None
    if pipeline.first_rank != pipeline.last_rank:
        for ranks in dims.groups("pp"):  # every rank has to make every group
            pair = [ranks[pipeline.first_rank], ranks[pipeline.last_rank]]
            made: Any = dist.new_group(pair)
            group = made if dist.get_rank() in pair else group
    return TiedCopies(next(iter(embeddings), None), next(iter(heads), None), group)
