"""A histogram cheap enough for the hot path: a list of counts and a sum, in whatever unit its bounds have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.metrics_core import HistogramMetricFamily


class Histogram:
    """Counts of values at most each bound. Values and bounds are integers or floats of 1 / `unit` of the base unit."""

    __slots__ = ("_bounds", "_counts", "_names", "_sum", "_unit")

    def __init__(self, bounds: Sequence[float], unit: int = 1) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum: float = 0
        self._unit = unit
        self._names = [f"{bound / unit:.12g}" for bound in self._bounds] + ["+Inf"]

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """Add the cumulative buckets to a metric family."""
        total, buckets = 0, []
        for name, count in zip(self._names, self._counts, strict=True):
            total += count
            buckets.append((name, float(total)))
        family.add_metric(labels, buckets, self._sum / self._unit)
