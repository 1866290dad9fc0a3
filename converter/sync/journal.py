"""What a hub decided, on disk before anybody is told: after a crash the next hub finishes it, or knows it never was.

A JSON object a line, each written and synced before the step that it announces. The last line may be torn: that step
was not begun. One hub has a journal at a time.

    {"event": "begin",  "run", "epoch", "version", "servers"}
    {"event": "commit", "epoch", "version", "root", "servers"}     from here on, version `version` is true
    {"event": "done",   "version", "servers"}                      these have confirmed it
    {"event": "abort",  "version", "reason"}
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SyncError

LONGEST = 1000
"""Lines after which a journal that is opened again is written anew, with what still matters."""


@dataclass
class Pending:
    """A commit that was decided; `servers` have not confirmed it yet."""

    version: int
    epoch: int
    root: str
    servers: list[str]


@dataclass
class Known:
    """What a journal tells.

    hub      the name that the hub goes by: one that is started again has its lease still
    epoch    the highest that was used; `version` the last one that was decided, with its root
    before   version and root of the decision before that: what is true again where that one is taken back
    pending  decided, and not confirmed by all
    begun    a push that was neither decided nor called off: presumed aborted
    """

    hub: str = ""
    epoch: int = 0
    version: int = 0
    root: str = ""
    before: tuple[int, str] = (0, "")
    pending: Pending | None = None
    begun: int | None = None
    snapshot: str = ""


@dataclass
class Journal:
    """Opened for one hub. Without a path, it lives as long as the process does, and no crash is survived."""

    path: Path | None
    known: Known = field(default_factory=Known)
    _fd: int | None = None

    @classmethod
    def open(cls, path: str | Path | None) -> Journal:
        """Read what is there, and lock it. Raises SyncError when another hub has it, or it is damaged."""
        if path is None:
            return cls(None, Known(hub=_new_name()))
        where = Path(path)
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SyncError(f"{where}: the journal cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise SyncError(f"{where}: another hub uses this journal.", hint="One hub has one journal.") from error
        journal = cls(where, _fd=fd)
        try:
            journal._read()
        except BaseException:
            journal.close()
            raise
        return journal

    def begin(self, run: str, epoch: int, version: int, servers: list[str]) -> None:
        self._write({"event": "begin", "run": run, "epoch": epoch, "version": version, "servers": servers})

    def commit(self, epoch: int, version: int, root: str, servers: list[str]) -> None:
        """The decision. When this returns it is on disk."""
        self._write({"event": "commit", "epoch": epoch, "version": version, "root": root, "servers": servers})

    def done(self, version: int, servers: list[str]) -> None:
        self._write({"event": "done", "version": version, "servers": servers})

    def abort(self, version: int, reason: str) -> None:
        self._write({"event": "abort", "version": version, "reason": reason[:500]})

    def retained(self, version: int, snapshot: str) -> None:
        self._write({"event": "retained", "version": version, "snapshot": snapshot})

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    # -------------------------------------------------------------------------------------------- underneath

    def _write(self, entry: dict[str, Any]) -> None:
        if self._fd is not None:
            line = json.dumps({**entry, "at": round(time.time(), 3)}, separators=(",", ":")) + "\n"
            try:
                _append(self._fd, line.encode())
            except OSError as error:
                raise SyncError(f"{self.path}: the journal cannot be written: {error.strerror}.") from error
        _take(self.known, entry)

    def _read(self) -> None:
        fd = self._fd
        assert fd is not None
        data = b""
        while chunk := os.pread(fd, 1 << 20, len(data)):
            data += chunk
        whole, torn = data.rpartition(b"\n")[0], data.rpartition(b"\n")[2]
        lines = whole.split(b"\n") if whole else []
        for n, line in enumerate(lines, 1):
            try:
                _take(self.known, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SyncError(
                    f"{self.path}: line {n} of the journal is damaged ({error}).",
                    hint="Look at the servers' /ws/status; then give the hub another journal.",
                ) from error
        if torn:
            os.ftruncate(fd, len(data) - len(torn))
        if not self.known.hub:
            self.known.hub = _new_name()
            self._write({"event": "hub", "hub": self.known.hub})
            _sync_directory(self.path)
        if len(lines) > LONGEST:
            self._rewrite()

    def _rewrite(self) -> None:
        """Only what still matters, put in the place of the old journal by one rename."""
        path, k = self.path, self.known
        assert path is not None
        entries: list[dict[str, Any]] = [{"event": "hub", "hub": k.hub}]
        pending = k.pending
        before, root = k.before if pending is not None else (k.version, k.root)
        entries += [
            {"event": "epoch", "epoch": k.epoch},
            {"event": "commit", "epoch": 0, "version": before, "root": root, "servers": []},
        ]
        if pending is not None:
            said = {"epoch": pending.epoch, "version": pending.version, "root": pending.root}
            entries.append({"event": "commit", **said, "servers": pending.servers})
        if k.snapshot:
            entries.append({"event": "retained", "version": k.version, "snapshot": k.snapshot})
        new = path.with_name(f".{path.name}.new")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        _append(fd, "".join(json.dumps(e) + "\n" for e in entries).encode())
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(new, path)
        _sync_directory(path)
        self.close()
        self._fd = fd


def _new_name() -> str:
    """Says where to look for a hub that holds a lease."""
    host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname())[:40]
    return f"hub-{host}-{secrets.token_hex(6)}"


def _append(fd: int, data: bytes) -> None:
    os.lseek(fd, 0, os.SEEK_END)
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])
    os.fsync(fd)


def _sync_directory(path: Path | None) -> None:
    if path is not None:
        fd = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _take(known: Known, entry: dict[str, Any]) -> None:
    """One entry's effect. Raises KeyError, TypeError, ValueError for what is none."""
    event = entry["event"]
    if event == "hub":
        known.hub = str(entry["hub"])
    elif event == "epoch":
        known.epoch = max(known.epoch, int(entry["epoch"]))
    elif event == "begin":
        known.epoch = max(known.epoch, int(entry["epoch"]))
        known.begun = int(entry["version"])
    elif event == "commit":
        servers = [str(s) for s in entry["servers"]]
        known.before = (known.version, known.root)
        known.version, known.root, known.begun = int(entry["version"]), str(entry["root"]), None
        known.epoch = max(known.epoch, int(entry["epoch"]))
        known.pending = Pending(known.version, int(entry["epoch"]), known.root, servers) if servers else None
    elif event == "done":
        if known.pending is not None and known.pending.version == int(entry["version"]):
            left = [s for s in known.pending.servers if s not in entry["servers"]]
            known.pending.servers = left
            known.pending = known.pending if left else None
    elif event == "abort":
        known.begun = None
        if known.pending is not None and known.pending.version == int(entry["version"]):
            known.pending = None  # nobody had been told of it yet: it never was
            known.version, known.root = known.before
    elif event == "retained":
        known.snapshot = str(entry["snapshot"])
    else:
        raise ValueError(f"there is no event {event!r}")
