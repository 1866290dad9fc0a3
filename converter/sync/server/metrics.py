"""Counts of what the server does: for Prometheus, and the last two minutes for the page."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

SECONDS = 120
_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PAUSE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class Metrics:
    """All of one server's; it has a registry of its own, so that several may live in one process."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()

        def make(kind: Any, name: str, about: str, *labels: str, **more: Any) -> Any:
            return kind(f"areal_{name}", about, labels, registry=self.registry, **more)

        self._requests = make(Counter, "requests_total", "Answers by endpoint and HTTP status.", "endpoint", "status")
        self._finished = make(Counter, "sequences_total", "Sequences that ended, by reason.", "reason")
        self._prompt = make(Counter, "prompt_tokens_total", "Tokens of prompts that were run.")
        self._generated = make(Counter, "generated_tokens_total", "Tokens that were generated.")
        self._first = make(Histogram, "first_token_seconds", "From the request to its first token.", buckets=_LATENCY)
        self._whole = make(Histogram, "sequence_seconds", "From the request to its last token.", buckets=_LATENCY)
        self._queue = make(Histogram, "queue_seconds", "From the request until it starts.", buckets=_LATENCY)
        self._pushes = make(Counter, "pushes_total", "Pushes of weights, by outcome.", "outcome")
        self._pushed = make(Counter, "pushed_bytes_total", "Bytes of weights that were received.")
        self._pause = make(Histogram, "swap_pause_seconds", "How long a change of weights held up.", buckets=_PAUSE)
        self.version = make(Gauge, "weight_version", "Version of the weights.")
        self.running = make(Gauge, "running_sequences", "Sequences in the batch.")
        self.waiting = make(Gauge, "waiting_sequences", "Sequences that wait.")
        self._lock = threading.Lock()
        self._series: deque[list[float]] = deque(maxlen=SECONDS)  # second, generated tokens, requests
        self.totals = {"requests": 0, "prompt_tokens": 0, "generated_tokens": 0}
        self.pushes: deque[dict[str, Any]] = deque(maxlen=20)
        self.started = time.time()

    def _count(self, column: int, count: int) -> None:
        now = float(int(time.time()))
        with self._lock:
            if not self._series or self._series[-1][0] != now:
                self._series.append([now, 0, 0])
            self._series[-1][column] += count

    def request(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()
        self.totals["requests"] += 1
        self._count(2, 1)

    def prompts(self, count: int) -> None:
        self._prompt.inc(count)
        self.totals["prompt_tokens"] += count

    def generated(self, count: int) -> None:
        self._generated.inc(count)
        self.totals["generated_tokens"] += count
        self._count(1, count)

    def queued(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        self._finished.labels(reason).inc()
        self._whole.observe(seconds)

    def swapped(self, version: int, pause: float) -> None:
        self.version.set(version)
        self._pause.observe(pause)

    def push(self, outcome: str, **facts: Any) -> None:
        """A push ended: `facts` are shown on the page (version, root, bytes, seconds, pause_s, …)."""
        self._pushes.labels(outcome).inc()
        self._pushed.inc(facts.get("bytes") or 0)
        self.pushes.appendleft({"outcome": outcome, "at": time.time(), **facts})

    def series(self) -> dict[str, Any]:
        """Tokens and requests of the last seconds, oldest first, the seconds without any filled in."""
        now = int(time.time())
        with self._lock:
            known = {int(second): (tokens, requests) for second, tokens, requests in self._series}
        seconds = range(now - SECONDS, now)
        return {
            "end": now,
            "tokens": [known.get(s, (0, 0))[0] for s in seconds],
            "requests": [known.get(s, (0, 0))[1] for s in seconds],
        }

    def exposition(self) -> bytes:
        """As Prometheus reads it."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)
