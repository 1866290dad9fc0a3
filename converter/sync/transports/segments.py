"""Shared memory with a name: made by one process, mapped by others on the same host, gone when all have ended.

A segment is a file on the host's `/dev/shm`. Its name says who made it (process id, when that process started, and in
which namespace), and it is unlinked as soon as everybody has mapped it: a process that is killed later leaves nothing
behind. What one that was killed before left is swept away by the next one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...codecs import Array
from ...errors import ConvertError

SHM = Path("/dev/shm")
"""Where Linux keeps shared memory. Without it there is no such transport."""

_NAME = re.compile(r"arcs-(?P<space>[0-9a-f]+)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{16}")
_STAT_START = 19
"""Of /proc/<pid>/stat, counted behind the parenthesis that ends the name: clock ticks from boot to the start."""


class SegmentError(ConvertError):
    """Shared memory cannot be made (no room, no /dev/shm) or is not there (another host, another container)."""


class Segment:
    """Some bytes that several processes see. `array` is their memory, which whoever does not write cannot."""

    def __init__(self, name: str, memory: mmap.mmap, made: bool) -> None:
        self.name, self.made, self._named = name, made, made
        self.array: Array = np.frombuffer(memory, np.uint8)

    @classmethod
    def make(cls, size: int) -> Segment:
        """New memory, all of it really there: too little room is an error now, and not a signal later.

        Raises SegmentError.
        """
        name = f"arcs-{_namespace():x}-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(8)}"
        path = SHM / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SegmentError(f"{path}: shared memory cannot be made: {error.strerror}.") from error
        try:
            os.posix_fallocate(fd, 0, size)
            return cls(name, mmap.mmap(fd, size), made=True)
        except OSError as error:
            path.unlink()
            raise SegmentError(
                f"{path}: there is no room for {size} bytes of shared memory: {error.strerror}.",
                hint="Containers often have 64 MiB: --shm-size, or a smaller bucket, or another transport.",
            ) from error
        finally:
            os.close(fd)

    @classmethod
    def attach(cls, name: str, *, write: bool = False) -> Segment:
        """Memory that another process made. Raises SegmentError when it is not to be seen from here."""
        if not _NAME.fullmatch(name):
            raise SegmentError(f"{name!r} is no name of a segment.")
        try:
            fd = os.open(SHM / name, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise SegmentError(
                f"{SHM / name}: shared memory cannot be opened: {error.strerror}.",
                hint="Hub and server must be on one host, in containers that share /dev/shm, and of one user.",
            ) from error
        try:
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
            return cls(name, mmap.mmap(fd, 0, prot=prot), made=False)
        except (OSError, ValueError) as error:
            raise SegmentError(f"{SHM / name}: shared memory cannot be mapped: {error}.") from error
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Take the name away; whoever has mapped the memory keeps it. Idempotent."""
        if self._named:
            self._named = False
            with contextlib.suppress(FileNotFoundError):
                (SHM / self.name).unlink()

    def close(self) -> None:
        """Unlink, and let go of the memory: it is given back when no array refers to it any more. Idempotent."""
        self.unlink()
        self.array = np.empty(0, np.uint8)


def available() -> bool:
    """Whether this host has shared memory with names."""
    return SHM.is_dir() and os.access(SHM, os.W_OK)


def host_id() -> str:
    """The same for two processes only if they see the same /dev/shm: the kernel's boot, and the file system's number,
    which differs for every mount of a container. Empty where there is none."""
    if not available():
        return ""
    with contextlib.suppress(OSError):
        boot = _read("/proc/sys/kernel/random/boot_id").strip()
        return f"{boot}:{SHM.stat().st_dev:x}:{SHM.stat().st_ino:x}"
    return ""


def sweep() -> list[str]:
    """Remove segments of processes that are no more, and return their names. Those of other process namespaces, where
    nobody can tell, stay."""
    gone = []
    for name in _names():
        found = _NAME.fullmatch(name)
        if found is None or int(found["space"], 16) != _namespace():
            continue
        if _started(int(found["pid"])) != int(found["start"]):
            with contextlib.suppress(OSError):
                (SHM / name).unlink()
                gone.append(name)
    return gone


def _names() -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from os.listdir(SHM)


def _namespace() -> int:
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _started(pid: int) -> int:
    """When a process started (clock ticks since boot); -1 when there is none, or only its body."""
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[_STAT_START])


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")
