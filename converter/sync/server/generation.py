"""The worker that generates: one thread, which takes sequences in, steps them together, and changes weights in between.

transformers' own continuous batching keeps serving old weights after a reset, so the loop is ours; the forward is
transformers'. Between two steps nothing runs on the weights: there, and only there, a new version is installed. What
was begun on the old weights may end on them (they are kept until the last of these sequences is done), be waited for,
be refused, or go on with the new ones, its keys and values computed anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from .batch import Batch, Copy, Model, Picked
from .metrics import Metrics
from .refusing import RequestRefused
from .sequences import Event, Sequence_

log = logging.getLogger("areal_convert.serve")

InFlight = Literal["finish", "wait", "abort", "keep"]
POLICIES: tuple[str, ...] = get_args(InFlight)


@dataclass(frozen=True, slots=True)
class Room:
    """How much the worker takes at a time.

    rows     sequences in the batch; `queue` those that wait; `prefill` tokens of prompts taken in between two steps
    """

    rows: int = 32
    queue: int = 512
    prefill: int = 4096


@dataclass
class Swapped:
    """What a change of weights did. `pause_s`: how long no token was made because of it."""

    version: int
    root: str | None
    pause_s: float
    in_flight: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Swap:
    version: int
    install: Callable[[], Copy]
    policy: InFlight
    future: Future[Swapped]
    since: float = field(default_factory=time.monotonic)
    waited: int | None = None
    begun: bool = False


class Engine:
    """The model, its sequences, and the version of its weights. All methods may be called from any thread."""

    def __init__(self, model: Model, first: Copy, metrics: Metrics, room: Room | None = None) -> None:
        self.model, self.metrics, self.room = model, metrics, room or Room()
        self.current = first
        self._old: list[Copy] = []
        self._batches: list[Batch] = []
        self._waiting: deque[Sequence_] = deque()
        self._swaps: deque[_Swap] = deque()
        self._changed = threading.Condition()
        self._closing: float | None = None
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------------------- from other threads

    @property
    def running(self) -> int:
        return sum(len(batch.rows) for batch in self._batches)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, sequences: Sequence[Sequence_]) -> None:
        """Generate these. Raises RequestRefused: the queue is full, another version is demanded, the server stops."""
        with self._changed:
            if self._closing is not None:
                raise RequestRefused("shutting_down", "The server is shutting down.")
            if len(self._waiting) + len(sequences) > self.room.queue:
                raise RequestRefused(
                    "queue_full",
                    f"{len(self._waiting)} sequences wait already; {len(sequences)} more do not fit.",
                    f"Try again later. The queue holds {self.room.queue}.",
                )
            for sequence in sequences:
                sequence.demand.check(self.current.version)
            self._waiting.extend(sequences)
            self._changed.notify_all()

    def cancel(self, sequences: Iterable[Sequence_]) -> None:
        """Nobody wants the rest of these."""
        with self._changed:
            for sequence in sequences:
                sequence.cancelled = True
            self._changed.notify_all()

    def swap(
        self, version: int, install: Callable[[], Copy], policy: InFlight = "finish", timeout: float | None = None
    ) -> Swapped:
        """Run `install`, which gives the new copy of the weights, between two steps; returns when it is done.

        What `install` raises is raised here; then the old version goes on, as if nothing had been asked. Raises
        TimeoutError when it was not begun within `timeout` seconds (requests that run are waited for, say).
        """
        if policy not in POLICIES:
            raise ValueError(f"in_flight: {policy!r} is none of {', '.join(POLICIES)}")
        swap = _Swap(version, install, policy, Future())
        with self._changed:
            if self._closing is not None:
                raise RequestRefused("shutting_down", "The server is shutting down.")
            self._swaps.append(swap)
            self._changed.notify_all()
        try:
            return swap.future.result(timeout)
        except TimeoutError:
            if swap.future.done():  # of `install` itself
                raise
            with self._changed:
                if not swap.begun:
                    self._swaps.remove(swap)
                    what = f"{self.running} sequences still ran after {timeout:g} s"
                    raise TimeoutError(f"{what}; commit with another in_flight, or again") from None
            return swap.future.result()

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._closing is None and self._thread.is_alive()

    def old_copies(self) -> int:
        """Copies of former weights on which sequences are still being finished."""
        return len(self._old)

    def close(self, grace: float = 5.0) -> None:
        """Finish what runs within `grace` seconds, refuse the rest, end the thread."""
        with self._changed:
            if self._closing is None:
                self._closing = time.monotonic() + grace
            self._changed.notify_all()
        self._thread.join(grace + 30)

    # -------------------------------------------------------------------------------------------- the worker's thread

    def _run(self) -> None:
        try:
            self._work()
        except BaseException:  # a fault of ours: whoever waits must not wait for ever
            log.exception("the worker ended")
            with self._changed:
                self._closing = time.monotonic()
        self._refuse_all(RequestRefused("shutting_down", "The server is shutting down."))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
            self._drop_cancelled()
            if self._closing is not None and self._is_over():
                break
            self._do_swaps()
            self._step()

    def _has_work(self) -> bool:
        return bool(self._swaps or self._batches or self._waiting or self._closing is not None)

    def _is_over(self) -> bool:
        assert self._closing is not None
        return not (self._batches or self._waiting) or time.monotonic() > self._closing

    def _step(self) -> None:
        """Take new sequences in, and one more token for each of those that run."""
        old = list(self._batches)
        taken = self._admit()
        for batch in old:
            self._guarded(batch, batch.step)
        for adapter, sequences in taken.items():
            self._start(adapter, sequences)
        self._tidy()

    def _admit(self) -> dict[Any, list[Sequence_]]:
        """Sequences that start now, by adapter. None while a swap waits for those that run."""
        taken: dict[Any, list[Sequence_]] = {}
        with self._changed:
            if self._swaps:
                return taken
            free, tokens = self.room.rows - self.running, self.room.prefill
            while self._waiting and free > 0 and (tokens > 0):
                sequence = self._waiting[0]
                if taken and sequence.length > tokens:
                    break
                self._waiting.popleft()
                try:
                    sequence.demand.check(self.current.version)
                except RequestRefused as refused:
                    self._fail(sequence, refused)
                    continue
                self.metrics.queued(time.monotonic() - sequence.submitted)
                taken.setdefault(sequence.adapter, []).append(sequence)
                free, tokens = free - 1, tokens - sequence.length
        return taken

    def _start(self, adapter: Any, sequences: list[Sequence_]) -> None:
        """Begin these on the current weights, in the batch of those that run on them already."""
        batch = next((b for b in self._batches if b.copy is self.current and b.adapter is adapter), None)
        if batch is None:
            batch = Batch(self.model, self.current, adapter)
            self._batches.append(batch)
        self._guarded(batch, lambda: batch.start(sequences), sequences)
        self.metrics.prompts(sum(len(s.prompt) for s in sequences if not s.out[1:]))

    def _guarded(self, batch: Batch, act: Callable[[], Picked], also: Sequence[Sequence_] = ()) -> None:
        """A step that fails (out of memory, say) fails the sequences that were in it, and no other."""
        try:
            picked = act()
        except Exception as error:
            log.exception("a step failed")
            refused = RequestRefused("internal", f"Generation failed: {type(error).__name__}: {error}")
            for sequence in [*batch.rows, *also]:
                self._fail(sequence, refused)
            batch.rows, batch.cache, batch.mask = [], None, None
            return
        for sequence, token, chosen in picked:
            try:
                self._deliver(batch, sequence, token, chosen)
            except Exception as error:  # of a tokenizer, say
                log.exception("a token could not be handed out")
                self._fail(sequence, RequestRefused("internal", f"Answering failed: {type(error).__name__}: {error}"))
        self.metrics.generated(len(picked))

    def _deliver(self, batch: Batch, sequence: Sequence_, token: int, chosen: Any) -> None:
        """Hand a token out, and see whether it was the last one."""
        if sequence.done:
            return
        if sequence.first_token is None:
            sequence.first_token = time.monotonic()
            self.metrics.first_token(sequence.first_token - sequence.submitted)
        how, text = sequence.sampling, ""
        if how.max_tokens == 0:  # only the prompt's log-probabilities were wanted
            sequence.finish = "length"
            self.metrics.finished("length", time.monotonic() - sequence.submitted)
            sequence.sink(Event(sequence, (), "", "length"))
            return
        sequence.add(token, batch.copy.version, chosen)
        ended = token in how.stop_ids or (token in self.model.eos and not how.ignore_eos)
        if ended:
            sequence.finish, sequence.stop_reason = "stop", token if token in how.stop_ids else None
        elif len(sequence.out) >= how.max_tokens:
            sequence.finish = "length"
        detokenizer = sequence.detokenizer
        if detokenizer is not None:
            text = detokenizer.add(token) if not ended or how.include_stop else ""
            if sequence.finish is not None and detokenizer.stopped is None:
                text += detokenizer.end()
            if detokenizer.stopped is not None:
                sequence.finish, sequence.stop_reason = "stop", detokenizer.stopped
        if sequence.finish is not None:
            self.metrics.finished(sequence.finish, time.monotonic() - sequence.submitted)
        sequence.sink(Event(sequence, (token,), text, sequence.finish))

    def _fail(self, sequence: Sequence_, error: RequestRefused) -> None:
        if not sequence.done:
            sequence.error = error
            self.metrics.finished(error.code, time.monotonic() - sequence.submitted)
            sequence.sink(Event(sequence, error=error))

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = [s for s in self._waiting if s.cancelled]
            if gone:
                self._waiting = deque(s for s in self._waiting if not s.cancelled)
        gone += [s for batch in self._batches for s in batch.rows if s.cancelled]
        for sequence in gone:
            if not sequence.done:
                sequence.finish = "abort"
                self.metrics.finished("cancelled", time.monotonic() - sequence.submitted)
                sequence.sink(Event(sequence, finish="abort"))
        if gone:
            self._tidy()

    def _tidy(self) -> None:
        """Let go of rows that are done, of batches without rows, and thereby of old weights."""
        for batch in self._batches:
            batch.drop_done()
        with self._changed:
            self._batches = [batch for batch in self._batches if batch.rows]
            needed = {id(batch.copy) for batch in self._batches}
            gone = [copy for copy in self._old if id(copy) not in needed]
            self._old = [copy for copy in self._old if id(copy) in needed]
        for copy in gone:
            copy.release()

    def _refuse_all(self, error: RequestRefused) -> None:
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
            swaps, self._swaps = list(self._swaps), deque()
        for sequence in [*waiting, *(s for batch in self._batches for s in batch.rows)]:
            self._fail(sequence, error)
        for swap in swaps:
            swap.future.set_exception(error)
        self._tidy()

    # -------------------------------------------------------------------------------------------- new weights

    def _do_swaps(self) -> None:
        while (swap := self._next_swap()) is not None:
            rows = [s for batch in self._batches for s in batch.rows]
            if swap.policy == "wait":
                swap.waited = len(rows) if swap.waited is None else swap.waited
                if rows:
                    return
            with self._changed:
                if swap not in self._swaps:  # given up meanwhile
                    continue
                swap.begun = True
            if swap.policy == "abort":
                refused = RequestRefused(
                    "aborted", f"The weights change to version {swap.version}.", "Send the request again."
                )
                for sequence in rows:
                    self._fail(sequence, refused)
                self._tidy()
            self._install(swap, len(rows))
            with self._changed:
                self._swaps.remove(swap)

    def _next_swap(self) -> _Swap | None:
        with self._changed:
            return self._swaps[0] if self._swaps else None

    def _install(self, swap: _Swap, rows: int) -> None:
        """The critical section. Everything is on the new version after it, or everything on the old one."""
        begin = swap.since if swap.policy == "wait" else time.monotonic()
        try:
            new = swap.install()
        except BaseException as error:
            swap.future.set_exception(error)
            return
        with self._changed:
            self._old.append(self.current)
            self.current = new
        told: dict[str, Any] = {"policy": swap.policy}
        if swap.policy == "finish":
            told["finishing"] = rows
        elif swap.policy == "keep":
            told |= self._recompute()
        elif swap.policy == "abort":
            told["aborted"] = rows
        else:
            told["waited"] = swap.waited or 0
        self._tidy()
        pause = time.monotonic() - begin
        self.metrics.swapped(new.version, pause)
        swap.future.set_result(Swapped(new.version, new.root, pause, told))

    def _recompute(self) -> dict[str, int]:
        """Go on with the new weights: what was computed with the old ones is computed again."""
        rows = [s for batch in self._batches for s in batch.rows if not s.done]
        for batch in self._batches:
            batch.rows, batch.cache, batch.mask = [], None, None
        kept: dict[Any, list[Sequence_]] = {}
        for sequence in rows:
            try:
                sequence.demand.check(self.current.version)
                kept.setdefault(sequence.adapter, []).append(sequence)
            except RequestRefused as refused:
                self._fail(sequence, refused)
        for adapter, sequences in kept.items():
            self._start(adapter, sequences)
        count = sum(map(len, kept.values()))
        return {"recomputed": count, "refused": len(rows) - count}
