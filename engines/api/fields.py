"""Typed fields for configurations: dataclasses whose values are checked, and named when they are wrong.

`option` and `part` make the fields, `settle` checks an object as it is made, `build` makes one of plain data (a YAML
file, a command line). Both collect everything that is wrong before they raise.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from ...converter.errors import ConfigError, Problems

S = TypeVar("S")
T = TypeVar("T")

_WRONG: Any = object()
"""What `coerce` gives for a value that it has reported."""


def option(
    default: T,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    names: Mapping[str, Any] | None = None,
) -> T:
    """A field with its default and what it does; numbers may have bounds, choices other spellings (`names`)."""
    limits = {"least": least, "above": above, "most": most, "names": names or {}}
    meta = {"help": help} | {key: value for key, value in limits.items() if value is not None}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def of(kind: type[T]) -> Callable[[T | Mapping[str, Any]], T]:
    """For type checkers: a dict may be given where this configuration is expected."""
    return lambda given: given if isinstance(given, kind) else build(kind, given)  # pyright: ignore[reportArgumentType]


def maybe(kind: type[T]) -> Callable[[T | Mapping[str, Any] | None], T | None]:
    """The same, or None."""
    return lambda given: None if given is None else of(kind)(given)


def part(*, default_factory: Callable[[], Any], converter: Callable[[S], T], help: str) -> T:
    """A field that is a configuration of its own; a dict of its fields may be given in its place.

    `converter` is for type checkers. At run time `settle` does the work, whose messages know the field's full name.
    """
    return dataclasses.field(default_factory=default_factory, metadata={"help": help})


@dataclass_transform(kw_only_default=True, field_specifiers=(part,))
def config(cls: type[T]) -> type[T]:
    """A dataclass with parts: keywords only, with slots."""
    return dataclasses.dataclass(kw_only=True, slots=True)(cls)


def nothing() -> None:
    """The default of a part that may be left out."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint: the known word that looks most like this one, else all of them when they are few."""
    known = list(known)
    found = difflib.get_close_matches(word, known, 1, 0.6)
    if not found:  # `tp` for `tensor_parallel_size`, `schedule` for `pp_schedule`
        parts = [name for name in known if word and (word in name or name in word)]
        found = parts[:1] if len(parts) == 1 else []
    if found:
        return f"did you mean {found[0]}?"
    return f"known: {', '.join(known)}" if len(known) <= 16 else ""


@cache
def hints(cls: type) -> dict[str, Any]:
    """The type of every field, `Annotated` and strings resolved."""
    return get_type_hints(cls)


def squash(word: str) -> str:
    """Spelling apart: `Interleaved1F1B`, `interleaved_1f1b` and `interleaved-1F1B` are one."""
    return re.sub(r"[^a-z0-9]", "", word.lower())


