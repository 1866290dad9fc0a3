"""The mount table: which directories of this machine stand for a place elsewhere.

Whoever reads a file's header, or a small file, calls `ensure` before; it returns at once when nothing is mounted. Of a
file that is mounted, only what was ensured is on the disk: everything else reads as zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SHOWN_AS
from .urls import is_remote

if TYPE_CHECKING:
    from .mirror import Mirror
    from .windows import Span

_table: dict[str, Mirror] = {}
_lock = threading.Lock()


def mount(text: str | Path) -> Path:
    """The directory (or the file) that stands for a URL; a path is itself. Raises RemoteError, ConfigError."""
    if not is_remote(text):
        return Path(text)
    from .mirror import Mirror
    from .store import open_store

    mirror = Mirror(open_store(text))
    with _lock:
        earlier = _table.get(str(mirror.directory))
        if earlier is not None:  # those who opened it before go on counting
            mirror.fetcher.traffic = earlier.fetcher.traffic
        _table[str(mirror.directory)] = mirror
        SHOWN_AS[str(mirror.directory)] = mirror.store.url
    return mirror.root


def anything_mounted() -> bool:
    """Whether this process reads from anywhere else at all."""
    return bool(_table)


def mounted(file: str | Path) -> tuple[Mirror, str] | None:
    """The mirror to which a file or directory belongs, and the path there; None for what simply is on this machine."""
    if not _table:
        return None
    text = str(file)
    for directory, mirror in list(_table.items()):
        if text == directory or text.startswith(directory + "/"):
            return mirror, text[len(directory) + 1 :]
    return None


def remote_file(file: str | Path) -> tuple[Mirror, str] | None:
    """As `mounted`, but None also for a file of which there is a complete copy on this machine."""
    found = mounted(file)
    return None if found is None or found[0].is_local(found[1]) else found


def ensure(file: str | Path, begin: int = 0, end: int | None = None) -> None:
    """Have these bytes of a file (None: to its end) on the disk, if it is mounted. Raises RemoteError."""
    found = remote_file(file) if _table else None
    if found is not None:
        mirror, path = found
        size = mirror.size(path)
        mirror.ensure({path: [(begin, size if end is None else min(end, size))]})


def ensure_all(wanted: Mapping[str | Path, Iterable[Span | None]]) -> None:
    """The same for many spans of many files at once (None: a whole file), in few requests, several at a time."""
    if not _table:
        return
    by_mirror: dict[int, tuple[Mirror, dict[str, list[Span]]]] = {}
    for file, spans in wanted.items():
        found = remote_file(file)
        if found is not None:
            mirror, path = found
            size = mirror.size(path)
            _, asked = by_mirror.setdefault(id(mirror), (mirror, {}))
            asked.setdefault(path, []).extend((0, size) if s is None else (s[0], min(s[1], size)) for s in spans)
    for mirror, asked in by_mirror.values():
        mirror.ensure(asked)


def forget(paths: Iterable[str | Path]) -> None:
    """Trust nothing that was fetched of these: something in it is wrong, and the next reader shall ask again."""
    for mirror in {id(place[0]): place[0] for path in paths if (place := mounted(path)) is not None}.values():
        mirror.forget()


def shown(path: str | Path) -> str:
    """What a path is called before the user: the URL, where it is mounted."""
    found = mounted(path)
    if found is None:
        return str(path)
    mirror, inside = found
    return f"{mirror.store.url}/{inside}" if inside else mirror.store.url


def named(path: Path) -> Path | str:
    """The same, but a path that is one stays one."""
    return path if mounted(path) is None else shown(path)


class Meter:
    """What the mirrors behind some paths fetch from now on. Empty when nothing of them is mounted."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        found = {id(place[0]): place[0] for path in paths if _table and (place := mounted(path)) is not None}
        self._mirrors = list(found.values())
        self._traffic = [(m.fetcher.traffic, m.fetcher.traffic.report()) for m in found.values()]

    def notes(self) -> list[str]:
        """What is odd about what was found of them on this machine."""
        return [note for mirror in self._mirrors for note in getattr(mirror.store, "notes", ())]

    def report(self) -> dict[str, int]:
        """Bytes, requests and retries, as plain data."""
        total: dict[str, int] = {}
        for traffic, before in self._traffic:
            for name, count in traffic.report().items():
                total[name] = total.get(name, 0) + count - before[name]
        return total


MANY = 2000
"""Requests: beyond this many, somebody should know why."""


def note_of(fetched: Mapping[str, int]) -> str:
    """What to tell of how it was fetched; empty when there is nothing."""
    count = fetched.get("requests", 0)
    if count <= MANY:
        return ""
    return f"{count:,} requests were made, for small pieces; a larger max_gap (--max-gap) makes fewer, of more bytes"


def unmount_all() -> None:
    """Forget everything (for tests)."""
    with _lock:
        _table.clear()
        SHOWN_AS.clear()
