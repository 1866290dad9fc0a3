"""The machine that reads pickles as data: a stack, marks on it, a memo, and nothing that it could call.

The opcodes are those that CPython's `Lib/pickletools.py` documents. Its text opcodes (protocol 0) are left out, but for
those that name classes: no checkpoint holds them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ..errors import UnsafePickle
from .pickle_values import BUILDERS, RENAMED, Builder, Global, Opaque, allowed, hashable

Handler = Callable[["Machine", int], int]


class Machine:
    """One run over one pickle. Frequent opcodes are handled in `run`, the others by the functions of the table."""

    __slots__ = ("about", "builders", "copied", "data", "globals", "marks", "memo", "persistent", "pos", "stack")

    def __init__(
        self,
        data: bytes,
        about: str,
        extra: Mapping[tuple[str, str], Builder],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.data = data
        self.about = about
        self.builders = {**BUILDERS, **extra}
        self.persistent = persistent
        self.globals: dict[tuple[str, str], Global] = {}
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.pos = 0
        self.copied = 0

    def run(self) -> Any:
        """Execute up to STOP. The opcodes that make up nine tenths of a `.metadata` are handled here, for speed."""
        data, stack, memo = self.data, self.stack, self.memo
        pos = 0
        while True:
            op = data[pos]
            if op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
                pos += 1
            elif op == 0x68:  # BINGET
                stack.append(memo[data[pos + 1]])
                pos += 2
            elif op == 0x4B:  # BININT1
                stack.append(data[pos + 1])
                pos += 2
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[pos + 1 : pos + 5], "little")])
                pos += 5
            elif op == 0x2E:  # STOP
                return stack.pop()
            else:
                self.pos = pos
                pos = _OPS[op](self, pos + 1)

    def take(self, pos: int, count: int) -> bytes:
        """`count` bytes at `pos`, which must exist: nothing is allocated on a file's word."""
        if count < 0 or pos + count > len(self.data):
            raise IndexError
        return self.data[pos : pos + count]

    def number(self, pos: int, width: int) -> int:
        return int.from_bytes(self.take(pos, width), "little")

    def pop_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def find(self, module: Any, name: Any) -> Global:
        """The inert stand-in of a name, or the refusal of the file."""
        if type(module) is not str or type(name) is not str:
            raise TypeError("a name that is no text")
        module = RENAMED.get(module, module)
        known = self.globals.get((module, name))
        if known is None:
            build = self.builders.get((module, name))
            if build is None and not allowed(module, name):
                self.refuse(module, name)
            known = self.globals[module, name] = Global(module, name, build)
        return known

    def refuse(self, module: str, name: str) -> NoReturn:
        raise UnsafePickle(
            f"{self.about} refers to {module}.{name}, which no checkpoint needs; the file was refused and nothing of "
            "it was run",
            hint="Do not open it with tools that run pickles unless you trust its origin. If you do trust it, load it "
            "with torch.load(..., weights_only=False) and save its tensors alone, best as safetensors.",
        )

    def call(self, func: Any, args: Any, kwargs: dict[str, Any] | None, new: bool) -> Any:
        """What calling `func` gives: a plain value that we know how to build, or the description of the call."""
        if type(func) is not Global or type(args) is not tuple:
            raise TypeError("a call of something that is not a name")
        if func.build is not None:
            self.count_copy(args)
            return func.build(*args, **(kwargs or {}))
        return Opaque(func.module, func.name, args, None, kwargs, new)

    def count_copy(self, args: tuple[Any, ...]) -> None:
        """A file may name one large value many times, and have it copied each time: not beyond its own size."""
        if args and type(args[0]) in (str, bytes, list, tuple, dict, set, frozenset):
            self.copied += len(args[0])
            if self.copied > len(self.data) + 1_000_000:
                raise ValueError("the same value copied over and over")


