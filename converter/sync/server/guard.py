"""In front of every endpoint: the bearer token, the size of bodies, and the count of answers."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .metrics import Metrics
from .refusing import RequestRefused

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OPEN = frozenset({"/", "/health"})
"""Without a token: whether the server lives, and the page, which holds no figures before it is given the token."""

COUNTED = frozenset({"/v1/completions", "/v1/chat/completions"})

PUSH_BODY = 1 << 30
"""Bytes that a body of the sync protocol may have: a bucket, or the manifest of a large model."""


class Guard:
    """ASGI middleware. `token` None: everybody may come."""

    def __init__(self, app: Any, *, token: str | None, max_body: int, metrics: Metrics) -> None:
        self.app, self.max_body, self.metrics = app, max_body, metrics
        self._token = token.encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, status = scope["path"], 0
        body = _Body(receive, PUSH_BODY if path.startswith("/ws/") else self.max_body)

        async def counted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if body.exceeded and status == 0:  # whatever became of reading it, this is why
                raise _too_large(body.limit)
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._check_token(path, headers)
            _check_length(headers, body.limit)
            await self.app(scope, body.receive, counted)
        except RequestRefused as refused:
            if status != 0:
                raise
            await _answer(send, refused)
            status = refused.status
        except Exception:
            if not body.exceeded or status != 0:
                raise
            await _answer(send, _too_large(body.limit))  # what others made of the exception above
            status = 413
        finally:
            if path.startswith("/v1/") and scope["method"] == "POST":
                self.metrics.request(path.removeprefix("/v1/") if path in COUNTED else "other", status)

    def _check_token(self, path: str, headers: MutableMapping[bytes, bytes]) -> None:
        if self._token is None or path in OPEN:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            what = "The bearer token is not this server's." if given else "This server wants a bearer token."
            raise RequestRefused("unauthorized", what, "Send the header Authorization: Bearer TOKEN.")


def _check_length(headers: MutableMapping[bytes, bytes], limit: int) -> None:
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> RequestRefused:
    return RequestRefused("too_large", f"The body is larger than {limit} bytes.", "--max-body allows more.")


class _Body:
    """Stops reading a body that never said how large it is."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self.limit, self._receive, self._seen = limit, receive, 0

    @property
    def exceeded(self) -> bool:
        return self._seen > self.limit

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            if self.exceeded:
                raise _too_large(self.limit)
        return message


async def _answer(send: Send, refused: RequestRefused) -> None:
    body = json.dumps(refused.to_json()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
