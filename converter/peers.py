"""The ranks of one job, as far as moving weights needs them: one collective, and who does what.

Whoever has process groups passes the collective in; nothing here knows of torch.distributed. A step that several ranks
take together ends for all of them when it fails for one: nobody waits for a rank that has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import ConvertError, Problems, RankError

K = TypeVar("K", bound=Hashable)


def _alone(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True, slots=True)
class Peers:
    """This process and the others of its job; by default there are no others.

    exchange   gives every rank the values of all ranks, in their order (an all-gather of objects)
    """

    rank: int = 0
    world: int = 1
    exchange: Callable[[Any], list[Any]] = _alone

    def together(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Take a step on every rank, and return what it gave on each.

        Where the action raises, its own error goes on there, and every other rank raises a RankError that tells of it.
        """
        value, failed = None, None
        try:
            value = action()
        except Exception as error:
            failed = error
        answers = self.exchange((None if failed is None else _said(failed), value))
        if failed is not None:
            raise failed
        problems = Problems()
        for rank, (text, _) in enumerate(answers):
            if text is not None:
                problems.add(f"rank {rank}", text)
        problems.raise_as(RankError, f"{what} failed on another rank:")
        return [value for _, value in answers]

    def agree(self, what: str, value: Any) -> None:
        """Raise RankError unless every rank has an equal value."""
        answers = self.exchange(value)
        if any(answer != answers[0] for answer in answers):
            odd = next(rank for rank, answer in enumerate(answers) if answer != answers[0])
            raise RankError(
                f"{what} differs between ranks: {answers[0]!r} on rank 0, {answers[odd]!r} on rank {odd}.",
                hint="All ranks must be given the same config, mesh and options.",
            )


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, ConvertError) else f"{type(error).__name__}: {error}"


def share_out(held: Mapping[K, tuple[int, Sequence[int]]], world: int) -> dict[K, int]:
    """Choose one of its holders for everything that is held; the same on every rank, and the bytes spread.

    held   what → (bytes, the ranks that have it); the order of the mapping decides between equals
    """
    chosen: dict[K, int] = {}
    load = [0] * world
    for what, (size, ranks) in sorted(held.items(), key=lambda item: (len(item[1][1]) > 1, -item[1][0])):
        rank = chosen[what] = min(ranks, key=lambda r: (load[r], r))
        load[rank] += size
    return chosen
