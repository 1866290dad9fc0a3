"""Pickles, read as data and written by hand.

`load` is an interpreter of the pickle opcodes (CPython's `Lib/pickletools.py` documents them) that can do nothing but
build inert values: it imports nothing, calls nothing that a file names, and takes nothing whose size the file only
claims. Python's own Unpickler, even with `find_class` overridden, allocates what a file's memo index asks for and
overflows the C stack on the hash of a deeply nested tuple.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CorruptFile
from .pickle_machine import Machine
from .pickle_values import Builder, Global, Opaque
from .pickle_write import dump

__all__ = ["Global", "Opaque", "dump", "load"]

MAX_DEPTH = 200
_GARBAGE = (IndexError, KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError)


def load(
    data: bytes,
    about: str,
    extra: Mapping[tuple[str, str], Builder] | None = None,
    persistent: Callable[[Any], Any] | None = None,
    *,
    check_depth: bool = True,
) -> Any:
    """The object that `data` describes; `about` names the file in errors.

    `extra` adds names to those that are allowed, each with the function that builds what a call of it gives; it
    gets the pickled arguments. `persistent` turns a persistent id into a value (torch's storages); without it such
    an id is an error. Data behind the pickle's end is not looked at. With `check_depth` a structure that refers to
    itself, or is nested deeper than anybody's, is refused, so that the caller may walk it recursively.
    """
    machine = Machine(data, about, extra or {}, persistent)
    try:
        value = machine.run()
        if check_depth:
            _check_depth(value)
    except (*_GARBAGE, struct.error) as error:
        raise CorruptFile(
            f"{about} holds a damaged pickle: {_reason(error)}, near byte {machine.pos} of {len(data)}",
            hint="Fetch or copy the file again; it was cut off or overwritten.",
        ) from None
    return value


def _reason(error: BaseException) -> str:
    if isinstance(error, IndexError):
        return "it ends in the middle"
    return f"{type(error).__name__} {error}"[:200]


def _check_depth(root: Any) -> None:
    """Refuse cycles and towers. Heights are computed once per container, so shared ones cost nothing extra."""
    height: dict[int, int] = {}
    todo: list[tuple[Any, bool]] = [(root, False)]
    while todo:
        item, done = todo.pop()
        children = _children(item)
        if not children:
            continue
        key = id(item)
        if done:
            height[key] = 1 + max(height.get(id(child), 0) for child in children)
            if height[key] > MAX_DEPTH:
                raise ValueError(f"values nested deeper than {MAX_DEPTH}")
        elif key not in height:
            height[key] = MAX_DEPTH  # in progress: whoever meets it again from below stands in a cycle
            todo.append((item, True))
            todo += [(child, False) for child in children if id(child) not in height]


def _children(item: Any) -> Any:
    kind = type(item)
    if kind is dict:
        return item.values()
    if kind is list or kind is tuple:
        return item
    if kind is Opaque:
        return (item.args, item.state, item.kwargs)
    return ()
