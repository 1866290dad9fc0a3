"""Writing pickles that name torch's classes, without importing torch.

Protocol 2, as `torch.save` writes it (opcodes: CPython's `Lib/pickletools.py`). A `Global` becomes a name, an
`Opaque` the call that it describes, everything else what Python's own pickler would make of it. Python's pickler
cannot do this: it insists on importing each name that it writes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import PurePath
from typing import Any

from .pickle_values import Global, Opaque

MAX_DEPTH = 200
PROTO_2 = b"\x80\x02"
STOP = b"."


def integer(value: int) -> bytes:
    """The shortest opcode for an int, the same choice that Python makes."""
    if 0 <= value < 256:
        return b"K" + value.to_bytes(1, "little")
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if -(2**31) <= value < 2**31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    width = (value.bit_length() + 8) // 8
    if value < 0 and value == -(1 << (8 * width - 9)):  # Python drops the byte that the sign does not need
        width -= 1
    if width > 255:
        return b"\x8b" + width.to_bytes(4, "little") + value.to_bytes(width, "little", signed=True)
    return b"\x8a" + bytes((width,)) + value.to_bytes(width, "little", signed=True)


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + len(raw).to_bytes(4, "little") + raw


def integers(values: tuple[int, ...]) -> bytes:
    """A tuple of ints, without memo."""
    body = b"".join(map(integer, values))
    if not values:
        return b")"
    return body + bytes((0x84 + len(values),)) if len(values) < 4 else b"(" + body + b"t"


class Emitter:
    """Collects opcodes. `special` says how values of further types are written; its functions call `emit` and `raw`."""

    def __init__(self, special: Mapping[type, Callable[[Emitter, Any], None]] | None = None) -> None:
        self.parts: list[bytes] = [PROTO_2]
        self.special = dict(special or {})
        self.memo: dict[tuple[str, str] | str, bytes] = {}
        self.depth = 0

    def finish(self) -> bytes:
        return b"".join([*self.parts, STOP])

    def raw(self, code: bytes) -> None:
        self.parts.append(code)

    def name(self, module: str, name: str) -> None:
        """A name, by memo from its second use on."""
        self._once((module, name), b"c" + module.encode() + b"\n" + name.encode() + b"\n")

    def _once(self, key: tuple[str, str] | str, code: bytes) -> None:
        known = self.memo.get(key)
        if known is not None:
            self.parts.append(known)
            return
        index = len(self.memo)
        short = index < 256
        number = index.to_bytes(1 if short else 4, "little")
        self.memo[key] = (b"h" if short else b"j") + number
        self.parts += [code, (b"q" if short else b"r") + number]

    def emit(self, value: Any) -> None:
        kind = type(value)
        if kind is str:
            self._once(value, text(value)) if len(value) < 100 else self.raw(text(value))
        elif value is None or kind is bool:
            self.raw({None: b"N", True: b"\x88", False: b"\x89"}[value])
        elif kind is int:
            self.raw(integer(value))
        elif kind is float:
            self.raw(b"G" + struct.pack(">d", value))
        elif kind is Global:
            self.name(value.module, value.name)
        else:
            self._nested(value)

    def _nested(self, value: Any) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"values nested deeper than {MAX_DEPTH}, or a structure that contains itself")
        writer = self.special.get(type(value)) or _WRITERS.get(type(value))
        if writer is None and isinstance(value, PurePath):
            writer = _write_path
        if writer is None:
            raise TypeError(f"no way to write a {type(value).__name__} into a pickle")
        writer(self, value)
        self.depth -= 1

    def call(self, module: str, name: str, args: tuple[Any, ...], new: bool = False) -> None:
        """The opcodes of `module.name(*args)`."""
        self.name(module, name)
        self.emit(args)
        self.raw(b"\x81" if new else b"R")


def _write_tuple(out: Emitter, value: tuple[Any, ...]) -> None:
    if len(value) > 3:
        out.raw(b"(")
    for item in value:
        out.emit(item)
    out.raw((b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t")


def _write_list(out: Emitter, value: list[Any]) -> None:
    out.raw(b"](")
    for item in value:
        out.emit(item)
    out.raw(b"e")


def _write_dict(out: Emitter, value: dict[Any, Any]) -> None:
    out.raw(b"}(")
    for key, item in value.items():
        out.emit(key)
        out.emit(item)
    out.raw(b"u")


def _write_bytes(out: Emitter, value: bytes) -> None:
    if value:
        out.call("_codecs", "encode", (value.decode("latin-1"), "latin1"))
    else:
        out.call("__builtin__", "bytes", ())


def _write_set(out: Emitter, value: set[Any]) -> None:
    out.call("__builtin__", type(value).__name__, (list(value),))


def _write_stream(out: Emitter, value: io.BytesIO) -> None:
    out.call("_io", "BytesIO", (), new=True)
    out.emit((value.getvalue(), 0, None))
    out.raw(b"b")


def _write_path(out: Emitter, value: PurePath) -> None:
    out.call("pathlib", type(value).__name__, tuple(value.parts))


def _write_timedelta(out: Emitter, value: timedelta) -> None:
    out.call("datetime", "timedelta", (value.days, value.seconds, value.microseconds))


def _write_opaque(out: Emitter, value: Opaque) -> None:
    if value.kwargs:
        raise TypeError(f"{value.module}.{value.name} was built with keyword arguments, which protocol 2 cannot say")
    out.call(value.module, value.name, value.args, value.new)
    if value.state is not None:
        out.emit(value.state)
        out.raw(b"b")


_WRITERS: dict[type, Callable[[Emitter, Any], None]] = {
    tuple: _write_tuple,
    list: _write_list,
    dict: _write_dict,
    bytes: _write_bytes,
    set: _write_set,
    frozenset: _write_set,
    io.BytesIO: _write_stream,
    timedelta: _write_timedelta,
    Opaque: _write_opaque,
}


def dump(value: Any, special: Mapping[type, Callable[[Emitter, Any], None]] | None = None) -> bytes:
    """The pickle of `value`: plain data, `Global` and `Opaque`, and what `special` knows."""
    out = Emitter(special)
    out.emit(value)
    return out.finish()
