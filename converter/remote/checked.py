"""Holds files that pass by whole against their sha256: bytes that were damaged on the way are found out nowhere else.

Windows come nearly in the order of the file; one that comes too early is kept until its turn. A file of which parts are
never fetched (a rank's share, dropped tensors, a resumed conversion) cannot be checked.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import RemoteChanged

if TYPE_CHECKING:
    from .mirror import Mirror

Token = TypeVar("Token")
"""What stands for a window: it is handed back when its bytes are needed no more."""


@dataclass(slots=True)
class _Passing:
    """How far a file has come, and the windows that are too early: begin → bytes, token."""

    digest: Any = field(default_factory=hashlib.sha256)
    at: int = 0
    early: dict[int, tuple[memoryview, Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False


class Checker(Generic[Token]):
    """Checks some files of one run. Several threads may show it windows.

    limit   bytes of one file that may wait for their turn; beyond them it is given up
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._files: dict[tuple[int, str], _Passing] = {}

    def expect(self, mirror: Mirror, path: str) -> None:
        """All of this file will pass, as far as it is not on this machine already."""
        if mirror.entry(path).sha256 is not None:
            self._files[id(mirror), path] = _Passing()

    def watches(self, mirror: Mirror, path: str) -> bool:
        """Whether windows of this file must be shown."""
        return (id(mirror), path) in self._files

    def saw(self, mirror: Mirror, path: str, begin: int, data: memoryview, token: Token) -> list[Token]:
        """Bytes of a file have come; returns the windows whose bytes were looked at, or never will be. Raises
        RemoteChanged when the last of them show that something was wrong."""
        passing = self._files[id(mirror), path]
        with passing.lock:
            if passing.over:
                return [token]
            passing.early[begin] = (data, token)
            through: list[Token] = []
            while passing.early and (taken := self._step(passing, mirror, path)):
                through += taken
            if sum(len(data) for data, _ in passing.early.values()) > self.limit:
                passing.over = True
                through += [token for _, token in passing.early.values()]
                passing.early.clear()
            return through

    def _step(self, passing: _Passing, mirror: Mirror, path: str) -> list[Token]:
        """Take the next window, if it is here. What lies before it may be on this machine: a header, say."""
        begin = min(passing.early)
        if begin > passing.at:
            between = mirror.present(path, passing.at, begin)
            if between is None:
                return []
            passing.digest.update(between)
            passing.at = begin
        data, token = passing.early.pop(begin)
        passing.digest.update(data[passing.at - begin :])
        passing.at = max(passing.at, begin + len(data))
        if passing.at == mirror.size(path):
            passing.over = True
            _compare(passing, mirror, path)
        return [token]


def _compare(passing: _Passing, mirror: Mirror, path: str) -> None:
    if passing.digest.hexdigest() != mirror.entry(path).sha256:
        mirror.forget()
        raise RemoteChanged(
            f"{mirror.store.url}/{path}: what came is not what its sha256 says.",
            hint="It was damaged on the way, or on the server. Try again; a proxy in between may be to blame.",
        )
    mirror.fetcher.traffic.add(checked=1)
