"""A request to the Hub of the tests with its body, and the answers that it may get: JSON, errors, files and ranges."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, unquote

from hub_faults import Fault, Request
from hub_state import Hub
from hub_store import HubError

CHUNK = 1 << 20
TYPES = {"models": "model", "datasets": "dataset", "spaces": "space"}


class Dropped(Exception):
    """The connection ends here, by a fault or because the client left."""


@dataclass
class FileBody:
    """A file to answer with, whole or in part."""

    path: Path
    size: int
    start: int = 0
    end: int = -1

    def __post_init__(self) -> None:
        self.end = self.size if self.end < 0 else self.end


@dataclass
class Reply:
    status: int = 200
    body: bytes | FileBody = b""
    headers: dict[str, str] = field(default_factory=dict)


def json_reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    known = {"Content-Type": "application/json; charset=utf-8"} | (headers or {})
    return Reply(status, json.dumps(value).encode(), known)


def error_reply(error: HubError) -> Reply:
    """As the Hub says it: once in the headers (HEAD has no body) and once in the body."""
    headers = {"X-Error-Message": error.message.replace("\n", " ")}
    if error.code:
        headers["X-Error-Code"] = error.code
    return json_reply({"error": error.message} | error.body, error.status, headers | error.headers)


def nowhere(call: Call) -> Reply:
    raise HubError(404, "Sorry, we can't find the page you are looking for.")


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """What a Range header asks of a file: [start, end), or nothing where it is to be ignored (malformed, several)."""
    unit, _, spec = (header or "").replace(" ", "").partition("=")
    first, dash, last = spec.partition("-")
    if unit.lower() != "bytes" or not dash or not all(part == "" or part.isdecimal() for part in (first, last)):
        return None
    if not first and not last:
        return None
    start = int(first) if first else max(size - int(last), 0)
    end = min(int(last) + 1, size) if first and last else size
    if first and last and int(last) < int(first):
        return None
    if start >= size or (not first and int(last) == 0):
        raise HubError(416, "Requested Range Not Satisfiable", headers={"Content-Range": f"bytes */{size}"})
    return start, end


def file_reply(call: Call, path: Path, size: int, etag: str, headers: dict[str, str]) -> Reply:
    """A file with its ETag; ranges and conditions are honoured."""
    known = headers | {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
    if f'"{etag}"' in call.headers.get("if-none-match", ""):
        return Reply(304, b"", known)
    condition = call.headers.get("if-range")
    span = None
    if (condition is None or condition == f'"{etag}"') and not any(fault.ignore_range for fault in call.faults):
        span = parse_range(call.headers.get("range"), size)
    if span is None:
        call.request.span = (0, size)
        return Reply(200, FileBody(path, size), known)
    call.request.span = span
    known["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{size}"
    return Reply(206, FileBody(path, size, *span), known)


@dataclass
class Call:
    """One request on its way through the routes."""

    hub: Hub
    method: str
    segments: list[str]
    """The path cut at its slashes, still quoted: `refs%2Fpr%2F1` is one segment."""
    query: dict[str, list[str]]
    raw_query: str
    headers: dict[str, str]
    incoming: Incoming
    request: Request = field(default_factory=lambda: Request(0, "", ""))
    faults: list[Fault] = field(default_factory=list)
    repo_type: str = "model"
    repo_id: str = ""
    revision: str = ""
    path: str = ""

    def flag(self, name: str) -> bool:
        return self.query.get(name, [""])[0].lower() in ("1", "true")

    def text(self, name: str, default: str = "") -> str:
        return self.query.get(name, [default])[0]

    def json(self) -> dict[str, Any]:
        return json.loads(self.incoming.read() or b"{}")

    def form(self) -> dict[str, list[str]]:
        body = self.incoming.read()
        if "json" in self.headers.get("content-type", ""):
            fields = json.loads(body).items()
            return {name: value if isinstance(value, list) else [str(value)] for name, value in fields}
        return parse_qs(body.decode(), keep_blank_values=True)


Route = Callable[[Call], Reply]


class Incoming:
    """The body of a request, by length or in chunks; a fault may cut it short."""

    def __init__(
        self,
        headers: Mapping[str, str],
        file: io.BufferedIOBase,
        stop: threading.Event,
        hang_up: Callable[[bool], NoReturn],
    ) -> None:
        self.file, self.stop, self.hang_up = file, stop, hang_up
        self.chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self.left = int(headers.get("content-length") or 0)
        self.done = not self.chunked and self.left == 0
        self.request: Request | None = None
        self.cut: Fault | None = None
        self.rate: float | None = None

    def read(self) -> bytes:
        return b"".join(self)

    def __iter__(self) -> Iterator[bytes]:
        received = 0
        for chunk in self._chunks():
            received += len(chunk)
            if self.request is not None:
                self.request.received = received
            if self.cut is not None and self.cut.drop_after is not None and received >= self.cut.drop_after:
                self.hang_up(self.cut.reset)
            if self.rate:
                self.stop.wait(len(chunk) / self.rate)
            yield chunk

    def _chunks(self) -> Iterator[bytes]:
        step = CHUNK if self.cut is None and self.rate is None else 16384
        while not self.done:
            if self.chunked and self.left == 0:
                self.left = int(self.file.readline().split(b";")[0] or b"0", 16)
                if self.left == 0:
                    self.file.readline()
                    self.done = True
                    return
            chunk = self.file.read1(min(self.left, step))
            if not chunk:
                raise Dropped("the client left")
            self.left -= len(chunk)
            if self.left == 0:
                self.done = not self.chunked
                if self.chunked:
                    self.file.readline()
            yield chunk


def unquoted(segments: list[str]) -> str:
    return unquote("/".join(segments))
