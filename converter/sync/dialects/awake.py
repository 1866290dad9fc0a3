"""Servers that can be sent to sleep: their weights are then given up, or elsewhere, and an update ends the engine.

vLLM's `/is_sleeping` is also true of an engine that is only paused (0.32: "sleeping at any level", pausing being level
0), as it is behind our own fence, or as a push that failed has left it. Its metrics tell the two apart.
"""

from __future__ import annotations

import re

from ...errors import Problem, ServerRefused, SyncError
from ..client import Client
from .base import ask

_STATE = re.compile(r'^vllm:engine_sleep_state\{[^}]*sleep_state="awake"[^}]*\} ([0-9.eE+-]+)$', re.MULTILINE)
_WAKE = "Weights that are sent to it now would end its engine: wake all of it first (POST /wake_up), then push again."


def asleep(client: Client, path: str, *, fenced: bool = False) -> list[Problem]:
    """What hinders a push while a server sleeps.

    path    where it tells; one without that endpoint never does
    fenced  whether we have paused it: where nothing else tells, that is why it says so
    """
    said = ask(client, path) if path else None
    if said is None or said.get("is_sleeping") is not True:
        return []
    awake = _awake(client)
    if awake if awake is not None else fenced:
        return []
    return [Problem(client.url, "is asleep", _WAKE)]


def _awake(client: Client) -> bool | None:
    """What vLLM's metrics say of all engines; None where they do not."""
    try:
        text = client.text("/metrics", timeout=10.0)
    except SyncError:
        return None
    values = [float(value) for value in _STATE.findall(text)]
    return all(values) if values else None


def check_awake(client: Client, path: str, *, fenced: bool = False) -> None:
    """Right before something is done to it: it may have been sent to sleep meanwhile. Raises ServerRefused."""
    for problem in asleep(client, path, fenced=fenced):
        raise ServerRefused("asleep", f"{problem.about} {problem.what}.", hint=problem.hint, retryable=True)
