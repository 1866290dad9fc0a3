"""The exact files of one commit, in a new directory: which of them, fetched in parallel, each checked, then renamed.

What has arrived is journalled in pieces, as a conversion journals its atoms: a pull that was killed fetches the rest.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ..checkpoint import Checkpoint
from ..convert import Progress
from ..errors import (
    ConfigError,
    ConvertError,
    NoAccess,
    Problems,
    RemoteChanged,
    RemoteError,
    SourceError,
    UnknownFamily,
)
from ..execute import Limits
from ..formats.hf import BIN, BIN_INDEX, SINGLE
from ..manifest import build, encode, read
from ..opening import open_checkpoint, read_headers
from ..rawio import write_exactly
from ..sidefiles import INDEX, MANIFEST, WEIGHTS
from ..verify import copies_digests
from ..workdir import JOURNAL, WorkDir, check_room, check_target, explained, settle_target
from .fetch import Fetcher
from .remote_tree import named_by
from .store import Entry, Store

PIECE = 16 << 20
"""Bytes of one request, and of one line in the journal."""

PARALLEL = 8
"""Requests at the same time. They wait more than they work."""

AS_ELSEWHERE = "`pull --to FORMAT --hf-config DIR` converts it with a config from elsewhere."


@dataclass
class Taken:
    """What was fetched into `path`: sizes by name, what was left, and how much came from where."""

    path: Path
    files: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    family: str | None = None
    format: str | None = None
    fetched: int = 0
    requests: int = 0
    retries: int = 0
    resumed: int = 0
    cached: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "format": self.format,
            "family": self.family,
            "files": self.files,
            "bytes": sum(self.files.values()),
            "left_out": self.left,
            "fetched_bytes": self.fetched,
            "requests": self.requests,
            "retries": self.retries,
            "bytes_of_the_pull_before": self.resumed,
            "bytes_from_the_cache": self.cached,
            "seconds": {k: round(v, 3) for k, v in self.seconds.items()},
            "notes": self.notes,
            "verified": True,
        }


def choose(names: Iterable[str], read_text: Callable[[str], str]) -> tuple[list[str], list[str]]:
    """The files that make up the model, and those that are left out: weights that no index names, other formats beside
    safetensors, and folders that hold such. `read_text` gives an index.

    >>> choose(["config.json", "model.safetensors", "pytorch_model.bin", "original/a.pth", "original/b.json"], str)
    (['config.json', 'model.safetensors'], ['original/a.pth', 'original/b.json', 'pytorch_model.bin'])
    """
    every = sorted(names)
    weights = _weights(every, read_text)
    if weights is None:
        return every, []
    foreign = {n.partition("/")[0] for n in every if "/" in n and _is_weights(n) and n not in weights}
    foreign -= {n.partition("/")[0] for n in weights if "/" in n}
    stale = {BIN_INDEX, INDEX} - ({INDEX, BIN_INDEX} & weights)
    out = {n for n in every if n not in weights and (_is_weights(n) or n in stale or n.partition("/")[0] in foreign)}
    return [n for n in every if n not in out], sorted(out)


def _is_weights(name: str) -> bool:
    return os.path.splitext(name)[1] in WEIGHTS


def _weights(every: list[str], read_text: Callable[[str], str]) -> set[str] | None:
    """The weight files of a Hugging Face model, with their index; None for what is none."""
    for index, single in ((INDEX, SINGLE), (BIN_INDEX, BIN)):
        if index in every:
            return {index} | (named_by(read_text(index)) & set(every))
        if single in every:
            return {single}
        lone = {n for n in every if n.endswith(".safetensors") and "/" not in n}
        if lone:
            return lone
    return None


# ------------------------------------------------------------------------------------------------ fetching


def take(
    store: Store,
    target: Path,
    *,
    include_all: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Taken:
    """Fetch a store's model into `target`. Raises RemoteError (then `resume` goes on), SourceError or TargetError."""
    with explained(target):
        path = settle_target(target)
        check_target(path, overwrite=overwrite, resume=resume)
    if getattr(store, "single", None):
        raise NoAccess(f"{store.url}: is a file; a pull takes a model's directory.", hint="Leave its name out.")
    traffic = Fetcher(store)
    entries = {name: entry for name, entry in store.entries().items() if name != JOURNAL}
    names, left = list(entries), list[str]()
    if not include_all:
        names, left = choose(entries, lambda name: _text(store, traffic, entries[name]))
    taken = Taken(path, {n: entries[n].size for n in sorted(names)}, left)
    total = sum(taken.files.values())
    wanted = {n: entries[n] for n in taken.files}
    failed: SourceError | None = None
    with explained(path, total), _work(store, path, wanted, resume, overwrite) as work:
        if not work.done:
            check_room(path, total)
        try:
            _Take(store, traffic, wanted, work, taken, progress).run()
            _publish(store, work, taken, limits or Limits(), progress)
        except SourceError as error:
            failed = error  # what has arrived stays, for a resume or to be looked at; raised below
    if failed is not None:
        raise _resumable(failed) if isinstance(failed, RemoteError) else failed
    return taken


