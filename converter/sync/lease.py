"""The right to push to a server, which one hub has at a time: taken on all servers, renewed while the hub lives."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..errors import ConvertError, LeaseHeld
from .sink import Sink


class LeaseKeeper:
    """Renews the leases of some sinks from a thread of its own. A hub that dies stops renewing, and they run out."""

    def __init__(self, hub: str, ttl: float) -> None:
        self.hub, self.ttl = hub, ttl
        self._sinks: list[Sink] = []
        self._lost: dict[str, LeaseHeld] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, sink: Sink) -> None:
        """Raises LeaseHeld, with who holds it and how long yet."""
        sink.lease(self.hub, self.ttl)
        with self._lock:
            self._lost.pop(sink.url, None)
            if sink not in self._sinks:
                self._sinks.append(sink)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="areal-sync-lease", daemon=True)
                self._thread.start()

    def check(self, sinks: Sequence[Sink]) -> None:
        """Raise LeaseHeld when another hub took one of them meanwhile."""
        with self._lock:
            for sink in sinks:
                if sink.url in self._lost:
                    raise self._lost[sink.url]

    def drop(self, sink: Sink) -> None:
        """Renew it no longer."""
        with self._lock:
            self._sinks = [s for s in self._sinks if s is not sink]

    def release(self) -> None:
        """Give all of them back, as far as the servers answer."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self.ttl)
        for sink in self._sinks:
            try:
                sink.release()
            except ConvertError:
                continue  # it runs out by itself
        self._sinks = []

    def _run(self) -> None:
        while not self._stop.wait(self.ttl / 3):
            with self._lock:
                sinks = list(self._sinks)
            for sink in sinks:
                try:
                    sink.lease(self.hub, self.ttl)
                except LeaseHeld as error:
                    with self._lock:
                        self._lost[sink.url] = error
                except ConvertError:
                    continue  # gone, or busy: the next push will find out which
