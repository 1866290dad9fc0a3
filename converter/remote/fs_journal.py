"""What an unfinished upload to a directory has sent, so that the same command with --resume sends only the rest."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

import xxhash

from ..errors import TargetError
from .fs_directory import Sums
from .mirror import cache_directory


@dataclass(frozen=True)
class Sent:
    """A file that is at the store. `etag`: what the store said of it then; `digests`: of the atoms in it."""

    path: str
    sums: Sums
    etag: str
    digests: dict[str, str]


@dataclass(frozen=True)
class MadeHere:
    """A conversion on this machine: digests of its atoms, and its files with their sizes."""

    digests: dict[str, str]
    files: dict[str, int]


class Journal:
    """The journal of one upload, and its scratch directory. `identity`: all that must be the same for it to count."""

    def __init__(self, *identity: str) -> None:
        self.identity = xxhash.xxh3_128("\0".join(("1", *identity)).encode(errors="surrogateescape")).hexdigest()
        base = cache_directory() / "upload" / self.identity
        self.path, self.scratch, self._lock = base.with_suffix(".jsonl"), base, base.with_suffix(".lock")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Ours alone while this lasts. Raises TargetError when another process has it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise TargetError("This very conversion is running already.", hint="Wait until it has ended.") from None
        try:
            yield
        finally:
            os.close(fd)

    def read(self) -> dict[str, Sent]:
        """What was sent, by path. A line that a kill cut in two is passed over."""
        found: dict[str, Sent] = {}
        for line in self._lines():
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                sums = Sums(**entry["sums"])
                found[entry["path"]] = Sent(entry["path"], sums, str(entry["etag"]), dict(entry["digests"]))
        return found

    def made(self) -> MadeHere | None:
        """The conversion that became whole in the scratch directory, though files of it may be sent and deleted."""
        found = None
        for line in self._lines():
            with suppress(ValueError, KeyError, TypeError):
                found = MadeHere(**json.loads(line)["made"])
        return found

    def _lines(self) -> list[bytes]:
        try:
            return self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []

    def add(self, sent: Sent) -> None:
        """On disk when this returns."""
        self._append(asdict(sent))

    def add_made(self, made: MadeHere) -> None:
        """The conversion in the scratch directory is whole."""
        self._append({"made": asdict(made)})

    def _append(self, entry: dict[str, object]) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"\n" + json.dumps(entry).encode() + b"\n")  # first an end for what a kill may have left
            os.fsync(fd)
        finally:
            os.close(fd)

    def forget(self) -> None:
        """Journal and scratch directory are gone; nothing is resumed."""
        self.path.unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        partial = self.scratch.with_name(self.scratch.name + ".areal-partial")
        shutil.rmtree(partial, ignore_errors=True)
