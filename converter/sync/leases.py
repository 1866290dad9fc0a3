"""A server's side of the lease: which hub may push to it, and until when."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from .refusals import Refused

LONGEST = 3600.0
"""Seconds: a hub that dies must not keep a server for a day."""


@dataclass
class Lease:
    """At most one hub holds it. The caller locks."""

    hub: str | None = None
    ttl: float = 0.0
    ends: float = 0.0

    @property
    def left(self) -> float:
        """Seconds until it runs out; 0 when nobody holds it."""
        return max(0.0, self.ends - time.monotonic()) if self.hub is not None else 0.0

    def take(self, hub: str, ttl: float) -> bool:
        """Give it to a hub, or renew it; True when it was another's before, and had run out. Raises Refused."""
        if self.left > 0 and self.hub != hub:
            raise self.held()
        other = self.hub is not None and self.hub != hub
        self.hub, self.ttl = hub, min(ttl, LONGEST)
        self.renew()
        return other

    def renew(self) -> None:
        self.ends = time.monotonic() + self.ttl

    def release(self) -> None:
        self.hub = None

    def check(self, hub: Any) -> None:
        """A message of this hub (None: it does not say) is a sign of life. Raises Refused when another holds it."""
        if hub is not None and self.hub is not None and hub != self.hub and self.left > 0:
            raise self.held()
        if self.left > 0 and hub in (None, self.hub):
            self.renew()  # one that has run out has to be taken again: what was under way may be gone

    def held(self) -> Refused:
        return Refused(
            "lease_held",
            f"The hub {self.hub} is pushing to this server; its lease ends in {self.left:.1f} s.",
            hint="Two hubs at once would undo each other's work. Stop one, or wait.",
            hub=self.hub,
            expires_in=round(self.left, 3),
        )

    def to_json(self) -> dict[str, Any] | None:
        return {"hub": self.hub, "expires_in": round(self.left, 3)} if self.left > 0 else None
