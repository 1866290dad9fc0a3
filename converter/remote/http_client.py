"""A small HTTP client: connections that are kept, proxies, redirects. Standard library only.

It exists for its speed (three times fsspec's, see `tools/bench_s3.py`) and because it shows status and headers.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from ..errors import RemoteError

TIMEOUT = 60.0
_REDIRECTS, _KEPT = 8, 64
_STALE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class _Connection(NamedTuple):
    """through: what a plain proxy in between wants to hear; then it is given the whole URL."""

    http: http.client.HTTPConnection
    through: dict[str, str] | None


class Client:
    """Requests to one server, and wherever it redirects to. Credentials go to the first only. For any thread: a
    connection belongs to one request at a time."""

    def __init__(self, scheme: str, user: str | None, password: str | None) -> None:
        self._idle: dict[str, list[_Connection]] = {}
        weakref.finalize(self, _close_all, self._idle)
        self._own = _configured(scheme)
        if user is not None:
            self._own["Authorization"] = _basic(user, password)

    @contextmanager
    def request(
        self, method: str, url: str, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer, whatever its status; its body is still to be read."""
        origin = urlsplit(url).netloc
        for _ in range(_REDIRECTS):
            own = self._own if urlsplit(url).netloc == origin else {}
            sent = {"Accept-Encoding": "identity", "User-Agent": "areal-convert"} | dict(headers or {}) | own
            connection, answer = self._send(method, url, sent)
            try:
                moved = answer.getheader("Location") if answer.status in (301, 302, 303, 307, 308) else None
                if moved is None:
                    yield answer
                    return
            finally:
                self._give_back(url, connection, answer)
            url = urljoin(url, moved)
            if urlsplit(url).scheme not in ("http", "https"):
                break
        raise RemoteError(f"{url.partition('?')[0]}: the server redirects without end.")

    def _send(self, method: str, url: str, headers: dict[str, str]) -> tuple[_Connection, http.client.HTTPResponse]:
        """A kept connection may have been closed by the server meanwhile: then the next one, at last a new one."""
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        idle = self._idle.setdefault(f"{parts.scheme}://{parts.netloc}", [])
        while True:
            try:
                connection, kept = idle.pop(), True
            except IndexError:
                connection, kept = _connect(parts.scheme, parts.netloc), False
            through = connection.through
            try:
                connection.http.request(method, target if through is None else url, headers=headers | (through or {}))
                return connection, connection.http.getresponse()
            except BaseException as error:
                connection.http.close()
                if not (kept and isinstance(error, _STALE)):
                    raise

    def _give_back(self, url: str, connection: _Connection, answer: http.client.HTTPResponse) -> None:
        """Keep the connection, unless something of the body stands between us and the next answer."""
        whole = answer.isclosed() and not answer.will_close
        answer.close()
        parts = urlsplit(url)
        idle = self._idle.setdefault(f"{parts.scheme}://{parts.netloc}", [])
        if whole and len(idle) < _KEPT:
            idle.append(connection)
        else:
            connection.http.close()


def _close_all(idle: dict[str, list[_Connection]]) -> None:
    for connections in idle.values():
        while connections:
            connections.pop().http.close()


def _connect(scheme: str, netloc: str) -> _Connection:
    """A connection, through the proxy that the environment names for it."""
    host = urlsplit(f"//{netloc}").hostname or netloc
    proxy = None if proxy_bypass(host) else getproxies().get(scheme)
    context = ssl.create_default_context() if scheme == "https" else None
    if proxy is None:
        if context is not None:
            return _Connection(http.client.HTTPSConnection(netloc, timeout=TIMEOUT, context=context), None)
        return _Connection(http.client.HTTPConnection(netloc, timeout=TIMEOUT), None)
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    where = f"{parts.hostname}:{parts.port or 80}"
    login = {"Proxy-Authorization": _basic(parts.username, parts.password)} if parts.username else {}
    if context is None:
        return _Connection(http.client.HTTPConnection(where, timeout=TIMEOUT), login | {"Host": netloc})
    tunnel = http.client.HTTPSConnection(where, timeout=TIMEOUT, context=context)
    at = urlsplit(f"//{netloc}")
    tunnel.set_tunnel(host, at.port or 443, headers=login)
    return _Connection(tunnel, None)


def _basic(user: str, password: str | None) -> str:
    text = f"{unquote(user)}:{unquote(password or '')}"
    return "Basic " + base64.b64encode(text.encode()).decode()


def _configured(scheme: str) -> dict[str, str]:
    """Headers that fsspec's configuration has for this scheme."""
    from fsspec.config import conf

    own = conf.get(scheme, {})
    found = {**own.get("client_kwargs", {}).get("headers", {}), **own.get("headers", {})}
    return {str(name): str(value) for name, value in found.items()}
