"""Bytes from a store, whatever happens on the way: tries again with growing pauses, and goes on at the byte reached."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import RemoteChanged, Unreachable
from .store import Dropped, Store

T = TypeVar("T")

ATTEMPTS = 6
"""Failures in a row, without one byte of progress between them, before a request is given up."""

FIRST_PAUSE, LONGEST_PAUSE, LONGEST_WAIT = 0.5, 20.0, 120.0
"""Seconds: our own pauses double from the first to the longest; a server may ask for at most LONGEST_WAIT."""


@dataclass
class Traffic:
    """What went over the wire. Several threads add to it. checked: files that came whole, with the right sha256."""

    bytes: int = 0
    requests: int = 0
    retries: int = 0
    checked: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, bytes: int = 0, requests: int = 0, retries: int = 0, checked: int = 0) -> None:
        with self._lock:
            self.bytes += bytes
            self.requests += requests
            self.retries += retries
            self.checked += checked

    def report(self) -> dict[str, int]:
        """As plain data."""
        return {"bytes": self.bytes, "requests": self.requests, "retries": self.retries, "checked_files": self.checked}


class Stopped(Exception):
    """Somebody else failed, or the user interrupts: what is being done is left. Never an error of its own."""


class Fetcher:
    """Reads ranges of a store's files into memory. Safe to use from several threads."""

    def __init__(self, store: Store, traffic: Traffic | None = None) -> None:
        self.store, self.traffic = store, traffic or Traffic()

    def read(self, path: str, begin: int, end: int, stop: threading.Event | None = None) -> bytearray:
        """The bytes `begin..end` of a file."""
        out = bytearray(end - begin)
        self.read_into(path, begin, memoryview(out), stop)
        return out

    def read_into(self, path: str, begin: int, out: memoryview, stop: threading.Event | None = None) -> None:
        """Fill `out` from byte `begin` of a file on. Raises RemoteError; Stopped soon after `stop` was set."""
        done, failures = 0, 0
        while done < len(out):
            reached = done
            try:
                done = self._attempt(path, begin, out, done, stop)
            except _Cut as cut:
                done = cut.done
                failures = 1 if done > reached else failures + 1
                self._give_up_or_wait(path, begin + done, failures, cut.cause, stop)

    def _attempt(self, path: str, begin: int, out: memoryview, done: int, stop: threading.Event | None) -> int:
        """One request; how far it came."""
        self.traffic.add(requests=1)
        first = done
        try:
            with closing(self.store.stream(path, begin + done, begin + len(out))) as chunks:
                for chunk in chunks:
                    count = len(chunk)
                    if done + count > len(out):
                        raise RemoteChanged(f"{self.store.url}/{path}: more bytes came than were asked for.")
                    out[done : done + count] = chunk
                    done += count
                    if stop is not None and stop.is_set():
                        raise Stopped
        except Dropped as dropped:
            raise _Cut(done, dropped) from dropped
        finally:
            self.traffic.add(bytes=done - first)
        if done < len(out):
            raise _Cut(done, Dropped("the connection ended too early"))
        return done

    def _give_up_or_wait(self, path: str, at: int, failures: int, cause: Dropped, stop: threading.Event | None) -> None:
        self.traffic.add(retries=1)
        if failures >= ATTEMPTS:
            raise Unreachable(
                f"{self.store.url}/{path}: {cause.what} (at byte {at}, after {failures} attempts).",
                hint="Try again later. A conversion keeps what it has: the same command with --resume goes on.",
            ) from cause
        pause(failures, cause.wait, stop)


class _Cut(Exception):
    """Where an attempt ended, and why."""

    def __init__(self, done: int, cause: Dropped) -> None:
        self.done, self.cause = done, cause
        super().__init__(cause.what)


def pause(failures: int, asked: float | None, stop: threading.Event | None = None) -> None:
    """Wait before the next attempt: as long as the server asked, or twice as long each time, and never in step with
    others; not at all before the first attempt that is said to need none. Raises Stopped when `stop` is set meanwhile.
    """
    if asked == 0 and failures == 1:
        return
    seconds = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
    if asked is not None:
        seconds = max(seconds, min(asked, LONGEST_WAIT))
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise Stopped


def retried(action: Callable[[], T], *, about: str, attempts: int = ATTEMPTS, traffic: Traffic | None = None) -> T:
    """The result of a call that raises Dropped now and then. Raises Unreachable when it does so too often."""
    failures = 0
    while True:
        try:
            return action()
        except Dropped as dropped:
            failures += 1
            if traffic is not None:
                traffic.add(retries=1)
            if failures >= attempts:
                raise Unreachable(
                    f"{about}: {dropped.what} (after {failures} attempts).", hint="Try again later."
                ) from dropped
            pause(failures, dropped.wait)
