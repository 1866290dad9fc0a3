"""Servers in threads of this process: a `Receiver` over tiny random weights behind its HTTP routes, started in a few
milliseconds. What speaks to them cannot tell the difference."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from areal_convert.converter import open_checkpoint
from areal_convert.converter.sync import Receiver
from areal_convert.converter.sync.routes import router


@dataclass
class ThreadServer:
    """A receiver at an address. `weights` is what it serves."""

    receiver: Receiver
    url: str
    server: uvicorn.Server
    thread: threading.Thread
    app: FastAPI

    def replace(self, method: str, answer: Callable[[Any], Mapping[str, Any]]) -> None:
        """From now on a method of the receiver answers something else."""
        setattr(self.receiver, method, answer)
        self.app.router.routes.clear()
        self.app.include_router(router(self.receiver))

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.receiver.current()

    def stop(self) -> None:
        """The port answers no more; what is under way is dropped, as a process that ends does."""
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join(10)
        self.receiver.close()


def state_of(model: Path, *, dtype: torch.dtype | None = None, zero: bool = True) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors in Hugging Face's names, all zero or with its values."""
    ckpt = open_checkpoint(model)
    names = {slot.buffer.name for slots in ckpt.slots.values() for slot in slots}
    state = {name: ckpt.read(name) for name in sorted(names)}
    return {k: (torch.zeros_like(v) if zero else v).to(dtype or v.dtype) for k, v in state.items()}


def start(model: Path, state: Mapping[str, torch.Tensor] | None = None, port: int = 0, **options: Any) -> ThreadServer:
    config = json.loads((model / "config.json").read_text())
    receiver = Receiver(dict(state) if state is not None else state_of(model), config, **options)
    app = FastAPI()
    app.include_router(router(receiver))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < end and thread.is_alive()
        time.sleep(0.005)
    bound = server.servers[0].sockets[0].getsockname()[1]
    return ThreadServer(receiver, f"http://127.0.0.1:{bound}", server, thread, app)


@contextmanager
def serving(model: Path, count: int = 1, **options: Any) -> Iterator[list[ThreadServer]]:
    """Some servers with weights of zero."""
    servers = [start(model, **options) for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
