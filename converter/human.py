"""Sizes, counts and durations as people read and write them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_UNITS = {"": 1, "b": 1}
_UNITS |= {letter + tail: 1000 ** (n + 1) for n, letter in enumerate("kmgt") for tail in ("", "b")}
_UNITS |= {letter + tail: 1024 ** (n + 1) for n, letter in enumerate("kmgt") for tail in ("i", "ib")}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes that a person means: `5GB` and `5g` are decimal, `384MiB` is binary, a bare number is bytes.

    Raises ValueError for anything else, and for a size of less than one byte.

    >>> parse_size("1.5GB"), parse_size("2 KiB"), parse_size("7")
    (1500000000, 2048, 7)
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no size; write 5GB, 500MB, 384MiB or a number of bytes")
    size = int(float(match.group(1)) * unit)
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return size


def size_text(count: float) -> str:
    """Bytes in decimal units, as disks and transfers are measured.

    >>> size_text(2_471_645_608), size_text(0), size_text(999)
    ('2.47 GB', '0 B', '999 B')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{_three(count / factor)} {unit}"
    return f"{count:.0f} B"


def count_text(count: int) -> str:
    """A number of elements: exact while it is short, then in millions and billions.

    >>> count_text(376_000), count_text(134_515_008), count_text(671_026_419_200)
    ('376,000', '134.5M', '671.0B')
    """
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f}{unit}"
    return f"{count:,}"


def seconds_text(seconds: float) -> str:
    """A duration.

    >>> seconds_text(0.042), seconds_text(3.25), seconds_text(75)
    ('0.04 s', '3.2 s', '1 min 15 s')
    """
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def ranges_text(numbers: Iterable[int]) -> str:
    """Whole numbers, neighbours joined.

    >>> ranges_text([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def plural(count: int, word: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def _three(value: float) -> str:
    """Three significant figures."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def parse_ranks(text: str) -> list[int]:
    """Ranks as a person lists them. Raises ValueError for anything else.

    >>> parse_ranks("0-3,7")
    [0, 1, 2, 3, 7]
    """
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f"{text!r} names no ranks; write 3, 0-3 or 0-3,7")
        found += range(first, last + 1)
    return found


def ranks_text(ranks: Iterable[int]) -> str:
    """The same the other way round.

    >>> ranks_text([7, 0, 1, 2, 3])
    '0-3,7'
    """
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)
