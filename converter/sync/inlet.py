"""Where a receiver's buckets come from: what every transport gives to `Receiver`, and the simplest kind of it.

An inlet is made by a join and lives for that epoch, over several pushes. During a push the receiver asks it, with one
thread for each sender, for one `Arrival` after another, until the sender's last bucket. There are two kinds:

- those that *pull* (gloo, NCCL): `next` takes part in a collective, `Stream.fill` in those after it;
- those that are *offered* buckets by HTTP messages (shared memory, inline bytes, files). They derive from `Offered`,
  whose `accept` is called with each message, and answers when the bucket is applied, or refused.

    class ShmInlet(Offered):                       # for example
        kind = "shm"
        def make(self, what, message, data):
            view = ...                              # map message["segment"]
            return Arrival(bytes.fromhex(message["header"]), lambda header: view, lambda error: unmap())
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from ..codecs import Array
from ..errors import ConvertError
from .refusals import Refused
from .wire import HEADER_BYTES, LAST, Header, ProtocolError


class InletClosed(ConvertError):
    """Somebody aborted the inlet while a thread was waiting in it."""


def _nothing(error: ConvertError | None) -> None: ...


@dataclass(slots=True, eq=False)
class Arrival:
    """One bucket that a sender has ready, in memory.

    header  HEADER_BYTES bytes, not looked at yet
    take    header → the payload, exactly `header.nbytes` of uint8, in memory of the inlet's own that is valid until
            `done`. May block. Raises ProtocolError when there is less or more, InletClosed after an abort
    done    called once, from any thread: the bucket is applied, or (error) never will be; its memory is free again
    """

    header: bytes
    take: Callable[[Header], Array]
    done: Callable[[ConvertError | None], None] = _nothing


@dataclass(slots=True, eq=False)
class Stream:
    """One bucket that is still to come, to wherever it is wanted.

    numbers  header → the bytes of its blocks' numbers; before `fill`. May block
    fill     (header, places): let the blocks' bytes come into these arrays (uint8), one after the other, which are the
             parts that `blocks.parts_of` makes. Returns at once, with what waits until they are full. Both raise
             ProtocolError, ChannelError, or InletClosed after an abort
    header, done  as an Arrival has them
    """

    header: bytes
    numbers: Callable[[Header], Array]
    fill: Callable[[Header, Sequence[Array]], Callable[[], None]]
    done: Callable[[ConvertError | None], None] = _nothing


class Inlet(Protocol):
    """One epoch's transport, seen from the server. All methods but `abort` may block.

    kind  `gloo`, `nccl`, `shm`, `disk`, `inline`
    """

    kind: str

    def open(self) -> None:
        """Form groups, map directories, … Called once, in a thread of the join. Raises ConvertError."""
        ...

    def begin(self, senders: int, bucket: int) -> None:
        """A push begins: so many senders, payloads of at most so many bytes. Called by `prepare`."""
        ...

    def next(self, sender: int) -> Arrival | Stream:
        """A sender's next bucket. Blocks until it is there. Raises ConvertError after the transport's own timeout, or
        when the other side is gone, and InletClosed after an abort."""
        ...

    def accept(self, what: str, message: Mapping[str, Any], data: bytes | memoryview | None = None) -> dict[str, Any]:
        """An HTTP message for this transport (`bucket` or `load`): its JSON fields, or the raw bytes of its body.

        Blocks until what it tells of is applied; returns the answer's fields. Raises Refused.
        """
        ...

    def abort(self, reason: str) -> None:
        """Free whoever waits, from any thread, at any time; idempotent. The inlet cannot be used afterwards."""
        ...

    def settled(self, timeout: float) -> bool:
        """Whether nothing is written any more to places that were given to `fill`, waiting so long for it. A collective
        may go on after an abort, until the other side is gone or its timeout is over."""
        ...

    def close(self) -> None:
        """Give back groups, mappings, threads; after `abort` or alone; idempotent."""
        ...


Factory = Callable[[Mapping[str, Any], float], Inlet]
"""Makes an inlet from the `transport` of a join (kind, host, port, names, rank, world, …) and a timeout in seconds."""

KINDS: dict[str, str] = {
    "inline": "inlet:InlineInlet",
    "gloo": "inlet_groups:GroupInlet",
    "nccl": "inlet_groups:GroupInlet",
    "shm": "transports.shm:ShmInlet",
    "disk": "transports.disk:DiskInlet",
}
"""Transport → module below `converter/sync` and the class in it, imported when a join asks for it."""


def open_inlet(transport: Mapping[str, Any], timeout: float) -> Inlet:
    """The inlet for a join's `transport`, not opened yet. Raises Refused for a kind that is none, or wrong fields."""
    kind = transport.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise Refused("bad_transport", f"There is no transport {kind!r}.", hint=f"Transports: {', '.join(KINDS)}.")
    module, _, name = KINDS[kind].partition(":")
    try:
        factory: Factory = getattr(import_module(f".{module}", __package__), name)
    except ImportError as error:
        raise Refused("bad_transport", f"The transport {kind} cannot be used here: {error}.") from error
    return factory(transport, timeout)


# ------------------------------------------------------------------------------------------------ offered buckets


@dataclass(eq=False)
class _Offer:
    """An arrival, and what `accept` waits for."""

    arrival: Arrival | Stream
    applied: threading.Event = field(default_factory=threading.Event)
    error: ConvertError | None = None

    def done(self, error: ConvertError | None) -> None:
        self.error = error
        self.arrival.done(error)
        self.applied.set()


