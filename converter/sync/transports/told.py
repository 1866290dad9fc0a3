"""Transports whose buckets lie somewhere, and are told of by HTTP: a window of buckets, and a few threads a server.

Servers answer when a bucket is applied. That frees its place in the window; a refusal, or a server that is gone, ends
the epoch for this sender.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from ...codecs import Array
from ...errors import ConvertError, SyncAborted
from ..transport import Place
from ..wire import Header

if TYPE_CHECKING:
    from ..client import Client

AT_ONCE = 2
"""Messages that one server has at a time: it applies one bucket while the next one's message travels."""


class Told:
    """Base of the hub's side. `message` says where a bucket lies; everything else is here.

    window  buckets that may be on their way, each with memory of its own (`begin_with`)
    """

    what = "bucket"
    straight = False

    def __init__(self, kind: str, place: Place, window: int) -> None:
        self.kind, self.place, self.window = kind, place, window
        self._turn = threading.Condition()
        self._left: list[int] = [0] * window  # servers that have not answered, for each place in the window
        self._memory: Sequence[Array] = ()
        self._next = 0
        self._error: ConvertError | None = None
        self._pools = [ThreadPoolExecutor(AT_ONCE, f"areal-{kind}") for _ in place.clients]

    def begin_with(self, memory: Sequence[Array]) -> None:
        """The memory of every place in the window."""
        self._memory = memory

    def begin(self, version: int) -> None:
        """A push begins."""

    def buffer(self) -> Array:
        self._wait_for(self._next)
        return self._memory[self._next]

    def send(self, header: Header, parts: Sequence[Array]) -> None:
        self.check()
        index = self._next
        self._wait_for(index)  # where nobody asked for `buffer`: a bucket without blocks
        self._next = (index + 1) % self.window
        told = {"sender": header.sender, "number": header.number, "header": header.pack().hex(), "epoch": header.epoch}
        message = told | self.message(index, header, parts)
        with self._turn:
            self._left[index] = len(self.place.clients)
        for pool, client in zip(self._pools, self.place.clients, strict=True):
            pool.submit(self._tell, client, message, index)

    def message(self, index: int, header: Header, parts: Sequence[Array]) -> dict[str, Any]:
        """Where a bucket lies, as fields of its message."""
        raise NotImplementedError

    def _tell(self, client: Client, message: dict[str, Any], index: int) -> None:
        error: ConvertError | None = None
        try:
            if self._error is None:
                client.post(f"/ws/{self.what}", message, timeout=self.place.timeout)
        except ConvertError as failed:
            error = failed
        except Exception as failed:  # a thread's exception would be lost, and the window wait for ever
            error = SyncAborted(f"{client.url}: {type(failed).__name__}: {failed}")
        with self._turn:
            self._left[index] -= 1
            self._error = self._error or error
            self._turn.notify_all()

    def _wait_for(self, index: int) -> None:
        with self._turn:
            while self._left[index] and self._error is None:
                self._turn.wait()
        self.check()

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        for index in range(self.window):
            self._wait_for(index)

    def abort(self, reason: str) -> None:
        with self._turn:
            self._error = self._error or SyncAborted(f"The push was aborted: {reason}.")
            self._turn.notify_all()

    def close(self) -> None:
        self.abort("the transport was closed")
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        self._memory = ()


def spare_memory(window: int, nbytes: int) -> list[Array]:
    """Memory for a window of buckets that lie elsewhere in the end."""
    return [np.empty(nbytes, np.uint8) for _ in range(window)]
