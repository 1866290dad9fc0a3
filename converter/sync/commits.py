"""The critical section of a commit: the server's own hooks around the swap, and back where one of them fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .refusals import Refused
from .staging import Staging
from .wire import Mode

InFlight = Literal["finish", "wait", "abort", "keep"]
POLICIES: tuple[str, ...] = get_args(InFlight)
"""What becomes of requests that run: they end on the old copy, are waited for, are refused, go on with the new one."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What is about to be installed, as hooks see it. `timeout`: seconds that the hub waits for its answer."""

    version: int
    root: str
    mode: Mode
    in_flight: InFlight
    timeout: float


Facts = Mapping[str, Any] | None
"""What a hook tells of the requests in flight; it stands in the receipt."""


class Swap:
    """Called, it lets what is staged serve; `back` undoes that. Each once at most."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self.done = self.undone = False

    def __call__(self) -> None:
        if self.done:
            raise RuntimeError("the weights were swapped already")
        self._staging.install()
        self.done = True

    def back(self) -> None:
        if self.done and not self.undone:
            self._staging.undo()
            self.undone = True


Critical = Callable[[Commit, Swap], Facts]
"""A server's own critical section: close the gate, call the swap, flush caches, open the gate. Where it raises, the old
weights are put back if it has not done so itself (`swap.back()`)."""


def bracketed(before: Callable[[Commit], Facts] | None, after: Callable[[Commit, bool], Facts] | None) -> Critical:
    """The critical section from two hooks. `after(commit, installed)` is called whenever `before` was: it opens the
    gate. Where it raises after an install, the old weights are put back, and it is called again with False."""

    def critical(commit: Commit, swap: Swap) -> Facts:
        facts: dict[str, Any] = {}
        try:
            facts |= (before(commit) if before is not None else None) or {}
            swap()
            facts |= (after(commit, True) if after is not None else None) or {}
        except BaseException:
            swap.back()
            if after is not None:
                after(commit, False)
            raise
        return facts

    return critical


def carry_out(staging: Staging, commit: Commit, critical: Critical) -> dict[str, Any]:
    """Install what is staged, all of it or nothing, and return the receipt.

    Raises Refused (`install_failed`): then the old version serves, and the new one is still staged.
    """
    swap = Swap(staging)
    start = time.perf_counter()
    try:
        facts = dict(critical(commit, swap) or {})
        if not swap.done or swap.undone:
            raise RuntimeError("the server's critical section ended without a swap")
    except Exception as error:
        swap.back()
        text = f"Version {commit.version} was not installed: {type(error).__name__}: {error}"
        raise Refused("install_failed", text, hint="The old version serves; commit again, or abort.") from error
    pause = facts.pop("pause_s", None)
    return {
        "version": commit.version,
        "root": commit.root,
        "pause_s": time.perf_counter() - start if pause is None else pause,
        "in_flight": {"policy": commit.in_flight, **facts},
    }
