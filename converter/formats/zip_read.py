"""The directory of a stored zip file, which may be a part of a larger file, read with `pread` alone.

PKWARE APPNOTE 6.3.9, sections 4.3.6 to 4.3.16. Python's `zipfile` would do, but reads a slice of a file only through a
wrapper, keeps a large object per record, and names neither the file nor the sizes in its errors.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptFile, SourceError
from ..remote.mounts import ensure_all, remote_file
from .zip_layout import CENTRAL_MAGIC, END64_MAGIC, END_MAGIC, LOCAL_MAGIC, LOCATOR_MAGIC, U16_MAX, U32_MAX

_END_SIZE = 22
_CENTRAL_SIZE = 46
LOCAL_SIZE = 30
_TAIL = 1 << 16
_MAX_DIRECTORY = 1 << 30
_HEAD = 4096


class Record(NamedTuple):
    """One entry of a zip file: its size, and where its local header begins, counted from the zip's start. `described`:
    its sizes stand behind its bytes once more."""

    name: str
    size: int
    header: int
    stored: bool
    described: bool = False


@dataclass(slots=True)
class Window:
    """`length` bytes of an open file from `start` on, under the name that errors use. `file` is its path: what is read
    of one that lies elsewhere is fetched before; `places` are the records' bytes, by local header, as `reckoned`."""

    fd: int
    start: int
    length: int
    about: str
    file: Path | None = None
    places: dict[int, int] = field(default_factory=dict)

    def ensure(self, spans: Iterable[tuple[int, int]]) -> None:
        """Have these bytes (counted from `start`) on this machine; reading them one by one would take many requests."""
        if self.file is not None:
            at, end = self.start, self.start + self.length
            ensure_all({self.file: [(min(at + a, end), min(at + b, end)) for a, b in spans]})

    def read(self, at: int, count: int) -> bytes:
        """`count` bytes at `at`, or an error that says how many there are."""
        if at < 0 or count < 0 or at + count > self.length:
            raise CorruptFile(
                f"{self.about} refers to bytes {at} to {at + count}, but is {self.length} bytes long",
                hint="It is truncated or damaged: fetch or copy it again.",
            )
        self.ensure([(at, at + count)])
        parts: list[bytes] = []
        got = 0
        while got < count:
            part = os.pread(self.fd, count - got, self.start + at + got)
            if not part:
                raise CorruptFile(
                    f"{self.about} ends at byte {self.start + at + got}; expected {self.start + at + count} or more",
                    hint="It is truncated: fetch or copy it again.",
                )
            parts.append(part)
            got += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def directory(window: Window) -> list[Record]:
    """All records, in the directory's order. Raises CorruptFile for whatever is not a whole, plain zip file."""
    tail_at = max(0, window.length - _TAIL - _END_SIZE)
    window.ensure([(0, _HEAD), (tail_at, window.length)])
    tail = window.read(tail_at, window.length - tail_at)
    end = tail.rfind(END_MAGIC)
    if end < 0 or end + _END_SIZE > len(tail):
        raise CorruptFile(
            f"{window.about} has no end record: it is truncated after {window.length} bytes",
            hint="Fetch or copy it again, and compare its size with the original's.",
        )
    count, size, at = struct.unpack_from("<H2I", tail, end + 10)
    comment = struct.unpack_from("<H", tail, end + 20)[0]
    whole = tail_at + end + _END_SIZE + comment
    if whole != window.length:
        raise CorruptFile(
            f"{window.about} is {window.length} bytes long, but its zip directory ends at byte {whole}",
            hint="Something was appended to it, or it was cut: fetch or copy it again.",
        )
    directory_end = tail_at + end
    if U32_MAX in (size, at) or count == U16_MAX:
        count, size, at, directory_end = _end64(window, tail_at + end)
    # Where the optional zip64 records stand between directory and end, the directory ends before them.
    if size > _MAX_DIRECTORY or at + size > directory_end or count * _CENTRAL_SIZE > size:
        raise CorruptFile(
            f"{window.about} claims a directory of {count} records in bytes {at} to {at + size}, which cannot be: "
            f"the file is {window.length} bytes long",
            hint="It is damaged: fetch or copy it again.",
        )
    inside = at >= tail_at
    records = _records(window, tail[at - tail_at : at - tail_at + size] if inside else window.read(at, size), count)
    if window.file is not None and remote_file(window.file) is not None:
        window.places = reckoned(records, at)
        window.ensure((r.header, r.header + LOCAL_SIZE) for r in records if r.header not in window.places)
    return records