@dataclass(eq=False)
class _Lane:
    """One sender's buckets: those that wait, by number, the headers of those that were taken, and which is the last."""

    waiting: dict[int, _Offer] = field(default_factory=dict)
    taken: list[_Offer] = field(default_factory=list)
    last: int | None = None


class Offered:
    """Base of inlets to which the hub's HTTP messages bring the buckets. A subclass turns a message into an Arrival.

    A sender may have `credit` buckets on their way at a time; they may overtake each other. A message that is sent
    again (its answer was lost) is answered like the first.
    """

    kind = "offered"
    credit = 4

    def __init__(self, transport: Mapping[str, Any], timeout: float) -> None:
        self.transport, self.timeout = transport, timeout
        self._lanes: list[_Lane] = []
        self._aborted: str | None = None
        self._changed = threading.Condition()

    def open(self) -> None: ...

    def begin(self, senders: int, bucket: int) -> None:
        with self._changed:
            self._lanes = [_Lane() for _ in range(senders)]

    def make(self, what: str, message: Mapping[str, Any], data: bytes | memoryview | None) -> Arrival | Stream:
        """The bucket that an HTTP message tells of. Raises Refused for one that cannot be understood."""
        raise NotImplementedError

    def accept(self, what: str, message: Mapping[str, Any], data: bytes | memoryview | None = None) -> dict[str, Any]:
        arrival = self.make(what, message, data)
        try:
            header = Header.unpack(arrival.header)
            offer, repeated = self.offer(header, arrival)
        except ProtocolError as error:
            arrival.done(error)
            raise Refused("bad_bucket", str(error)) from error
        except Refused as error:
            arrival.done(error)
            raise
        if not offer.applied.wait(self.timeout):
            raise Refused("timeout", f"Bucket {header.number} was not applied within {self.timeout:g} s.")
        if offer.error is not None:
            raise offer.error if isinstance(offer.error, Refused) else Refused("bad_bucket", str(offer.error))
        return {"sender": header.sender, "number": header.number, "applied": True, "repeated": repeated}

    def offer(self, header: Header, arrival: Arrival | Stream) -> tuple[_Offer, bool]:
        """Hand a bucket to the thread of its sender; True when it is one that came before. Raises Refused when no push,
        or no such sender, expects it."""
        with self._changed:
            if self._aborted is not None:
                raise Refused("aborted", f"The push was aborted: {self._aborted}.")
            if not 0 <= header.sender < len(self._lanes):
                raise Refused("bad_bucket", f"There is no sender {header.sender}; the push has {len(self._lanes)}.")
            lane, number = self._lanes[header.sender], header.number
            known = lane.taken[number] if number < len(lane.taken) else lane.waiting.get(number)
            if known is not None and known.arrival.header == arrival.header:
                arrival.done(None)
                return known, True
            if lane.last is not None and number > lane.last:
                raise Refused("bad_bucket", f"Bucket {number} of sender {header.sender} comes after its last one.")
            if known is not None or number >= len(lane.taken) + self.credit:
                raise Refused(
                    "bad_bucket",
                    f"Bucket {number} of sender {header.sender} is out of turn; {len(lane.taken)} is the next.",
                    hint=f"At most {self.credit} buckets of a sender may be on their way, each with its own number.",
                )
            lane.last = number if header.flags & LAST else lane.last
            offer = lane.waiting[number] = _Offer(arrival)
            self._changed.notify_all()
            return offer, False

    def next(self, sender: int) -> Arrival | Stream:
        end = time.monotonic() + self.timeout
        with self._changed:
            lane = self._lanes[sender]
            while len(lane.taken) not in lane.waiting:
                if self._aborted is not None:
                    raise InletClosed(f"The push was aborted: {self._aborted}.")
                if not self._changed.wait(end - time.monotonic()):
                    raise ProtocolError(f"Sender {sender} sent nothing for {self.timeout:g} s.")
            offer = lane.waiting.pop(len(lane.taken))
            lane.taken.append(_Offer(Arrival(offer.arrival.header, _gone), offer.applied))
            known = lane.taken[-1]

        def done(error: ConvertError | None) -> None:
            known.error = error  # before the event that both share: a repeated message gets the same answer
            offer.done(error)

        return replace(offer.arrival, done=done)

    def abort(self, reason: str) -> None:
        with self._changed:
            self._aborted = self._aborted or reason
            left = [offer for lane in self._lanes for offer in lane.waiting.values()]
            for lane in self._lanes:
                lane.waiting.clear()
            self._changed.notify_all()
        for offer in left:
            offer.done(Refused("aborted", f"The push was aborted: {reason}."))

    def settled(self, timeout: float) -> bool:
        return True

    def close(self) -> None:
        self.abort("the inlet was closed")


def _gone(header: Header) -> Array:
    raise ProtocolError(f"Bucket {header.number} was taken before.")


class InlineInlet(Offered):
    """Buckets in the bodies of `POST /ws/bucket` (application/octet-stream): the header and the payload after it."""

    kind = "inline"

    def make(self, what: str, message: Mapping[str, Any], data: bytes | memoryview | None) -> Arrival:
        if what != "bucket" or data is None:
            raise Refused("bad_request", "This transport takes buckets as application/octet-stream, header first.")
        view = memoryview(data)

        def take(header: Header) -> Array:
            payload = np.frombuffer(view[HEADER_BYTES:], np.uint8)
            if payload.nbytes != header.nbytes:
                raise ProtocolError(
                    f"Bucket {header.number} of sender {header.sender} has {payload.nbytes} bytes; "
                    f"its header says {header.nbytes}."
                )
            return payload

        return Arrival(bytes(view[:HEADER_BYTES]), take)
