"""Buckets over process groups, the hub's side: gloo on CPUs, NCCL on GPUs. Every sender is rank 0 of a group.

A bucket is a few broadcasts: its head, of a fixed size (the header, and the numbers of its blocks), and its body, the
bytes of the blocks, cut as `parts_of` cuts them: the numbers tell both sides what comes. Long parts are sent from the
memory of the source and received in the server's. For what is not, three payloads of memory let the next one be filled
while others travel.

Heads run ahead: `head 0, head 1, body 0, head 2, body 1, …, body n`. A server that has read a head waits for its body
already while the one before it travels; otherwise nothing would, between two bodies, for as long as it takes to read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..codecs import Array
from ..errors import ChannelError
from .channel import Channel, Pending, open_channel, open_store
from .transport import Peer, Place
from .wire import ABORT, HEAD_BYTES, HEADER_BYTES, LAST, Header

BUFFERS = 3
"""One is filled, one waits for its turn, one travels."""


class GroupTransport:
    """See `transport.Transport`. The offer: {kind, host, port, names: [group per sender], timeout}."""

    straight = True

    def __init__(self, kind: str, place: Place) -> None:
        self.kind, self.place = kind, place
        self._store: Any = None
        self._channel: Channel | None = None
        self._free: list[Array] = []
        self._flying: deque[tuple[Array, list[Pending]]] = deque()  # memory, broadcasts
        self._held: tuple[Array, Sequence[Array], list[Pending]] | None = None  # a bucket whose head is on its way
        self._last: Header | None = None  # its header
        self._torn = False  # a bucket is being sent, or something broke in on it
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

    def send(self, header: Header, parts: Sequence[Array]) -> None:
        if self._channel is None:
            raise ChannelError("The transport is not open.")
        if self._torn:  # a server that gets a head where it waits for a body is ended by gloo
            raise ChannelError("Sending was broken off within a bucket: nothing can be sent after it.")
        self._channel.check()
        self._torn = True
        memory, (numbers, *body) = self._free.pop(), parts
        works = [self._channel.post(_head(header, numbers))]
        if self._held is not None:
            self._send_body(self._channel, *self._held)
        self._held, self._last = (memory, body, works), header
        if header.flags & (LAST | ABORT):
            self._send_body(self._channel, *self._held)
            self._held = None
        self._torn = False

    def _send_body(self, channel: Channel, memory: Array, body: Sequence[Array], works: list[Pending]) -> None:
        self._flying.append((memory, [*works, *(channel.post(part) for part in body)]))

    def _land(self) -> None:
        """Wait for the oldest bucket under way."""
        memory, works = self._flying.popleft()
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
            self._channel.close(self._promised())
        self._free, self._store, self._held = [], None, None
        self._flying.clear()

    def _promised(self) -> list[Array]:
        """What servers have made room for, in its order: they wait for a head, and for the body before it."""
        if self._held is None or self._last is None or self._torn:
            return []
        last = self._last
        off = Header(last.epoch, last.version, last.sender, last.number + 1, 0, 0, bytes(16), ABORT)
        return [_head(off, np.empty(0, np.uint8)), *self._held[1]]


def _head(header: Header, numbers: Array) -> Array:
    head = np.zeros(HEAD_BYTES, np.uint8)
    head[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    head[HEADER_BYTES : HEADER_BYTES + numbers.nbytes] = numbers
    return head