def _end64(window: Window, end_at: int) -> tuple[int, int, int, int]:
    magic, _, end64_at, _ = struct.unpack("<4sIQI", window.read(end_at - 20, 20))
    record = window.read(end64_at, 56) if magic == LOCATOR_MAGIC else b""
    if record[:4] != END64_MAGIC:
        raise CorruptFile(
            f"{window.about} says that it is a zip64 file, but its zip64 end record is missing",
            hint="It is damaged: fetch or copy it again.",
        )
    count, size, at = struct.unpack_from("<3Q", record, 32)
    return count, size, at, end64_at


def _records(window: Window, data: bytes, count: int) -> list[Record]:
    out: list[Record] = []
    at = 0
    try:
        for _ in range(count):
            record, at = _record(data, at)
            out.append(record)
    except (struct.error, ValueError):
        raise CorruptFile(
            f"{window.about}: record {len(out)} of the {count} in its zip directory is damaged",
            hint="Fetch or copy it again.",
        ) from None
    return out


def _record(data: bytes, at: int) -> tuple[Record, int]:
    fields = struct.unpack_from("<4s6H3I5H2I", data, at)
    if fields[0] != CENTRAL_MAGIC:
        raise ValueError("no directory record")
    flags, method = fields[3], fields[4]
    stored_size, size, name_length, extra_length, comment_length = fields[8:13]
    header = fields[16]
    name_at = at + _CENTRAL_SIZE
    extra_at = name_at + name_length
    after = extra_at + extra_length + comment_length
    if after > len(data):
        raise ValueError("record exceeds the directory")
    if U32_MAX in (size, stored_size, header):
        size, stored_size, header = _wide(data[extra_at : extra_at + extra_length], size, stored_size, header)
    name = data[name_at:extra_at].decode("utf-8")
    stored = method == 0 and size == stored_size and not flags & 1
    return Record(name, size, header, stored, bool(flags & 8)), after


def _wide(extra: bytes, *values: int) -> tuple[int, ...]:
    """The zip64 extra field holds, in order, those values that do not fit into 32 bits."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            return tuple(next(numbers, value) if value == U32_MAX else value for value in values)
        at += 4 + length
    raise ValueError("zip64 field missing")


def reckoned(records: Iterable[Record], directory_at: int) -> dict[int, int]:
    """Where records' bytes begin, by where their local headers do: from the directory alone, for those that say so
    twice. They end where the next record begins, and begin on a multiple of 64 right behind their local header, as
    torch writes them. Reading every local header of a file that lies elsewhere would take a request for each tensor."""
    out: dict[int, int] = {}
    ordered = sorted(records, key=lambda record: record.header)
    for record, following in zip(ordered, [*(r.header for r in ordered[1:]), directory_at], strict=True):
        named = record.header + LOCAL_SIZE + len(record.name.encode())
        ends = (16, 24) if record.described else (0,)
        found = [at for end in ends if (at := following - end - record.size) % 64 == 0 and 0 <= at - named < 96]
        if record.stored and len(found) == 1:
            out[record.header] = found[0]
    return out


def data_offset(window: Window, record: Record) -> int:
    """Where the record's bytes begin, counted from the zip's start; they are checked to lie within the file."""
    if not record.stored:
        raise SourceError(
            f"{window.about} holds {record.name} compressed or encrypted, which torch never writes",
            hint="Load it with torch.load and save it with torch.save, or unzip it and zip it with `zip -0`.",
        )
    known = window.places.get(record.header)
    if known is not None:
        return known
    header = window.read(record.header, LOCAL_SIZE)
    if header[:4] != LOCAL_MAGIC:
        raise CorruptFile(
            f"{window.about} has no record {record.name} at byte {record.header}, where its directory says",
            hint="It is damaged: fetch or copy it again.",
        )
    name_length, extra_length = struct.unpack_from("<2H", header, 26)
    at = record.header + LOCAL_SIZE + name_length + extra_length
    if at + record.size > window.length:
        raise CorruptFile(
            f"{window.about} is {window.length} bytes long, its record {record.name} ends at byte {at + record.size}",
            hint="It is truncated: fetch or copy it again.",
        )
    return at
