"""Directories that fsspec knows how to reach (`s3://`, `gs://`, `http(s)://`, `memory://`, …), as a Store.

What differs between them is a Place: how it is listed, read and asked again. S3 and HTTP have their own (`s3_place`,
`http_place`): fsspec's readers of both give no response to check, and are slower (`tools/bench_s3.py`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import ConfigError, NoAccess, RemoteChanged, RemoteError
from .fetch import retried
from .fs_errors import explain
from .store import Chunk, Entry
from .urls import scheme_of, url_of

UNFINISHED = ".areal-unfinished"
"""An object that stands in a remote target as long as the target is not whole."""

_STATES = ("ETag", "etag", "generation", "md5Hash", "crc32c", "content_md5", "checksum", "mtime", "LastModified")
_STATES += ("last_modified", "modified", "updated", "created")
"""What file systems call that which changes with the content, the surest first."""


WEAK = "size "
"""Begins the state of a file of which nothing but the size is known."""


class Listing(NamedTuple):
    """The files below a URL by their paths; `single` is the one that the URL names, if it names a file."""

    entries: dict[str, Entry]
    single: str | None = None


class Place(Protocol):
    """A directory or file somewhere. `url` is what people may see of it: without passwords and signatures."""

    url: str

    def listed(self) -> Listing:
        """Every file below it. Raises anything that `explain` knows."""
        ...

    def stream(self, entry: Entry, begin: int, end: int) -> Generator[Chunk, None, None]:
        """The bytes of a file, exactly those, and only if it still is what `entry` says."""
        ...

    def state(self, path: str) -> Entry:
        """What a file is now."""
        ...


def place_of(url: str) -> Place:
    """The way to read from a URL. Raises ConfigError for a scheme that nobody knows or whose package is missing."""
    scheme = scheme_of(url)
    if scheme in ("http", "https"):
        from .http_place import HttpPlace

        return HttpPlace(url)
    if scheme in ("s3", "s3a"):
        from .s3_place import S3Place

        return S3Place(url)
    return PlainPlace(url)


class FsspecStore:
    """One directory somewhere, as it was when it was listed."""

    revision: str | None = None

    def __init__(self, url: str) -> None:
        self._place = place = _said(lambda: place_of(url_of(url)), url)
        listing = retried(lambda: _said(place.listed, place.url), about=place.url, attempts=4)
        self.single = listing.single
        self.notes: list[str] = []
        self._entries = self._usable(listing.entries)
        self.url = place.url[: -len(self.single) - 1] if self.single else place.url
        if UNFINISHED in self._entries:
            raise RemoteError(
                f"{self.url} is not whole: something is being written there, or was never finished.",
                hint="Finish it with the same command and --resume, or begin again with --overwrite.",
            )
        if not self._entries:
            raise NoAccess(f"{self.url}: there is nothing there.", hint="Check the bucket and the directory.")
        self.name = self.url.partition("://")[2]
        self.key = _key(self.url, self._entries)

    def _usable(self, found: Mapping[str, Entry]) -> dict[str, Entry]:
        """Those whose names can be paths here. Object stores may hold `a` beside `a/b`."""
        directories = {path[:n] for path in found for n, letter in enumerate(path) if letter == "/"}
        left = sorted(path for path in found if not is_safe(path) or path in directories)
        if left:
            self.notes.append(f"{self._place.url}: left aside, as no file can be called so: {', '.join(left[:5])}")
        return {path: entry for path, entry in found.items() if path not in set(left)}

    def entries(self) -> dict[str, Entry]:
        return self._entries

    def local(self, path: str) -> Path | None:
        """None: nobody keeps copies of such places."""
        return None

    def stream(self, path: str, begin: int, end: int) -> Generator[Chunk, None, None]:
        about, wanted, got = f"{self.url}/{path}", end - begin, 0
        with closing(self._place.stream(self._entries[path], begin, end)) as pieces:
            while True:
                piece = _said(lambda: next(pieces, None), about)
                if piece is None:
                    return
                got += len(piece)
                if got > wanted:
                    raise RemoteError(
                        f"{about}: {wanted} bytes were asked for, more came: the place ignores ranges.",
                        hint="Copy the directory to this machine, and convert that.",
                    )
                yield piece

    def unchanged(self, path: str) -> bool:
        about, was = f"{self.url}/{path}", self._entries[path]
        try:
            now = retried(lambda: _said(lambda: self._place.state(path), about), about=about)
        except (NoAccess, RemoteChanged):
            return False
        return (now.size, now.etag) == (was.size, was.etag)


def _said(action: Callable[[], Any], about: str) -> Any:
    """The result of a call, or what went wrong in our words."""
    try:
        return action()
    except Exception as error:
        raise explain(error, about) from error


def _key(url: str, entries: Mapping[str, Entry]) -> str:
    """Names one state of one directory. Where sizes are all that tells states apart, this one is like no other:
    nothing that was fetched before may be taken for what is there now."""
    h = hashlib.sha256(url.encode(errors="surrogateescape"))
    for path, entry in sorted(entries.items()):
        h.update(f"\0{path}\0{entry.size}\0{entry.etag}".encode(errors="surrogateescape"))
    if any(entry.etag.startswith(WEAK) for entry in entries.values()):
        h.update(os.urandom(16))
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", url.partition("://")[2])[-40:].strip("-")
    return f"fs/{scheme_of(url)}/{slug or 'root'}-{h.hexdigest()[:24]}"


def is_safe(path: str) -> bool:
    """Whether a name from a listing may become a path on this machine."""
    parts = path.split("/")
    short = all(len(part.encode(errors="surrogateescape")) <= 255 for part in parts)
    return short and not {"", ".", ".."} & set(parts) and "\0" not in path


# ------------------------------------------------------------------------------------------------ any file system


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system for a URL, as its configuration sets it up, and the path there. Raises ConfigError."""
    from fsspec import url_to_fs
    from fsspec.registry import known_implementations

    scheme = scheme_of(url)
    try:
        fs, path = url_to_fs(url)
    except ImportError as error:
        known = known_implementations.get(scheme, {})
        raise ConfigError(
            f"{scheme}:// needs a package that is not installed: {error}.",
            hint=f"{known.get('err', 'See fsspec on which one.')} (`pip install {_package(scheme, known)}`)",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{url}: {error}.", hint="Known are hf, s3, gs, http, https, and whatever fsspec has an implementation of."
        ) from error
    return fs, path.rstrip("/")


