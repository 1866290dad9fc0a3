"""The zip files that torch writes, byte for byte, laid out before any data exists.

The layout is that of `PyTorchStreamWriter` (pytorch, caffe2/serialize/inline_container.cc: `getPadding`, `setup`,
`writeRecord`, `writeEndOfFile`) over miniz (third_party/miniz: `mz_zip_writer_add_mem_ex_v2`): stored records,
each padded by an extra field `FB` so that its data starts at a multiple of 64; sizes and CRC not in the local header
but in a descriptor behind the data; zip64 fields only in the records that need them, the zip64 end record always.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

U32_MAX = 0xFFFFFFFF
U16_MAX = 0xFFFF
ALIGNMENT = 64

LOCAL_MAGIC = b"PK\x03\x04"
CENTRAL_MAGIC = b"PK\x01\x02"
DESCRIPTOR_MAGIC = b"PK\x07\x08"
END_MAGIC = b"PK\x05\x06"
END64_MAGIC = b"PK\x06\x06"
LOCATOR_MAGIC = b"PK\x06\x07"

_UTF8 = 0x0800
_SIZES_FOLLOW = 0x0008
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")


@dataclass(slots=True)
class ZipLayout:
    """Where everything of a zip file stands. `segments` are all its bytes but the data of the records given by size.

    `crc_at` holds, for each such record, the two positions of its CRC: behind its data and in the directory. They
    are zero in `segments`, which is what torch writes with `set_crc32_options(False)`, and what its reader accepts.
    An empty record has no such places: its CRC is zero.
    """

    size: int = 0
    segments: list[tuple[int, bytes]] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)
    crc_at: dict[str, tuple[int, int]] = field(default_factory=dict)


def lay_out(
    records: Sequence[tuple[str, bytes | int]], archive: str = "archive", alignment: int = ALIGNMENT
) -> ZipLayout:
    """Lay out the records in this order; content is bytes, or the size of data that is written later."""
    layout = ZipLayout()
    pending: list[bytes] = []
    pending_at = cursor = 0
    central: list[bytes] = []
    central_size = 0
    central_crc: list[tuple[str, int]] = []
    for name, content in records:
        size = content if isinstance(content, int) else len(content)
        crc = 0 if isinstance(content, int) else zlib.crc32(content)
        full = f"{archive}/{name}".encode()
        extra = _zip64_extra(size, size, cursor)
        flags = _UTF8 | (_SIZES_FOLLOW if size else 0)
        header = _local_header(full, flags, _zip64_extra(size, 0, cursor), cursor, alignment)
        layout.offsets[name] = data_at = cursor + len(header)
        cursor_after = data_at + size
        pending.append(header)
        if isinstance(content, int):
            layout.segments.append((pending_at, b"".join(pending)))
            pending, pending_at = [], cursor_after
            if size:
                layout.crc_at[name] = (cursor_after + 4, 0)
                central_crc.append((name, central_size + 16))
        else:
            pending.append(content)
        if size:
            pending.append(DESCRIPTOR_MAGIC + struct.pack("<I2Q" if extra else "<I2I", crc, size, size))
            cursor_after += len(pending[-1])
        central.append(_central_header(full, flags, extra, cursor, size, crc))
        central_size += len(central[-1])
        cursor = cursor_after
    for name, at in central_crc:
        layout.crc_at[name] = (layout.crc_at[name][0], cursor + at)
    pending += central
    pending.append(_end(len(central), central_size, cursor))
    layout.segments.append((pending_at, b"".join(pending)))
    layout.size = pending_at + len(layout.segments[-1][1])
    return layout


def patch_crc(layout: ZipLayout, crcs: Mapping[str, int]) -> list[tuple[int, bytes]]:
    """What to write where, so that the given records carry their CRC-32."""
    return [(at, struct.pack("<I", crc)) for name, crc in crcs.items() for at in layout.crc_at.get(name, ())]


def _zip64_extra(size: int, stored_size: int, cursor: int) -> bytes:
    """What is too large for 32 bits. In a local header miniz leaves the stored size 0, as it is not known yet."""
    values = [size, stored_size] if size >= U32_MAX else []
    values += [cursor] if cursor >= U32_MAX else []
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _local_header(name: bytes, flags: int, extra: bytes, cursor: int, alignment: int) -> bytes:
    start = cursor + _LOCAL.size + len(name) + len(extra) + 4
    padding = -start % alignment
    fields = (LOCAL_MAGIC, 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra) + 4 + padding)
    return _LOCAL.pack(*fields) + name + extra + b"FB" + padding.to_bytes(2, "little") + b"Z" * padding


def _central_header(name: bytes, flags: int, extra: bytes, cursor: int, size: int, crc: int) -> bytes:
    short = min(size, U32_MAX)
    sizes = (crc, short, short, len(name), len(extra))
    fields = (CENTRAL_MAGIC, 0, 0, flags, 0, 0, 0, *sizes, 0, 0, 0, 0, min(cursor, U32_MAX))
    return _CENTRAL.pack(*fields) + name + extra


def _end(count: int, size: int, at: int) -> bytes:
    end64 = _END64.pack(END64_MAGIC, _END64.size - 12, 0x031E, 45, 0, 0, count, count, size, at)
    locator = _LOCATOR.pack(LOCATOR_MAGIC, 0, at + size, 1)
    few = min(count, U16_MAX)
    return end64 + locator + _END.pack(END_MAGIC, 0, 0, few, few, min(size, U32_MAX), min(at, U32_MAX), 0)
