"""A directory that hub and servers both see: buckets are files in it, told of by HTTP as those in shared memory are.

For servers that nothing but a file system reaches, and where the way must leave traces. A push writes
`<directory>/v000007/s0-000012.bucket` (the header, then the payload); a file goes when all servers have applied it,
or, with `keep`, the directories of the last so many versions stay.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...codecs import Array
from ...errors import ConvertError, ServerRefused, TargetError
from ...rawio import Files, write_exactly
from ..blocks import NUMBER_BYTES
from ..inlet import Offered, Stream
from ..refusals import Refused
from ..transport import Peer, Place
from ..wire import HEADER_BYTES, Header, ProtocolError
from .shm import header_of
from .told import Told

WINDOW = 3
"""Files of a sender that may wait for servers."""

MARK = ".areal-sync-{token}"
_VERSION = re.compile(r"v\d{6,}")
_FILE = re.compile(r"v\d{6,}/s\d+-\d{6,}\.bucket")


class DiskTransport(Told):
    """The hub's side. `options`: directory (must be given), keep (versions whose files stay, 0)."""

    what = "load"

    def __init__(self, kind: str, place: Place) -> None:
        super().__init__(kind, place, WINDOW)
        given = place.options.get("directory")
        if not given:
            raise ServerRefused("bad_transport", "disk: no directory was given.", hint="One that all servers see.")
        self.directory, self.keep = Path(given).absolute(), int(place.options.get("keep", 0))
        self._mark: Path | None = None
        self._folder = self.directory
        self._files: list[Path | None] = [None] * WINDOW

    @staticmethod
    def unfit(peer: Peer) -> str:
        """Nothing can be known before the server has looked: the join tells."""
        return ""

    def offer(self) -> dict[str, Any]:
        token = secrets.token_hex(16)
        mark = self.directory / MARK.format(token=token)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            mark.touch(exist_ok=False)
        except OSError as error:
            raise TargetError(f"{self.directory}: cannot be written: {error.strerror}.") from error
        self._mark = mark
        return {"kind": self.kind, "directory": str(self.directory), "token": token}

    def open(self, offer: Mapping[str, Any]) -> None:
        if not (self.directory / MARK.format(token=offer["token"])).is_file():
            raise TargetError(f"{self.directory} is not the directory that the first sender made.")
        memory = np.empty(self.place.bucket, np.uint8)
        self.begin_with([memory] * WINDOW)  # a bucket is in its file when `send` returns

    def begin(self, version: int) -> None:
        self._folder = self.directory / f"v{version:06d}"
        self._folder.mkdir(exist_ok=True)

    def message(self, index: int, header: Header, parts: Sequence[Array]) -> dict[str, Any]:
        self._drop(index)
        path = self._folder / f"s{header.sender}-{header.number:06d}.bucket"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                at = 0
                for part in (np.frombuffer(header.pack(), np.uint8), *parts):
                    write_exactly(fd, part.data, at)
                    at += part.nbytes
            finally:
                os.close(fd)  # before anybody is told: NFS shows a file to others when it is closed
        except OSError as error:
            raise TargetError(f"{path}: cannot be written: {error.strerror}.") from error
        self._files[index] = path
        return {"file": f"{self._folder.name}/{path.name}"}

    def _drop(self, index: int) -> None:
        path, self._files[index] = self._files[index], None
        if path is not None and not self.keep:
            with suppress(OSError):
                path.unlink()

    def finish(self) -> None:
        super().finish()
        for index in range(WINDOW):
            self._drop(index)
        if self.place.sender == 0:
            self._tidy(keep=self.keep)

    def _tidy(self, keep: int) -> None:
        """Remove the directories of all versions but the last `keep`; those that another sender still fills stay."""
        with suppress(OSError):
            made = sorted(p for p in self.directory.iterdir() if _VERSION.fullmatch(p.name))
            for path in made[: len(made) - keep] if keep else made:
                if path != self._folder:
                    shutil.rmtree(path, ignore_errors=True)
                elif not keep:
                    path.rmdir()  # fails while files of other senders are in it

    def close(self) -> None:
        super().close()
        for index in range(WINDOW):
            self._drop(index)
        if self._mark is not None:
            with suppress(OSError):
                self._mark.unlink()
            self._tidy(keep=self.keep)
            self._mark = None


class DiskInlet(Offered):
    """The server's side. `transport`: {directory, token}."""

    kind = "disk"
    credit = WINDOW

    def __init__(self, transport: Mapping[str, Any], timeout: float) -> None:
        super().__init__(transport, timeout)
        directory, token = transport.get("directory"), transport.get("token")
        if not isinstance(directory, str) or not isinstance(token, str) or not re.fullmatch(r"[0-9a-f]{32}", token):
            raise Refused("bad_transport", "disk: a join says {directory, token}.")
        self.directory, self._mark = Path(directory), MARK.format(token=token)

    def open(self) -> None:
        """See that it is the directory that the hub sees."""
        if not (self.directory / self._mark).is_file():
            raise Refused(
                "bad_transport",
                f"disk: {self.directory} is not on this server's file system, or another directory there.",
                hint="Hub and servers must see one directory under one path.",
            )

    def make(self, what: str, message: Mapping[str, Any], data: bytes | memoryview | None) -> Stream:
        name = message.get("file")
        if what != "load" or data is not None or not isinstance(name, str) or not _FILE.fullmatch(name):
            raise Refused("bad_request", "disk: a bucket is told by JSON {sender, number, file, header}.")
        path = str(self.directory / name)

        def read(header: Header, at: int, places: Sequence[Array]) -> None:
            files = Files()
            try:
                said = bytearray(HEADER_BYTES)
                files.read(path, 0, memoryview(said))
                if bytes(said) != header.pack():
                    raise ProtocolError(f"{path} holds another bucket than number {header.number}.")
                for place in places:
                    files.read(path, at, place.data)
                    at += place.nbytes
            except ProtocolError:
                raise
            except ConvertError as error:
                raise ProtocolError(str(error)) from error
            finally:
                files.close()

        def numbers(header: Header) -> Array:
            found = np.empty(header.blocks * NUMBER_BYTES, np.uint8)
            read(header, HEADER_BYTES, [found])
            return found

        def fill(header: Header, places: Sequence[Array]) -> Callable[[], None]:
            return lambda: read(header, HEADER_BYTES + header.blocks * NUMBER_BYTES, places)

        return Stream(header_of(message), numbers, fill)
