#!/usr/bin/env python3
"""Writes the table of all configuration fields into `docs/guides/train.md`, from the dataclasses themselves.

python tools/config_reference.py            # rewrites the part between the marks
python tools/config_reference.py --check    # fails when the file is out of date
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from areal_convert.engines.api.fields import hints
from areal_convert.engines.api.run import RunConfig

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "train.md"
BEGIN, END = "<!-- fields: made by tools/config_reference.py -->", "<!-- end of fields -->"


def parts(cls: Any, name: str = "", seen: set[Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Every configuration class from this one down, once, with the full name of the first field that has it."""
    seen = set() if seen is None else seen
    seen.add(cls)
    yield name, cls
    for field in dataclasses.fields(cls):
        kind = hints(cls)[field.name]
        for part in (kind, *get_args(kind)):
            if dataclasses.is_dataclass(part) and part not in seen:
                yield from parts(part, f"{name}.{field.name}".lstrip("."), seen)


def kind_of(kind: Any) -> str:
    """A type as a reader of YAML would say it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(kind_of(arg) for arg in args)
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is list:
        return "list"
    plain = {int: "integer", float: "number", str: "text", bool: "true, false", type(None): "null"}
    return plain.get(kind, "fields of its own")


def default_of(field: dataclasses.Field[Any]) -> str:
    """As YAML has it."""
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
        if dataclasses.is_dataclass(value):
            return ""
    else:
        value = field.default
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}" if value < 1e6 else f"2^{value.hex().split('p')[1].lstrip('+')}"
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return str(value) or '""'


def limits_of(field: dataclasses.Field[Any]) -> str:
    signs = {"least": "≥", "above": ">", "most": "≤"}
    return "".join(f", {sign} {field.metadata[key]:g}" for key, sign in signs.items() if key in field.metadata)


def rows(cls: Any) -> Iterator[str]:
    """The table of one class; parts of their own are named, not shown."""
    yield "| field | default | kind | what it does |"
    yield "|---|---|---|---|"
    for field in dataclasses.fields(cls):
        kind = kind_of(hints(cls)[field.name]) + limits_of(field)
        cells = (f"`{field.name}`", f"`{d}`" if (d := default_of(field)) else "", kind, field.metadata["help"])
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def reference() -> str:
    """Every table, a heading each."""
    lines = []
    for name, cls in parts(RunConfig):
        doc = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        lines += [f"### `{name or 'RunConfig'}`", "", doc, "", *rows(cls), ""]
    return "\n".join(lines).rstrip()


def written(text: str) -> str:
    """The guide with its tables brought up to date."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{GUIDE} has no place for the tables: {BEGIN} … {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n\n{reference()}\n\n{END}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when the guide is out of date")
    given = parser.parse_args()
    now = GUIDE.read_text(encoding="utf-8")
    after = written(now)
    if given.check and after != now:
        raise SystemExit(f"{GUIDE} is out of date: python tools/config_reference.py")
    if not given.check:
        GUIDE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
