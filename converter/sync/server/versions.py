"""Which weights answer: the receiver of pushes and the worker, put together.

A push is received beside the weights that serve. Its commit is one critical section, carried out by the worker between
two steps: nothing runs on the weights then, so there is no answer that has seen half of a change. Every copy of the
weights is held as long as a sequence is generated on it; the receiver does not write into a copy that is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter

from ..commits import Commit, Swap
from ..receiver import Receiver
from ..routes import router
from ..transports.lora import AdapterStage
from ..wire import State
from .adapters import Adapters
from .batch import Copy
from .generation import Engine, InFlight
from .metrics import Metrics


class _ByDefault(Receiver):
    """A receiver that has a policy of its own for commits that name none."""

    policy: InFlight = "finish"

    def commit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        named = body.get("in_flight") or body.get("policy")
        return super().commit(body if named else {**body, "in_flight": self.policy})


class Versions:
    """The weights of one server. `attach` the worker before the first push.

    policy  what becomes of running requests when a commit does not say
    """

    def __init__(
        self,
        module: Any,
        config: Mapping[str, Any],
        adapters: Adapters,
        metrics: Metrics,
        *,
        name: str = "areal-convert",
        version: int = 0,
        policy: InFlight = "finish",
    ) -> None:
        self.policy, self._metrics = policy, metrics
        self._engine: Engine | None = None
        self._commit: Commit | None = None
        self._seen = {"committed": 0, "aborted": 0, "bytes": 0, "receive_seconds": 0.0, "pause_seconds": 0.0}
        self.receiver = _ByDefault(
            module,
            config,
            name=name,
            version=version,
            critical=self._critical,
            adapters=AdapterStage(adapters),
            on_change=self._changed,
        )
        self.receiver.policy = policy

    def first(self) -> Copy:
        """The weights that the server starts with, held."""
        return self._hold()

    def attach(self, engine: Engine) -> None:
        self._engine = engine

    def router(self) -> APIRouter:
        """`/ws/*`. The token is asked for by `guard`, of all endpoints alike."""
        return router(self.receiver)

    def status(self) -> dict[str, Any]:
        return self.receiver.status()

    def close(self) -> None:
        """Drop what is under way."""
        self.receiver.close()

    def _hold(self) -> Copy:
        stack = ExitStack()
        module, version = stack.enter_context(self.receiver.reading())
        return Copy(module, version, self.receiver.stage.root, stack.close)

    def _critical(self, commit: Commit, swap: Swap) -> dict[str, Any]:
        """Install what is staged, on the worker's thread; what became of the requests that ran."""
        self._commit = commit
        assert self._engine is not None
        if commit.mode == "lora":  # one assignment; whoever runs keeps the adapter that it began with
            swap()
            return {"pause_s": 0.0}

        def install() -> Copy:
            swap()
            return self._hold()

        done = self._engine.swap(commit.version, install, commit.in_flight, commit.timeout)
        return {"pause_s": done.pause_s, **done.in_flight}

    def _changed(self, state: State) -> None:
        """Note pushes that came to their end, for the metrics and the page."""
        counters, status = self.receiver.counters, self.receiver.status()
        before, self._seen = self._seen, {name: getattr(counters, name) for name in self._seen}
        grown = {name: value - before[name] for name, value in self._seen.items()}
        facts = {"bytes": grown["bytes"], "seconds": grown["receive_seconds"]}
        commit = self._commit
        if grown["committed"] and commit is not None:
            pause = grown["pause_seconds"]
            facts |= {"version": commit.version, "root": commit.root, "mode": commit.mode, "pause_s": pause}
            self._metrics.push("committed", **facts)
        elif grown["aborted"]:
            error = status["error"] or {}
            self._metrics.push("aborted", version=error.get("version"), error=error.get("message"), **facts)
