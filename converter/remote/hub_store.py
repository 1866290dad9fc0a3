"""Repositories on the Hub, pinned to one commit: listed by huggingface_hub, read by exact ranges through its client.

`hf_hub_download` is not used: it keeps nothing of a download that was killed, ends at a reset connection or at one 503,
and `HfFileSystem` does not notice a server that ignores ranges; see docs/dev/huggingface-hub.md.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from ..errors import NoAccess, RemoteChanged, RemoteError, Unreachable
from .hub_errors import call, explain, wait_of
from .store import Chunk, Dropped, Entry
from .urls import HubUrl

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIECE = 256 * 1024


class _Location(NamedTuple):
    """Where a file's bytes are: a signed address elsewhere, or one on the Hub, which wants the token."""

    url: str
    own: bool


def hub_api(token: str | bool | None = None) -> HfApi:
    """The library's client, under our name."""
    from huggingface_hub import HfApi, constants

    from ..manifest import tool_version

    return HfApi(endpoint=constants.ENDPOINT, token=token, library_name="areal-convert", library_version=tool_version())


class HubStore:
    """One commit of a repository, or a directory of it. Raises RemoteError when it cannot be had.

    single  the name of the file, when the URL names a file: the store is the directory that holds it
    notes   what is odd about the local cache
    """

    def __init__(self, place: HubUrl, *, token: str | bool | None = None) -> None:
        from huggingface_hub import constants

        self.place, self.token = place, token
        self.single: str | None = None
        self.notes: list[str] = []
        self._locations: dict[str, _Location] = {}
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()
        self._asking: dict[str, threading.Lock] = {}
        self._prefix = f"{place.path}/" if place.path else ""
        self.offline = bool(constants.HF_HUB_OFFLINE)
        self.revision: str | None = self._cached_commit() if self.offline else self._pin()
        self._commit: str = self.revision or ""
        self.url = str(HubUrl(place.repo, self._commit, place.path, place.kind))
        self._listed = self._cached_entries() if self.offline else self._list()
        self._settle_single()
        folder = self._prefix.rstrip("/")
        self.name = f"{place.repo}/{folder}" if folder else place.repo
        kind = "" if place.kind == "model" else f"{place.kind}s--"
        self.key = f"hub/{kind}{place.repo.replace('/', '--')}/{self._commit}" + (f"/{folder}" if folder else "")

    # ---- which commit, and what is in it

    def _pin(self) -> str:
        """The commit that the revision means now. Everything is read from this one, though the branch may move."""
        api, place = hub_api(self.token), self.place
        info = call(
            lambda: api.repo_info(place.repo, revision=place.revision, repo_type=place.kind, timeout=_timeout()),
            str(place),
        )
        if not info.sha:
            raise RemoteError(f"{place}: the Hub does not say which commit this is.")
        return info.sha

    def _list(self) -> dict[str, Entry]:
        from huggingface_hub.hf_api import RepoFile

        api, place = hub_api(self.token), self.place
        found = call(
            lambda: list(api.list_repo_tree(place.repo, recursive=True, revision=self._commit, repo_type=place.kind)),
            str(place),
        )
        out: dict[str, Entry] = {}
        for item in found:
            if not isinstance(item, RepoFile) or not _safe(item.path):
                continue
            sha256 = item.lfs.sha256 if item.lfs is not None else None
            out[item.path] = Entry(
                item.path, item.size, sha256 or item.blob_id, sha256, None if sha256 else item.blob_id
            )
        return out

    def _settle_single(self) -> None:
        """Keep what lies below the URL's path, which may be a file."""
        path = self.place.path
        if path in self._listed:
            self._prefix, self.single = path[: path.rfind("/") + 1], path.rpartition("/")[2]
            self.url = str(HubUrl(self.place.repo, self._commit, self._prefix.rstrip("/"), self.place.kind))
        elif path and not any(name.startswith(self._prefix) for name in self._listed):
            tops = sorted({name.partition("/")[0] for name in self._listed})[:8]
            raise NoAccess(f"{self.url}: there is no such file or directory.", hint=f"It holds: {', '.join(tops)}.")
        inside = {n.removeprefix(self._prefix): e for n, e in self._listed.items() if n.startswith(self._prefix)}
        self._entries = {name: Entry(name, e.size, e.etag, e.sha256, e.git) for name, e in inside.items()}

    def entries(self) -> dict[str, Entry]:
        return self._entries

    def unchanged(self, path: str) -> bool:
        """A commit does not change; that what came was of this commit is checked for every file."""
        return path in self._entries

    # ---- Hugging Face's cache

    def _cache(self) -> Path:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=self.place.repo, repo_type=self.place.kind)
        return Path(constants.HF_HUB_CACHE).absolute() / folder

    def local(self, path: str) -> Path | None:
        """The file in Hugging Face's cache, links followed. A link whose target is gone is noted, and fetched."""
        place = self._cache() / "snapshots" / self._commit / (self._prefix + path)
        if place.is_symlink() and not place.exists():
            self.notes.append(
                f"{place} in Hugging Face's cache is a dangling link ({os.readlink(place)}); it is fetched"
            )
            return None
        if not place.is_file() or place.stat().st_size != self._entries[path].size:
            return None
        return place

    def _cached_commit(self) -> str:
        revision, cache = self.place.revision or "main", self._cache()
        snapshots = cache / "snapshots"
        names = sorted(p.name for p in snapshots.iterdir()) if snapshots.is_dir() else []
        if ".." not in revision and (cache / "refs" / revision).is_file():
            commit = (cache / "refs" / revision).read_text(encoding="ascii").strip()
        else:
            commit = next((n for n in names if len(revision) >= 7 and n.startswith(revision)), "")
        if commit not in names or not _COMMIT.fullmatch(commit):
            raise Unreachable(
                f"{self.place}: offline mode is on (HF_HUB_OFFLINE), and Hugging Face's cache does not hold revision "
                f"{revision}: {cache.parent}.",
                hint="Unset HF_HUB_OFFLINE, or fetch it into the cache before.",
            )
        return commit

    def _cached_entries(self) -> dict[str, Entry]:
        base, out, dangling = self._cache() / "snapshots" / self._commit, dict[str, Entry](), list[str]()
        for place in sorted(base.rglob("*")):
            name = str(place.relative_to(base))
            if place.is_symlink() and not place.exists():
                dangling.append(name)
            elif place.is_file():
                out[name] = Entry(name, place.stat().st_size, place.resolve().name)
        if dangling:
            raise Unreachable(
                f"{self.url}: Hugging Face's cache is damaged, these links lead nowhere: {', '.join(dangling[:8])}.",
                hint=f"Offline mode is on (HF_HUB_OFFLINE). Fetch them again, or delete {base}.",
            )
        return out

    # ---- bytes

    def stream(self, path: str, begin: int, end: int) -> Generator[Chunk, None, None]:
        if self.offline:
            raise Unreachable(f"{self.url}/{path}: offline mode is on (HF_HUB_OFFLINE), and the cache has lost it.")
        about = f"{self.url}/{path}"
        where = self._location(path, about)
        try:
            with _opened(where.url, self._headers(where, begin, end)) as response:
                self._check_answer(path, where, response, begin, end)
                yield from _pieces(response)
        except (RemoteError, Dropped):
            raise
        except GeneratorExit:
            raise
        except Exception as error:
            raise explain(error, about) from error

    def _headers(self, where: _Location, begin: int, end: int) -> dict[str, str]:
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        if where.own:
            from huggingface_hub.utils import build_hf_headers

            headers |= build_hf_headers(token=self.token, library_name="areal-convert")
        return headers

    def _location(self, path: str, about: str) -> _Location:
        """Where the file's bytes are; asked once, and again when a signed address has expired."""
        with self._lock:
            asking = self._asking.setdefault(path, threading.Lock())
        with asking:  # several windows of one file begin together, and one answer does for all
            found = self._locations.get(path)
            return found if found is not None else self._ask(path, about)

    def _ask(self, path: str, about: str) -> _Location:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        place, entry = self.place, self._entries[path]
        url = hf_hub_url(
            place.repo, self._prefix + path, revision=self._commit, repo_type=place.kind, endpoint=constants.ENDPOINT
        )
        try:
            meta = get_hf_file_metadata(url, token=self.token, timeout=_timeout())
        except Exception as error:
            raise explain(error, about) from error
        if meta.commit_hash != self._commit or meta.etag != entry.etag or meta.size != entry.size:
            raise RemoteChanged(
                f"{about} is not what commit {self._commit[:10]} lists: expected {entry.size} bytes "
                f"({entry.etag[:16]}…), found {meta.size} ({str(meta.etag)[:16]}…).",
                hint="The repository was changed, or something between here and the Hub serves another file.",
            )
        own = urlsplit(meta.location).netloc == urlsplit(constants.ENDPOINT).netloc
        self._locations[path] = found = _Location(meta.location, own)
        return found

    def _check_answer(self, path: str, where: _Location, response: Any, begin: int, end: int) -> None:
        """Only exactly the bytes that were asked for, of the very file, will do."""
        about, size, status = f"{self.url}/{path}", self._entries[path].size, response.status_code
        if status == 206:
            said = str(response.headers.get("Content-Range") or "")
            if said.replace(" ", "") != f"bytes{begin}-{end - 1}/{size}":
                raise RemoteChanged(f"{about}: asked for bytes {begin}-{end - 1}/{size}, the server sends {said!r}.")
        elif status == 200:
            if (begin, end) != (0, size):
                raise RemoteError(
                    f"{about}: the server ignores ranges: it sends the whole file for bytes {begin} to {end}.",
                    hint="A proxy in between may be to blame. Download it with `hf download`, and convert that.",
                )
            if str(response.headers.get("Content-Encoding") or "identity") != "identity":
                raise Dropped("the server compresses what must come as it is")
        else:
            self._refused(path, where, response)
        tag = str(response.headers.get("ETag") or "")
        if tag and self._tags.setdefault(path, tag) != tag:
            raise RemoteChanged(
                f"{about} was changed while it was read: its ETag was {self._tags[path]}, now it is {tag}.",
                hint="Begin again; name a commit (@revision) that stays.",
            )

    def _refused(self, path: str, where: _Location, response: Any) -> None:
        """An error, or a signed address that has expired: then the next attempt asks for a new one."""
        if response.status_code in (401, 403, 404, 410):
            with self._lock:  # others may have had the same answer, and a new address already
                if self._locations.get(path) is where:
                    del self._locations[path]
            if not where.own:
                raise Dropped(f"the signed address has expired or is refused (status {response.status_code})", 0.0)
        if response.status_code == 416:
            raise RemoteChanged(f"{self.url}/{path}: the server's file is shorter than the listing says.")
        if response.status_code in (408, 429) or response.status_code >= 500:
            raise Dropped(f"the server answers {response.status_code}", wait_of(response))
        from huggingface_hub.utils import hf_raise_for_status

        hf_raise_for_status(response)
        raise RemoteError(f"{self.url}/{path}: the server answers {response.status_code}.")


def _safe(path: str) -> bool:
    parts = path.split("/")
    return not path.startswith("/") and not {"", ".", ".."} & set(parts) and "\0" not in path


def _timeout() -> float:
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


@contextmanager
def _opened(url: str, headers: dict[str, str]) -> Iterator[Any]:
    """A response whose body is still to be read; of httpx (huggingface_hub 1 and later) or requests."""
    from huggingface_hub.utils import get_session

    session: Any = get_session()
    if callable(getattr(session, "stream", None)):  # of requests' session it is a switch
        with session.stream("GET", url, headers=headers, timeout=_timeout()) as response:
            yield response
    else:
        with session.get(url, headers=headers, stream=True, timeout=_timeout()) as response:
            yield response


def _pieces(response: Any) -> Iterator[Chunk]:
    if hasattr(response, "iter_raw"):
        yield from response.iter_raw()
    else:
        yield from response.raw.stream(_PIECE, decode_content=False)
