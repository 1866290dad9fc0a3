"""A sender's part of a push: read ‖ hash ‖ send. What lies in memory as it travels is sent from there, where the
transport can; everything else is read into a bucket's memory. Blocks are hashed while they are in the cache, and a
bucket travels while the next one is filled.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import xxhash

from ..codecs import Array, bits, has_nan
from ..dtypes import BY_NAME
from ..errors import SourceError, SyncAborted
from ..slots import Box
from .blocks import LONG, NUMBER_BYTES, Blocks, Run, by_bucket, parts_of
from .ledger import DIGEST, bucket_digest
from .source import Source
from .transport import Transport
from .wire import ABORT, LAST, Header, Manifest

LOOKED_AT = 32 << 20
"""Bytes that a thread looks at in one go to find out what changed."""

AHEAD = 3
"""Such parts that wait for every thread: the one that hands them out gets its turn only now and then."""


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
    allow_nan: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    reason: str = ""
    workers: int = 0

    def __post_init__(self) -> None:
        self._reader = Reader(self.source, self.manifest, self.blocks)

    def send(self, base: Array | None = None) -> Sent:
        """Send all blocks, or (`base`: the digests of this sender's blocks in the version that the servers have) those
        that changed. Raises SyncAborted after a stop, SourceError for a NaN unless it is allowed, and whatever reading
        and the transport raise."""
        start = time.perf_counter()
        mine = self.blocks.of_sender(self.number)
        sent = Sent(np.zeros((len(mine), DIGEST), np.uint8))
        cores = len(os.sched_getaffinity(0))
        # A transport has threads of its own, and they have work as soon as the first bucket is full; where little has
        # changed they wait, and looking for it is all there is to do.
        self.workers = self.workers or max(1, min(4, cores // 2 if base is None else cores))
        with ThreadPoolExecutor(self.workers, thread_name_prefix="areal-sync-read") as pool:
            numbers: Iterable[int] = mine
            if base is None:
                self.source.expect(self._reader.what(n) for n in mine)
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
        numbers = np.array(held, "<u4")
        bucket = _Bucket.of(self.blocks, numbers, memory[:size], self._reader, self.transport.straight)
        digests = np.empty((len(held), DIGEST), np.uint8)

        def fill(some: range) -> None:
            for n in some:
                if self.stop.is_set():
                    return
                data = bucket.fill(n, self._reader)
                digests[n] = _digest(data)
                self._look_at(bucket.atoms[n], data)

        if self.workers == 1:  # the transport has threads of its own
            fill(range(len(held)))
        elif held:
            for future in [pool.submit(fill, some) for some in _split(bucket.ends, bucket.start, self.workers)]:
                future.result()
        self._check()
        sent.digests[np.asarray(held, np.int64) - first] = digests
        m = self.manifest
        digest = bucket_digest(numbers, digests)
        header = Header(m.epoch, m.version, self.number, sent.buckets, size, len(held), digest, flags)
        self.transport.send(header, bucket.parts)
        sent.buckets += 1
        sent.blocks += len(held)
        sent.bytes += size - bucket.start
        sent.payload += size
        self.advance(size - bucket.start)

    def _look_at(self, number: int, data: Array) -> None:
        """Raise SourceError for a NaN in a part of an atom, as a conversion does."""
        if self.allow_nan:
            return
        atom = self.manifest.atoms[number]
        if has_nan(data.view(bits(BY_NAME[atom.dtype].size)), atom.dtype):
            raise SourceError(
                f"{atom.name} holds NaN: these weights would answer nothing but NaN.",
                hint="Look at the training run; allow_nan=True (--allow-nan) sends them all the same.",
            )

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
            self.transport.send(header, [np.empty(0, np.uint8)])
            self.transport.finish()
        except Exception:  # the first error is the one to tell; the hub's abort reaches the servers over HTTP
            self.transport.abort(str(error))

    # -------------------------------------------------------------------------------------------- what changed

    def _changed(self, pool: ThreadPoolExecutor, mine: range, base: Array, sent: Sent) -> Iterator[int]:
        """Numbers of the blocks whose digest is another than in `base`. All digests are noted; a few groups of blocks
        are looked at ahead. What changed is read again as it is sent, and its digest is then the one that counts."""
        ahead: deque[Future[list[int]]] = deque()

        def look(held: list[int]) -> list[int]:
            if self.stop.is_set():
                return []
            numbers = np.array(held, np.int64)
            rows = numbers - mine.start
            sent.digests[rows] = found = self._reader.digests(numbers)
            changed: list[int] = numbers[np.any(found != base[rows], axis=1)].tolist()
            return changed

        for held, _ in by_bucket(self.blocks, mine, LOOKED_AT):
            ahead.append(pool.submit(look, held))
            if len(ahead) > AHEAD * self.workers:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()


class Reader:
    """A source's blocks, by their numbers. For several threads."""

    def __init__(self, source: Source, manifest: Manifest, blocks: Blocks) -> None:
        self.source, self.manifest, self.blocks = source, manifest, blocks
        self._flat: dict[int, Array | None] = {}

    def what(self, number: int) -> tuple[str, Box]:
        """The box of which atom a block is."""
        atom, lo, hi = self.blocks.box(number)
        return self.manifest.atoms[atom].name, Box(lo, hi)

    def read(self, number: int, out: Array) -> None:
        """Fill a block's memory."""
        atom, lo, hi = self.blocks.box(number)
        said = self.manifest.atoms[atom]
        self.source.read(said.name, Box(lo, hi), said.dtype, out)

    def flat(self, run: Run) -> Array | None:
        """The memory of the box that a run is of, where the source has it as it travels."""
        if run.cut not in self._flat:
            said = self.manifest.atoms[run.atom]
            self._flat[run.cut] = self.source.flat(said.name, Box(run.lo, run.hi), said.dtype)
        return self._flat[run.cut]

    def digests(self, numbers: Array) -> Array:
        """Of some blocks: a row of 16 bytes each. What lies in memory is not copied."""
        lengths = self.blocks.lengths(numbers)
        found: list[bytes] = []
        memory: Array | None = None
        for run in self.blocks.runs(numbers, lengths):
            flat, at = self.flat(run), run.begin
            for n in range(run.at, run.at + run.blocks):
                size = int(lengths[n])
                if flat is not None:
                    data = flat[at : at + size]
                else:
                    memory = memory if memory is not None else np.empty(int(lengths.max()), np.uint8)
                    data = memory[:size]
                    self.read(int(numbers[n]), data)
                found.append(xxhash.xxh3_128_digest(data.data))
                at += size
        return np.frombuffer(b"".join(found), np.uint8).reshape(-1, DIGEST)


@dataclass
class _Bucket:
    """Where the blocks of one bucket go, and where they are.

    start   bytes of the numbers, which come first; `begins` and `ends` of every block behind them, in the payload
    atoms   of which atom each block is
    places  where each lies in the source (memory, from which byte on, whether it is sent from there); None: it is read
    parts   the payload in pieces, one after the other: the numbers, then what is sent from the bucket's memory or
            straight from the source's
    """

    numbers: Array
    payload: Array
    start: int
    begins: list[int]
    ends: list[int]
    atoms: list[int]
    places: list[tuple[Array, int, bool] | None]
    parts: list[Array]

    @classmethod
    def of(cls, blocks: Blocks, numbers: Array, payload: Array, reader: Reader, straight: bool) -> _Bucket:
        start = NUMBER_BYTES * len(numbers)
        payload[:start] = numbers.view(np.uint8)
        lengths = blocks.lengths(numbers)
        ends: list[int] = (start + np.cumsum(lengths)).tolist()
        bucket = cls(numbers, payload, start, [start, *ends[:-1]], ends, [], [], [payload[:start]])
        for runs in parts_of(blocks.runs(numbers, lengths)):
            bucket._add(runs, reader, straight)
        return bucket

    def _add(self, runs: Sequence[Run], reader: Reader, straight: bool) -> None:
        for run in runs:
            flat = reader.flat(run)
            stays = straight and run.nbytes >= LONG
            shift = run.begin - self.begins[run.at]
            self.atoms += [run.atom] * run.blocks
            self.places += [
                (flat, self.begins[n] + shift, stays) if flat is not None else None
                for n in range(run.at, run.at + run.blocks)
            ]
            if flat is not None and stays:
                self.parts.append(flat[run.begin : run.begin + run.nbytes])
                return
        last = runs[-1]
        self.parts.append(self.payload[self.begins[runs[0].at] : self.ends[last.at + last.blocks - 1]])

    def fill(self, n: int, reader: Reader) -> Array:
        """The bytes of a block, which are then where they are sent from."""
        out, place = self.payload[self.begins[n] : self.ends[n]], self.places[n]
        if place is None:
            reader.read(int(self.numbers[n]), out)
            return out
        flat, at, stays = place
        data = flat[at : at + out.size]
        if stays:
            return data
        out[:] = data
        return out


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


def _digest(data: Array) -> Array:
    return np.frombuffer(xxhash.xxh3_128_digest(data.data), np.uint8)
