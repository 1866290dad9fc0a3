"""One push on its way in: threads that receive, threads that hash and apply, and the first thing that went wrong.

Receiving and applying overlap. What can be is received right where it belongs: the stage serves nobody, and what is
wrong with it is found before it does. After an error nothing more is applied, but the buckets are still taken
(drained): a server that left the collectives would make all others wait.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash

from ..codecs import Array
from ..errors import ConvertError
from .blocks import LONG, NUMBER_BYTES, Blocks, Run, parts_of
from .checking import largest_payload
from .inlet import Arrival, Inlet, InletClosed, Stream
from .ledger import DIGEST, Ledger, bucket_digest
from .staging import WINDOW, Staging
from .wire import ABORT, CALLED_OFF, LAST, MOST_NUMBERS, Header, Manifest, ProtocolError

log = logging.getLogger("areal_convert.sync")

APPLIERS = 2
"""Threads that hash and write: together they are faster than a network."""


@dataclass(eq=False)
class _Bucket:
    """One bucket on its way into the stage.

    runs    of its blocks, each with its bytes, and where these go: the same memory (they were received there), other
            memory, or (None) block by block wherever the stage wants them
    wait    until the bytes are there
    buffer  memory that is free again when they are applied
    """

    header: Header
    arrival: Arrival | Stream
    numbers: Array
    lengths: Array
    runs: list[tuple[Run, Array, Array | None]]
    wait: Callable[[], None]
    buffer: Array | None = None
    drained: bool = False


class Reception:
    """Everything that comes in for one manifest. `start` it, `wait` for it, or `cancel` it.

    error     the first thing that went wrong, or None
    changed   called after the first bucket, after the first error, and at the end
    """

    def __init__(
        self,
        inlet: Inlet,
        manifest: Manifest,
        blocks: Blocks,
        staging: Staging,
        ledger: Ledger,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.manifest, self.ledger = manifest, ledger
        self.bytes = self.buckets = 0
        self.began: float | None = None
        self.ended: float | None = None
        self.error: ConvertError | None = None
        self.broken = False
        self._inlet, self._blocks, self._staging, self._changed = inlet, blocks, staging, changed
        self._limit = largest_payload(manifest, blocks)
        self._senders = iter(range(len(manifest.senders)))
        self._lock = threading.Condition()
        self._cancelled: str | None = None
        self._left = threads = min(WINDOW, len(manifest.senders))
        self._appliers = ThreadPoolExecutor(APPLIERS, thread_name_prefix="areal-apply")
        self._buffers: queue.Queue[Array | None] = queue.Queue()
        for _ in range(threads + 1):
            self._buffers.put(None)  # memory is taken when the first bucket wants it
        self._threads = [
            threading.Thread(target=self._run, name=f"areal-receive-{n}", daemon=True) for n in range(threads)
        ]

    # -------------------------------------------------------------------------------------------- from outside

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> bool:
        """Whether every sender's last bucket is there, and everything is applied (or an error ended it)."""
        return self._left == 0

    def wait(self, timeout: float) -> bool:
        """Until everything is there or something went wrong; False when it took too long."""
        end = time.monotonic() + timeout
        with self._lock:
            while not self.done and self.error is None:
                if not self._lock.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    return False
        return True

    def cancel(self, reason: str, timeout: float = 10.0) -> None:
        """Stop, and return when nothing is written to the stage any more."""
        with self._lock:
            self._cancelled = self._cancelled or reason
        if not self.done:
            self.broken = True
            self._inlet.abort(reason)
        end = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
        self._appliers.shutdown(wait=True)  # what is left in it waits for nothing any more

    def settled(self, timeout: float) -> bool:
        """Whether nothing is received any more into the stage, waiting so long for it."""
        return self._inlet.settled(timeout)

    # -------------------------------------------------------------------------------------------- receiving

    def _run(self) -> None:
        try:
            while self._cancelled is None:
                with self._lock:
                    sender = next(self._senders, None)
                if sender is None or not self._receive(sender):
                    break
        except InletClosed as error:
            self._fail(error)
        except ConvertError as error:
            self._fail(error, broken=True)
        except Exception as error:  # whatever it is, nobody may wait for us in vain
            log.exception("receiving version %d failed", self.manifest.version)
            self._fail(ProtocolError(f"Receiving failed: {type(error).__name__}: {error}"), broken=True)
        finally:
            self._end()

    def _end(self) -> None:
        """The last thread to end waits until everything is applied."""
        with self._lock:
            last = self._left == 1
            if not last:
                self._left -= 1
        if last:
            self._appliers.shutdown(wait=True)
            with self._lock:
                self._left, self.ended = 0, time.monotonic()
                self._lock.notify_all()
            self._changed()

    def _receive(self, sender: int) -> bool:
        """All of one sender's buckets; False when nothing more can come."""
        expected = 0
        while True:
            arrival = self._inlet.next(sender)
            try:
                header = Header.unpack(arrival.header)
                self._check(header, sender, expected)
            except ProtocolError as error:
                self._fail(error, broken=True)  # how many bytes come next is anybody's guess: nothing can be drained
                arrival.done(error)
                return False
            if self.began is None:
                self.began = time.monotonic()
                self._changed()
            if header.flags & ABORT:
                self._fail(ProtocolError(f"{CALLED_OFF} (sender {sender}, bucket {header.number})."))
                arrival.done(self.error)
                return True
            self._take(arrival, header)
            if header.flags & LAST:
                return True
            expected += 1

    def _check(self, header: Header, sender: int, expected: int) -> None:
        """Raises ProtocolError for a header that is not the next one here."""
        m = self.manifest
        where = f"Bucket {header.number} of sender {header.sender}"
        for name, found, wanted in (
            ("epoch", header.epoch, m.epoch),
            ("version", header.version, m.version),
            ("sender", header.sender, sender),
            ("number", header.number, expected),
        ):
            if found != wanted:
                raise ProtocolError(f"{where}: {name} {found}; {wanted} was expected.")
        if header.flags & ~(LAST | ABORT):
            raise ProtocolError(f"{where}: there is no flag {header.flags:#x}.")
        if header.nbytes > self._limit:
            raise ProtocolError(f"{where} has {header.nbytes} bytes; {self._limit} are the most.")
        if header.blocks > MOST_NUMBERS:
            raise ProtocolError(f"{where} has {header.blocks} blocks; {MOST_NUMBERS} are the most.")
        if header.flags & ABORT and header.nbytes:
            raise ProtocolError(f"{where}: an abort with a payload of {header.nbytes} bytes.")

    def _take(self, arrival: Arrival | Stream, header: Header) -> None:
        """Receive a payload, and hand it on."""
        try:
            bucket = self._stream(arrival, header) if isinstance(arrival, Stream) else self._view(arrival, header)
        except BaseException as error:
            arrival.done(error if isinstance(error, ConvertError) else ProtocolError(str(error)))
            raise
        try:
            self._appliers.submit(self._applied, bucket)
        except RuntimeError:  # cancelled meanwhile
            if bucket.buffer is not None:
                self._buffers.put(None)
            arrival.done(self.error or InletClosed("The push was aborted."))

    def _view(self, arrival: Arrival, header: Header) -> _Bucket:
        """A bucket that is in memory."""
        payload = arrival.take(header)
        bucket = _Bucket(header, arrival, np.empty(0, np.int64), np.empty(0, np.int64), [], _at_once)
        try:
            bucket.numbers, bucket.lengths, start = self._numbers(header, payload[: NUMBER_BYTES * header.blocks])
            self.ledger.claim(header.sender, bucket.numbers)
        except ProtocolError as error:
            self._fail(error)
            return bucket
        for run in self._blocks.runs(bucket.numbers, bucket.lengths):
            bucket.runs.append((run, payload[start : start + run.nbytes], self._staging.where(run)))
            start += run.nbytes
        return bucket

    def _stream(self, arrival: Stream, header: Header) -> _Bucket:
        """A bucket whose bytes are still to come: let them come where they belong, or into a buffer. Raises
        ProtocolError when nobody knows how many they are."""
        if header.blocks * NUMBER_BYTES > header.nbytes:
            raise self._too_few(header, header.nbytes)
        numbers, lengths, _ = self._numbers(header, arrival.numbers(header))
        bucket = _Bucket(header, arrival, numbers, lengths, [], _at_once)
        try:
            self.ledger.claim(header.sender, numbers)
        except ProtocolError as error:
            self._fail(error)
        bucket.drained = self.error is not None
        places, filled = [], 0
        for runs in parts_of(self._blocks.runs(numbers, lengths)):
            nbytes = sum(run.nbytes for run in runs)
            target = self._staging.where(runs[0]) if runs[0].nbytes >= LONG and not bucket.drained else None
            if target is not None:
                bucket.runs.append((runs[0], target, target))
                places.append(target)
                continue
            if bucket.buffer is None:
                found = self._buffers.get()
                bucket.buffer = found if found is not None else np.empty(self._limit, np.uint8)
            places.append(bucket.buffer[filled : filled + nbytes])
            for run in runs:
                where = self._staging.where(run) if not bucket.drained else None
                bucket.runs.append((run, bucket.buffer[filled : filled + run.nbytes], where))
                filled += run.nbytes
        bucket.wait = arrival.fill(header, places)
        return bucket

    # -------------------------------------------------------------------------------------------- applying

    def _applied(self, bucket: _Bucket) -> None:
        landed = self._cancelled is None and self._landed(bucket)
        try:
            if landed and self.error is None and self._cancelled is None:
                self._apply(bucket)
                with self._lock:
                    self.bytes += bucket.header.nbytes
                    self.buckets += 1
        except ConvertError as error:
            self._fail(error)
        except Exception as error:
            log.exception("applying version %d failed", self.manifest.version)
            self._fail(ProtocolError(f"{_named(bucket.header)} was not applied: {type(error).__name__}: {error}"))
        finally:
            if bucket.buffer is not None:  # what did not land may still be written to: nobody gets that memory again
                self._buffers.put(bucket.buffer if landed else None)
            bucket.arrival.done(self.error or (InletClosed("The push was aborted.") if self._cancelled else None))

    def _landed(self, bucket: _Bucket) -> bool:
        """Wait for the bytes; False when they do not come."""
        try:
            bucket.wait()
            return True
        except InletClosed as error:
            self._fail(error)
        except ConvertError as error:
            self._fail(error, broken=True)
        except Exception as error:  # nobody asks for what this thread raises
            log.exception("receiving version %d failed", self.manifest.version)
            self._fail(ProtocolError(f"{_named(bucket.header)}: {type(error).__name__}: {error}"), broken=True)
        return False

    def _apply(self, bucket: _Bucket) -> None:
        """Hash every block, and write it to its places unless it came there. Raises ProtocolError."""
        numbers, lengths = bucket.numbers.tolist(), bucket.lengths.tolist()
        digests = np.empty((len(numbers), DIGEST), np.uint8)
        for run, data, target in bucket.runs:
            begin = 0
            for n in range(run.at, run.at + run.blocks):
                end = begin + lengths[n]
                block = data[begin:end]
                digests[n] = np.frombuffer(xxhash.xxh3_128_digest(block.data), np.uint8)
                if target is None:
                    self._staging.put(numbers[n], block)
                elif target is not data:
                    target[begin:end] = block
                begin = end
                if self._cancelled is not None:
                    return
        if bucket_digest(bucket.numbers.astype("<u4"), digests) != bucket.header.digest:
            raise ProtocolError(f"{_named(bucket.header)} is damaged: its bytes are not those that were sent.")
        self.ledger.record(bucket.numbers, digests)

    def _numbers(self, header: Header, said: Array) -> tuple[Array, Array, int]:
        """(block numbers, their lengths, where the first one's bytes begin) from the numbers' bytes; all of the payload
        must be theirs. Raises ProtocolError."""
        start = NUMBER_BYTES * header.blocks
        if start > header.nbytes:
            raise self._too_few(header, header.nbytes)
        numbers = said.view("<u4").astype(np.int64)
        beyond = numbers[numbers >= self._blocks.count]
        if beyond.size:
            raise ProtocolError(f"{_named(header)}: there is no block {int(beyond[0])} of {self._blocks.count}.")
        lengths = self._blocks.lengths(numbers)
        if start + int(lengths.sum()) != header.nbytes:
            raise ProtocolError(
                f"{_named(header)} has {header.nbytes} bytes; its {header.blocks} blocks make "
                f"{start + int(lengths.sum())}."
            )
        return numbers, lengths, start

    @staticmethod
    def _too_few(header: Header, nbytes: int) -> ProtocolError:
        return ProtocolError(f"{_named(header)} has {nbytes} bytes, too few for {header.blocks} blocks.")

    def _fail(self, error: ConvertError, *, broken: bool = False) -> None:
        """Remember the first error. `broken`: the transport cannot go on, so everybody in it is freed."""
        with self._lock:
            self.broken = self.broken or broken or isinstance(error, InletClosed)
            if self.error is None:
                self.error = error
            self._lock.notify_all()
        if broken:
            self._inlet.abort(str(error))
        self._changed()


def _at_once() -> None:
    """Nothing to wait for."""


def _named(header: Header) -> str:
    return f"Bucket {header.number} of sender {header.sender}"
