"""The model card's section on where the weights came from. Pure text: what others wrote stays as it is.

A card is Markdown below a head of YAML between two lines of `---`; the Hub wants the head first and wants it valid.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from ..errors import TargetError

CARD = "README.md"
BEGIN, END = "<!-- areal-convert:begin -->", "<!-- areal-convert:end -->"
SHOWN = 5
"""Atoms whose digests stand in the card; all of them stand in the manifest."""

_HEAD = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)(?:\r?\n)?^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)


def update(card: str | None, section: str, title: str) -> str:
    """The card with `section` in the place of the one that it has, or at its end; a new card when there is none.

    Everything outside the markers stays byte for byte, but for a head, which is put before a card that has none.
    Raises TargetError when the markers do not pair.
    """
    text = card if card and card.strip() else f"# {title}\n"
    marked = f"{BEGIN}\n{section.strip()}\n{END}"
    place = _markers(text)
    text = f"{text.rstrip()}\n\n{marked}\n" if place is None else text[: place[0]] + marked + text[place[1] :]
    return text if _HEAD.match(text) else f"---\nlibrary_name: transformers\n---\n\n{text}"


def _markers(text: str) -> tuple[int, int] | None:
    """Where our section begins and ends, if there is one."""
    begins, ends = text.count(BEGIN), text.count(END)
    if not begins and not ends:
        return None
    begin, end = text.find(BEGIN), text.find(END) + len(END)
    if begins != 1 or ends != 1 or text.find(END) < begin:
        raise TargetError(
            f"{CARD}: the marks of our section do not pair: {begins} × {BEGIN}, {ends} × {END}.",
            hint="Leave one of each, in this order, or none.",
        )
    return begin, end


def head_of(card: str) -> str | None:
    """The YAML of a card's head, or None."""
    found = _HEAD.match(card)
    return found[1] if found else None


def section(manifest: Mapping[str, Any], exactness: str) -> str:
    """Provenance as Markdown, from the manifest that travels with the weights. Nothing in it depends on the time."""
    source, atoms = manifest["source"], manifest["atoms"]
    types = Counter(entry[0] for entry in atoms.values())
    rows = [
        ("source", _source(source)),
        ("mesh of the source", _code(source.get("dialect", {}).get("mesh"))),
        *(("before that", line) for line in _origins(source)),
        ("family", _code(manifest["family"])),
        ("element types", ", ".join(f"{dtype} × {count:,}" for dtype, count in types.most_common())),
        ("conversion", exactness),
        ("left out", ", ".join(map(_code, manifest["left_out"][:SHOWN])) if manifest["left_out"] else ""),
        ("plan", _code(manifest["plan"])),
        ("all digests together", _code(digest_of(atoms))),
        ("tool", manifest["tool"]),
    ]
    lines = ["## Provenance", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in rows if value]
    lines += ["", f"Content digests ({manifest['digest']} of the values, the same in every format); all "]
    lines[-1] += f"{len(atoms):,} stand in `areal_manifest.json`:"
    lines += ["", "| tensor | type | digest |", "|---|---|---|"]
    lines += [f"| {_code(name)} | {dtype} | {_code(digest)} |" for name, (dtype, digest) in _few(atoms)]
    return "\n".join(lines)


def digest_of(atoms: Mapping[str, Sequence[str]]) -> str:
    """One digest for all atoms: their names, types and contents."""
    h = xxhash.xxh3_128()
    for name, entry in sorted(atoms.items()):
        h.update(f"{name} {entry[0]} {entry[1]}\n".encode())
    return h.hexdigest()


def _few(atoms: Mapping[str, Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    """A sample from all over the model, the same for the same model."""
    entries = sorted(atoms.items())
    step = max(1, len(entries) // SHOWN)
    return entries[::step][:SHOWN]


def _source(source: Mapping[str, Any]) -> str:
    revision = source.get("revision")
    return f"{_code(source.get('name'))} ({source.get('format')})" + (f" at {_code(revision)}" if revision else "")


def _origins(source: Mapping[str, Any]) -> list[str]:
    lines, origin = [], source.get("origin")
    while isinstance(origin, dict) and len(lines) < SHOWN:
        lines.append(_source(origin))
        origin = origin.get("origin")
    return lines


def _code(value: Any) -> str:
    """A value in a code span; what would end the span is not in it."""
    text = str(value).replace("`", "'") if value not in (None, "") else ""
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    """One line of a table, whatever a name contains."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<!--", "<!- -")
