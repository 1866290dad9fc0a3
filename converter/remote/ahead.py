"""Reads ahead of a conversion: fetches, in large requests, what will be read next, within a budget of memory.

What will be read is known: the boxes of the plan, in order. They are taken in batches; the bytes that a batch wants
become windows (`windows.requests`), which a few threads fetch in order. A window goes when all boxes that need it were
read. A reader that comes too early asks for its windows first, over the budget if need be, so nobody waits for ever.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ..slots import Box, Slot
from .boxes import runs_of, to_prove, wanted
from .checked import Checker
from .fetch import Stopped
from .memory import Block, Memory, cost
from .mirror import Mirror
from .mounts import remote_file
from .windows import WINDOW, requests

SMALL = 256 * 1024
"""A request for so many bytes or fewer takes its round trip and little more: MORE times as many are under way together,
at most MOST (rank 0 of 1 GB, TP4, answers 30 ms late: 29 s with 8 of them, 9 s with 32)."""
MORE, MOST = 4, 64

POLL = 0.2
"""Seconds after which somebody who waits looks whether the run was stopped."""


@dataclass(slots=True, eq=False)
class Window:
    """One request: bytes `begin..end` of a file, and the reads that wait for them."""

    mirror: Mirror
    path: str
    begin: int
    end: int
    reads: list[Expected] = field(default_factory=list)
    users: int = 0
    data: Block | None = None
    started: bool = False

    @property
    def cost(self) -> int:
        """Bytes of memory that it takes."""
        return cost(self.end - self.begin)


@dataclass(slots=True, eq=False)
class Expected:
    """One box that will be read: the windows that hold it, by file and in order, and how many are still to come."""

    slot: Slot
    box: Box
    batch: int
    windows: dict[str, list[Window]] = field(default_factory=dict)
    missing: int = 0

    def read(self, file: str, begin: int, out: memoryview) -> bool:
        """Fill `out` from the windows. False when they do not hold all of it."""
        held = self.windows.get(file, ())
        n = bisect_right(held, begin, key=lambda w: w.begin) - 1 if len(held) > 1 else 0
        done = 0
        while done < len(out):
            window = held[n] if 0 <= n < len(held) else None
            at = begin + done - window.begin if window is not None else -1
            if window is None or window.data is None or not 0 <= at < window.end - window.begin:
                return False
            part = min(len(out) - done, window.end - window.begin - at)
            out[done : done + part] = memoryview(window.data)[at : at + part]
            done, n = done + part, n + 1
        return True


class ReadAhead:
    """Fetches for one run.

    reads        every box that will be read, in order
    budget       bytes that windows may hold together
    connections  requests at the same time; more of small ones
    stop         set when the run is to end: waiting readers raise Stopped
    """

    def __init__(
        self,
        reads: Iterable[tuple[Slot, Box]],
        *,
        budget: int,
        connections: int,
        max_gap: int | None,
        stop: threading.Event,
    ) -> None:
        self.budget, self.max_gap, self.stop = max(budget, 2 * WINDOW), max_gap, stop
        self._batches: list[list[Expected]] = []
        self._waiting: dict[tuple[Slot, tuple[int, ...]], deque[Expected]] = {}
        self._checker: Checker[Window] = Checker(self.budget // 2)
        self._sort_in(reads)
        self._opened, self._held, self._memory = 0, 0, Memory()
        self._next: deque[Window] = deque()
        self._urgent: deque[Window] = deque()
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._change = threading.Condition()
        self._connections, self._threads = connections, list[threading.Thread]()
        self._start_threads(connections if self._batches else 0)

    def _start_threads(self, count: int, small: bool = False) -> None:
        """`small`: they make small requests only, so that large ones do not share the line with ever more others."""
        for n in range(len(self._threads), len(self._threads) + count):
            thread = threading.Thread(target=self._work, args=(small,), name=f"areal-fetch-{n}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _sort_in(self, reads: Iterable[tuple[Slot, Box]]) -> None:
        filled, limit = 0, max(WINDOW, self.budget // 3)
        wanted_of: dict[str, int] = {}
        for slot, box in reads:
            if remote_file(slot.buffer.file) is None:
                continue
            if not self._batches or filled >= limit:
                self._batches.append([])
                filled = 0
            expected = Expected(slot, box, len(self._batches) - 1)
            self._batches[-1].append(expected)
            self._waiting.setdefault((slot, box.lo), deque()).append(expected)
            runs = runs_of(slot, box)
            filled += prod(runs.outer) * runs.block
            wanted_of[slot.buffer.file] = wanted_of.get(slot.buffer.file, 0) + prod(runs.outer) * runs.block
        for file, count in wanted_of.items():
            place = remote_file(file)
            if place is not None and count + place[0].amount(place[1]) >= place[0].size(place[1]):
                self._checker.expect(*place)

    # ---- readers

    def take(self, slot: Slot, box: Box) -> Expected | None:
        """The windows for a box, all of them there; None when nobody expected this read. Give it back with `done`."""
        with self._change:
            queue = self._waiting.get((slot, box.lo))
            if not queue or queue[0].box.hi != box.hi:
                return None
            expected = queue.popleft()
            while expected.batch >= self._opened:
                self._open_batch()
            if expected.missing:
                pending = [w for held in expected.windows.values() for w in held if not w.started]
                self._urgent.extend(pending)
                self._change.notify_all()
            while expected.missing:
                self._check()
                self._change.wait(POLL)
        return expected

    def done(self, expected: Expected) -> None:
        """The box was read: windows that nobody else needs go."""
        with self._change:
            for held in expected.windows.values():
                for window in held:
                    self._leave(window)
            expected.windows = {}
            self._change.notify_all()

    def _leave(self, window: Window) -> None:
        window.users -= 1
        if not window.users and window.data is not None:
            self._held -= window.cost
            self._memory.give(window.data)
            window.data = None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._over.is_set() or self.stop.is_set():
            raise Stopped

    # ---- batches

    def _open_batch(self) -> None:
        """Turn the next batch into windows, in the order of their first reader."""
        batch, self._batches[self._opened] = self._batches[self._opened], []
        self._opened += 1
        spans = [[*wanted(e.slot, e.box), *to_prove(e.slot)] for e in batch]
        by_file: dict[str, list[tuple[int, int]]] = {}
        for found in spans:
            for file, begin, end in found:
                by_file.setdefault(file, []).append((begin, end))
        windows: dict[str, list[Window]] = {}
        for file, asked in by_file.items():
            place = remote_file(file)
            if place is not None:
                watched = int(self._checker.watches(*place))  # the checker is one more reader
                windows[file] = [Window(*place, a, b, users=watched) for a, b in requests(asked, max_gap=self.max_gap)]
        starts = {file: [w.begin for w in held] for file, held in windows.items()}
        for expected, found in zip(batch, spans, strict=True):
            for file, begin, end in found:
                if file in windows:
                    self._assign(expected, windows[file], starts[file], begin, end)
        new = dict.fromkeys(w for e in batch for held in e.windows.values() for w in held)
        self._next.extend(new)
        if len(self._threads) == self._connections and sum(w.cost <= SMALL for w in new) > 2 * self._connections:
            self._start_threads(min(MORE * self._connections, MOST) - self._connections, small=True)

    @staticmethod
    def _assign(expected: Expected, windows: Sequence[Window], starts: list[int], begin: int, end: int) -> None:
        held = expected.windows.setdefault(_file_of(windows[0]), [])
        n = bisect_right(starts, begin) - 1
        while n < len(windows) and windows[n].begin < end:
            window = windows[n]
            if not (window.reads and window.reads[-1] is expected):
                window.reads.append(expected)
                window.users += 1
                expected.missing += 1
                held.append(window)
                if len(held) > 1 and held[-2].begin > window.begin:
                    held.sort(key=lambda w: w.begin)
            n += 1

    # ---- fetching

    def _work(self, small: bool) -> None:
        while True:
            try:
                with self._change:
                    window = self._choose(small)
                if window is None:
                    return
                size = window.end - window.begin
                data = self._memory.take(size)
                memory = memoryview(data)[:size]
                window.mirror.fetcher.read_into(window.path, window.begin, memory, self._over)
                self._arrived(window, data, self._check_content(window, memory))
            except Stopped:
                return
            except BaseException as error:
                with self._change:
                    self._error = self._error or error
                    self._change.notify_all()
                return

    def _arrived(self, window: Window, data: Block, seen: list[Window]) -> None:
        """A window is there for its readers; `seen` are those that the checker needs no more."""
        with self._change:
            window.data = data
            for expected in window.reads:
                expected.missing -= 1
                if not expected.missing:
                    self._change.notify_all()
            window.reads = []
            for one in seen:
                self._leave(one)
            if seen:
                self._change.notify_all()

    def _check_content(self, window: Window, memory: memoryview) -> list[Window]:
        """Windows that the checker has done with. Raises RemoteChanged when a file's content is wrong."""
        if not self._checker.watches(window.mirror, window.path):
            return []
        return self._checker.saw(window.mirror, window.path, window.begin, memory, window)

    def _choose(self, small: bool) -> Window | None:
        """The next window to fetch, when there is room for it. None at the end."""
        while not (self._over.is_set() or self.stop.is_set() or self._error):
            while self._urgent and not (small and self._urgent[0].cost > SMALL):
                window = self._urgent.popleft()
                if not window.started:
                    return self._start(window)
            while self._next and self._next[0].started:
                self._next.popleft()
            if not self._next and self._opened < len(self._batches) and self._held < self.budget:
                self._open_batch()
                continue
            room = min(self.budget - self._held, SMALL) if small else self.budget - self._held
            if self._next and self._next[0].cost <= room:
                return self._start(self._next.popleft())
            self._change.wait(POLL if self._next or self._opened < len(self._batches) else 1.0)
        return None

    def _start(self, window: Window) -> Window:
        window.started = True
        self._held += window.cost
        return window

    def close(self) -> None:
        """End the threads. One that hangs in a read ends by itself, when its time is over."""
        self._over.set()
        with self._change:
            self._change.notify_all()
        end = time.monotonic() + 1
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def _file_of(window: Window) -> str:
    return str(Path(window.mirror.directory) / window.path)