def _proto(m: Machine, pos: int) -> int:
    if m.data[pos] > 5:
        raise ValueError(f"pickle protocol {m.data[pos]}")
    return pos + 1


def _constant(value: Any) -> Handler:
    def push(m: Machine, pos: int) -> int:
        m.stack.append(value)
        return pos

    return push


def _empty(make: Callable[[], Any]) -> Handler:
    def push(m: Machine, pos: int) -> int:
        m.stack.append(make())
        return pos

    return push


def _integer(width: int, signed: bool) -> Handler:
    def push(m: Machine, pos: int) -> int:
        m.stack.append(int.from_bytes(m.take(pos, width), "little", signed=signed))
        return pos + width

    return push


def _long(width: int) -> Handler:
    def push(m: Machine, pos: int) -> int:
        count = m.number(pos, width)
        m.stack.append(int.from_bytes(m.take(pos + width, count), "little", signed=True))
        return pos + width + count

    return push


def _float(m: Machine, pos: int) -> int:
    m.stack.append(struct.unpack(">d", m.take(pos, 8))[0])
    return pos + 8


def _text(width: int) -> Handler:
    def push(m: Machine, pos: int) -> int:
        count = m.number(pos, width)
        m.stack.append(m.take(pos + width, count).decode("utf-8", "surrogatepass"))
        return pos + width + count

    return push


def _short_text(m: Machine, pos: int) -> int:
    end = pos + 1 + m.data[pos]
    if end > len(m.data):
        raise IndexError
    m.stack.append(m.data[pos + 1 : end].decode("utf-8", "surrogatepass"))
    return end


def _raw(width: int) -> Handler:
    def push(m: Machine, pos: int) -> int:
        count = m.number(pos, width)
        m.stack.append(m.take(pos + width, count))
        return pos + width + count

    return push


def _line(m: Machine, pos: int) -> tuple[str, int]:
    end = m.data.index(b"\n", pos)
    return m.data[pos:end].decode("utf-8"), end + 1


def _global(m: Machine, pos: int) -> int:
    module, pos = _line(m, pos)
    name, pos = _line(m, pos)
    m.stack.append(m.find(module, name))
    return pos


def _stack_global(m: Machine, pos: int) -> int:
    name = m.stack.pop()
    m.stack[-1] = m.find(m.stack[-1], name)
    return pos


def _inst(m: Machine, pos: int) -> int:
    module, pos = _line(m, pos)
    name, pos = _line(m, pos)
    args = tuple(m.pop_mark())
    m.stack.append(m.call(m.find(module, name), args, None, False))
    return pos


def _obj(m: Machine, pos: int) -> int:
    func, *args = m.pop_mark()
    m.stack.append(m.call(func, tuple(args), None, False))
    return pos


def _reduce(m: Machine, pos: int) -> int:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args, None, False)
    return pos


def _newobj(m: Machine, pos: int) -> int:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args, None, True)
    return pos


def _newobj_ex(m: Machine, pos: int) -> int:
    kwargs, args = m.stack.pop(), m.stack.pop()
    if type(kwargs) is not dict or not all(type(key) is str for key in kwargs):
        raise TypeError("keyword arguments that are none")
    m.stack[-1] = m.call(m.stack[-1], args, kwargs, True)
    return pos


def _build(m: Machine, pos: int) -> int:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is Opaque:
        target.state = state
    elif type(target) is not dict:  # attributes of a dict, such as the `_metadata` of a module's state: not needed
        raise TypeError("a state for something that has none")
    return pos


def _extension(m: Machine, pos: int) -> int:
    m.refuse("copyreg", "_extension_registry")


def _unknown(m: Machine, pos: int) -> int:
    raise ValueError(f"opcode {m.data[pos - 1]:#04x}, which no checkpoint holds")


def _persistent(m: Machine, pos: int) -> int:
    if m.persistent is None:
        raise ValueError("a reference to data outside of the pickle")
    m.stack[-1] = m.persistent(m.stack[-1])
    return pos


