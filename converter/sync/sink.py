"""What `hub.py` wants of a server, whichever it is. Two kinds:

- a `StagedSink` speaks our protocol: it takes blocks from a transport into a stage, and swaps (`protocol_sink.py`);
- a `FencedSink` is another's server (vLLM, SGLang, …: `dialects/`): it takes whole tensors under its own names, in
  place, behind a fence, over a channel of its own.

A push brings all staged sinks to STAGED first, then loads the fenced ones, journals COMMIT, commits the staged ones,
and opens the fences last. All methods may block, and are called from one thread for each sink.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..codecs import Array
from .wire import Atom, Manifest

Tier = Literal["swap", "host_stage", "fenced"]
"""The atomicity that a server can give."""


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """What a server says of itself now.

    sink      names this run of the server: a restarted one has another; "" where a dialect has no such thing
    state     as `wire.State`; a dialect says `serving` or `failed` (fenced after a failure)
    version   committed; `root` its digest or "" where the server has none
    staged    (version, root) that waits for a commit
    epoch     the highest that it has seen; `run` of the hub that joined it
    lease     who holds it, and for how many seconds yet
    raw       the whole answer
    """

    sink: str
    state: str
    version: int
    root: str = ""
    staged: tuple[int, str] | None = None
    epoch: int = 0
    run: str = ""
    lease: tuple[str, float] | None = None
    error: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SinkLayout:
    """What a server holds.

    model  `{"family": "qwen3", "sizes": {…}}`, as `checkpoint.sizes` makes them; family "" where it cannot be asked
    atoms  in the server's element types; empty for a dialect that cannot be asked (the base model's are taken)
    ties   atoms that share memory there: [[name, name], …]
    """

    model: Mapping[str, Any]
    atoms: Sequence[Atom]
    ties: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """A commit that was carried out. `pause_s` seconds in which the server answered nobody."""

    version: int
    root: str
    pause_s: float
    in_flight: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


class Sink(Protocol):
    """Both kinds. Raises ServerUnreachable, or ServerRefused with the server's code; messages name the URL."""

    url: str
    name: str
    """What it is, for messages: `areal-convert`, `vLLM 0.33`, …"""
    tier: Tier

    def status(self) -> SinkStatus: ...

    def layout(self) -> SinkLayout: ...

    def lease(self, hub: str, ttl: float) -> None:
        """Take or renew the right to push to it. Raises LeaseHeld. Nothing to do for a dialect without."""
        ...

    def release(self) -> None: ...

    def abort(self, version: int | None, reason: str) -> None:
        """Back to what it was, idempotent. A fenced sink that began to load stays fenced, and says so by ServerRefused
        with the code `fenced`; one that did not is opened again with its pause state and locks restored."""
        ...

    def commit(self, version: int, root: str) -> Receipt:
        """Install and publish (staged), or set the version and open the fence (fenced). Idempotent."""
        ...

    def close(self) -> None: ...


class StagedSink(Sink, Protocol):
    """Speaks `/ws/*`. Every call names the epoch of the last `join`."""

    def join(self, epoch: int, transport: Mapping[str, Any]) -> None: ...

    def prepare(self, manifest: Manifest) -> None:
        """Raises ServerRefused with all that is wrong with it in `problems`."""
        ...

    def seal(self, version: int, root: str) -> str:
        """Waits until all is received; returns the root that the server computed (equal, or ServerRefused)."""
        ...

    def digests(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """xxh3_128 of whole committed atoms, layout-independent."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that a fenced server wants: its name in a naming of the family (Hugging Face's, fused or not)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Feed(Protocol):
    """The new weights as whole tensors, read when they are asked for, one (or a few) at a time.

    With several sender ranks a tensor is put together on rank 0 when its turn comes; the other ranks take part in
    `tensors` alike. Nothing larger than the largest tensor is held.
    """

    def wanted(self, dtype: str | None = None) -> list[Wanted]:
        """All tensors under Hugging Face's names, as `base` has them (or in `dtype`), in file order, ties once."""
        ...

    def tensors(self, wanted: Sequence[Wanted]) -> Iterator[tuple[Wanted, Array]]:
        """Raw bits of each (unsigned integers of the element's size, C order, valid until the next)."""
        ...


class FencedSink(Sink, Protocol):
    """Another's server. `load` is called after `check` passed on every server, and all staged sinks are STAGED."""

    def check(self, wanted: Sequence[Wanted], version: int) -> None:
        """Everything that can be known before a byte moves: names, shapes, types, awake, endpoints. Raises
        ServerRefused with all problems."""
        ...

    def load(self, feed: Feed, version: int) -> None:
        """Drain, pause, begin, send, end, verify; the fence stays closed and the version unset until `commit`."""
        ...
