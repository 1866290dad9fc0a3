"""Buckets over process groups, the server's side: one group for each sender, in which the hub's rank is rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..codecs import Array
from ..errors import ChannelError
from .channel import Channel, open_channel, open_store
from .checking import MOST_SENDERS, number, seconds, text
from .inlet import Arrival, InletClosed
from .refusals import Refused
from .wire import HEADER_BYTES, Header, ProtocolError


class GroupInlet:
    """See `inlet.Inlet`. The join's transport: {kind, host, port, names: [group per sender], rank, world, timeout}."""

    fills = True

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

    def next(self, sender: int) -> Arrival:
        channel = self._channels[sender]
        header = np.empty(HEADER_BYTES, np.uint8)
        self._fill(channel, header)

        def take(header: Header, buffer: Array | None) -> Array:
            if buffer is None or buffer.nbytes != header.nbytes:
                raise ProtocolError(f"Bucket {header.number}: no buffer of {header.nbytes} bytes to receive into.")
            self._fill(channel, buffer)
            return buffer

        return Arrival(header.tobytes(), take)

    def _fill(self, channel: Channel, buffer: Array) -> None:
        try:
            channel.broadcast(buffer).wait()
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

    def close(self) -> None:
        self.abort("the inlet was closed")
        for channel in list(self._channels):
            channel.close()