def _package(scheme: str, known: Mapping[str, str]) -> str:
    return "'areal-convert[s3]'" if scheme in ("s3", "s3a") else str(known.get("class", scheme)).partition(".")[0]


class PlainPlace:
    """Any file system of fsspec's, read by `cat_file`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._root = file_system(url)

    def listed(self) -> Listing:
        self._fs.invalidate_cache()
        if self._fs.isfile(self._root):
            parent, _, name = self._root.rpartition("/")
            infos = {i["name"]: i for i in self._fs.ls(parent, detail=True) if i["type"] == "file"}
            return Listing(_relative(infos, parent), name)
        return Listing(_relative(self._fs.find(self._root, detail=True), self._root))

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if not self._root.endswith(f"/{path}") else self._root

    def stream(self, entry: Entry, begin: int, end: int) -> Generator[Chunk, None, None]:
        yield self._fs.cat_file(self._path(entry.path), start=begin, end=end)

    def state(self, path: str) -> Entry:
        self._fs.invalidate_cache()
        info = self._fs.info(self._path(path))
        return Entry(path, int(info["size"]), state_of(info))


def _relative(infos: Mapping[str, Mapping[str, Any]], root: str) -> dict[str, Entry]:
    out: dict[str, Entry] = {}
    for name, info in infos.items():
        path = str(name).removeprefix(root).lstrip("/") if root else str(name).lstrip("/")
        out[path] = Entry(path, int(info["size"] or 0), state_of(info))
    return out


def state_of(info: Mapping[str, Any]) -> str:
    """What tells one content of a file from another; only its size where the file system says no more."""
    found = next((info[key] for key in _STATES if info.get(key) not in (None, "")), None)
    found = found.timestamp() if isinstance(found, datetime) else found  # memory:// says either
    return str(found).strip('"') if found is not None else f"{WEAK}{info.get('size')}"
