"""Hubs, trainer ranks and servers that end themselves (SIGKILL) at a named step of a push, for
`test_sync_failures`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

from areal_convert.converter import Mesh
from areal_convert.converter.peers import Peers
from areal_convert.converter.sync.commits import Swap
from areal_convert.converter.sync.fleet import Fleet
from areal_convert.converter.sync.hub import WeightSync
from areal_convert.converter.sync.protocol_sink import ProtocolSink
from areal_convert.converter.sync.rounds import Round
from areal_convert.converter.sync.sending import Sender
from areal_convert.engines.ranks import peers_of
from sync_server import PRELOAD, start_forkserver

SMALL: dict[str, Any] = {"transport": "gloo", "bucket": 1 << 16, "block": 1 << 13, "timeout": 10.0}

Step = tuple[type, str, bool, int]
"""Class and method; whether after it (else before); at which call."""

STEPS: dict[str, Step] = {
    "leased": (Round, "agree_on", False, 1),
    "joining": (Fleet, "join", True, 1),
    "joined": (Fleet, "await_joined", True, 1),
    "prepared": (Fleet, "prepare", True, 1),
    "sending": (Sender, "_send_bucket", True, 2),
    "sent": (Fleet, "seal", False, 1),
    "staged": (Fleet, "decide", False, 1),
    "journalled": (Fleet, "decide", True, 1),
    "told 1": (ProtocolSink, "commit", True, 1),
    "told 2": (ProtocolSink, "commit", True, 2),
    "told 3": (ProtocolSink, "commit", True, 3),
}
"""A hub's steps in their order. From `journalled` on the new version is decided."""


def interposed(step: str, act: Callable[[], None]) -> tuple[type, str, Callable[..., Any]]:
    """What to put in the place of a step's method, for `act` to be called there once. Calls take turns, so that after
    the second commit the third has not begun."""
    owner, name, after, nth = STEPS[step]
    original, turn, calls = getattr(owner, name), threading.Lock(), [0]

    def method(*arguments: Any, **more: Any) -> Any:
        with turn:
            calls[0] += 1
            if calls[0] == nth and not after:
                act()
            found = original(*arguments, **more)
            if calls[0] == nth and after:
                act()
            return found

    return owner, name, method


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in_commit() -> None:
    """In a server: it ends inside of its critical section, when the new weights are installed and nobody knows yet."""
    original = Swap.__call__

    def swap_and_die(self: Swap) -> None:
        original(self)
        die()

    setattr(Swap, "__call__", swap_and_die)  # noqa: B010 - an assignment to a method is none that types allow


def hub_that_dies(source: str, urls: Sequence[str], journal: str, step: str) -> int | None:
    """A hub in a process of its own that pushes, and is killed at a step. Returns the exit code."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    start_forkserver()
    process = context.Process(target=_dying_hub, args=(source, list(urls), journal, step), daemon=True)
    process.start()
    process.join(30)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"the hub neither died nor ended at {step!r}")
    return process.exitcode


def _dying_hub(source: str, urls: list[str], journal: str, step: str) -> None:
    setattr(*interposed(step, die))
    with WeightSync(source, urls, journal=journal, **SMALL) as sync:
        sync.push()


def rank_that_dies(source: str, urls: Sequence[str], journal: str, step: str, answer: str) -> None:
    """Two ranks share a checkpoint out; the second one is killed as it comes to a step. What became of the first one's
    push is written to a file."""
    peers = peers_of()
    if peers.rank == 1:
        together = Peers.together

        def dying(self: Peers, what: str, action: Any) -> Any:
            if what == step:
                die()
            return together(self, what, action)

        if step == "a bucket":
            setattr(*interposed("sending", die))
        else:
            _set_together(dying)
    with WeightSync(source, urls, mesh=Mesh(), rank=peers.rank, peers=peers, journal=journal, **SMALL) as sync:
        try:
            sync.push()
        except Exception as error:
            if peers.rank == 0:
                with open(answer, "w") as out:
                    out.write(f"{type(error).__name__}: {error}")
            raise


def _set_together(method: Callable[..., Any]) -> None:
    Peers.together = method
