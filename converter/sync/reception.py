"""One push on its way in: threads that receive, threads that hash and apply, and the first thing that went wrong.

Receiving and applying overlap. After an error nothing more is applied, but the buckets are still taken (drained): a
server that left the collectives would make all others wait.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from ..codecs import Array
from ..errors import ConvertError
from .blocks import NUMBER_BYTES, Blocks
from .checking import largest_payload
from .inlet import Arrival, Inlet, InletClosed
from .ledger import DIGEST, Ledger, bucket_digest
from .staging import WINDOW, Staging
from .wire import ABORT, LAST, Header, Manifest, ProtocolError

log = logging.getLogger("areal_convert.sync")

APPLIERS = 2
"""Threads that hash and write: together they are faster than a network."""


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
        self._appliers.shutdown(wait=True, cancel_futures=True)

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
                self._fail(ProtocolError(f"The hub called the push off (sender {sender}, bucket {header.number})."))
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
        if header.flags & ABORT and header.nbytes:
            raise ProtocolError(f"{where}: an abort with a payload of {header.nbytes} bytes.")

    def _take(self, arrival: Arrival, header: Header) -> None:
        """Receive a payload, and hand it on."""
        buffer: Array | None = None
        try:
            if not header.nbytes:
                payload = np.empty(0, np.uint8)
            elif self._inlet.fills:
                buffer = self._buffers.get()
                if buffer is None:
                    buffer = np.empty(self._limit, np.uint8)
                payload = arrival.take(header, buffer[: header.nbytes])
            else:
                payload = arrival.take(header, None)
        except BaseException as error:
            self._give_back(buffer)
            arrival.done(error if isinstance(error, ConvertError) else ProtocolError(str(error)))
            raise
        try:
            self._appliers.submit(self._applied, arrival, header, payload, buffer)
        except RuntimeError:  # cancelled meanwhile
            self._give_back(buffer)
            arrival.done(self.error or InletClosed("The push was aborted."))

    def _give_back(self, buffer: Array | None) -> None:
        if self._inlet.fills:
            self._buffers.put(buffer)

    # -------------------------------------------------------------------------------------------- applying

    def _applied(self, arrival: Arrival, header: Header, payload: Array, buffer: Array | None) -> None:
        try:
            if self.error is None and self._cancelled is None:
                self._apply(header, payload)
                with self._lock:
                    self.bytes += header.nbytes
                    self.buckets += 1
        except ConvertError as error:
            self._fail(error)
        except Exception as error:
            log.exception("applying version %d failed", self.manifest.version)
            self._fail(ProtocolError(f"{_named(header)} was not applied: {type(error).__name__}: {error}"))
        finally:
            if buffer is not None:
                self._give_back(buffer)
            arrival.done(self.error)

    def _apply(self, header: Header, payload: Array) -> None:
        """Hash every block and write it to its places. The stage serves nobody: what is wrong is found before it does.

        Raises ProtocolError.
        """
        numbers, lengths, start = self._numbers(header, payload)
        self.ledger.claim(header.sender, numbers)
        digests = np.empty((len(numbers), DIGEST), np.uint8)
        view = memoryview(payload)  # type: ignore[arg-type]
        ends = start + np.cumsum(lengths)
        for n, (number, end) in enumerate(zip(numbers.tolist(), ends.tolist(), strict=True)):
            begin = end - int(lengths[n])
            digests[n] = np.frombuffer(xxhash.xxh3_128_digest(view[begin:end]), np.uint8)
            self._staging.put(number, payload[begin:end])
            if self._cancelled is not None:
                return
        if bucket_digest(numbers.astype("<u4"), digests) != header.digest:
            raise ProtocolError(f"{_named(header)} is damaged: its bytes are not those that were sent.")
        self.ledger.record(numbers, digests)

    def _numbers(self, header: Header, payload: Array) -> tuple[Array, Array, int]:
        """(block numbers, their lengths, where the first one's bytes begin); all of the payload must be theirs."""
        start = NUMBER_BYTES * header.blocks
        if start > payload.nbytes:
            raise ProtocolError(f"{_named(header)} has {payload.nbytes} bytes, too few for {header.blocks} blocks.")
        numbers = payload[:start].view("<u4").astype(np.int64)
        beyond = numbers[numbers >= self._blocks.count]
        if beyond.size:
            raise ProtocolError(f"{_named(header)}: there is no block {int(beyond[0])} of {self._blocks.count}.")
        lengths = self._blocks.lengths(numbers)
        if start + int(lengths.sum()) != payload.nbytes:
            raise ProtocolError(
                f"{_named(header)} has {payload.nbytes} bytes; its {header.blocks} blocks make "
                f"{start + int(lengths.sum())}."
            )
        return numbers, lengths, start

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


def _named(header: Header) -> str:
    return f"Bucket {header.number} of sender {header.sender}"
