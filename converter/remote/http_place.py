"""Plain directories over http(s): exact ranges through a connection for each thread, every answer checked.

Where a server lists a directory, its page of links says what there is. Where it does not, the files of a Hugging Face
model are looked for by the names that they must have.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from ..errors import NoAccess, RemoteChanged, RemoteError
from ..sidefiles import INDEX
from .fs_errors import LATER
from .fs_store import WEAK, Listing
from .http_client import Client
from .store import Chunk, Dropped, Entry

_PIECE = 256 * 1024
_PARALLEL = 8
_DEPTH, _PAGES = 4, 500
_WEIGHTS = (".safetensors", ".bin", ".distcp", ".pt")
_BIN_INDEX = "pytorch_model.bin.index.json"
_MODEL = ("config.json", INDEX, "model.safetensors", _BIN_INDEX, "pytorch_model.bin")
_BESIDES = ("areal_manifest.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_BESIDES += ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json")
_BESIDES += ("chat_template.jinja", "chat_template.json", "preprocessor_config.json", "spiece.model")
_BESIDES += ("README.md", "LICENSE")


class HttpPlace:
    """A directory of an HTTP server, or one file. A query (a signature, say) goes with every request, and is shown to
    nobody; nor is a password."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        self._base = urlunsplit((parts.scheme, host, quote(parts.path.rstrip("/"), safe="/%:@+,;=~!$&'()*"), "", ""))
        self._query = parts.query
        self.url = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
        self._client = Client(parts.scheme, parts.username, parts.password)

    # ---- what there is

    def listed(self) -> Listing:
        name = unquote(self._base.rpartition("/")[2])
        if name.endswith((*_WEIGHTS, ".json")):
            self._base = self._base.rpartition("/")[0]
            found = self._known()
            found |= {name: entry} if (entry := self._entry(name)) else {}
            return Listing(found if entry else {}, name if entry else None)
        paths = self._crawled()
        if not any(path.endswith((*_WEIGHTS, ".json", ".metadata")) for path in paths):
            return Listing(self._known())
        hidden = {path.rpartition("/")[0] for path in paths if path.endswith(".distcp")}  # dot files are not listed
        paths |= {f"{d}/.metadata" if d else ".metadata" for d in hidden}
        return Listing(self._entries(sorted(paths)))

    def _crawled(self) -> set[str]:
        """Files that the server's pages of links name, down some levels."""
        found, todo, pages = set[str](), [("", 0)], 0
        while todo and pages < _PAGES:
            directory, depth = todo.pop()
            pages += 1
            for path in self._links(directory):
                if not path.endswith("/"):
                    found.add(path)
                elif depth < _DEPTH:
                    todo.append((path, depth + 1))
        return found

    def _links(self, directory: str) -> set[str]:
        """What a directory's page links to below it; nothing where there is no such page."""
        url = f"{self._base}/{quote(directory)}"
        with self._client.request("GET", self._with_query(url)) as answer:
            if answer.status != 200 or "html" not in str(answer.getheader("Content-Type")):
                if answer.status in LATER or answer.status in (401,):
                    self._refused(answer, url)
                return set()
            page = _Links()
            page.feed(answer.read(8 << 20).decode("utf-8", "replace"))
        out = set[str]()
        for link in page.found:
            target, _, query = urljoin(url, link).partition("#")[0].partition("?")
            path = unquote(target.removeprefix(url))
            if not query and target.startswith(url) and path.strip("/") and "/" not in path.rstrip("/"):
                out.add(directory + path)
        return out

    def _known(self) -> dict[str, Entry]:
        """The files of a model, by the names that they must have."""
        found = self._entries(_MODEL)
        if not found:
            return {}
        shards = set[str]()
        for index in (INDEX, _BIN_INDEX):
            if index in found:
                shards |= self._shards(found[index])
        return found | self._entries([*sorted(shards - found.keys()), *_BESIDES])

    def _shards(self, index: Entry) -> set[str]:
        """Files that an index names. What is wrong with it is said when it is read as an index."""
        data = b"".join(map(bytes, self.stream(index, 0, index.size)))
        try:
            named = json.loads(data)["weight_map"].values()
            return {name for name in named if isinstance(name, str) and "/" not in name}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return set()

    def _entries(self, paths: Iterable[str]) -> dict[str, Entry]:
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="areal-http") as pool:
            return {entry.path: entry for entry in pool.map(self._entry, paths) if entry is not None}

    def _entry(self, path: str) -> Entry | None:
        """Size and state of a file; None when there is none."""
        refusal = 0
        for method, headers in (("HEAD", {}), ("GET", {"Range": "bytes=0-0"})):
            with self._client.request(method, self._url(path), headers) as answer:
                if answer.status in (404, 410):
                    return None
                if answer.status in LATER:
                    self._refused(answer, self._url(path))
                if answer.status not in (200, 206):
                    refusal = answer.status
                    continue  # some allow no HEAD (signed for GET)
                size = str(answer.getheader("Content-Range", "")).rpartition("/")[2] or answer.getheader(
                    "Content-Length"
                )
                if size is not None and size.isdigit():
                    return Entry(path, int(size), _state(answer) or WEAK + size)
                refusal = answer.status
        if refusal in (401, 403):
            return None  # S3 says so of files that are not there, to those who may not list
        raise RemoteError(
            f"{self.url}/{path}: the server does not say how large it is (status {refusal}).",
            hint="Copy the directory to this machine, and convert that.",
        )

    def state(self, path: str) -> Entry:
        entry = self._entry(path)
        if entry is None:
            raise NoAccess(f"{self.url}/{path}: it is there no more.")
        return entry

    # ---- bytes

    def _url(self, path: str) -> str:
        return self._with_query(f"{self._base}/{quote(path)}")

    def _with_query(self, url: str) -> str:
        return f"{url}?{self._query}" if self._query else url

    def stream(self, entry: Entry, begin: int, end: int) -> Generator[Chunk, None, None]:
        if begin >= end:
            return
        with self._client.request("GET", self._url(entry.path), {"Range": f"bytes={begin}-{end - 1}"}) as answer:
            self._check(entry, answer, begin, end)
            while piece := answer.read(_PIECE):
                yield piece

    def _check(self, entry: Entry, answer: Any, begin: int, end: int) -> None:
        """Only exactly the bytes that were asked for, of the very file, will do."""
        about = f"{self.url}/{entry.path}"
        if answer.status == 416:
            raise RemoteChanged(f"{about}: it is shorter than it was when it was listed ({entry.size} bytes).")
        if answer.status not in (200, 206):
            self._refused(answer, about)
        state = _state(answer)
        if state and not entry.etag.startswith(WEAK) and state != entry.etag:
            raise RemoteChanged(
                f"{about} was changed while it was read: it was {entry.etag}, now it is {state}.",
                hint="Begin again when nothing writes to it.",
            )
        if answer.status == 200 and (begin, end) != (0, entry.size):
            raise RemoteError(
                f"{about}: the server ignores ranges: it sends the whole file for bytes {begin} to {end}.",
                hint="Copy the directory to this machine (`wget`, `curl`), and convert that.",
            )
        said = str(answer.getheader("Content-Range") or answer.getheader("Content-Length"))
        if said not in (f"bytes {begin}-{end - 1}/{entry.size}", str(entry.size)):
            raise RemoteChanged(f"{about}: asked for bytes {begin}-{end - 1}/{entry.size}, the server sends {said!r}.")

    def _refused(self, answer: Any, about: str) -> None:
        shown = about.partition("?")[0]
        if answer.status in LATER:
            asked = str(answer.getheader("Retry-After", ""))
            raise Dropped(f"the server answers {answer.status}", float(asked) if asked.isdigit() else None)
        if answer.status in (401, 403, 404, 410):
            why = {401: "it wants a login", 403: "access is denied"}.get(answer.status, "there is no such file")
            hint = "https://user:password@host/… logs in; fsspec's configuration can hold headers."
            raise NoAccess(
                f"{about.partition('?')[0]}: {why} ({answer.status}).", hint=hint if answer.status < 404 else ""
            )
        raise RemoteError(f"{shown}: the server answers {answer.status}.")


def _state(answer: Any) -> str:
    return str(answer.getheader("ETag") or answer.getheader("Last-Modified") or "")


class _Links(HTMLParser):
    """Where a page's links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]
