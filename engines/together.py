"""What goes wrong on one rank is raised on all of them, while they still go together.

A rank that raises in the middle of a step, in the user's loss function as a rule, leaves the others in a collective
that it will never enter: they wait for the group's timeout, and then say nothing about the reason. So an error is held
back until the ranks meet: at places where all of them come anyway, with one number each. Until then the rank goes on
with a loss of zero, so that every collective finds its partners. After the meeting the rank's own error goes on there,
and the others raise a RankError that names it; nobody has lost the thread, and the engine can be used again.

What cannot be held back (out of memory in a layer, a rank that is killed) is written to the job's store; ranks whose
collective breaks look there for the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ..converter.errors import ConfigError, ConvertError, Problem, RankError, SourceError
from .watchdog import first_line, lost_others, tell, told

__all__ = ["Together", "check_weight", "nothing_of"]


class Together:
    """The ranks of the default group, and the first error that this one holds back.

    device  where numbers are reduced
    group   all ranks, over gloo: what went wrong is said there
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self.device, self.group = device, group
        self.error: Exception | None = None
        self._raised: Exception | None = None

    # -------------------------------------------------------------------------------------------- until they meet

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep what is raised inside for the next meeting. Nothing inside may be collective."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def loss(self, loss_fn: Callable[..., Any], *args: Any) -> Tensor:
        """`loss_fn(*args)`; once anything is held back, a zero that goes backward through the first argument."""
        if self.error is None:
            with self.holding():
                return _checked(loss_fn(*args), args[0])
        return nothing_of(args[0])

    def held(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A `process_output_fn` that does not raise; once anything is held back it gives None."""

        def process(logits: Tensor, ctx: dict[str, Any]) -> Tensor | None:
            if self.error is None:
                with self.holding():
                    loss = function(logits, ctx)
                    return None if loss is None else _checked(loss, logits)
            return None

        return process

    # -------------------------------------------------------------------------------------------- where they meet

    def meet(self, *numbers: float, op: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> list[float]:
        """The largest (or sums) of all ranks' numbers. Collective.

        Raises what this rank holds back, or RankError with what others do.
        """
        if dist.get_world_size() > 1:
            found = torch.tensor([float(self.error is not None), *numbers], dtype=torch.float64, device=self.device)
            dist.all_reduce(found, op)
            fault, *numbers = found.tolist()  # type: ignore[assignment]
            if fault:
                self._raise()
        elif self.error is not None:
            self._raise()
        return list(numbers)

    def _raise(self) -> None:
        error, self.error = self.error, None
        self._raised = error
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, None if error is None else first_line(error), group=self.group)
        if error is not None:
            raise error
        problems = [Problem(f"rank {rank}", text) for rank, text in enumerate(said) if text is not None]
        raise RankError("A step failed on another rank:", problems, "All ranks have left it; none has stepped.")

    def same_number(self, number: int) -> None:
        """Meet, and see that all have as many micro-batches. Collective.

        Raises as `meet`; ConfigError, on every rank, when they do not.
        """
        most, least = self.meet(number, -number)
        if most != -least:
            raise ConfigError(
                f"Ranks have between {-least:.0f} and {most:.0f} micro-batches, this one {number}.",
                hint="Every rank goes through the same collectives: give all of them as many.",
            )

    def same_batch(self, batch: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        """Hold back RankError unless all ranks of `group` (those that share the model) have the same tokens: cut by the
        global rank, say, they would train on a mixture. Collective over the group."""
        if group.size() == 1:
            return
        own = float(_checksum(batch))
        found = torch.tensor([own, -own], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        most, least = found.tolist()
        if most != -least:
            ranks = dist.get_process_group_ranks(group)
            self.error = self.error or RankError(
                f"Ranks {', '.join(map(str, ranks))} share a model, and were given different tokens, or masks.",
                hint="Choose a rank's part of the batch by data_parallel_rank, not by its global rank.",
            )

    # -------------------------------------------------------------------------------------------- what breaks

    @contextmanager
    def working(self) -> Iterator[None]:
        """Collectives go on inside. What breaks them is told to the other ranks; a collective that broke because of
        another one raises RankError with what that one has told."""
        try:
            yield
        except ConvertError:
            self.error = None
            raise
        except Exception as error:
            held, self.error = self.error, None
            if error is self._raised or dist.get_world_size() == 1:
                raise
            if held is not None:
                raise held from error
            if not lost_others(error):
                tell(f"Rank {dist.get_rank()} failed: {_with_cause(error)}")
                raise
            reason = told()
            if reason is None:
                raise
            raise RankError(reason, hint="This rank cannot go on without it: end the process.") from error


def _with_cause(error: BaseException) -> str:
    """The first lines of an error, and of what it came from: torch wraps those of pipeline stages."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    return first_line(error) + (f" ({first_line(root)})" if root is not error else "")


def nothing_of(x: Tensor) -> Tensor:
    """0, with a gradient of zeros for `x`, whatever is in it."""
    return x[:0].sum()


def _checked(loss: Any, x: Tensor) -> Tensor:
    """A loss that can go backward to `x`, as a 0-d tensor.

    Raises ConfigError for one that is no single number, or that does not depend on `x`, unless it is 0: the loss of a
    micro-batch in which nothing counts may be a constant.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"loss_fn: expected a tensor with one number, found {found}.", hint="Return a mean.")
    loss = loss.sum()  # no view of anything: torch's halves of backward passes detach it in place
    if not x.requires_grad or loss.requires_grad:
        return loss
    if float(loss) != 0.0:
        raise ConfigError(
            f"loss_fn: its loss ({float(loss):.6g}) does not depend on what the model gave: nothing would be trained.",
            hint="Leave out detach(), item() and torch.no_grad().",
        )
    return loss + nothing_of(x)


def check_weight(total: float) -> None:
    """Raise SourceError unless the weights of a global batch's losses have a sum to divide by."""
    if not 0.0 < total < float("inf"):
        why = "no token of it is a target" if total <= 0.0 else "a micro-batch's weight is not finite"
        raise SourceError(f"The batch's loss weights sum to {total}: {why}.")


def _checksum(batch: Mapping[str, Any]) -> int:
    """Of the tokens, where sequences begin, and which tokens count."""
    values = (batch["input_ids"], batch["cu_seqlens"], batch.get("loss_mask"))
    found = 0
    for value in (value for value in values if isinstance(value, Tensor)):
        found = crc32(value.detach().cpu().to(torch.int64).contiguous().numpy().tobytes(), found)
    return found
