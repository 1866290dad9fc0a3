"""Buckets over process groups, the hub's side: gloo on CPUs, NCCL on GPUs. Every sender is rank 0 of a group.

A bucket is two broadcasts: the header, and a payload of exactly the size that the header says. Three payloads of memory
let the next one be filled while the last ones travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..codecs import Array
from ..errors import ChannelError
from .channel import Channel, Pending, open_channel, open_store
from .transport import Peer, Place
from .wire import HEADER_BYTES, Header

BUFFERS = 3
"""One is filled, one travels, one waits behind it."""


class GroupTransport:
    """See `transport.Transport`. The offer: {kind, host, port, names: [group per sender], timeout}."""

    def __init__(self, kind: str, place: Place) -> None:
        self.kind, self.place = kind, place
        self._store: Any = None
        self._channel: Channel | None = None
        self._free: list[Array] = []
        self._flying: deque[tuple[Array, Array, list[Pending]]] = deque()  # memory, header, broadcasts
        self._aborted: str | None = None

    @staticmethod
    def unfit(peer: Peer) -> str:
        return ""

    def offer(self) -> dict[str, Any]:
        place = self.place
        self._store = open_store(place.host, 0, place.timeout, serve=True)
        names = [place.group_name(s) for s in range(place.senders)]
        return {
            "kind": self.kind,
            "host": place.host,
            "port": self._store.port,
            "names": names,
            "timeout": place.timeout,
        }

    def open(self, offer: Mapping[str, Any]) -> None:
        place, sinks = self.place, len(self.place.clients)
        name = offer["names"][place.sender]
        self._channel = open_channel(
            self.kind, offer["host"], offer["port"], name, 0, sinks + 1, place.timeout, store=self._store
        )
        if self._aborted is not None:
            self._channel.abort(self._aborted)

    def begin(self, version: int) -> None:
        self._free += [np.empty(self.place.bucket, np.uint8) for _ in range(BUFFERS - len(self._free))]

    def buffer(self) -> Array:
        if not self._free:
            self._land()
        return self._free[-1]

    def send(self, header: Header, payload: Array) -> None:
        if self._channel is None:
            raise ChannelError("The transport is not open.")
        memory = self._free.pop()
        packed = np.frombuffer(bytearray(header.pack()), np.uint8)
        works = [self._channel.broadcast(packed), self._channel.broadcast(payload)]
        self._flying.append((memory, packed, works))

    def _land(self) -> None:
        """Wait for the oldest bucket under way."""
        memory, _, works = self._flying.popleft()
        for work in works:
            work.wait()
        self._free.append(memory)

    def finish(self) -> None:
        while self._flying:
            self._land()

    def abort(self, reason: str) -> None:
        self._aborted = self._aborted or reason
        if self._channel is not None:
            self._channel.abort(reason)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._free, self._store = [], None
        self._flying.clear()


assert HEADER_BYTES == 64  # what both sides broadcast before they know anything
