"""The right to push to a server, which one hub has at a time: taken on all servers, renewed while the hub lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..errors import ConvertError, LeaseHeld
from .sink import Sink


class LeaseKeeper:
    """Renews the leases of some sinks, each from a thread of its own: one that says nothing must not keep the others'
    from being renewed. A hub that dies stops renewing, and they run out."""

    def __init__(self, hub: str, ttl: float) -> None:
        self.hub, self.ttl = hub, ttl
        self._sinks: list[Sink] = []
        self._lost: dict[str, LeaseHeld] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def take(self, sink: Sink) -> None:
        """Raises LeaseHeld, with who holds it and how long yet."""
        sink.lease(self.hub, self.ttl)
        with self._lock:
            self._lost.pop(sink.url, None)
            if sink not in self._sinks:
                self._sinks.append(sink)
                self._start(self._run, sink)

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
        self._join()  # a renewal that came after it would take the lease again
        with self._lock:
            for sink in self._sinks:
                self._start(self._give_back, sink)
            self._sinks = []
        self._join()

    def _start(self, action: Callable[[Sink], None], sink: Sink) -> None:
        """Caller locks."""
        thread = threading.Thread(target=action, args=(sink,), name="areal-sync-lease", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _join(self) -> None:
        end = time.monotonic() + self.ttl
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    @staticmethod
    def _give_back(sink: Sink) -> None:
        with suppress(ConvertError):  # it runs out by itself
            sink.release()

    def _run(self, sink: Sink) -> None:
        while not self._stop.wait(self.ttl / 3):
            with self._lock:
                if sink not in self._sinks:
                    return
            try:
                sink.lease(self.hub, self.ttl)
            except LeaseHeld as error:
                with self._lock:
                    self._lost[sink.url] = error
            except ConvertError:
                continue  # gone, or busy: the next push will find out which
