"""safetensors files: their headers, read with full validation, and written.

The format (safetensors/src/tensor.rs and the README of huggingface/safetensors): 8 bytes little-endian header length,
a JSON object of that length, then the data; each entry is `"name": {"dtype", "shape", "data_offsets": [begin, end]}`
with offsets counted from the data's start, and the data is covered without holes or overlaps.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..dtypes import BY_NAME
from ..errors import CorruptFile, Problems, SourceError
from ..remote.mounts import ensure

# The library refuses longer headers, and so do we, before we allocate anything.
MAX_HEADER = 100_000_000
ALIGNMENT = 8
HEAD = 32 * 1024
"""Bytes of a remote file that are asked for first: the header of most."""

_METADATA = "__metadata__"

# Bits per element: what `dtypes` knows, and what the library (0.8) knows beyond it.
BITS: dict[str, int] = {name: dtype.size * 8 for name, dtype in BY_NAME.items()} | {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "C64": 64,
}
_CUT = "It is truncated or damaged: fetch or copy it again, and compare its size with the original's."
_WRONG = "It was not written by the safetensors library, or was damaged: fetch or copy it again."


class StTensor(NamedTuple):
    """A tensor in a file: its bytes are `begin` to `end`, counted from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class StHeader:
    """What a file holds. `empty` names the tensors without elements: legal, yet in a model mostly a failed export."""

    path: Path
    tensors: dict[str, StTensor]
    metadata: dict[str, str]
    size: int
    data_start: int
    empty: tuple[str, ...]


def read_header(path: str | Path) -> StHeader:
    """The header of a file, checked against the format and the file's size; all that is wrong is raised together."""
    path = Path(path)
    ensure(path, 0, HEAD)
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            raw = _raw_header(path, file, size)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None
    problems = Problems()
    entries = _parse(path, raw, problems)
    metadata = _metadata(entries.pop(_METADATA, None), problems)
    start = 8 + len(raw)
    tensors: dict[str, StTensor] = {}
    for name, entry in entries.items():
        tensor = _tensor(name, entry, start, problems)
        if tensor is not None:
            tensors[name] = tensor
    if not problems:
        _check_cover(path, tensors, start, size, problems)
    problems.raise_as(CorruptFile, f"{path} is not a sound safetensors file", hint=_CUT)
    empty = tuple(name for name, tensor in tensors.items() if tensor.begin == tensor.end)
    return StHeader(path, tensors, metadata, size, start, empty)


def _raw_header(path: Path, file: Any, size: int) -> bytes:
    first = file.read(8)
    if len(first) < 8:
        raise CorruptFile(f"{path} is {size} bytes long; a safetensors file has at least 10", hint=_CUT)
    length = int.from_bytes(first, "little")
    if first.startswith((b"version ", b"<!DOCTYP", b"<html>")):
        raise CorruptFile(
            f"{path} is no safetensors file but a Git LFS pointer or a web page",
            hint="Fetch the real file, for instance with `git lfs pull` or `hf download`.",
        )
    if length > MAX_HEADER:
        raise CorruptFile(f"{path} claims a header of {length} bytes, the format's limit is {MAX_HEADER}", hint=_WRONG)
    if 8 + length > size:
        raise CorruptFile(
            f"{path} claims a header of {length} bytes: expected {8 + length} bytes or more, found {size}", hint=_CUT
        )
    ensure(path, 8, 8 + length)
    return file.read(length)


def _parse(path: Path, raw: bytes, problems: Problems) -> dict[str, Any]:
    """The JSON object, with keys that stand twice reported rather than silently merged."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    problems.add(key, "stands twice in the header", "one of the two would be lost")
                seen.add(key)
        return out

    if not raw.startswith(b"{"):
        raise CorruptFile(f"{path} has a header that is no JSON object: it begins with {raw[:8]!r}", hint=_WRONG)
    try:
        entries: dict[str, Any] = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} has a header that is no JSON: {str(error)[:200]}", hint=_WRONG) from None
    if b"\\u" in raw:  # an escape can spell half of a surrogate pair, which is no text and cannot be written again
        for name in entries:
            if name.encode("utf-8", "replace").decode() != name:
                problems.add(ascii(name), "is a name that is no valid Unicode")
    return entries


def _metadata(value: Any, problems: Problems) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        problems.add(_METADATA, "is not an object whose values are all strings")
        return {}
    return value


def _tensor(name: str, entry: Any, start: int, problems: Problems) -> StTensor | None:
    """One entry, when it is of the right form and its offsets fit its shape."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        problems.add(name, 'is described without "dtype", "shape" and two "data_offsets"')
        return None
    bits = BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        problems.add(name, f"has the unknown dtype {str(dtype)[:40]!r}", f"known are {', '.join(sorted(BITS))}")
        return None
    if type(shape) is not list or not _naturals(shape) or not _naturals((begin, end)):
        problems.add(name, "has a shape or offsets that are no plain, non-negative integers")
        return None
    needed = math.prod(shape) * bits
    if needed % 8 or begin > end or needed != (end - begin) * 8:
        problems.add(
            name, f"shape {shape} of {dtype} needs {needed / 8:g} bytes, found {end - begin} (offsets {begin} to {end})"
        )
        return None
    return StTensor(dtype, tuple(shape), start + begin, start + end)


def _naturals(values: Iterable[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _check_cover(path: Path, tensors: dict[str, StTensor], start: int, size: int, problems: Problems) -> None:
    """In order of offset, each tensor must begin where the one before it ends, and the last one with the file."""
    at, before = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < at:
            problems.add(name, f"overlaps {before}: begins at byte {tensor.begin}, expected {at}")
        elif tensor.begin > at:
            problems.add(name, f"leaves a hole behind {before}: begins at byte {tensor.begin}, expected {at}")
        at, before = max(at, tensor.end), name
    if at > size:
        lost = [name for name, tensor in tensors.items() if tensor.end > size]
        hint = f"cut off are {_some(lost)}, of {len(tensors)} tensors"
        problems.add(path.name, f"is truncated: expected {at} bytes, found {size}", hint)
    elif at < size:
        problems.add(path.name, f"is longer than its header says: expected {at} bytes, found {size}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The first bytes of a file whose tensors, `(name, dtype, shape)`, follow each other in this order.

    The same bytes as the library writes for the same order: compact JSON, metadata first, padded with spaces to a
    multiple of 8. (The library itself orders by alignment and name; readers accept any order.)
    """
    parts: list[str] = []
    if metadata:
        parts.append(f'"{_METADATA}":{_compact(dict(metadata))}')
    at = 0
    for name, dtype, shape in tensors:
        bits = math.prod(shape) * BITS[dtype]
        if bits % 8:
            raise ValueError(f"{name}: {shape} of {dtype} is no whole number of bytes")
        end = at + bits // 8
        extents = ",".join(map(str, shape))
        parts.append(f'{_compact(name)}:{{"dtype":"{dtype}","shape":[{extents}],"data_offsets":[{at},{end}]}}')
        at = end
    raw = ("{" + ",".join(parts) + "}").encode("utf-8")
    raw += b" " * (-len(raw) % ALIGNMENT)
    return struct.pack("<Q", len(raw)) + raw


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
