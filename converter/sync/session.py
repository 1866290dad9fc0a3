"""Who pushes to a server, and how far it is: the lease, the epoch, the push under way, and how it ends early.

`Receiver` adds what a push does. Locks: `_lock` guards every field here and is held for moments; `_turn` is held by
join, prepare and commit, one after the other. Ending a push early takes no turn: it has to get through at any time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConvertError
from .checking import number, seconds, text
from .inlet import Inlet, open_inlet
from .leases import Lease
from .ledger import Ledger
from .reception import Reception
from .refusals import Refused
from .staging import Staging
from .wire import Manifest, State

log = logging.getLogger("areal_convert.sync")


@dataclass(eq=False)
class Epoch:
    """A join: whose it is, and the transport that it made. `ready` when that is open, or failed."""

    number: int
    hub: str
    run: str
    inlet: Inlet
    ready: threading.Event = field(default_factory=threading.Event)
    error: ConvertError | None = None


@dataclass(eq=False)
class Push:
    """What was prepared. `root` when it is staged."""

    manifest: Manifest
    staging: Staging
    ledger: Ledger
    reception: Reception
    root: str | None = None

    @property
    def version(self) -> int:
        return self.manifest.version


@dataclass
class Counters:
    """Totals since the start, for metrics."""

    pushes: int = 0
    committed: int = 0
    aborted: int = 0
    failed: int = 0
    bytes: int = 0
    buckets: int = 0
    receive_seconds: float = 0.0
    pause_seconds: float = 0.0

    def add(self, reception: Reception) -> None:
        self.bytes += reception.bytes
        self.buckets += reception.buckets
        if reception.began is not None:
            self.receive_seconds += (reception.ended or time.monotonic()) - reception.began


class Session:
    """See the module's docstring. Methods of the protocol take a message's fields, and raise Refused."""

    def __init__(
        self, sink: str, transports: list[str], timeout: float, on_change: Callable[[State], None] | None
    ) -> None:
        self.sink, self.transports, self.timeout = sink, transports, timeout
        self.counters = Counters()
        self._on_change = on_change
        self._state: State = "serving"
        self._epoch: Epoch | None = None
        self._seen = 0  # the highest epoch
        self._push: Push | None = None
        self._error: dict[str, Any] | None = None
        self._lease = Lease()
        self._drops = self._dropping = 0  # pushes and epochs that were ended early; those whose end is under way
        self._closed = False
        self._turn = threading.Lock()
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._watcher: threading.Thread | None = None

    @property
    def state(self) -> State:
        return self._state

    # -------------------------------------------------------------------------------------------- lease

    def lease(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{hub, ttl}: give this hub the right to push, or renew it."""
        hub, ttl = text(body, "hub"), seconds(body, "ttl", 30.0)
        with self._lock:
            other = self._lease.take(hub, ttl)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="areal-lease", daemon=True)
                self._watcher.start()
            self._wake.notify_all()
        if other:
            self._drop("another hub took the lease, which had run out", close=True)
        with self._lock:
            return {"sink": self.sink, "hub": hub, "ttl": self._lease.ttl, "expires_in": self._lease.left}

    def release(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{hub}: give the lease back; what this hub had under way is dropped."""
        hub = text(body, "hub")
        with self._lock:
            if self._lease.hub != hub:
                return {"released": False}
            self._lease.release()
        self._drop(f"the hub {hub} gave its lease back", close=True)
        return {"released": True}

    def _watch(self) -> None:
        """A hub that does not renew its lease is gone: what it did not commit is presumed aborted."""
        while True:
            with self._lock:
                if self._closed:
                    return
                hub, left = self._lease.hub, self._lease.left
                over = hub is not None and left <= 0 and self._push is not None and self._state != "committing"
                if not over:
                    self._wake.wait(left if left > 0 else None if self._push is None else 0.2)
            if over:
                self._drop(f"the lease of the hub {hub} ran out", close=True, expired=True)

    # -------------------------------------------------------------------------------------------- join

    def join(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{hub, run, epoch, transport}: a new epoch. Its transport is opened in a thread; `prepare` waits for it.

        What an older epoch had under way is dropped.
        """
        hub, run, epoch = text(body, "hub"), text(body, "run"), number(body, "epoch", 1)
        transport = body.get("transport")
        if not isinstance(transport, Mapping):
            raise Refused("bad_request", "transport: no object that says how buckets come.")
        if transport.get("kind") not in self.transports:
            hint = f"Transports of this server: {', '.join(self.transports)}."
            raise Refused("bad_transport", f"There is no transport {transport.get('kind')!r} here.", hint=hint)
        with self._turn:
            with self._lock:
                self._check_join(hub, epoch)
            inlet = open_inlet(transport, seconds(transport, "timeout", self.timeout))
            self._drop(f"epoch {epoch} began", close=True)
            with self._lock:
                self._check_join(hub, epoch)
                self._seen, self._error = epoch, None
                made = self._epoch = Epoch(epoch, hub, run, inlet)
            threading.Thread(target=self._open, args=(made,), name="areal-join", daemon=True).start()
        return {"sink": self.sink, "epoch": epoch}

    def _check_join(self, hub: str, epoch: int) -> None:
        """Caller locks."""
        if self._closed:
            raise Refused("shutting_down", "This server is shutting down.")
        self._lease.check(hub)
        if self._lease.hub != hub or self._lease.left <= 0:
            raise self._no_lease(hub)
        if epoch <= self._seen:
            raise self._stale(epoch)

    @staticmethod
    def _no_lease(hub: str) -> Refused:
        what = f"The hub {hub} has no lease of this server, or it ran out."
        return Refused("no_lease", what, hint="POST /ws/lease first, and again before its time is over.")

    def _open(self, epoch: Epoch) -> None:
        try:
            epoch.inlet.open()
        except ConvertError as error:
            epoch.error = error
        except Exception as error:
            log.exception("epoch %d was not joined", epoch.number)
            epoch.error = Refused("join_failed", f"{type(error).__name__}: {error}")
        with self._lock:
            epoch.ready.set()
            over = self._epoch is not epoch
            if not over and epoch.error is None:
                self._state = "joined"
            elif not over:
                self._error = {"code": "join_failed", "message": str(epoch.error), "epoch": epoch.number}
        if over or epoch.error is not None:
            epoch.inlet.close()
        self._tell()

    def _stale(self, epoch: int) -> Refused:
        what = f"Epoch {epoch} is over; this server has seen epoch {self._seen}."
        return Refused("stale_epoch", what, hint="Read /ws/status, and join with a higher one.", epoch=self._seen)

    def _check_epoch(self, body: Mapping[str, Any]) -> Epoch:
        """The epoch that a message names, which must be the one that goes on. Caller locks."""
        epoch = number(body, "epoch", 1)
        self._lease.check(body.get("hub"))
        if epoch < self._seen:
            raise self._stale(epoch)
        if self._epoch is None or epoch != self._epoch.number:
            what = f"Epoch {epoch} was not joined, or is over; this server has seen epoch {self._seen}."
            raise Refused("not_joined", what, hint="Join with a higher epoch.", epoch=self._seen, error=self._error)
        return self._epoch

    # -------------------------------------------------------------------------------------------- the end

    def abort(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{epoch, version?, reason}: drop what is under way. Idempotent: nothing to drop is no error."""
        epoch, reason = number(body, "epoch"), text(body, "reason", "the hub aborted", 100_000)
        version = number(body, "version", 1) if body.get("version") is not None else None
        with self._lock:
            self._lease.check(body.get("hub"))
            if epoch < self._seen:
                raise self._stale(epoch)
            if self._state == "committing":
                raise Refused("committing", "A commit is being carried out: it is too late to abort it.")
            other = self._push is not None and version is not None and self._push.version != version
        dropped = epoch == self._seen and not other and self._drop(reason)
        return {"sink": self.sink, "state": self._state, "aborted": dropped}

    def _drop(self, reason: str, *, close: bool = False, expired: bool = False) -> bool:
        """Forget the push that is under way; True when there was one, and it was not being committed.

        close    end the epoch too; it ends anyway unless everything that its senders had to send has come
        expired  only if the lease has really run out: it may have been renewed at the last moment
        """
        with self._lock:
            push, epoch = self._push, self._epoch
            if self._state == "committing" or (expired and self._lease.left > 0):
                return False
            self._push = None
            self._drops += 1
            self._dropping += 1
            close = close or (push is not None and (push.reception.broken or not push.reception.done))
            if close:
                self._epoch = None
            if push is not None:
                self._error = {"code": "aborted", "message": f"Aborted: {reason}.", "version": push.version}
            joined = self._epoch is not None and self._epoch.ready.is_set() and self._epoch.error is None
            self._state = "joined" if joined else "serving"
        try:
            if epoch is not None and close:
                epoch.inlet.abort(reason)
            if push is not None:
                push.reception.cancel(reason)
                push.staging.drop(push.reception.settled)
            if epoch is not None and close:
                epoch.inlet.close()
        finally:
            with self._lock:
                self._dropping -= 1
                if push is not None:
                    self.counters.aborted += 1
                    self.counters.add(push.reception)
                self._wake.notify_all()
        self._tell()
        return push is not None

    def _wait_for_drops(self) -> int:
        """Until nobody writes to the stage any more. Returns how many drops there were."""
        with self._lock:
            while self._dropping:
                self._wake.wait(1.0)
            return self._drops

    def close(self) -> None:
        """End the epoch and drop what is under way. The version that serves goes on serving."""
        with self._lock:
            self._closed = True
            self._wake.notify_all()
        self._drop("the server is shutting down", close=True)

    def _tell(self) -> None:
        """Say the state to whoever wants to know; not while locked."""
        if self._on_change is None:
            return
        try:
            self._on_change(self._state)
        except Exception:
            log.exception("on_change failed at the state %s", self._state)
