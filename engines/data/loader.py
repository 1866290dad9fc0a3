"""Batches in an order that only the seed and the epoch decide, and a position that can be resumed.

The position is that of the whole training, not of a rank: epoch and samples taken. Ranks take their shares of every
global batch, so that a run resumes in the middle of an epoch on any number of ranks with the very next sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ...converter.errors import ConfigError, Problems, SourceError
from .batches import Batch

__all__ = ["Loader", "order"]

SCHEMA = 1


class Data(Protocol):
    """What a loader takes batches from."""

    def __len__(self) -> int: ...
    @property
    def digest(self) -> str: ...
    def batch(self, which: Sequence[int]) -> Batch: ...


def order(size: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray[Any, Any]:
    """The samples of an epoch: a permutation by PCG64, whose stream numpy keeps the same between versions."""
    if not shuffle:
        return np.arange(size)
    keys = np.random.PCG64([seed, epoch]).random_raw(size)
    return np.argsort(keys, kind="stable")


class Loader:
    """Gives rank `rank` of `ranks` its part of each global batch of `batch_size` samples. What is left over at the end
    of an epoch, less than a batch, is not used in it. `group` neighbours stay together, in order and on one rank.

    Raises ConfigError when the data is smaller than a batch, a batch has not one group for every rank, or groups do not
    come out even.
    """

    def __init__(
        self,
        data: Data,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        ranks: int = 1,
        group: int = 1,
    ) -> None:
        problems = Problems()
        if batch_size < ranks * group:
            what = f"{batch_size} samples for {ranks} data-parallel ranks; each needs {group} at least"
            problems.add("data.batch_size", what)
        if len(data) < batch_size:
            problems.add("data.batch_size", f"{batch_size}, but the data has only {len(data)} samples")
        for name, size in (("data.batch_size", batch_size), ("data.path", len(data))):
            if size % group:
                problems.add(name, f"{size} samples are not whole groups of {group}")
        problems.raise_as(ConfigError, "Batches cannot be made of this data.")
        self.data, self.batch_size, self.group = data, batch_size, group
        self.seed, self.shuffle, self.rank, self.ranks = seed, shuffle, rank, ranks
        self.epoch = self.index = 0
        self._order: tuple[int, np.ndarray[Any, Any]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return len(self.data) // self.batch_size

    def next(self) -> Batch:
        """This rank's part of the next global batch: every `ranks`-th of its groups."""
        if self.index + self.batch_size > len(self.data):
            self.epoch, self.index = self.epoch + 1, 0
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, order(len(self.data) // self.group, self.seed, self.epoch, self.shuffle)
        groups = self._order[1][self.index // self.group : (self.index + self.batch_size) // self.group]
        self.index += self.batch_size
        mine = groups[self.rank :: self.ranks].tolist()
        return self.data.batch([g * self.group + k for g in mine for k in range(self.group)])

    def state_dict(self) -> dict[str, Any]:
        """Where the training stands in the data, as JSON. The generator's state is the seed and the epoch."""
        return {
            "schema": SCHEMA,
            "epoch": self.epoch,
            "index": self.index,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": len(self.data),
            "digest": self.data.digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there. Raises SourceError when the data, the seed or the order is another than then."""
        mine, problems = self.state_dict(), Problems()
        for name in ("schema", "seed", "shuffle", "samples", "digest"):
            if state.get(name) != mine[name]:
                problems.add(name, f"{state.get(name)!r} when it was saved, {mine[name]!r} now")
        if not problems and not (state["epoch"] >= 0 and 0 <= state["index"] <= len(self.data)):
            problems.add("position", f"epoch {state['epoch']}, sample {state['index']} is outside the data")
        problems.raise_as(
            SourceError,
            "The position in the data cannot be resumed: this is not the data that the run was trained on.",
            "Give the same files, tokenizer, seed and data options as before.",
        )
        self.epoch, self.index = state["epoch"], state["index"]
