"""A sender's part of a push: read ‖ hash ‖ send. Blocks are read straight into a bucket's memory, hashed while they are
in the cache, and the bucket travels while the next one is filled.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import xxhash

from ..codecs import Array
from ..errors import SyncAborted
from ..slots import Box
from .blocks import NUMBER_BYTES, Blocks, by_bucket
from .ledger import DIGEST, bucket_digest
from .source import Source
from .transport import Transport
from .wire import ABORT, LAST, Header, Manifest

LOOKED_AT = 2 << 20
"""Bytes that a thread reads at a time to find out what changed."""


@dataclass
class Sent:
    """What one sender did.

    digests  a row of 16 bytes for every block of its own, sent or not
    bytes    of blocks that were sent; `payload` with their numbers; `buckets` of them
    waited   seconds in which this sender had a bucket to fill and no memory free: the wire is slower than reading
    """

    digests: Array
    bytes: int = 0
    payload: int = 0
    buckets: int = 0
    blocks: int = 0
    waited: float = 0.0
    seconds: float = 0.0


@dataclass
class Sender:
    """One push of one sender rank. `stop` is set from outside to call it off."""

    source: Source
    manifest: Manifest
    blocks: Blocks
    number: int
    transport: Transport
    advance: Callable[[int], None] = lambda n: None
    stop: threading.Event = field(default_factory=threading.Event)
    reason: str = ""
    workers: int = field(default_factory=lambda: max(1, min(4, len(os.sched_getaffinity(0)) // 2)))

    def send(self, base: Array | None = None) -> Sent:
        """Send all blocks, or (`base`: the digests of this sender's blocks in the version that the servers have) those
        that changed. Raises SyncAborted after a stop, and whatever reading and the transport raise."""
        start = time.perf_counter()
        mine = self.blocks.of_sender(self.number)
        sent = Sent(np.zeros((len(mine), DIGEST), np.uint8))
        with ThreadPoolExecutor(self.workers, thread_name_prefix="areal-sync-read") as pool:
            numbers: Iterable[int] = mine
            if base is None:
                self.source.expect(self._box(n) for n in mine)
            else:
                numbers = self._changed(pool, mine, base, sent)
            self.transport.begin(self.manifest.version)
            try:
                self._buckets(pool, numbers, mine.start, sent)
            except BaseException as error:
                self._tell_abort(sent, error)
                raise
            self.transport.finish()
        sent.seconds = time.perf_counter() - start
        return sent

    def call_off(self, reason: str) -> None:
        """From another thread: send no more, and free whoever waits in the transport."""
        self.reason = self.reason or reason
        self.stop.set()
        self.transport.abort(reason)

    # -------------------------------------------------------------------------------------------- buckets

    def _buckets(self, pool: ThreadPoolExecutor, numbers: Iterable[int], first: int, sent: Sent) -> None:
        """One bucket after another; the last one, which may be empty, says that it is."""
        buckets = iter(by_bucket(self.blocks, numbers, self.manifest.bucket))
        bucket = next(buckets, None)
        if bucket is None:
            self._send_bucket(pool, [], 0, first, sent, LAST)
        while bucket is not None:
            held, size = bucket
            bucket = next(buckets, None)
            self._send_bucket(pool, held, size, first, sent, 0 if bucket is not None else LAST)

    def _send_bucket(
        self, pool: ThreadPoolExecutor, held: list[int], size: int, first: int, sent: Sent, flags: int
    ) -> None:
        self._check()
        began = time.perf_counter()
        memory = self.transport.buffer()
        sent.waited += time.perf_counter() - began
        payload = memory[:size]
        numbers = np.array(held, "<u4")
        start = NUMBER_BYTES * len(held)
        payload[:start] = numbers.view(np.uint8)
        lengths = self.blocks.lengths(numbers)
        digests = np.empty((len(held), DIGEST), np.uint8)
        ends = (start + np.cumsum(lengths)).tolist() if held else []
        begins = [start, *ends[:-1]]

        def fill(some: range) -> None:
            for n in some:
                if self.stop.is_set():
                    return
                digests[n] = self._read(held[n], payload[begins[n] : ends[n]])

        if self.workers == 1:  # the transport has threads of its own
            fill(range(len(held)))
        elif held:
            for future in [pool.submit(fill, some) for some in _split(ends, start, self.workers)]:
                future.result()
        self._check()
        sent.digests[np.asarray(held, np.int64) - first] = digests
        m = self.manifest
        digest = bucket_digest(numbers, digests)
        header = Header(m.epoch, m.version, self.number, sent.buckets, size, len(held), digest, flags)
        self.transport.send(header, payload)
        sent.buckets += 1
        sent.blocks += len(held)
        sent.bytes += size - start
        sent.payload += size
        self.advance(size - start)

    def _box(self, number: int) -> tuple[str, Box]:
        atom, lo, hi = self.blocks.box(number)
        return self.manifest.atoms[atom].name, Box(lo, hi)

    def _read(self, number: int, out: Array) -> Array:
        return _read(self.source, self.manifest, self.blocks, number, out)

    def _check(self) -> None:
        if self.stop.is_set():
            raise SyncAborted(f"The push was called off: {self.reason or 'stopped'}.")

    def _tell_abort(self, sent: Sent, error: BaseException) -> None:
        """As long as the transport is whole, the servers need not wait for its timeout."""
        if self.stop.is_set():
            return
        m = self.manifest
        header = Header(m.epoch, m.version, self.number, sent.buckets, 0, 0, bytes(DIGEST), ABORT)
        try:
            self.transport.buffer()
            self.transport.send(header, np.empty(0, np.uint8))
            self.transport.finish()
        except Exception:  # the first error is the one to tell; the hub's abort reaches the servers over HTTP
            self.transport.abort(str(error))

    # -------------------------------------------------------------------------------------------- what changed

    def _changed(self, pool: ThreadPoolExecutor, mine: range, base: Array, sent: Sent) -> Iterator[int]:
        """Numbers of the blocks whose digest is another than in `base`. All digests are noted; a few groups of blocks
        are looked at ahead. What changed is read again as it is sent, and its digest is then the one that counts."""
        groups = by_bucket(self.blocks, mine, LOOKED_AT)
        ahead: deque[Future[list[int]]] = deque()

        def look(held: list[int]) -> list[int]:
            changed = []
            memory = np.empty(max(self.blocks.lengths(np.array(held, np.int64)).tolist()), np.uint8)
            for number in held:
                if self.stop.is_set():
                    break
                n = number - mine.start
                sent.digests[n] = self._read(number, memory[: self.blocks.nbytes(number)])
                if not np.array_equal(sent.digests[n], base[n]):
                    changed.append(number)
            return changed

        for held, _ in groups:
            ahead.append(pool.submit(look, held))
            if len(ahead) > 2 * self.workers:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()


def _split(ends: list[int], start: int, parts: int) -> list[range]:
    """Cut a bucket's blocks into runs of about the same bytes, one for each thread."""
    total = ends[-1] - start
    cuts = [0]
    for part in range(1, parts):
        target = start + total * part // parts
        at = int(np.searchsorted(ends, target)) + 1
        if cuts[-1] < at < len(ends):
            cuts.append(at)
    cuts.append(len(ends))
    return [range(a, b) for a, b in pairwise(cuts) if b > a]


def hash_all(source: Source, manifest: Manifest, blocks: Blocks, number: int) -> Sent:
    """The digests of a sender's blocks, without sending them."""
    mine = blocks.of_sender(number)
    memory = np.empty(blocks.largest, np.uint8)
    sent = Sent(np.empty((len(mine), DIGEST), np.uint8))
    for n, block in enumerate(mine):
        sent.digests[n] = _read(source, manifest, blocks, block, memory[: blocks.nbytes(block)])
    return sent


def _read(source: Source, manifest: Manifest, blocks: Blocks, number: int, out: Array) -> Array:
    """Fill a block's memory; returns its digest."""
    atom, lo, hi = blocks.box(number)
    said = manifest.atoms[atom]
    source.read(said.name, Box(lo, hi), said.dtype, out)
    return np.frombuffer(xxhash.xxh3_128_digest(out.data), np.uint8)
