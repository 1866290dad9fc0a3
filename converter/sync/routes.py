"""`/ws/*` for FastAPI: the protocol's endpoints over a `Receiver`. See `receiver.py` for how to mount them.

Everything that a receiver does may block, so it is done in threads of these routes' own: requests to a model that fill
FastAPI's threads cannot keep a commit out, and the event loop waits for nothing.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from ..errors import ConvertError
from .receiver import Receiver
from .refusals import Refused
from .wire import HEADER_BYTES

log = logging.getLogger("areal_convert.sync")

THREADS = {"control": 16, "data": 256}
"""At once: control messages, and buckets that are told of by HTTP (each waits until it is applied)."""

MANIFEST_BYTES = 256 << 20
MESSAGE_BYTES = 1 << 20
BUCKET_BYTES = (1 << 30) + HEADER_BYTES + (4 << 20)

Work = Callable[[], Mapping[str, Any]]


def router(receiver: Receiver) -> APIRouter:
    """The routes of one receiver. With `receiver.token` all of them want `Authorization: Bearer …`."""
    routes = APIRouter(prefix="/ws")
    serve = _Serve(receiver)

    @routes.get("/status")
    async def status(request: Request) -> Response:
        return await serve.answer(request, receiver.status)

    @routes.get("/layout")
    async def layout(request: Request) -> Response:
        return await serve.answer(request, receiver.layout)

    @routes.get("/digests")
    async def digests(request: Request) -> Response:
        query = request.query_params
        version, names = query.get("version"), query.getlist("name")

        def work() -> Mapping[str, Any]:
            if version is not None and not version.isdecimal():
                raise Refused("bad_request", f"version: {version[:40]!r} is no number.")
            return receiver.digests(int(version) if version is not None else None, names)

        return await serve.answer(request, work)

    @routes.delete("/lease")
    async def release(request: Request) -> Response:
        return await serve.call(request, receiver.release)

    for path, method, limit in (
        ("lease", receiver.lease, MESSAGE_BYTES),
        ("join", receiver.join, MESSAGE_BYTES),
        ("prepare", receiver.prepare, MANIFEST_BYTES),
        ("seal", receiver.seal, MESSAGE_BYTES),
        ("commit", receiver.commit, MESSAGE_BYTES),
        ("abort", receiver.abort, MESSAGE_BYTES),
    ):
        routes.add_api_route(f"/{path}", serve.endpoint(method, limit), methods=["POST"], name=path)
    for what in ("bucket", "load"):
        routes.add_api_route(f"/{what}", serve.data(what), methods=["POST"], name=what)
    return routes


class _Serve:
    """Token, body, thread, errors: what all routes have in common."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self._limiters: dict[str, CapacityLimiter] = {}

    def endpoint(self, method: Callable[[Any], Mapping[str, Any]], limit: int) -> Callable[..., Any]:
        async def act(request: Request) -> Response:
            return await self.call(request, method, limit)

        return act

    def data(self, what: str) -> Callable[..., Any]:
        """A message of the data path: JSON, or a bucket's raw bytes."""

        async def act(request: Request) -> Response:
            raw = request.headers.get("content-type", "").partition(";")[0].strip() == "application/octet-stream"
            return await self.call(
                request,
                lambda body: self.receiver.message(what, {} if raw else body, body if raw else None),
                BUCKET_BYTES if raw else MESSAGE_BYTES,
                raw=raw,
                lane="data",
            )

        return act

    async def call(
        self,
        request: Request,
        method: Callable[[Any], Mapping[str, Any]],
        limit: int = MESSAGE_BYTES,
        *,
        raw: bool = False,
        lane: str = "control",
    ) -> Response:
        """Read the body, and have the method called with it in a thread."""
        try:
            self._check_caller(request)
            data = await _body(request, limit)
        except Refused as refused:
            return _refusal(refused)
        return await self.answer(request, lambda: method(data if raw else _object(data)), lane=lane)

    async def answer(self, request: Request, work: Work, *, lane: str = "control") -> Response:
        limiter = self._limiters.setdefault(lane, CapacityLimiter(THREADS[lane]))
        try:
            self._check_caller(request)
            return JSONResponse(await run_sync(work, limiter=limiter))
        except Refused as refused:
            return _refusal(refused)
        except ConvertError as error:
            return _refusal(Refused("failed", error.what, error.problems, error.hint))
        except Exception as error:
            log.exception("%s %s failed", request.method, request.url.path)
            text = f"{request.method} {request.url.path} failed: {type(error).__name__}: {error}"
            return _refusal(Refused("internal", text, hint="This is a fault of the server; its log has more."))

    def _check_caller(self, request: Request) -> None:
        """The token, where there is one; and no page in a browser. Any web site may have a browser on this machine post
        here, and need not read the answers to push weights; browsers say where a page is from, hubs do not."""
        if (origin := request.headers.get("origin")) is not None:
            what = f"A page of {origin[:100]} asks; the sync protocol is not spoken with browsers."
            raise Refused("browser", what, hint="Leave the header Origin out.")
        wanted = self.receiver.token
        if wanted is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise Refused("unauthorized", "This server wants a token.", hint="Authorization: Bearer …")
        if callable(wanted):
            why = wanted(given.strip())
            if why is not None:
                code = "expired_token" if "expired" in why else "unauthorized"
                raise Refused(code, f"The token does not do: {why}.")
        elif not hmac.compare_digest(given.strip().encode(), wanted.encode()):
            raise Refused("unauthorized", "The token is not this server's.", hint="Was it changed meanwhile?")


async def _body(request: Request, limit: int) -> bytes:
    """All of it, or Refused (`too_large`) without having read more than the limit."""
    length = request.headers.get("content-length", "")
    parts, size = [], 0
    if not length.isdecimal() or int(length) <= limit:
        try:
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > limit:
                    break
            else:
                return b"".join(parts)
        except ClientDisconnect:
            raise Refused("bad_request", f"The body of {request.url.path} ended after {size} bytes.") from None
    raise Refused("too_large", f"The body of {request.url.path} is longer than {limit} bytes.")


def _object(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refused("bad_request", f"The body is no JSON: {error}.") from None
    if not isinstance(body, dict):
        raise Refused("bad_request", f"The body is no JSON object but {type(body).__name__}.")
    return body


def _refusal(refused: Refused) -> Response:
    headers = {"www-authenticate": "Bearer"} if refused.status == 401 else None
    return JSONResponse(refused.to_json(), status_code=refused.status, headers=headers)
