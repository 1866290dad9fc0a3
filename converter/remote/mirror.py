"""A remote directory as a local one, of sparse files: every name and size is right, bytes arrive when asked for.

    <cache>/<key>/files/<name>/…    the files; <key> names one state of the place (a commit), so they never go stale
    <cache>/<key>/have/…            for each file, a line for each range of it that is there
    <cache>/<key>/used              when it was opened last: after a month without, it goes

Several processes may share a mirror: files are only ever extended and filled with the same bytes, and a range is noted
when its bytes are on the disk, so that one that is killed leaves nothing wrong behind.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..errors import RemoteChanged, TargetError
from .cleaning import clean, used
from .fetch import Fetcher
from .store import Entry, Store
from .windows import Span, bridged, cut, union, without

GAP = 64 * 1024
"""Bytes between two headers that are fetched along rather than asked for around."""

PARALLEL = 16
"""Small requests at the same time."""

_NOTE = re.compile(r"(\d+) (\d+)")


def cache_directory() -> Path:
    """Where mirrors lie: AREAL_CACHE, or `areal-convert` in the user's cache."""
    given = os.environ.get("AREAL_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "areal-convert"


class Unproved(NamedTuple):
    """What is supposed of bytes that were not read yet: those from `begin` to `end` are given to `prove`, which raises
    a SourceError when it is otherwise."""

    begin: int
    end: int
    prove: Callable[[bytes], None]


class Mirror:
    """One store's directory on this machine. `root` is what to open: the directory, or the one file that was named."""

    def __init__(self, store: Store, cache: Path | None = None) -> None:
        self.store, self.fetcher = store, Fetcher(store)
        cache = cache or cache_directory()
        base = cache / store.key
        leaf = re.sub(r"[^\w.-]", "-", store.name.rstrip("/").rpartition("/")[2]) or "root"
        self.directory, self._have = base / "files" / leaf, base / "have"
        self._entries = store.entries()
        self._ranges: dict[str, list[Span]] = {}
        self._links: set[str] = set()
        self._unproved: dict[tuple[str, int], Unproved] = {}
        self._lock = threading.Lock()
        try:
            self._lay_out()
            if used(base):
                clean(cache)
        except OSError as error:
            raise _unwritable(error, base) from error
        self.root = self.directory / store.single if store.single else self.directory

    def _lay_out(self) -> None:
        """Every file with its size and nothing in it; a link where there is a complete copy."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path, entry in self._entries.items():
            place = self.directory / path
            place.parent.mkdir(parents=True, exist_ok=True)
            local = self.store.local(path)
            if local is not None:
                self._links.add(path)
                self._link(place, local)
                continue
            if place.is_symlink():
                place.unlink(missing_ok=True)
            fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if os.fstat(fd).st_size < entry.size:
                    # New, or cut off by whoever cleans caches: what is noted of it is no longer there.
                    (self._have / path).unlink(missing_ok=True)
                    os.ftruncate(fd, entry.size)
            finally:
                os.close(fd)

    def _link(self, place: Path, local: Path) -> None:
        if place.is_symlink() and Path(os.readlink(place)) == local:
            return
        beside = self._have.with_name(f"link-{os.getpid()}-{threading.get_ident()}")
        beside.unlink(missing_ok=True)
        beside.symlink_to(local)
        beside.replace(place)

    def is_local(self, path: str) -> bool:
        """Whether a complete copy is read instead, or there is no such file."""
        return path in self._links or path not in self._entries

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return self._entries[path].size

    def entry(self, path: str) -> Entry:
        """What the store says of a file."""
        return self._entries[path]

    def state(self, path: str) -> str:
        """What a resumed conversion must find again."""
        entry = self._entries[path]
        return f"{entry.size} {entry.etag}"

    def ensure(self, wanted: Mapping[str, Iterable[Span]]) -> None:
        """Have these ranges on the disk; what is missing is fetched, several requests at a time. Raises RemoteError."""
        jobs: list[tuple[str, Span]] = []
        for path, spans in wanted.items():
            missing = without(spans, self._known(path))
            jobs += [(path, span) for span in cut(bridged(missing, max_gap=GAP))]
        if len(jobs) <= 1:
            for job in jobs:
                self._fetch(*job)
            return
        stop = threading.Event()
        with ThreadPoolExecutor(min(PARALLEL, len(jobs)), thread_name_prefix="areal-headers") as pool:
            try:
                for done in [pool.submit(self._fetch, *job, stop) for job in jobs]:
                    done.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, path: str, span: Span, stop: threading.Event | None = None) -> None:
        begin, end = span
        data = self.fetcher.read(path, begin, end, stop)
        entry = self._entries[path]
        if (begin, end) == (0, entry.size):
            self._check(entry, data)
        try:
            self._keep(path, begin, data)
            self._note(path, span)
        except OSError as error:
            raise _unwritable(error, self.directory / path) from error

    def _keep(self, path: str, begin: int, data: bytearray) -> None:
        fd = os.open(self.directory / path, os.O_RDWR | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, memoryview(data)[done:], begin + done)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def _check(self, entry: Entry, data: bytearray) -> None:
        """A file that came whole can be held against what the store says of its content."""
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() if entry.git else None
        sha256 = hashlib.sha256(data).hexdigest() if entry.sha256 else None
        if (git, sha256) != (entry.git, entry.sha256):
            raise RemoteChanged(
                f"{self.store.url}/{entry.path}: its content is not what its digest says.",
                hint="It was damaged on the way, or on the server. Try again; a proxy in between may be to blame.",
            )

    def present(self, path: str, begin: int, end: int) -> bytes | None:
        """These bytes, if they are on this machine."""
        if without([(begin, end)], self._known(path)):
            return None
        fd = os.open(self.directory / path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(fd, end - begin, begin)
        finally:
            os.close(fd)
        return data if len(data) == end - begin else None

    def amount(self, path: str) -> int:
        """Bytes of a file that are on this machine."""
        return sum(end - begin for begin, end in self._known(path))

    # ---- what is only supposed

    def suppose(self, path: str, begin: int, what: Unproved) -> None:
        """Whoever reads the tensor whose bytes begin here must prove this first."""
        self._unproved[path, begin] = what

    def unproved(self, path: str, begin: int) -> Unproved | None:
        """What must be proved before the tensor is used whose bytes begin here."""
        return self._unproved.get((path, begin)) if self._unproved else None

    def proved(self, path: str, begin: int) -> None:
        """It was."""
        self._unproved.pop((path, begin), None)

    def forget(self) -> None:
        """Everything is fetched anew, by whoever asks next."""
        with self._lock:
            self._ranges.clear()
            shutil.rmtree(self._have, ignore_errors=True)

    # ---- what is there

    def _known(self, path: str) -> list[Span]:
        """The ranges of a file that are on the disk; read anew when it is asked for the first time."""
        with self._lock:
            if path not in self._ranges:
                self._ranges[path] = self._read_notes(path)
            return list(self._ranges[path])

    def _read_notes(self, path: str) -> list[Span]:
        try:
            text = (self._have / path).read_text(encoding="ascii", errors="replace")
        except OSError:
            return []
        found = [(int(m[1]), int(m[2])) for line in text.split("\n") if (m := _NOTE.fullmatch(line))]
        return union(span for span in found if span[1] <= self.size(path))

    def _note(self, path: str, span: Span) -> None:
        """A line of its own at the end of the file, whatever a killed writer left there."""
        place = self._have / path
        with self._lock:
            place.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.write(fd, f"\n{span[0]} {span[1]}\n".encode())
            finally:
                os.close(fd)
            self._ranges[path] = union([*self._ranges.get(path, []), span])


def _unwritable(error: OSError, place: Path) -> TargetError:
    return TargetError(
        f"{error.filename or place}: {error.strerror}. Headers of remote files are kept there.",
        hint="AREAL_CACHE names another directory.",
    )
