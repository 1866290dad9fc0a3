"""An HTTP file server that knows ranges, for tests: plain directories over http(s), and enough of S3 to be read from.

It can be told to misbehave: drop a connection after some bytes, answer 503, ignore ranges, leave out the ETag, serve
a changed file. Every request is noted.

    with RangeServer(directory) as server:
        server.fault("*.safetensors", drop_after=1000, times=2)
        …
        server.spans("model.safetensors")

As a program, `python range_server.py DIRECTORY`, it prints its URL and serves until its input ends.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
import threading
from dataclasses import dataclass, field
from email.utils import formatdate
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import xxhash


@dataclass
class Fault:
    """What happens to requests for files of a pattern.

    drop_after   bytes of the body after which the connection is cut; `reset`: with an RST instead of a plain end
    status       answer this instead; `headers` go with it
    whole        ignore the range, answer 200 with everything
    no_etag      leave ETag and Last-Modified out
    call         run this before answering
    after, times let so many matching requests pass first; then hit so many (None: all)
    methods      which requests it concerns; hits: how many it has concerned
    """

    pattern: str
    drop_after: int | None = None
    reset: bool = False
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    whole: bool = False
    no_etag: bool = False
    call: Any = None
    after: int = 0
    times: int | None = None
    methods: tuple[str, ...] = ("GET",)
    hits: int = 0


@dataclass(frozen=True)
class Call:
    """One request, and how many bytes of body were sent."""

    method: str
    path: str
    begin: int
    end: int
    status: int
    sent: int


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def owner(self) -> RangeServer:
        assert isinstance(self.server, _Server)
        return self.server.owner

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def _serve(self, *, body: bool) -> None:
        owner = self.owner
        path = unquote(urlsplit(self.path).path).lstrip("/")
        fault = owner.hit(self.command, path) or Fault(path)
        if fault.call is not None:
            fault.call()
        file = owner.root / path
        listed = parse_qs(urlsplit(self.path).query)
        if fault.status is not None:
            self._short(path, fault.status, b"told to fail", fault.headers)
        elif "list-type" in listed:
            self._short(path, 200, owner.list_s3(file, listed), {"Content-Type": "application/xml"})
        elif file.is_dir() and owner.listing:
            names = sorted(p.name + "/" * p.is_dir() for p in file.iterdir())
            page = "".join(f'<a href="{name}">{name}</a>\n' for name in names)
            self._short(path, 200, f"<html><body>{page}</body></html>".encode(), {"Content-Type": "text/html"})
        elif not file.is_file():
            self._short(path, 404, b"no such file", {})
        else:
            self._file(path, file, fault, body)

    def _short(self, path: str, status: int, text: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)
        self.owner.note(Call(self.command, path, 0, len(text), status, len(text)))

    def _file(self, path: str, file: Path, fault: Fault, body: bool) -> None:
        size = file.stat().st_size
        begin, end, status = 0, size, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and not fault.whole and not self.owner.no_ranges:
            begin, end, status = int(asked[1]), min(size, int(asked[2]) + 1) if asked[2] else size, 206
            if begin >= size:
                self._short(path, 416, b"", {"Content-Range": f"bytes */{size}"})
                return
        etag = self.owner.etag(file)
        if self.headers.get("If-Match") not in (None, etag, "*"):
            self._short(path, 412, b"", {})
            return
        self.send_response(status)
        if not fault.no_etag:
            self.send_header("ETag", etag)
            self.send_header("Last-Modified", formatdate(file.stat().st_mtime, usegmt=True))
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        if not self.owner.no_ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        self.wfile.flush()
        sent = self._body(file, begin, end, fault) if body else 0
        self.owner.note(Call(self.command, path, begin, end, status, sent))

    def _body(self, file: Path, begin: int, end: int, fault: Fault) -> int:
        stop = end if fault.drop_after is None else min(end, begin + fault.drop_after)
        at = begin
        with file.open("rb") as stream:
            try:
                while at < stop:
                    at += os.sendfile(self.connection.fileno(), stream.fileno(), at, min(stop - at, 1 << 20))
            except OSError:
                self.close_connection = True  # the client has left
        if stop < end:
            self.close_connection = True
            if fault.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return at - begin


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    owner: RangeServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave early are part of the tests; anything else is a fault of this file."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.owner.broken = error


class RangeServer:
    """Serves a directory on loopback. `listing`: answer directories with a page of links, as nginx and Apache do."""

    def __init__(self, root: Path, *, listing: bool = False, no_ranges: bool = False) -> None:
        self.root, self.listing, self.no_ranges = Path(root), listing, no_ranges
        self._lock, self._faults, self._calls = threading.Lock(), list[Fault](), list[Call]()
        self.broken: BaseException | None = None
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> RangeServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self.broken is not None:
            raise self.broken

    def etag(self, file: Path) -> str:
        """From size and time, as nginx makes it."""
        stat = file.stat()
        return f'"{stat.st_mtime_ns:x}-{stat.st_size:x}-{xxhash.xxh3_64_hexdigest(str(file).encode())}"'

    def list_s3(self, bucket: Path, query: dict[str, list[str]]) -> bytes:
        """ListObjectsV2: a directory below the root is a bucket."""
        prefix, flat = query.get("prefix", [""])[0], query.get("delimiter") == ["/"]
        items = ""
        for file in sorted(p for p in bucket.rglob("*") if p.is_file()):
            key = str(file.relative_to(bucket))
            if key.startswith(prefix) and not (flat and "/" in key.removeprefix(prefix)):
                size, etag = file.stat().st_size, escape(self.etag(file))
                items += f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>{etag}</ETag></Contents>"
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()

    def fault(self, pattern: str, **what: Any) -> Fault:
        """Misbehave for requests of a pattern; see Fault."""
        fault = Fault(pattern, **what)
        with self._lock:
            self._faults.append(fault)
        return fault

    def hit(self, method: str, path: str) -> Fault | None:
        """The fault that concerns this request, counted."""
        with self._lock:
            for fault in self._faults:
                if method not in fault.methods or not fnmatch(path, fault.pattern) or fault.times == 0:
                    continue
                if fault.after:
                    fault.after -= 1
                    continue
                fault.hits += 1
                fault.times = None if fault.times is None else fault.times - 1
                return fault
        return None

    def note(self, call: Call) -> None:
        with self._lock:
            self._calls.append(call)

    def calls(self, pattern: str = "*", method: str = "GET") -> list[Call]:
        """Requests so far."""
        with self._lock:
            return [c for c in self._calls if c.method == method and fnmatch(c.path, pattern)]

    def bytes_sent(self, pattern: str = "*") -> int:
        """Bytes of bodies that were sent for files of a pattern."""
        return sum(c.sent for c in self.calls(pattern))

    def spans(self, pattern: str) -> list[tuple[int, int]]:
        """Byte ranges that were asked for."""
        return [(c.begin, c.end) for c in self.calls(pattern)]

    def reset(self) -> None:
        """Forget faults and requests."""
        with self._lock:
            self._faults.clear()
            self._calls.clear()


if __name__ == "__main__":
    with RangeServer(Path(sys.argv[1])) as running:
        print(running.url, flush=True)
        sys.stdin.read()
