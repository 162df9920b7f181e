"""Exact statistics: percentiles are values that occurred, never interpolations or histogram bounds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import itemgetter


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of ascending data: the least value with at least `share` of the data up to it.

    `share` is within 0 and 1; None for no data.
    """
    if not ordered:
        return None
    # Shares such as 0.99 are not exact in binary: without the slack, 99 % of 100 would be rank 100.
    rank = math.ceil(share * len(ordered) - 1e-9)
    return ordered[min(len(ordered), max(1, rank)) - 1]


def jain_index(amounts: Iterable[float]) -> float | None:
    """Jain's fairness index of what keys got: 1 is even, 1/n all to one. None below two keys or when all got 0."""
    values = list(amounts)
    squares = sum(value * value for value in values)
    if len(values) < 2 or squares == 0:
        return None
    total = sum(values)
    return total * total / (len(values) * squares)


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float | None:
    """A counter's value at a time, between samples `(time, value)`; held at the ends, None without samples."""
    if not points:
        return None
    after = bisect_left(points, at, key=itemgetter(0))
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (from_at, low), (to_at, high) = points[after - 1], points[after]
    return low + (high - low) * (at - from_at) / (to_at - from_at)