def _mark(m: Machine, pos: int) -> int:
    m.marks.append(len(m.stack))
    return pos


def _pop(m: Machine, pos: int) -> int:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.stack.pop()
    return pos


def _pop_to_mark(m: Machine, pos: int) -> int:
    m.pop_mark()
    return pos


def _dup(m: Machine, pos: int) -> int:
    m.stack.append(m.stack[-1])
    return pos


def _put(width: int) -> Handler:
    """Picklers number their memo from 0 up; an index beyond that would only make us allocate."""

    def put(m: Machine, pos: int) -> int:
        index = m.number(pos, width)
        if index == len(m.memo):
            m.memo.append(m.stack[-1])
        elif index < len(m.memo):
            m.memo[index] = m.stack[-1]
        else:
            raise ValueError(f"memo index {index} where {len(m.memo)} is next")
        return pos + width

    return put


def _tuple(count: int) -> Handler:
    def make(m: Machine, pos: int) -> int:
        if len(m.stack) < count:
            raise IndexError
        m.stack[-count:] = [tuple(m.stack[-count:])]
        return pos

    return make


def _marked_tuple(m: Machine, pos: int) -> int:
    m.stack.append(tuple(m.pop_mark()))
    return pos


def _marked_list(m: Machine, pos: int) -> int:
    m.stack.append(m.pop_mark())
    return pos


def _append(m: Machine, pos: int) -> int:
    item = m.stack.pop()
    _expect(m.stack[-1], list).append(item)
    return pos


def _appends(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    _expect(m.stack[-1], list).extend(items)
    return pos


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _setitem(m: Machine, pos: int) -> int:
    value, key = m.stack.pop(), m.stack.pop()
    _expect(m.stack[-1], dict)[hashable(key)] = value
    return pos


def _setitems(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    target = _expect(m.stack[-1], dict)
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[key if type(key) is str else hashable(key)] = value
    return pos


def _additems(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    _expect(m.stack[-1], set).update(hashable(item) for item in items)
    return pos


def _frozenset(m: Machine, pos: int) -> int:
    m.stack.append(frozenset(hashable(item) for item in m.pop_mark()))
    return pos


def _table() -> list[Handler]:
    ops: list[Handler] = [_unknown] * 256
    named: dict[bytes, Handler] = {
        b"\x80": _proto, b"\x95": lambda m, pos: pos + 8,
        b"N": _constant(None), b"\x88": _constant(True), b"\x89": _constant(False), b")": _constant(()),
        b"]": _empty(list), b"}": _empty(dict), b"\x8f": _empty(set),
        b"J": _integer(4, True), b"M": _integer(2, False), b"\x8a": _long(1), b"\x8b": _long(4), b"G": _float,
        b"\x8c": _short_text, b"X": _text(4), b"\x8d": _text(8), b"U": _text(1), b"T": _text(4),
        b"C": _raw(1), b"B": _raw(4), b"\x8e": _raw(8), b"\x96": _raw(8),
        b"c": _global, b"\x93": _stack_global, b"i": _inst, b"o": _obj,
        b"R": _reduce, b"\x81": _newobj, b"\x92": _newobj_ex, b"b": _build, b"Q": _persistent,
        b"\x82": _extension, b"\x83": _extension, b"\x84": _extension,
        b"(": _mark, b"0": _pop, b"1": _pop_to_mark, b"2": _dup, b"q": _put(1), b"r": _put(4),
        b"\x85": _tuple(1), b"\x86": _tuple(2), b"\x87": _tuple(3), b"t": _marked_tuple, b"l": _marked_list,
        b"a": _append, b"e": _appends, b"s": _setitem, b"u": _setitems, b"\x90": _additems, b"\x91": _frozenset,
    }  # fmt: skip
    for code, function in named.items():
        ops[code[0]] = function
    return ops


_OPS = _table()
