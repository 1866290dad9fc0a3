"""Shared memory: hub and servers on one host. Any number of servers read the very bytes that the hub has written.

Each sender has a ring of segments, of one bucket each. A sender fills one and tells every server by `POST /ws/bucket`
{sender, number, segment, header}; the answer says that the bucket is applied, and is the credit: a segment is filled
again when all servers have answered. The first sender makes all segments, and takes their names away as soon as
everybody has said, in a small segment that all may write, that it has mapped them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...codecs import Array
from ...errors import ServerRefused
from ..inlet import Arrival, Offered
from ..refusals import Refused
from ..transport import Peer, Place
from ..wire import Header, ProtocolError
from .segments import Segment, SegmentError, available, host_id, sweep
from .told import Told

SEGMENTS = 3
"""Of a ring: one is filled while the servers read another, and one waits."""

TOKEN = 16
"""Bytes at the beginning of the control segment by which everybody knows that it sees what the hub has made."""

SERVERS, SENDERS, CONTROL = 64, 2048, 4096
"""The control segment: a byte for every server (by its rank), a byte for every sender, and its size."""

_LOOK = 0.001
"""Seconds between two looks at the control segment."""


class ShmTransport(Told):
    """The hub's side; see `transport.Transport`."""

    what = "bucket"

    def __init__(self, kind: str, place: Place) -> None:
        super().__init__(kind, place, SEGMENTS)
        self._rings: list[list[Segment]] = []
        self._control: Segment | None = None

    @staticmethod
    def unfit(peer: Peer) -> str:
        """Why shared memory cannot reach a server, or ""."""
        if not available():
            return "this machine has no /dev/shm"
        if not peer.host_id:
            return "the server does not say which shared memory it sees"
        return "" if peer.host_id == host_id() else "it is on another host, or in a container with memory of its own"

    def offer(self) -> dict[str, Any]:
        sweep()
        place = self.place
        if place.senders > CONTROL - SENDERS or len(place.clients) >= SENDERS - SERVERS:
            raise ServerRefused("bad_transport", f"shm: {place.senders} senders and {len(place.clients)} are too many.")
        self._control = Segment.make(CONTROL)
        token = secrets.token_bytes(TOKEN)
        self._control.array[:TOKEN] = np.frombuffer(token, np.uint8)
        for _ in range(place.senders):
            self._rings.append([Segment.make(place.bucket) for _ in range(SEGMENTS)])
        names = [[segment.name for segment in ring] for ring in self._rings]
        return {
            "kind": self.kind,
            "control": self._control.name,
            "segments": names,
            "token": token.hex(),
            "host": host_id(),
        }

    def open(self, offer: Mapping[str, Any]) -> None:
        sender = self.place.sender
        if self._control is None:
            self._control = _control(offer)
            self._rings = [[] for _ in range(sender)] + [
                [Segment.attach(n, write=True) for n in offer["segments"][sender]]
            ]
        self._control.array[SENDERS + sender] = 1
        if self._control.made:
            self._await_all(self._control.array)
            for segment in [self._control, *(s for ring in self._rings for s in ring)]:
                segment.unlink()
        self.begin_with([segment.array for segment in self._rings[sender]])

    def _await_all(self, control: Array) -> None:
        """Until all servers and senders have mapped the memory. Raises SegmentError after the timeout."""
        end, servers = time.monotonic() + self.place.timeout, len(self.place.clients)
        while True:
            absent = [f"server {self.place.clients[n].url}" for n in range(servers) if not control[SERVERS + 1 + n]]
            absent += [f"sender {n}" for n in range(self.place.senders) if not control[SENDERS + n]]
            if not absent:
                return
            self.check()
            if time.monotonic() > end:
                raise SegmentError(
                    f"shm: {', '.join(absent)} did not map the shared memory within {self.place.timeout:g} s."
                )
            time.sleep(_LOOK)

    def message(self, index: int, header: Header, parts: Sequence[Array]) -> dict[str, Any]:
        return {"segment": index}

    def close(self) -> None:
        super().close()
        for segment in [s for ring in self._rings for s in ring] + ([self._control] if self._control else []):
            segment.close()
        self._rings, self._control = [], None


def _control(offer: Mapping[str, Any]) -> Segment:
    """The control segment of an offer. Raises SegmentError when it is not what the hub has made."""
    theirs, name = offer.get("host"), offer.get("control")
    if theirs != host_id() or not isinstance(name, str):
        raise SegmentError(
            f"shm: the hub sees another shared memory ({theirs}) than this process ({host_id() or 'none'}).",
            hint="They are on two hosts, or in two containers; transport gloo reaches further.",
        )
    control = Segment.attach(name, write=True)
    if control.array.nbytes != CONTROL or control.array[:TOKEN].tobytes().hex() != offer.get("token"):
        raise SegmentError(f"shm: {name} does not hold what the hub wrote.")
    return control


class ShmInlet(Offered):
    """The server's side. `transport`: {control, segments: [[name, …] per sender], token, host, rank}."""

    kind = "shm"
    credit = SEGMENTS

    def __init__(self, transport: Mapping[str, Any], timeout: float) -> None:
        super().__init__(transport, timeout)
        self._rings: list[list[Segment]] = []
        names = transport.get("segments")
        if not (isinstance(names, list) and all(isinstance(ring, list) and ring for ring in names)):
            raise Refused("bad_transport", "shm: `segments` is no list of every sender's segments.")
        if not all(isinstance(name, str) for ring in names for name in ring):
            raise Refused("bad_transport", "shm: a segment's name is no text.")
        self._names: list[list[str]] = names
        rank = transport.get("rank")
        if not isinstance(rank, int) or not 0 < rank < SENDERS - SERVERS:
            raise Refused("bad_transport", f"shm: rank {rank!r} is none of a server's.")
        self._rank = rank

    def open(self) -> None:
        """Map every segment, and say so."""
        control = _control(self.transport)
        self._rings = [[Segment.attach(name) for name in ring] for ring in self._names]
        control.array[SERVERS + self._rank] = 1
        control.close()

    def make(self, what: str, message: Mapping[str, Any], data: bytes | memoryview | None) -> Arrival:
        if what != "bucket" or data is not None:
            raise Refused("bad_request", "shm: a bucket is told by JSON {sender, number, segment, header}.")
        header, sender = header_of(message), message.get("sender")
        if not isinstance(sender, int) or not 0 <= sender < len(self._rings):
            raise Refused("bad_request", f"shm: there is no sender {sender!r}; {len(self._rings)} joined.")
        ring, index = self._rings[sender], message.get("segment")
        if not isinstance(index, int) or not 0 <= index < len(ring):
            raise Refused("bad_request", f"shm: there is no segment {index!r}; the ring has {len(ring)}.")
        memory = ring[index].array

        def take(header: Header) -> Array:
            if header.sender != sender or header.nbytes > memory.nbytes:
                raise ProtocolError(
                    f"Bucket {header.number} of sender {header.sender} has {header.nbytes} bytes; it was told of by "
                    f"sender {sender}, whose segments have {memory.nbytes}."
                )
            return memory[: header.nbytes]

        return Arrival(header, take)

    def close(self) -> None:
        super().close()
        for segment in (segment for ring in self._rings for segment in ring):
            segment.close()
        self._rings = []


def header_of(message: Mapping[str, Any]) -> bytes:
    """The header in a message. Raises Refused."""
    header = message.get("header")
    try:
        return bytes.fromhex(header if isinstance(header, str) else "-")
    except ValueError:
        raise Refused("bad_request", f"The header {header!r} is not hexadecimal.") from None
