"""Which sequences share a micro-batch: bin packing of lengths, standard library only.

Two ways. First-fit decreasing (`ffd`) makes few bins, none above the limit. Karmarkar-Karp (`kk`) makes a given number
of bins whose sums differ little, so that no micro-batch waits for a longer one on another rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ...converter.errors import ConfigError, Problem

__all__ = ["fewest_bins", "first_fit_decreasing", "karmarkar_karp", "pack"]

Bins = list[list[int]]
"""Indices into the lengths, a list for each bin."""


def first_fit_decreasing(lengths: Sequence[int], limit: int) -> Bins:
    """Bins with sums of at most `limit`: the longest item goes first, into the first bin that has room.

    Raises ConfigError with every item that is longer than the limit.
    """
    _check_fit(lengths, limit)
    bins: Bins = []
    sums: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((i for i, held in enumerate(sums) if held + lengths[item] <= limit), len(bins))
        if place == len(bins):
            bins.append([])
            sums.append(0)
        bins[place].append(item)
        sums[place] += lengths[item]
    return [sorted(items) for items in bins]


def karmarkar_karp(lengths: Sequence[int], bins: int) -> Bins:
    """Exactly `bins` bins (some empty when there are fewer items) with nearly equal sums, by the largest differencing
    method: the two partial partitions with the largest spread are merged, the largest part of one with the smallest
    of the other."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for i, length in enumerate(lengths):
        heapq.heappush(heap, (-length, i, [(0, [])] * (bins - 1) + [(length, [i])]))
    number = len(lengths)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda part: (part[0], part[1]))
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], number, merged))
        number += 1
    parts = heap[0][2] if heap else [(0, [])] * bins
    return sorted((sorted(items) for _, items in parts), key=lambda items: items[:1] or [len(lengths)])


def fewest_bins(lengths: Sequence[int], limit: int | None, least: int = 1) -> int:
    """How many bins `pack` needs for these lengths, at least `least`. Raises ConfigError as `first_fit_decreasing`."""
    return max(least, 1, len(first_fit_decreasing(lengths, limit)) if limit is not None else 0)


def pack(lengths: Sequence[int], limit: int | None, bins: int, algorithm: str = "ffd") -> Bins:
    """Exactly `bins` bins, none above `limit`; empty ones (fewer items than bins) stand last.

    `bins` is at least `fewest_bins(lengths, limit)`. Karmarkar-Karp knows no limit: where one of its bins is too full,
    the bins of first-fit decreasing are taken, the fullest split until there are enough. Raises ConfigError.
    """
    if algorithm not in ("ffd", "kk"):
        raise ConfigError(f"mb_spec.packing_algorithm is {algorithm!r}.", hint="Known: ffd, kk.")
    found: Bins | None = None
    if algorithm == "kk" or limit is None:
        found = karmarkar_karp(lengths, bins)
        if limit is not None and any(sum(lengths[i] for i in items) > limit for items in found):
            found = None
    if found is None:
        assert limit is not None
        found = _split_until(first_fit_decreasing(lengths, limit), lengths, bins)
    found = sorted((items for items in found if items), key=lambda items: items[0])
    return found + [[] for _ in range(bins - len(found))]


def _split_until(found: Bins, lengths: Sequence[int], bins: int) -> Bins:
    """Splits the fullest bin that has two items or more until there are `bins`, or nothing is left to split."""
    while len(found) < bins:
        many = [i for i, items in enumerate(found) if len(items) > 1]
        if not many:
            break
        fullest = max(many, key=lambda i: sum(lengths[j] for j in found[i]))
        items = found.pop(fullest)
        halves = karmarkar_karp([lengths[j] for j in items], 2)
        found += [[items[j] for j in half] for half in halves]
    return found


def _check_fit(lengths: Sequence[int], limit: int) -> None:
    long = [Problem(f"sequence {i}", f"{n} tokens, at most {limit}") for i, n in enumerate(lengths) if n > limit]
    if long:
        raise ConfigError(
            f"{len(long)} of {len(lengths)} sequences do not fit a micro-batch of {limit} tokens.",
            long,
            "Raise mb_spec.max_tokens_per_mb, or shorten the samples (data.max_length).",
        )