def _text(store: Store, fetcher: Fetcher, entry: Entry) -> str:
    local = store.local(entry.path)
    data = _read(local, 0, entry.size) if local is not None else fetcher.read(entry.path, 0, entry.size)
    return data.decode("utf-8", "replace")


def _work(store: Store, path: Path, wanted: Mapping[str, Entry], resume: bool, overwrite: bool) -> WorkDir:
    return WorkDir(path, _identity(store, wanted), resume=resume, overwrite=overwrite, source=store.url)


def _identity(store: Store, wanted: Mapping[str, Entry]) -> str:
    h = xxhash.xxh3_128(f"pull {store.key}".encode())
    for name, entry in wanted.items():
        h.update(f"{name}\0{entry.size} {entry.etag}\n".encode())
    return h.hexdigest()


def _resumable(error: RemoteError) -> RemoteError:
    hint = "What has arrived is kept: the same pull with --resume fetches the rest."
    return type(error)(error.what, error.problems, hint if "--resume" in error.hint else f"{error.hint} {hint}".strip())


class _Take:
    """One run of fetching: pieces that are missing, then every file against its digest."""

    def __init__(
        self,
        store: Store,
        fetcher: Fetcher,
        wanted: Mapping[str, Entry],
        work: WorkDir,
        taken: Taken,
        progress: Progress | None,
    ) -> None:
        self.store, self.fetcher, self.wanted, self.work, self.taken = store, fetcher, wanted, work, taken
        self._progress, self._arrived, self._lock = progress, 0, threading.Lock()
        self._left: Counter[str] = Counter()
        self._problems, self._stop = Problems(), threading.Event()

    def run(self) -> None:
        """Raises RemoteError."""
        start = time.perf_counter()
        self.work.keep_only(set(self.wanted))
        new = {name for name, entry in self.wanted.items() if self.work.allocate(name, entry.size)}
        pieces = [(name, begin) for name, e in self.wanted.items() for begin in range(0, max(e.size, 1), PIECE)]
        self.work.forget_all_but({_key(name, begin) for name, begin in pieces if name not in new})
        todo = [p for p in pieces if _key(*p) not in self.work.done]
        self.taken.resumed = sum(self._size(*p) for p in pieces if _key(*p) in self.work.done)
        self._advance(self.taken.resumed)
        self._left.update(name for name, _ in todo)
        whole = [(name, None) for name in self.wanted if not self._left[name]]
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="areal-pull") as pool:
            futures = [pool.submit(self._check, name) for name, _ in whole]
            futures += [pool.submit(self._piece, *piece) for piece in todo]
            self._settle(pool, futures)
        traffic = self.fetcher.traffic
        self.taken.fetched, self.taken.requests, self.taken.retries = traffic.bytes, traffic.requests, traffic.retries
        self.taken.seconds["fetch"] = time.perf_counter() - start
        self._problems.raise_as(
            RemoteChanged, f"{self.store.url}: files came twice with another content than the Hub says:"
        )

    def _settle(self, pool: ThreadPoolExecutor, futures: list[Future[None]]) -> None:
        """Wait for all; the first failure stops the rest at once."""
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise

    def _size(self, name: str, begin: int) -> int:
        return min(PIECE, self.wanted[name].size - begin)

    def _piece(self, name: str, begin: int) -> None:
        self._fetch(name, begin)
        with self._lock:
            self._left[name] -= 1
            last = not self._left[name]
        if last:
            self._check(name)

    def _fetch(self, name: str, begin: int, cache: bool = True) -> None:
        size, local = self._size(name, begin), self.store.local(name) if cache else None
        if local is not None:
            data: bytes | bytearray = _read(local, begin, size)
            with self._lock:
                self.taken.cached += size
        else:
            data = self.fetcher.read(name, begin, begin + size, self._stop) if size else b""
        fd = os.open(self.work.path / name, os.O_RDWR)
        try:
            write_exactly(fd, memoryview(data), begin)
        finally:
            os.close(fd)
        self.work.finished(_key(name, begin), "", {name})
        self._advance(size)

    def _check(self, name: str) -> None:
        """A file is whole: is it what the store says? If not, once more from the beginning, past any cache."""
        entry = self.wanted[name]
        if _digest_fits(self.work.path / name, entry):
            return
        self._advance(-entry.size)
        for begin in range(0, max(entry.size, 1), PIECE):
            self._fetch(name, begin, cache=False)
        if not _digest_fits(self.work.path / name, entry):
            with self._lock:
                self._problems.add(name, "its digest is wrong", "a proxy or the server damages it")

    def _advance(self, count: int) -> None:
        with self._lock:
            self._arrived += count
            arrived = self._arrived
        if self._progress is not None:
            self._progress("fetch", arrived, sum(self.taken.files.values()))


