"""Which requests to make for the bytes that are wanted: few and large, with little that nobody wants. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

Span = tuple[int, int]
"""Bytes `begin..end` of a file."""

WINDOW = 16 * 1024 * 1024
"""Bytes of one request at most: long enough that its round trip does not matter, short enough to begin with it soon."""

WASTE = 0.08
"""Share of the wanted bytes that may be fetched besides, to bridge gaps."""


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans in order; those that touch or overlap are one.

    >>> union([(4, 6), (0, 4), (9, 9), (5, 8)])
    [(0, 8)]
    """
    out: list[Span] = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if out and begin <= out[-1][1]:
            if end > out[-1][1]:
                out[-1] = (out[-1][0], end)
        else:
            out.append((begin, end))
    return out


def bridged(spans: list[Span], *, waste: float = WASTE, max_gap: int | None = None) -> list[Span]:
    """Close gaps between spans (in order, apart): all up to `max_gap` bytes, or, without one, the smallest first while
    all that is fetched in vain stays below `waste` of what is wanted.

    >>> bridged([(0, 100), (104, 200), (300, 400)], waste=0.08)
    [(0, 200), (300, 400)]
    """
    gaps = [b[0] - a[1] for a, b in pairwise(spans)]
    if max_gap is None:
        left = int(waste * sum(end - begin for begin, end in spans))
        close = set[int]()
        for n in sorted(range(len(gaps)), key=gaps.__getitem__):
            left -= gaps[n]
            if left < 0:
                break
            close.add(n)
    else:
        close = {n for n, gap in enumerate(gaps) if gap <= max_gap}
    out = spans[:1]
    for n, span in enumerate(spans[1:]):
        if n in close:
            out[-1] = (out[-1][0], span[1])
        else:
            out.append(span)
    return out


def cut(spans: Iterable[Span], limit: int = WINDOW) -> list[Span]:
    """No span longer than `limit`; a long one becomes equal parts.

    >>> cut([(0, 10)], 4)
    [(0, 4), (4, 8), (8, 10)]
    """
    out: list[Span] = []
    for begin, end in spans:
        count = -(-(end - begin) // limit)
        step = -(-(end - begin) // max(1, count))
        out += [(at, min(at + step, end)) for at in range(begin, end, max(1, step))]
    return out


def requests(
    spans: Iterable[Span], *, waste: float = WASTE, max_gap: int | None = None, limit: int = WINDOW
) -> list[Span]:
    """The requests that fetch these bytes of one file."""
    return cut(bridged(union(spans), waste=waste, max_gap=max_gap), limit)


def without(spans: Iterable[Span], have: Iterable[Span]) -> list[Span]:
    """What of `spans` is not in `have`.

    >>> without([(0, 10)], [(2, 4), (8, 20)])
    [(0, 2), (4, 8)]
    """
    out: list[Span] = []
    held = union(have)
    for begin, end in union(spans):
        for low, high in held:
            if high <= begin or low >= end:
                continue
            if low > begin:
                out.append((begin, low))
            begin = max(begin, high)
        if begin < end:
            out.append((begin, end))
    return out