def described(kind: Any) -> str:
    """A type in the words of the messages."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(described(arg) for arg in get_args(kind))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(arg) for arg in get_args(kind))
    plain = {
        NoneType: "null", bool: "true or false", int: "an integer", float: "a number", str: "text",
        dict: "a mapping", list: "a list",
    }  # fmt: skip
    if get_origin(kind) is list:
        return f"a list (each {described(get_args(kind)[0])})"
    if dataclasses.is_dataclass(kind):
        return f"a mapping with the fields of {kind.__name__}"  # pyright: ignore[reportAttributeAccessIssue]
    return plain.get(get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))


def _text(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value) if type(value) in (str, int) else _WRONG


def _integer(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 1e3
    return value if isinstance(value, int) and not isinstance(value, bool) else _WRONG


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return _WRONG
    try:
        number = float(value)  # also 1e-3, which YAML 1.1 reads as text
    except (ValueError, OverflowError):
        return _WRONG
    return number if math.isfinite(number) else _WRONG


def _choice(value: Any, choices: Sequence[Any], names: Mapping[str, Any]) -> Any:
    if value in choices and not isinstance(value, bool):
        return value
    spelled = {squash(str(choice)): choice for choice in choices} | {squash(k): v for k, v in names.items()}
    word = str(value).rpartition(".")[2] if str(value).startswith("torch.") else str(value)
    return spelled.get(squash(word), _WRONG)


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    str: _text,
    int: _integer,
    float: _number,
    bool: lambda value: value if isinstance(value, bool) else _WRONG,
    Any: lambda value: value,
}


def coerce(value: Any, kind: Any, where: str, problems: Problems, meta: Mapping[str, Any] | None = None) -> Any:
    """The value as the type says, nested configurations built. What does not fit is reported under `where`."""
    meta = meta or {}
    before = len(problems.found)
    given = _coerced(value, kind, where, problems, meta)
    if given is not _WRONG:
        _check_limits(given, where, problems, meta)
    elif len(problems.found) == before:
        choices = [str(c) for k in (kind, *get_args(kind)) if get_origin(k) is Literal for c in get_args(k)]
        close = difflib.get_close_matches(str(value), choices, 1, 0.6)
        found = "null" if value is None else repr(value)
        problems.add(where, f"{found}, expected {described(kind)}", f"did you mean {close[0]}?" if close else "")
    return given


def _coerced(value: Any, kind: Any, where: str, problems: Problems, meta: Mapping[str, Any]) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind](value)
    if origin in (Union, UnionType):
        if value is None:
            return None if NoneType in args else _WRONG
        inner = [arg for arg in args if arg is not NoneType]
        fitting = (_coerced(value, arg, where, problems, meta) for arg in inner)
        return next((found for found in fitting if found is not _WRONG), _WRONG)
    if origin is Literal:
        return _choice(value, args, meta.get("names", {}))
    if origin is list:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            return _WRONG
        made = [coerce(item, args[0], f"{where}[{n}]", problems) for n, item in enumerate(items)]
        return _WRONG if any(item is _WRONG for item in made) else made
    if origin is dict:
        if not isinstance(value, Mapping):
            return _WRONG
        return {str(k): coerce(v, args[1], f"{where}.{k}", problems) for k, v in value.items()}
    if isinstance(value, kind):
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _build(kind, value, where, problems)
    return _WRONG


def _check_limits(value: Any, where: str, problems: Problems, meta: Mapping[str, Any]) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    bounds = [
        ("least", lambda limit: value >= limit, "at least"),
        ("above", lambda limit: value > limit, "more than"),
        ("most", lambda limit: value <= limit, "at most"),
    ]
    for key, holds, words in bounds:
        if key in meta and not holds(meta[key]):  # also for NaN
            problems.add(where, f"{value} is out of range, expected {words} {meta[key]:g}")


def _build(cls: Any, data: Mapping[Any, Any], where: str, problems: Problems) -> Any:
    """One configuration of plain data; `where` names it in the messages ("" for the outermost)."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    before, made = len(problems.found), {}
    for key, value in data.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in fields:
            problems.add(name, f"no such field in {cls.__name__}", nearest(str(key), fields))
        else:
            made[key] = coerce(value, hints(cls)[key], name, problems, fields[key].metadata)
    for field in fields.values():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in data:
            problems.add(f"{where}.{field.name}" if where else field.name, "is required and not given")
    if len(problems.found) > before:
        return _WRONG
    try:
        return cls(**made)
    except ConfigError as error:
        for found in error.problems:
            problems.add(f"{where}.{found.about}" if where else found.about, found.what, found.hint)
        return _WRONG


def build(cls: type[T], data: Mapping[str, Any]) -> T:
    """A configuration of plain data.

    Raises ConfigError naming every unknown field (with the nearest known) and every value of the wrong type.
    """
    problems = Problems()
    made = _build(cls, data, "", problems)
    problems.raise_as(ConfigError, f"The configuration ({cls.__name__}) has mistakes.")
    return made


def settle(config: Any) -> None:
    """For `__post_init__`: check every field, put canonical spellings and nested configurations in place.

    Raises ConfigError with everything that is wrong.
    """
    problems = Problems()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        made = coerce(value, hints(type(config))[field.name], field.name, problems, field.metadata)
        if made is not _WRONG and made is not value:
            object.__setattr__(config, field.name, made)
    problems.raise_as(ConfigError, f"{type(config).__name__} has mistakes.")
