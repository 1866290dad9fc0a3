"""The server as a whole: model, worker, receiver of pushes, endpoints; and how it is started and stopped."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from ...errors import ConfigError
from .adapters import Adapters
from .batch import Model, cache_name
from .generation import Engine, InFlight, Room
from .guard import Guard
from .loading import Served, load_model
from .metrics import Metrics
from .openai import Service, router
from .refusing import RequestRefused
from .versions import Versions

log = logging.getLogger("areal_convert.serve")

PAGE = "page.html"


@dataclass(frozen=True)
class Settings:
    """Everything that `areal-convert serve` can be told.

    port        0: any that is free
    token       bearer token; None: everybody who reaches the port may push weights
    in_flight   what becomes of running requests at a commit that does not say
    version     of the weights that are there at the start
    max_body    bytes of a request; `max_tokens` that one may ask for (None: what the context holds)
    grace       seconds that running requests get when the server is stopped
    opening     more arguments of `open_checkpoint`
    """

    model: str | Path
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    dtype: str | None = None
    device: str = "auto"
    tokenizer: str | Path | None = None
    names: tuple[str, ...] = ()
    max_len: int | None = None
    attention: str | None = None
    in_flight: InFlight = "finish"
    version: int = 0
    room: Room = field(default_factory=Room)
    max_body: int = 8 << 20
    max_tokens: int | None = None
    grace: float = 5.0
    opening: dict[str, Any] = field(default_factory=dict)


class EmbeddedServer:
    """One model that is served. `app` is the ASGI application; `close` ends the worker.

    server = EmbeddedServer(Settings("model/"))
    uvicorn.run(server.app)
    """

    def __init__(self, settings: Settings, served: Served | None = None) -> None:
        self.settings = settings
        self.served = served or load_model(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            tokenizer=settings.tokenizer,
            max_len=settings.max_len,
            attention=settings.attention,
            **settings.opening,
        )
        module = self.served.module
        self.metrics = Metrics()
        self.adapters = Adapters(module)
        model = Model(self.served.device, self.served.eos, cache_name(module), self.adapters.active)
        self.versions = Versions(
            module,
            self.served.config,
            self.adapters,
            self.metrics,
            version=settings.version,
            policy=settings.in_flight,
        )
        self.engine = Engine(model, self.versions.first(), self.metrics, settings.room)
        self.versions.attach(self.engine)
        names = settings.names or (Path(str(settings.model)).resolve().name,)
        self.adapters.reserved = names
        self.service = Service(
            self.engine,
            self.served.text,
            self.adapters,
            tuple(dict.fromkeys((*names, str(settings.model)))),
            self.served.max_len,
            int(module.get_input_embeddings().weight.shape[0]),
            settings.max_tokens,
        )
        self.app = self._make_app()

    def close(self) -> None:
        """End the worker and whatever push is under way; what still runs is refused after the grace time."""
        self.versions.close()
        self.engine.close(self.settings.grace)

    # ---------------------------------------------------------------------------------------------- endpoints

    def _make_app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            from anyio.to_thread import run_sync

            await run_sync(self.close)

        app = FastAPI(title="areal-convert serve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_middleware(
            Guard,
            token=self.settings.token, max_body=self.settings.max_body, metrics=self.metrics,
        )  # fmt: skip
        app.include_router(router(self.service))
        app.include_router(self.versions.router())
        self._add_status(app)
        app.add_exception_handler(RequestRefused, _refused)
        app.add_exception_handler(RequestValidationError, _invalid)
        app.add_exception_handler(HTTPException, _http)
        return app

    def _add_status(self, app: FastAPI) -> None:
        page = Path(__file__).with_name(PAGE).read_text(encoding="utf-8")

        @app.get("/")
        async def index() -> Response:
            policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
            return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if self.engine.alive else 503)

        @app.get("/version")
        async def version_() -> dict[str, Any]:
            return self.about()

        @app.get("/stats")
        async def stats() -> dict[str, Any]:
            return self.stats()

        @app.get("/metrics")
        async def metrics() -> Response:
            self.metrics.version.set(self.engine.current.version)
            self.metrics.running.set(self.engine.running)
            self.metrics.waiting.set(self.engine.waiting)
            return Response(self.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def about(self) -> dict[str, Any]:
        """What this server is, and which weights it has."""
        from ..wire import PROTOCOL

        current = self.engine.current
        return {
            "version": _package_version(),
            "protocol": PROTOCOL,
            "model": self.service.names[0],
            "source": self.served.source,
            "family": self.served.config.get("model_type"),
            "dtype": str(next(self.served.module.parameters()).dtype).removeprefix("torch."),
            "device": str(self.served.device),
            "max_model_len": self.served.max_len,
            "weight_version": current.version,
            "root": current.root,
        }

    def stats(self) -> dict[str, Any]:
        """What the page shows."""
        return {
            **self.about(),
            "uptime": time.time() - self.metrics.started,
            "running": self.engine.running,
            "waiting": self.engine.waiting,
            "old_copies": self.engine.old_copies(),
            "totals": self.metrics.totals,
            "series": self.metrics.series(),
            "pushes": list(self.metrics.pushes),
            "adapters": [{"name": a.name, "version": a.version} for a in self.adapters],
            "in_flight": self.versions.policy,
            "sync": self.versions.status(),
        }


def _package_version() -> str:
    try:
        return version("areal-convert")
    except PackageNotFoundError:
        return "not installed"


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return JSONResponse(error.to_json(), status_code=error.status)


async def _invalid(_: Request, error: Exception) -> Response:
    """Pydantic's findings as one message, each with its field."""
    assert isinstance(error, RequestValidationError)
    found = [(".".join(str(x) for x in e["loc"] if x != "body"), e["msg"]) for e in error.errors()]
    what = "; ".join(f"{where or 'body'}: {text}" for where, text in dict.fromkeys(found))
    param = found[0][0].split(".")[0] if found and found[0][0] else None
    return await _refused(_, RequestRefused("invalid_request", f"{what}.", param=param))


async def _http(_: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same form as everything else."""
    assert isinstance(error, HTTPException)
    refused = RequestRefused("not_found" if error.status_code == 404 else "invalid_request", f"{error.detail}.")
    return JSONResponse(refused.to_json(), status_code=error.status_code, headers=error.headers)


# -------------------------------------------------------------------------------------------------- running it


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError when the address is taken or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named: asyncio sends at once (TCP_NODELAY) only on sockets that say so, and an answer would wait 40 ms for an ACK.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"{host}:{port}: cannot listen there: {error.strerror or error}.", hint="--port 0 takes any free port."
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a client finds it."""
    name, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, str(name))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(settings: Settings, ready: Callable[[str, EmbeddedServer], None], *, log_level: str = "warning") -> None:
    """Serve until SIGINT or SIGTERM. `ready` is called with the URL once requests are answered."""
    import uvicorn

    sock = listen(settings.host, settings.port)
    try:
        server = EmbeddedServer(settings)
        config = uvicorn.Config(
            server.app,
            log_level=log_level,
            timeout_graceful_shutdown=int(settings.grace) + 1,
            access_log=False,
            ws="none",
        )

        class Announced(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets=sockets)
                if self.started:
                    ready(url_of(sock), server)

        Announced(config).run(sockets=[sock])
    finally:
        sock.close()
