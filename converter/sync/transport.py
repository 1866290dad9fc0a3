"""How a sender's buckets get to the servers: what `hub.py` wants of every transport, and how one is chosen.

A transport lives for one epoch, on every sender rank alike, over several pushes. It carries whatever buckets it is
given: which blocks they hold (all, or those that changed) is the send loop's affair (`sending.py`).

    class ShmTransport:                              # for example
        kind = "shm"
        @staticmethod
        def unfit(peer): return "" if same_host(peer) else "is on another host"
        …

Its other side is an `Inlet` (`inlet.py`) of the same kind. Add a kind to `KINDS`, in the order of preference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from ..codecs import Array
from ..errors import Problems, ServerRefused
from .wire import Header

if TYPE_CHECKING:
    from .client import Client


@dataclass(frozen=True, slots=True)
class Place:
    """Where in an epoch a transport stands: the same on all senders, but for `sender`.

    run, epoch  name the epoch; `group_name` makes a name from them that no other epoch has
    sender      this rank's number; `senders` how many there are
    clients     the servers' HTTP clients, in the order of the sinks (sink n is rank n + 1 of every group)
    host        address of this machine as the servers reach it
    bucket      bytes that a payload has at most
    options     what the user gave for this kind (`directory` for disk, …)
    """

    run: str
    epoch: int
    sender: int
    senders: int
    clients: Sequence[Client]
    host: str
    bucket: int
    timeout: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def group_name(self, sender: int) -> str:
        return f"ac-{self.run}-e{self.epoch}-s{sender}"


class Transport(Protocol):
    """One sender's way to all servers of an epoch. A call that fails raises a ConvertError, and the epoch is over:
    nothing is sent again, the hub aborts and makes a new epoch.

    straight  whether the parts of a payload may lie anywhere: what is in memory already is not copied into a bucket
    """

    kind: str
    straight: bool

    def offer(self) -> dict[str, Any]:
        """Rank 0 only, first of all: what a join says of it (`kind`, host, port, names, timeout, …), as JSON. The hub
        adds `rank` and `world` for each server, and hands the offer to the other sender ranks."""
        ...

    def open(self, offer: Mapping[str, Any]) -> None:
        """On every sender, while the servers do theirs: form groups, map memory. Blocks until all are there."""
        ...

    def begin(self, version: int) -> None:
        """All servers are prepared; this sender's first bucket is next, number 0."""
        ...

    def buffer(self) -> Array:
        """Memory for the next payload: `place.bucket` bytes of uint8. Blocks until some is free again: this is the
        credit window. Valid until `send`."""
        ...

    def send(self, header: Header, parts: Sequence[Array]) -> None:
        """Send a bucket on. The payload is the parts, one after the other: the blocks' numbers (empty for a bucket
        without blocks), then their bytes as `blocks.parts_of` cuts them. They lie in the memory that `buffer` gave
        last, from its beginning on, or, where the transport is `straight`, at the same place in other memory.

        Returns at once; what went wrong with an earlier bucket is raised here, or by `finish`."""
        ...

    def finish(self) -> None:
        """After the last bucket: blocks until all buckets have left, and were acknowledged where the kind has it."""
        ...

    def abort(self, reason: str) -> None:
        """From any thread, at any time: free whoever waits, here and, as far as it goes, on the servers. Idempotent; of
        the transport only `close` may be called afterwards."""
        ...

    def close(self) -> None:
        """Give back groups, memory, files, threads. Idempotent."""
        ...


class Kind(Protocol):
    """What stands in `KINDS`: the class of a transport."""

    def __call__(self, kind: str, place: Place) -> Transport: ...

    def unfit(self, peer: Peer) -> str:
        """Why this kind cannot reach a server, or ""; a static method."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """What is known of a server when the transport is chosen: its `/ws/status`, and where it is."""

    url: str
    status: Mapping[str, Any]

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(self.status.get("transports") or ())

    @property
    def host_id(self) -> str:
        """Says the same for two processes that share memory and a file system (`host` of the status)."""
        return str(self.status.get("host") or "")


KINDS: dict[str, str] = {
    "shm": "transports.shm:ShmTransport",
    "nccl": "transport_groups:GroupTransport",
    "gloo": "transport_groups:GroupTransport",
    "inline": "transport_inline:InlineTransport",
    "disk": "transports.disk:DiskTransport",
}
"""Kind → module below `converter/sync` and the class in it, best first. `auto` takes the first that every server can
have; those of `ON_REQUEST` are used only where somebody asks for them."""

ON_REQUEST = frozenset({"disk", "inline", "nccl"})


def kind_class(kind: str) -> Kind:
    """The class of a transport. Raises ServerRefused for a kind that is none, or that cannot be used here."""
    if kind not in KINDS:
        raise ServerRefused(
            "bad_transport", f"There is no transport {kind!r}.", hint=f"Known: auto, {', '.join(KINDS)}."
        )
    module, _, name = KINDS[kind].partition(":")
    try:
        found: Kind = getattr(import_module(f".{module}", __package__), name)
    except ImportError as error:
        raise ServerRefused("bad_transport", f"The transport {kind} cannot be used here: {error}.") from error
    return found


def choose(wanted: str, peers: Sequence[Peer]) -> str:
    """The transport for all of these servers. Raises ServerRefused, saying for each server why not."""
    tried = [k for k in KINDS if k not in ON_REQUEST] if wanted == "auto" else [wanted]
    problems = Problems()
    for kind in tried:
        reasons = {p.url: _unfit(kind, p) for p in peers}
        if not any(reasons.values()):
            return kind
        for url, why in reasons.items():
            if why:
                problems.add(url, f"cannot be reached by {kind}: {why}")
    raise ServerRefused("bad_transport", "No transport reaches all servers:", problems.found)


def _unfit(kind: str, peer: Peer) -> str:
    if kind not in peer.transports:
        return f"the server offers {', '.join(peer.transports) or 'none'}"
    try:
        return kind_class(kind).unfit(peer)
    except ServerRefused as error:
        return str(error)


def make(kind: str, place: Place) -> Transport:
    """A transport of this kind, not opened yet."""
    return kind_class(kind)(kind, place)


OnProgress = Callable[[str, int, int], None]
"""Called with (phase, bytes done, bytes in all)."""
