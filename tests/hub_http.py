"""HTTP/1.1 as the Hub of the tests speaks it: connections, and the faults that happen on the wire."""

from __future__ import annotations

import gzip
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn, cast
from urllib.parse import parse_qs, urlsplit

from hub_call import CHUNK, Call, Dropped, FileBody, Incoming, Reply, Route, error_reply
from hub_faults import Fault
from hub_state import Hub
from hub_store import HubError


class Listener(ThreadingHTTPServer):
    """One port. Connections are known, so that stopping ends them all."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: Hub, find: Callable[[Call], tuple[str, Route]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub
        self.find = find
        self.stopping = threading.Event()
        self.open: set[socket.socket] = set()
        self.threads: list[threading.Thread] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        with self.lock:
            self.threads = [old for old in self.threads if old.is_alive()] + [thread]
        thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave when they like; anything else was already put on record where it was caught."""

    def stop(self) -> None:
        self.stopping.set()
        self.shutdown()
        with self.lock:
            for connection in self.open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            threads = list(self.threads)
        for thread in threads:
            thread.join(timeout=10)
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Listener  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.number = self.server.hub.ledger.connect()
        with self.server.lock:
            self.server.open.add(self.connection)

    def finish(self) -> None:
        with self.server.lock:
            self.server.open.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """The ledger knows it all."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (Dropped, OSError):
            self.close_connection = True

    def answer(self) -> None:
        hub = self.server.hub
        url = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        incoming = Incoming(headers, self.rfile, self.server.stopping, self.hang_up)
        segments = url.path.strip("/").split("/")
        query = parse_qs(url.query, keep_blank_values=True)
        call = Call(hub, self.command, segments, query, url.query, headers, incoming)
        kind, route = self.server.find(call)
        token = headers.get("authorization", "").removeprefix("Bearer ") or None
        call.request, call.faults = hub.ledger.record(
            method=self.command,
            kind=kind,
            repo=call.repo_id,
            path=call.path,
            revision=call.revision,
            token=token,
            user=hub.tokens[token].name if token in hub.tokens else None,
            connection=self.number,
            headers=headers,
            asked=headers.get("range"),
        )
        incoming.request = call.request
        reply = self.forestalled(call) or self.routed(call, route)
        for _ in incoming:  # a body that nobody read would be taken for the next request
            pass
        call.request.status = reply.status
        if any(fault.lose_reply for fault in call.faults):
            self.hang_up(reset=False)
        self.send(call, reply)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = answer

    def forestalled(self, call: Call) -> Reply | None:
        """The faults that come before the request is looked at."""
        reply = None
        for fault in call.faults:
            if fault.call is not None:
                fault.call(call.request)
            if fault.delay:
                self.server.stopping.wait(fault.delay)
            if self.command not in ("GET", "HEAD"):
                call.incoming.rate = fault.rate or call.incoming.rate
                call.incoming.cut = fault if fault.drop_after is not None else call.incoming.cut
                if fault.drop_after == 0:
                    self.hang_up(fault.reset)
            if fault.status is not None:
                reply = error_reply(HubError(fault.status, fault.message, fault.code))
                reply.headers |= fault.headers
                if fault.retry_after is not None:
                    reply.headers["Retry-After"] = str(fault.retry_after)
                    if fault.status == 429:
                        reply.headers["RateLimit"] = f'"resolvers";r=0;t={fault.retry_after}'
                        reply.headers["RateLimit-Policy"] = '"fixed window";"resolvers";q=5000;w=300'
        return reply

    def routed(self, call: Call, route: Route) -> Reply:
        try:
            return route(call)
        except HubError as error:
            return error_reply(error)
        except (Dropped, OSError):
            raise
        except Exception as error:
            call.hub.crashes.append(error)
            return error_reply(HubError(500, f"the Hub of the tests is broken: {error!r}"))

    def hang_up(self, reset: bool) -> NoReturn:
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # The server would shut the socket down politely before it closes it; closing here sends the RST.
            self.rfile.close()
            self.connection.close()
        else:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        raise Dropped

    def send(self, call: Call, reply: Reply) -> None:
        body = reply.body
        packed = any(fault.gzip for fault in call.faults) and isinstance(body, FileBody) and self.command == "GET"
        length = body.end - body.start if isinstance(body, FileBody) else len(body)
        self.send_response(206 if reply.status == 206 and not packed else 200 if packed else reply.status)
        for name, value in reply.headers.items():
            if not (packed and name in ("Content-Range", "Accept-Ranges")):
                self.send_header(name, value)
        self.send_header("X-Request-Id", f"Root=1-{call.request.number:08x}-tests")
        if packed:
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Transfer-Encoding", "chunked")
        elif reply.status != 304:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD" or reply.status == 304:
            return
        if packed:
            self.send_packed(call, cast(FileBody, body))
        elif isinstance(body, FileBody):
            self.send_file(call, body)
        else:
            self.send_bytes(call, body)

    def send_bytes(self, call: Call, data: bytes | memoryview) -> None:
        """Count first: a client that has it all may ask the ledger before this thread runs on."""
        self.server.hub.ledger.count_sent(call.request, len(data))
        cut, rate = _cut(call), _rate(call)
        if cut is not None and self.command in ("GET", "HEAD") and (cut.drop_after or 0) < len(data):
            keep = cut.drop_after or 0
            self.server.hub.ledger.count_sent(call.request, keep - len(data))
            self.wfile.write(data[:keep])
            self.hang_up(cut.reset)
        step = len(data) if rate is None else max(1, min(65536, int(rate / 20)))
        for at in range(0, len(data), max(step, 1)):
            self.wfile.write(data[at : at + step])
            if rate is not None and self.server.stopping.wait(step / rate):
                raise Dropped

    def send_file(self, call: Call, body: FileBody) -> None:
        cut, rate = _cut(call), _rate(call)
        spoilt = next((fault.corrupt_at for fault in call.faults if fault.corrupt_at is not None), None)
        end = body.end if cut is None else min(body.end, body.start + (cut.drop_after or 0))
        at = body.start
        step = CHUNK if rate is None else max(1, min(65536, int(rate / 20)))
        with body.path.open("rb") as file:
            while at < end:
                count = min(step, end - at)
                self.server.hub.ledger.count_sent(call.request, count)
                if rate is None and spoilt is None:
                    self.connection.sendfile(file, at, count)
                else:
                    file.seek(at)
                    data = bytearray(file.read(count))
                    if spoilt is not None and at <= spoilt < at + count:
                        data[spoilt - at] ^= 0xFF
                    self.wfile.write(data)
                    if rate is not None and self.server.stopping.wait(count / rate):
                        raise Dropped
                at += count
        if cut is not None and end < body.end:
            self.hang_up(cut.reset)

    def send_packed(self, call: Call, body: FileBody) -> None:
        call.request.span = (0, body.size)
        data = gzip.compress(body.path.read_bytes())
        self.server.hub.ledger.count_sent(call.request, len(data))
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n")


def _cut(call: Call) -> Fault | None:
    return next((fault for fault in call.faults if fault.drop_after is not None), None)


def _rate(call: Call) -> float | None:
    return next((fault.rate for fault in call.faults if fault.rate is not None), None)
