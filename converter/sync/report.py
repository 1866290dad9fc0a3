"""What a push did, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..human import size_text

OutcomeKind = Literal["committed", "in_doubt", "dropped", "behind"]


@dataclass
class Outcome:
    """One server's part.

    kind     committed: it confirmed the version; in_doubt: decided, but not confirmed yet; dropped: it failed before
             the decision and keeps its old weights; behind: it was not reached
    tier     the atomicity that it gives (swap, host_stage, fenced)
    pause_s  seconds in which it answered nobody
    """

    kind: OutcomeKind
    server: str = ""
    tier: str = ""
    version: int = 0
    pause_s: float = 0.0
    in_flight: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class PushReport:
    """What `WeightSync.push` did. The same on every rank, but for `rank_*`.

    bytes       of the model in the servers' element types; `sent_bytes` of them those that were sent
    seconds     per phase: plan, join, prepare, send, seal, load (fenced servers), commit, retain; and `total`
    transport   as servers with a stage get it; none: there are only fenced ones, which take tensor by tensor
    gb_per_s    of the model's bytes over the send phase (fenced servers alone: load)
    pause_s     url → seconds in which that server answered nobody
    root        digest of all blocks' digests; `digests`: atom → xxh3_128 where they were asked for
    rank_waited seconds in which this sender waited for the wire
    """

    version: int
    mode: str
    transport: str
    bytes: int
    sent_bytes: int
    root: str
    epoch: int
    seconds: dict[str, float] = field(default_factory=dict)
    servers: dict[str, Outcome] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    casts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    senders: int = 1
    buckets: int = 0
    rank_waited: float = 0.0

    @property
    def gb_per_s(self) -> float:
        phase = "load" if self.transport == "none" else "send"
        return self.bytes / 1e9 / max(self.seconds.get(phase, 0.0), 1e-9)

    @property
    def pause_s(self) -> dict[str, float]:
        return {url: outcome.pause_s for url, outcome in self.servers.items()}

    @property
    def complete(self) -> bool:
        """Whether every server that was given has confirmed the version."""
        return all(outcome.kind == "committed" for outcome in self.servers.values())

    def report(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "version": self.version,
            "mode": self.mode,
            "transport": self.transport,
            "epoch": self.epoch,
            "bytes": self.bytes,
            "sent_bytes": self.sent_bytes,
            "buckets": self.buckets,
            "senders": self.senders,
            "seconds": {k: round(v, 4) for k, v in self.seconds.items()},
            "gb_per_s": round(self.gb_per_s, 3),
            "root": self.root,
            "digests": self.digests,
            "casts": self.casts,
            "servers": {url: vars(outcome) for url, outcome in self.servers.items()},
            "notes": self.notes,
        }

    def __str__(self) -> str:
        done = sum(outcome.kind == "committed" for outcome in self.servers.values())
        text = f"version {self.version}: {size_text(self.sent_bytes)} of {size_text(self.bytes)} to {done} servers"
        pause = max(self.pause_s.values(), default=0.0)
        return f"{text} in {self.seconds.get('total', 0.0):.2f} s, pause {pause * 1000:.1f} ms"
