"""Buckets over process groups, the server's side: one group for each sender, in which the hub's rank is rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..codecs import Array
from ..errors import ChannelError
from .blocks import NUMBER_BYTES
from .channel import Channel, Pending, open_channel, open_store
from .checking import MOST_SENDERS, number, seconds, text
from .inlet import InletClosed, Stream
from .refusals import Refused
from .wire import HEAD_BYTES, HEADER_BYTES, LAST, Header


class GroupInlet:
    """See `inlet.Inlet`. The join's transport: {kind, host, port, names: [group per sender], rank, world, timeout}."""

    def __init__(self, transport: Mapping[str, Any], timeout: float) -> None:
        self.kind = str(transport["kind"])
        self._host, self._port = text(transport, "host"), number(transport, "port", 1)
        self._rank, self._world = number(transport, "rank", 1), number(transport, "world", 2)
        names = transport.get("names")
        if not isinstance(names, list) or not names or not all(isinstance(n, str) and n for n in names):
            raise Refused("bad_transport", "names: no list of the senders' groups.")
        if self._rank >= self._world or len(names) > MOST_SENDERS or len(set(names)) < len(names):
            raise Refused("bad_transport", f"rank {self._rank} of {self._world}, groups {names[:5]}: cannot be joined.")
        self._names: list[str] = names
        self._timeout = seconds(transport, "timeout", timeout)
        self._channels: list[Channel] = []
        self._heads: dict[int, tuple[Array, Pending]] = {}  # by sender: what comes next
        self._filling: dict[int, list[Pending]] = {}  # by sender, which has a thread of its own
        self._aborted: str | None = None

    def open(self) -> None:
        """Join the groups in the order of the senders."""
        store = open_store(self._host, self._port, self._timeout)
        for name in self._names:
            if self._aborted is not None:
                raise InletClosed(f"The join was aborted: {self._aborted}.")
            self._channels.append(
                open_channel(
                    self.kind, self._host, self._port, name, self._rank, self._world, self._timeout, store=store
                )
            )
        if self._aborted is not None:
            self.close()

    def begin(self, senders: int, bucket: int) -> None:
        if senders != len(self._channels):
            raise Refused("bad_manifest", f"The manifest has {senders} senders; {len(self._channels)} joined.")

    def next(self, sender: int) -> Stream:
        """See `transport_groups` for what comes when."""
        channel = self._channels[sender]
        head, coming = self._heads.pop(sender, None) or self._head(channel)
        self._wait(coming)

        def numbers(header: Header) -> Array:
            return head[HEADER_BYTES:][: header.blocks * NUMBER_BYTES]

        def fill(header: Header, places: Sequence[Array]) -> Callable[[], None]:
            if not header.flags & LAST:
                self._heads[sender] = self._head(channel)
            body: list[Pending] = []
            filling = self._filling[sender] = [p for p in self._filling.get(sender, ()) if not p.settled(0)]
            for place in places:
                body.append(channel.broadcast(place))
                filling.append(body[-1])  # each at once: an abort may come before the next one

            def wait() -> None:
                for part in body:
                    self._wait(part)

            return wait

        return Stream(head[:HEADER_BYTES].tobytes(), numbers, fill)

    @staticmethod
    def _head(channel: Channel) -> tuple[Array, Pending]:
        """Where the next head comes."""
        head = np.empty(HEAD_BYTES, np.uint8)
        return head, channel.broadcast(head)

    def _wait(self, pending: Pending) -> None:
        try:
            pending.wait()
        except ChannelError as error:
            if self._aborted is not None:
                raise InletClosed(f"The push was aborted: {self._aborted}.") from error
            raise

    def accept(self, what: str, message: Mapping[str, Any], data: bytes | memoryview | None = None) -> dict[str, Any]:
        raise Refused("bad_request", f"Buckets come over {self.kind} in this epoch, not by HTTP.")

    def abort(self, reason: str) -> None:
        self._aborted = self._aborted or reason
        for channel in list(self._channels):
            channel.abort(reason)

    def settled(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        filling = [pending for some in list(self._filling.values()) for pending in some]
        return all(pending.settled(max(0.0, end - time.monotonic())) for pending in filling)

    def close(self) -> None:
        self.abort("the inlet was closed")
        for channel in list(self._channels):
            channel.close()
