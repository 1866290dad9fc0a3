"""What the Hub of the tests remembers about every request, and what it does wrong on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any


@dataclass
class Request:
    """One request as it was served. `sent` and `received` count the bytes of the bodies."""

    number: int
    method: str
    kind: str
    """What was asked for: whoami info tree paths-info refs commits preupload commit branch tag lfs-batch lfs-upload …
    `resolve` is answered by a redirect, `file` by the bytes of a small file, `cdn` by those of an LFS file."""
    repo: str = ""
    path: str = ""
    """The file in the repository; the sha256 for uploads, which do not say what they will be called."""
    revision: str = ""
    user: str | None = None
    token: str | None = None
    connection: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    asked: str | None = None
    """The Range header."""
    span: tuple[int, int] | None = None
    """The bytes [start, end) of the file that the answer set out to carry."""
    status: int = 0
    sent: int = 0
    received: int = 0
    fault: str = ""


@dataclass
class Fault:
    """Requests that match `kind`, `path`, `repo` (patterns) and `method` go wrong.

    Which of them: the first `after` are spared, then every `every`-th is hit, at most `times` of them.
    What happens (several together where that makes sense):

    - `status`, with `message`, `code` (X-Error-Code), `retry_after`, `headers`: this answer instead
    - `drop_after`: so many bytes of the body, then the connection ends (`reset`: with an RST); for uploads, of theirs
    - `lose_reply`: all is done as asked for, and then the connection ends without an answer
    - `rate`: the body trickles at so many bytes a second; `delay`: seconds before anything happens
    - `corrupt_at`: the byte of the file at this offset is flipped, silently
    - `ignore_range`: the whole file with status 200, though a range was asked for
    - `gzip`: compressed and chunked, no length, ranges ignored, as the Hub sends text to those who accept gzip
    - `call`: called with the request before it is looked at (move a branch, change a file, kill a process)
    """

    kind: str = "*"
    path: str = "*"
    repo: str = "*"
    method: str = "*"
    after: int = 0
    every: int = 1
    times: int | None = None
    status: int | None = None
    message: str = "fault on demand"
    code: str | None = None
    retry_after: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    drop_after: int | None = None
    reset: bool = False
    lose_reply: bool = False
    rate: float | None = None
    delay: float = 0.0
    corrupt_at: int | None = None
    ignore_range: bool = False
    gzip: bool = False
    call: Callable[[Request], object] | None = None
    seen: int = 0
    fired: int = 0

    def strikes(self, request: Request) -> bool:
        pairs = ((self.kind, request.kind), (self.path, request.path), (self.repo, request.repo))
        if self.method not in ("*", request.method) or not all(fnmatch(text, pattern) for pattern, text in pairs):
            return False
        self.seen += 1
        late = self.seen - self.after
        if late <= 0 or late % self.every or (self.times is not None and self.fired >= self.times):
            return False
        self.fired += 1
        return True

    @property
    def label(self) -> str:
        chosen = ("status", "drop_after", "lose_reply", "rate", "delay", "corrupt_at", "ignore_range", "gzip", "call")
        return " ".join(name for name in chosen if getattr(self, name) not in (None, False, 0.0))


class Ledger:
    """All requests in the order of their arrival, and the faults that wait for some of them. Safe among threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.connections = 0
        self._number = 0

    def connect(self) -> int:
        with self.lock:
            self.connections += 1
            return self.connections

    def record(self, **facts: Any) -> tuple[Request, list[Fault]]:
        """Note a request; the faults that strike it."""
        with self.lock:
            self._number += 1
            request = Request(self._number, **facts)
            self.requests.append(request)
            struck = [fault for fault in self.faults if fault.strikes(request)]
            request.fault = " ".join(fault.label for fault in struck)
            return request, struck

    def count_sent(self, request: Request, amount: int) -> None:
        with self.lock:
            request.sent += amount

    def fault(self, kind: str = "*", path: str = "*", **how: Any) -> Fault:
        fault = Fault(kind, path, **how)
        with self.lock:
            self.faults.append(fault)
        return fault

    def clear_faults(self) -> None:
        with self.lock:
            self.faults.clear()

    def reset(self) -> None:
        """Forget the requests so far (not the faults)."""
        with self.lock:
            self.requests.clear()
            self.connections = 0

    def select(self, kind: str = "*", path: str = "*", repo: str = "*", method: str = "*") -> list[Request]:
        with self.lock:
            return [
                request
                for request in self.requests
                if fnmatch(request.kind, kind)
                and fnmatch(request.path, path)
                and fnmatch(request.repo, repo)
                and method in ("*", request.method)
            ]


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges as disjoint ranges in order."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result
