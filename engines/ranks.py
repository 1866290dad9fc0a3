"""The ranks of a process group as `converter.peers` wants them: objects gathered over gloo, failures told to all."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..converter.errors import RankError
from ..converter.peers import Peers


def peers_of(group: dist.ProcessGroup | None = None) -> Peers:
    """All ranks of a group that moves objects on the CPU; without torch.distributed, this process alone.

    group   a gloo group, or None for the default one (which then must have a CPU backend)
    """
    if not dist.is_initialized():
        return Peers()
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world == 1:
        return Peers()

    def exchange(value: Any) -> list[Any]:
        answers: list[Any] = [None] * world
        try:
            dist.all_gather_object(answers, value, group=group)
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"Rank {rank} lost the others: {str(error).splitlines()[0][:200]}",
                hint="A rank died, or did not come here within the group's timeout; see its own output.",
            ) from error
        return answers

    return Peers(rank, world, exchange)
