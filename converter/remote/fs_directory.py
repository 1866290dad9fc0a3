"""A directory somewhere that is written to: files are put there whole, and held against their checksums.

What the store says of an object's content (S3's and Google's MD5) is compared with what was sent; where it says nothing
that can be compared, the object is read back.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError, TargetError
from .fetch import pause
from .fs_errors import explain_writing
from .fs_store import file_system, place_of, state_of
from .store import Dropped, Entry
from .urls import scheme_of

T = TypeVar("T")

PART = 32 << 20
"""Bytes of one part of a large upload; four are on their way at a time."""

_STEP = 1 << 20
_ATTEMPTS = 5
_OBJECTS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"}
"""Stores without directories: what has none cannot be made, and making one may make a bucket."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Checksums of a file. `parts`: S3's, of an object that was uploaded in parts of PART."""

    size: int
    sha256: str
    md5: str
    parts: str


def sums_of(pieces: Iterable[bytes]) -> Sums:
    """Checksums of what comes in pieces of at most PART, none of which crosses a multiple of it."""
    whole, sha256, part = (hashlib.md5(usedforsecurity=False), hashlib.sha256(), hashlib.md5(usedforsecurity=False))
    size, parts = 0, list[bytes]()
    for piece in pieces:
        for h in (whole, sha256, part):
            h.update(piece)
        size += len(piece)
        if size % PART == 0:
            parts.append(part.digest())
            part = hashlib.md5(usedforsecurity=False)
    if size % PART:
        parts.append(part.digest())
    joined = f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"
    return Sums(size, sha256.hexdigest(), whole.hexdigest(), joined)


def sums_of_file(file: Path) -> Sums:
    """Checksums of a file on this machine."""
    return sums_of(_pieces(file))


def _pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while piece := stream.read(_STEP):
            yield piece


class Directory:
    """A directory of a store. Raises TargetError for whatever cannot be done; what may pass is tried again."""

    def __init__(self, url: str) -> None:
        self.url = url
        if scheme_of(url) in ("http", "https"):
            raise ConfigError(
                f"{url}: a plain HTTP server takes no files.", hint="Write to s3://, gs:// or a directory."
            )
        self._fs, self.root = file_system(url)
        self._s3 = scheme_of(url) in ("s3", "s3a")
        if not self.root.strip("/") or (scheme_of(url) in _OBJECTS - {"memory"} and "/" not in self.root):
            raise TargetError(f"{url} is a whole bucket.", hint="Name a directory in it.")

    def beside(self, suffix: str) -> Directory:
        """The directory of this name with something after it."""
        return Directory(self.url + suffix)

    def files(self) -> dict[str, Entry]:
        """What is there now."""
        listing = self._tried(lambda: place_of(self.url).listed(), "listing it")
        if listing.single is not None:
            raise TargetError(f"{self.url} is a file, not a directory.", hint="Choose another target.")
        return listing.entries

    def put(self, path: str, file: Path, sums: Sums) -> Entry:
        """Send a file; what the store then says of it, checked."""
        how: dict[str, Any] = {"chunksize": PART, "max_concurrency": 4} if self._s3 else {}
        self._tried(lambda: self._put_file(path, file, how), f"uploading {path}")
        return self.checked(path, sums)

    def _put_file(self, path: str, file: Path, how: dict[str, Any]) -> None:
        self._parent(path)
        self._fs.put_file(str(file), self._at(path), **how)

    def put_bytes(self, path: str, data: bytes) -> Entry:
        """The same for a small file."""

        def action() -> None:
            self._parent(path)
            self._fs.pipe_file(self._at(path), data)

        self._tried(action, f"uploading {path}")
        return self.checked(path, sums_of(data[n : n + _STEP] for n in range(0, len(data), _STEP)))

    def read(self, path: str) -> bytes:
        """A small file."""
        return self._tried(lambda: self._fs.cat_file(self._at(path)), f"reading {path}")

    def copy_from(self, other: Directory, path: str, sums: Sums) -> Entry:
        """Copy a file from another directory of the same store, which does so by itself."""

        def action() -> None:
            self._parent(path)
            self._fs.cp_file(other._at(path), self._at(path))

        self._tried(action, f"copying {path} from {other.url}")
        return self.checked(path, sums)

    def remove(self, paths: Iterable[str]) -> None:
        """Delete files; those that are gone already are fine."""
        for path in paths:
            self._tried(lambda path=path: self._remove(path), f"deleting {path}")

    def _remove(self, path: str) -> None:
        try:
            self._fs.rm_file(self._at(path))
        except FileNotFoundError:
            return

    def checked(self, path: str, sums: Sums) -> Entry:
        """Raise TargetError unless an object is what was sent: by the store's own checksum, or read back."""
        self._fs.invalidate_cache()
        info = self._tried(lambda: self._fs.info(self._at(path)), f"looking at {path}")
        entry = Entry(path, int(info["size"]), state_of(info))
        if entry.size == sums.size and _claims(info) & {sums.md5, sums.parts}:
            return entry
        sha256 = self._read_back(path, entry.size) if entry.size == sums.size else "another"
        if sha256 != sums.sha256:
            raise TargetError(
                f"{self.url}/{path} is not what was sent: expected {sums.size} bytes (sha256 {sums.sha256[:16]}…), "
                f"found {entry.size} bytes (sha256 {sha256[:16]}…).",
                hint="Something else writes there, or the store is damaged; --resume sends it again.",
            )
        return entry

    def _read_back(self, path: str, size: int) -> str:
        h = hashlib.sha256()
        for begin in range(0, size, PART):
            end = min(size, begin + PART)
            what = f"reading {path} back"
            h.update(self._tried(lambda a=begin, b=end: self._fs.cat_file(self._at(path), start=a, end=b), what))
        return h.hexdigest()

    # ----

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}"

    def _parent(self, path: str) -> None:
        if scheme_of(self.url) not in _OBJECTS:
            self._fs.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)

    def _tried(self, action: Callable[[], T], doing: str) -> T:
        """The result of a call, tried again where that may help."""
        failures = 0
        while True:
            try:
                return action()
            except Exception as error:
                told = explain_writing(error, f"{self.url}: {doing}")
                if not isinstance(told, Dropped):
                    raise (told if isinstance(told, TargetError | ConfigError) else TargetError(str(told))) from error
                failures += 1
                if failures >= _ATTEMPTS:
                    raise TargetError(
                        f"{self.url}: {doing}: {told.what} (after {failures} attempts).",
                        hint="What was sent is kept: the same command with --resume goes on from there.",
                    ) from error
                pause(failures, told.wait)


def _claims(info: Any) -> set[str]:
    """MD5 sums by which a store knows an object, as hexadecimal text."""
    found = {str(info.get("ETag", "")).strip('"').lower()}
    settings = info.get("content_settings") or {}
    for value in (info.get("md5Hash"), settings.get("content_md5") if hasattr(settings, "get") else None):
        if isinstance(value, str):
            found.add(base64.b64decode(value).hex())
        elif isinstance(value, bytes | bytearray):
            found.add(bytes(value).hex())
    return found - {""}
