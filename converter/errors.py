"""The exceptions of areal-convert, one small tree.

    ConvertError                    everything that this package raises on purpose
    ├── SourceError                 the checkpoint that was read cannot be used
    │   ├── NotACheckpoint          the directory or file is none of the known formats
    │   ├── CorruptFile             a file is truncated, over-long, or its header is wrong
    │   ├── UnsafePickle            a pickle names something that is not on the allow-list
    │   └── RemoteError             it lies elsewhere, and cannot be read from there
    │       ├── Unreachable         the network or the server fails; the same may work later
    │       ├── NoAccess            unknown, private or gated, or the token does not do
    │       └── RemoteChanged       what came is not what the server had announced
    ├── UnknownFamily               no table in `mappings/` for this architecture
    ├── ConfigError                 the model's configuration lacks or contradicts something
    ├── MeshError                   the mesh cannot hold this model
    ├── PlanError                   source and target do not fit together, element for element
    ├── TargetError                 the target exists, is full, or cannot be written
    ├── VerifyError                 bytes that were written read back differently
    ├── RankError                   another rank of the same job failed, or has something else
    └── SyncError                   new weights did not get to a running server
        ├── ServerUnreachable       it does not answer, or not in time
        ├── ServerRefused           it answers that it will not: see `code`
        │   └── LeaseHeld           another hub is pushing to it
        ├── ChannelError            the connection that buckets travel on broke, or was aborted
        ├── SyncAborted             a push was called off; every server answers with its old weights
        └── InDoubt                 decided and journalled, but not confirmed by every server yet

Every message names what it is about (tensor, file, rank or field), what was expected, what was found, and
what to do. An error that several things caused carries all of them in `problems`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_LONG_WORD = re.compile(r"\S{400,}")

SHOWN_AS: dict[str, str] = {}
"""Directories that stand for a place elsewhere, with its URL: no message names the directory (`remote.mounts`)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: what it concerns, what is wrong with it, and what to do about it."""

    about: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        text = self.what if self.what.startswith(self.about) else f"{self.about}: {self.what}"
        return printable(f"{text} ({self.hint})" if self.hint else text)


def printable(text: str) -> str:
    """Names come from files: control characters and lone surrogates are shown, not sent to the terminal; a word of
    thousands of letters is cut. What is a mirror of a place elsewhere is called by that place's URL."""
    for directory, url in SHOWN_AS.items():
        text = text.replace(directory, url)
    text = _LONG_WORD.sub(lambda m: f"{m[0][:160]}…({len(m[0])} characters)", text)
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class ConvertError(Exception):
    """Base class. `problems` holds every single finding; `str()` shows them all, a line each."""

    shown = 40

    def __init__(self, what: str, problems: Iterable[Problem] = (), hint: str = "") -> None:
        self.what = what
        self.problems: Sequence[Problem] = tuple(problems)
        self.hint = hint
        super().__init__(what)

    def __str__(self) -> str:
        lines = [printable(self.what)]
        lines += [f"  - {problem}" for problem in self.problems[: self.shown]]
        if len(self.problems) > self.shown:
            lines.append(f"  … and {len(self.problems) - self.shown} more")
        if self.hint:
            lines.append(printable(self.hint))
        return "\n".join(lines)


class SourceError(ConvertError):
    """The checkpoint that was read cannot be used as it is."""


class NotACheckpoint(SourceError):
    """Nothing at this path looks like one of the known formats."""


class CorruptFile(SourceError):
    """A file is truncated, over-long, or its header contradicts it."""


class UnsafePickle(SourceError):
    """A pickle refers to something outside the allow-list; nothing of it was run."""


class RemoteError(SourceError):
    """A checkpoint that lies elsewhere cannot be read from there."""


class Unreachable(RemoteError):
    """The network or the server fails, also after several attempts. The same may work later."""


class NoAccess(RemoteError):
    """There is no such repository, revision or bucket, or this user may not see it."""


class RemoteChanged(RemoteError):
    """A file is another one than was announced: somebody changed it, or its bytes are damaged on the way."""


class UnknownFamily(ConvertError):
    """There is no mapping table for this architecture."""


class ConfigError(ConvertError):
    """A field of the model's configuration is missing or contradicts another."""


class MeshError(ConvertError):
    """The mesh cannot hold this model; the message says what would divide."""


class PlanError(ConvertError):
    """The plan is not total: something is unmapped, missing, duplicated or wrongly shaped."""


class TargetError(ConvertError):
    """The target exists already, is full, or cannot be written."""


class VerifyError(ConvertError):
    """What was read back is not what was written."""


class RankError(ConvertError):
    """Another rank of the same job failed, or was given something else than this one."""


class SyncError(ConvertError):
    """New weights did not get to a running server."""


class ServerUnreachable(SyncError):
    """A server does not answer, or not in time; what it did with the request is not known."""


class ServerRefused(SyncError):
    """A server (or the hub in its name) will not do what was asked, and nothing changed there.

    code       a word for programs: `stale_epoch`, `mismatch`, `memory`, `old_version`, …
    retryable  whether the same request may succeed later
    facts      other fields of the server's answer
    """

    def __init__(
        self,
        code: str,
        what: str,
        problems: Iterable[Problem] = (),
        hint: str = "",
        *,
        retryable: bool = False,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(what, problems, hint)
        self.code, self.retryable, self.facts = code, retryable, dict(facts or {})


class LeaseHeld(ServerRefused):
    """Another hub is pushing to this server."""


class ChannelError(SyncError):
    """The connection that a sender's buckets travel on broke, was aborted, or timed out. It is never used again."""


class SyncAborted(SyncError):
    """A push was called off before it was decided: every server goes on answering with its old weights."""


class InDoubt(SyncError):
    """A push was decided and journalled, and some server has not confirmed it yet: it is completed later."""


@dataclass(slots=True)
class Problems:
    """Collects findings, so that a user sees all of them at once."""

    found: list[Problem] = field(default_factory=list)

    def add(self, about: str, what: str, hint: str = "") -> None:
        self.found.append(Problem(about, what, hint))

    def __bool__(self) -> bool:
        return bool(self.found)

    def raise_as(self, error: type[ConvertError], what: str, hint: str = "") -> None:
        """Raise `error` with all that was found; do nothing when nothing was."""
        if self.found:
            raise error(what, self.found, hint)
