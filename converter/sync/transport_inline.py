"""Buckets in the bodies of HTTP requests: slow, and it goes wherever the hub's messages go. For small models, and where
nothing else gets through."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ..codecs import Array
from ..errors import SyncAborted
from .transport import Peer, Place
from .wire import Header

BUFFERS = 2


class InlineTransport:
    """See `transport.Transport`. The offer: {kind}. A server takes a sender's buckets one after the other."""

    straight = True

    def __init__(self, kind: str, place: Place) -> None:
        self.kind, self.place = kind, place
        self._free: queue.Queue[Array] = queue.Queue()
        self._held: Array | None = None
        self._flying: list[Future[Any]] = []
        self._pools = [ThreadPoolExecutor(1, thread_name_prefix="areal-inline") for _ in place.clients]
        self._reason: str | None = None
        self._made = 0

    @staticmethod
    def unfit(peer: Peer) -> str:
        return ""

    def offer(self) -> dict[str, Any]:
        return {"kind": self.kind, "timeout": self.place.timeout}

    def open(self, offer: Mapping[str, Any]) -> None: ...

    def begin(self, version: int) -> None: ...

    def buffer(self) -> Array:
        while self._held is None:
            self._check()
            if self._made < BUFFERS:
                self._made += 1
                self._held = np.empty(self.place.bucket, np.uint8)
                break
            try:
                self._held = self._free.get(timeout=0.5)
            except queue.Empty:
                continue
        return self._held

    def send(self, header: Header, parts: Sequence[Array]) -> None:
        self._check()
        memory, self._held = self._held, None
        body = b"".join([header.pack(), *(part.data for part in parts)])
        left = [len(self._pools)]

        def post(client: Any) -> None:
            try:
                if self._reason is None:
                    client.post_bytes("/ws/bucket", body, timeout=self.place.timeout)
            finally:
                left[0] -= 1
                if not left[0] and memory is not None:
                    self._free.put(memory)

        clients = self.place.clients
        self._flying += [pool.submit(post, c) for pool, c in zip(self._pools, clients, strict=True)]

    def finish(self) -> None:
        for future in self._flying:
            future.result()
        self._check()
        self._flying = []

    def _check(self) -> None:
        if self._reason is not None:
            raise SyncAborted(f"The push was called off: {self._reason}.")
        for future in [f for f in self._flying if f.done()]:
            future.result()
            self._flying.remove(future)

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason

    def close(self) -> None:
        self.abort("the transport was closed")
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
