"""Ranks that watch each other: when one dies or hangs the others say which, and stop.

A collective waits for a dead rank until its own timeout, which is long, and then says nothing about who is missing. So
every rank has a thread that beats into the store that the process group was made from, and watches the next rank's
beats. Whoever fails writes why, if it still can; whoever sees its neighbour silent writes that. Everybody reads it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..converter.errors import RankError

__all__ = ["FOLLOWED", "Watchdog", "first_line", "lost_others", "shared_store", "stop_process", "tell", "told"]

FOLLOWED = 3
"""Exit code of a rank that ends because another one has failed."""

_WORDS = ("gloo", "nccl", "connection", "timed out", "timeout", "peer", "broken pipe", "socket")

_FAILED, _BEAT = "areal/failed", "areal/beat"
_DONE = b"done"


def stop_process(message: str) -> None:
    """End this process from a thread: the main thread sits in a collective that no signal handler of Python's can
    interrupt."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    os._exit(FOLLOWED)


def lost_others(error: BaseException) -> bool:
    """Whether this looks like a collective that lost a rank: there is no exception type for it in gloo."""
    if isinstance(error, RankError):
        return isinstance(error.__cause__, RuntimeError)
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


def shared_store() -> Any:
    """Of the default process group, over a connection of its own: the main thread may wait in the group's for long."""
    import torch.distributed as dist

    default: Any = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("watchdog", default.clone())


def tell(reason: str) -> None:
    """Write why this rank has failed where watchdogs, and ranks that look for a reason (`told`), find it."""
    with suppress(RuntimeError, ValueError):  # the store or the group is gone: nobody is left to be told
        shared_store().compare_set(_FAILED, "", reason)


def told() -> str | None:
    """What the first rank that failed has written, if any has."""
    try:
        store = shared_store()
        return store.get(_FAILED).decode(errors="replace") if store.check([_FAILED]) else None
    except (RuntimeError, ValueError):
        return None


class Watchdog:
    """Watches over `ranks` processes through `store` (a `torch.distributed` store of its own, or a clone).

    `silent` seconds without a beat mean that a rank is gone. When one is, `stop` is called after `grace` seconds, in
    which the main thread may have come to an end by itself (its collective fails as well, as a rule).
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        *,
        silent: float = 60.0,
        period: float = 0.5,
        grace: float = 5.0,
        stop: Callable[[str], None] = stop_process,
    ) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        self.silent, self.period, self.grace, self.stop = silent, period, grace, stop
        self.reason: str | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="areal-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.ranks > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Leave: in peace, or with the reason written for the others."""
        self._end.set()
        if self.ranks == 1:
            return
        try:
            if error is not None and not isinstance(error, RankError):
                self._tell(f"Rank {self.rank} failed: {first_line(error)}")
            self.store.set(f"{_BEAT}/{self.rank}", _DONE)
        except RuntimeError:
            pass  # the store is gone with the rank that held it: nobody is left to be told
        self._thread.join(self.period * 4)

    def explain(self, error: BaseException, wait: float | None = None) -> BaseException:
        """Why a collective failed: a RankError that names the rank, or `error` when nobody else is to blame.

        Waits until a silent rank has been silent long enough, at most `wait` seconds; not at all for an error that is
        no lost connection.
        """
        if self.ranks == 1 or not lost_others(error):
            return error
        end = time.monotonic() + (self.silent + 4 * self.period if wait is None else wait)
        while self.reason is None and time.monotonic() < end and self._thread.is_alive():
            time.sleep(self.period / 4)
        if self.reason is None or self.reason.startswith(f"Rank {self.rank} "):
            return error
        return RankError(self.reason, hint="This rank stops too. The last complete training state is untouched.")

    # ---------------------------------------------------------------------------------------- the thread

    def _tell(self, reason: str) -> None:
        """The first reason stays."""
        self.store.compare_set(_FAILED, "", reason)

    def _watch(self) -> None:
        neighbour = (self.rank + 1) % self.ranks
        count, seen, since = 0, b"", time.monotonic()
        while not self._end.wait(self.period):
            try:
                count += 1
                self.store.set(f"{_BEAT}/{self.rank}", str(count))
                key = f"{_BEAT}/{neighbour}"
                beat = self.store.get(key) if self.store.check([key]) else b""
                now = time.monotonic()
                if beat != seen:
                    seen, since = beat, now
                if beat != _DONE and now - since > self.silent:
                    self._tell(f"Rank {neighbour} has given no sign of life for {now - since:.0f} s: dead or stuck.")
                if self.store.check([_FAILED]):
                    self.reason = self.store.get(_FAILED).decode(errors="replace")
            except RuntimeError as error:
                self.reason = f"The rank that holds the store is gone (rank 0, as a rule): {first_line(error)}"
            if self.reason is not None:
                if not self._end.wait(self.grace):
                    self.stop(self.reason)
                return


def first_line(error: BaseException) -> str:
    """The kind of an error and its first line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
