"""The servers of a hub, and how something is done with all of them at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import ConvertError, Problem, ServerRefused, SyncError
from .client import Client
from .sink import Sink, SinkLayout, SinkStatus

T = TypeVar("T")


@dataclass(eq=False)
class Member:
    """A server of the fleet.

    status  as it was last seen; `joined` (epoch, the server's own name) since it joined
    behind  why it is left out of the current epoch, or ""
    silent  what it did when it was asked for the last time in this push, where it gave no answer; else ""
    called_off  whether it was told of the end of this push, or could not be
    """

    sink: Sink
    client: Client
    layout: SinkLayout
    status: SinkStatus
    joined: tuple[int, str] | None = None
    behind: str = ""
    silent: str = ""
    called_off: bool = False

    @property
    def url(self) -> str:
        return self.sink.url

    @property
    def staged(self) -> bool:
        return self.sink.tier != "fenced"


@dataclass
class Settings:
    """What a user chose, as far as the servers are concerned."""

    token: str | None = None
    timeout: float = 60.0
    ttl: float = 30.0
    in_flight: str = "finish"
    on_failure: str = "abort"
    options: Mapping[str, Any] = field(default_factory=dict)


def each(members: Sequence[Member], action: Callable[[Member], T]) -> tuple[dict[str, T], dict[str, ConvertError]]:
    """Do something with all servers at the same time: url → what it gave, url → its error."""
    if not members:
        return {}, {}
    found: dict[str, T] = {}
    failed: dict[str, ConvertError] = {}
    with ThreadPoolExecutor(min(32, len(members)), thread_name_prefix="areal-sync-http") as pool:
        futures = {member.url: pool.submit(action, member) for member in members}
        for url, future in futures.items():
            try:
                found[url] = future.result()
            except ConvertError as error:
                failed[url] = error
    return found, failed


def raise_all(failed: Mapping[str, ConvertError], what: str) -> None:
    """Raise what went wrong: one error as it is, several together, of their common kind where they have one."""
    errors = list(failed.values())
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    problems = [
        p for url, e in failed.items() for p in (e.problems or (Problem(url, e.what.removeprefix(f"{url}: ")),))
    ]
    kinds, codes = {type(e) for e in errors}, {getattr(e, "code", "") for e in errors}
    hint = errors[0].hint
    if len(kinds) == len(codes) == 1 and isinstance(errors[0], ServerRefused):
        raise type(errors[0])(errors[0].code, what, problems, hint, retryable=errors[0].retryable) from errors[0]
    kind = kinds.pop() if len(kinds) == 1 and not isinstance(errors[0], ServerRefused) else SyncError
    raise kind(what, problems, hint) from errors[0]