def _key(name: str, begin: int) -> str:
    return f"{name} {begin}"


def _read(file: Path, begin: int, size: int) -> bytes:
    fd = os.open(file, os.O_RDONLY)
    try:
        return os.pread(fd, size, begin)
    finally:
        os.close(fd)


def _digest_fits(file: Path, entry: Entry) -> bool:
    """Whether a file has the sha256, or git's name, that the store gives it."""
    if entry.sha256 is None and entry.git is None:
        return True
    h = hashlib.sha256() if entry.sha256 else hashlib.sha1(b"blob %d\0" % entry.size)
    begin = 0
    while chunk := _read(file, begin, 1 << 20):
        h.update(chunk)
        begin += len(chunk)
    return begin == entry.size and h.hexdigest() == (entry.sha256 or entry.git)


# ------------------------------------------------------------------------------------------------ the model


def _publish(store: Store, work: WorkDir, taken: Taken, limits: Limits, progress: Progress | None) -> None:
    """Look at what came as at any model, write down where it came from, and let it appear."""
    start = time.perf_counter()
    taken.notes += dict.fromkeys(getattr(store, "notes", ()))
    try:
        ckpt = open_checkpoint(work.path).check()
    except UnknownFamily as error:
        found = read_headers(work.path)
        found.problems.raise_as(SourceError, f"{store.url} ({found.format}) is not whole:")
        taken.format = found.format
        taken.notes.append(
            f"{error.what} The files are whole; the model was not checked, and no {MANIFEST} was written"
        )
    except ConvertError as error:
        raise SourceError(
            f"{store.url} was fetched whole, but is no whole model: {error.what}",
            error.problems,
            f"{AS_ELSEWHERE if isinstance(error, ConfigError) else error.hint} Its files are in {work.path}.".strip(),
        ) from error
    else:
        taken.family, taken.format = ckpt.table.name, ckpt.format
        taken.notes += ckpt.notes
        manifest = _manifest(store, work, ckpt, taken, limits, progress)
        work.write_text(MANIFEST, encode(manifest))
    taken.seconds["check"] = time.perf_counter() - start
    work.sync()
    work.publish()


def _manifest(
    store: Store, work: WorkDir, ckpt: Checkpoint, taken: Taken, limits: Limits, progress: Progress | None
) -> dict[str, Any]:
    """The manifest of the pulled files: what they are, with the commit. One that came along becomes its origin."""
    total = sum(s.buffer.size for slots in ckpt.slots.values() for s in slots)
    done, lock = 0, threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress is not None:
                progress("check", min(done, total), total)

    digests = copies_digests(ckpt, limits, advance)
    types = ckpt.dtypes()
    atoms = {name: (types[name], found[0]) for name, found in digests.items()}
    earlier = (read(work.path) or {}).get("atoms", {})
    changed = [n for n, entry in atoms.items() if n in earlier and tuple(earlier[n]) != entry]
    if changed:
        taken.notes.append(f"{MANIFEST} of the repository is not of these weights ({changed[0]}, …)")
    differing = [name for name, found in digests.items() if len(set(found)) > 1]
    taken.notes += [f"{name} is stored several times, with different values" for name in differing]
    built = build(ckpt, ckpt.format, ckpt.dialect, work.identity, atoms)
    built["source"] |= {"name": store.name, "revision": store.revision}
    return built
