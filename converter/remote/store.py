"""The seam: what must be known of a place elsewhere to read a checkpoint from it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .urls import HubUrl, parse_hub, scheme_of, url_of

Chunk = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Entry:
    """A file below the store's directory. `path` is relative, with `/`.

    etag     anything that changes with the content
    sha256   of the content, where the store knows it; git: its git object id (small files on the Hub)
    """

    path: str
    size: int
    etag: str
    sha256: str | None = None
    git: str | None = None


class Dropped(Exception):
    """One attempt failed in a way in which the next may not: a connection cut, a 503, a 429. Never leaves the package:
    `fetch` tries again, and raises a RemoteError when it has tried enough.

    what  for people; wait: seconds that the server asked for, if it did
    """

    def __init__(self, what: str, wait: float | None = None) -> None:
        self.what, self.wait = what, wait
        super().__init__(what)


class Store(Protocol):
    """One directory elsewhere, in one state. Methods may be called from several threads at once.

    url       what people call it, with the commit where there is one
    key       what names this very state of it (the commit, or a digest of the listing): part of the cache's path, so
              letters, digits, `-`, `_`, `.` and `/` only
    name      short, for the manifest: `org/name`, `bucket/dir`
    revision  the commit, or None
    single    the file that the URL names, if it names one: the store is the directory that holds it
    """

    @property
    def url(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def revision(self) -> str | None: ...

    @property
    def single(self) -> str | None: ...

    def entries(self) -> dict[str, Entry]:
        """Every file below it, by its path. Asked once, then remembered."""
        ...

    def local(self, path: str) -> Path | None:
        """A complete local copy that may be read instead (Hugging Face's cache), or None."""
        ...

    def stream(self, path: str, begin: int, end: int) -> Generator[Chunk, None, None]:
        """The bytes `begin..end` of a file, in pieces as they come: ONE attempt.

        Raises Dropped for what may pass (also in the middle), a RemoteError for what will not: another content than
        `entries` said, a server that ignores ranges, no access.
        """
        ...

    def unchanged(self, path: str) -> bool:
        """Ask again whether a file is still what `entries` said. A pinned commit needs no asking."""
        ...


def open_store(text: str | Path, *, revision: str | None = None, token: str | bool | None = None) -> Store:
    """The store behind a URL. Raises ConfigError for a URL that is none, RemoteError when it cannot be reached."""
    url = url_of(text)
    if scheme_of(url) == "hf":
        return open_hub(parse_hub(url, revision), token=token)
    from .fs_store import FsspecStore

    return FsspecStore(url)


def open_hub(place: HubUrl, *, token: str | bool | None = None) -> Store:
    """A repository on the Hub, pinned to one commit."""
    from .hub_store import HubStore

    return HubStore(place, token=token)
