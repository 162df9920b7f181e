"""What the control benchmark counts: rates of good work within a window, recovery, shares, and their confidence."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

RESAMPLES = 2000
CONFIDENCE = 0.95
PROMPT_WEIGHT = 0.25
"""Of a prompt token beside an output token, where both count: what it costs the engine, roughly."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was served within the objective; from its first token to its last, in ns."""

    from_ns: int
    to_ns: int
    prompt: int
    output: int

    def share_within(self, from_ns: int, to_ns: int) -> float:
        """Of its time, that which lies within the window."""
        if self.to_ns <= self.from_ns:
            return 1.0 if from_ns <= self.to_ns < to_ns else 0.0
        overlap = min(self.to_ns, to_ns) - max(self.from_ns, from_ns)
        return max(0.0, overlap / (self.to_ns - self.from_ns))

    @property
    def weighted(self) -> float:
        """Its tokens, a prompt's for less."""
        return PROMPT_WEIGHT * self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second of a window. Long answers count for the part of them that lies in it: a count of those that end
    there would favour short ones for as long as the longest take."""

    requests: float
    tokens: float
    weighted: float


def rates(served: Iterable[Served], from_ns: int, to_ns: int) -> Rates:
    """What good requests came to within the window."""
    requests = tokens = weighted = 0.0
    for one in served:
        share = one.share_within(from_ns, to_ns)
        if share:
            requests += share
            tokens += share * one.output
            weighted += share * one.weighted
    seconds = (to_ns - from_ns) / 1e9
    return Rates(requests / seconds, tokens / seconds, weighted / seconds)


def first_window(
    moments_ns: Sequence[int],
    good: Sequence[bool],
    from_ns: int,
    *,
    window_ns: int,
    share: float,
    until_ns: int,
    step_ns: int = 100_000_000,
) -> int | None:
    """Start, after `from_ns`, of the first window in which that share of what began there was good; None: there is
    none before `until_ns`. `moments_ns` ascend. A window without requests says nothing."""
    totals = [0]
    for one in good:
        totals.append(totals[-1] + one)
    start = from_ns
    while start + window_ns <= until_ns:
        low, high = bisect_left(moments_ns, start), bisect_left(moments_ns, start + window_ns)
        if high > low and totals[high] - totals[low] >= share * (high - low):
            return start - from_ns
        start += step_ns
    return None


def worst_window(
    moments_ns: Sequence[int], good: Sequence[bool], from_ns: int, *, window_ns: int, until_ns: int
) -> float | None:
    """The least share of good among windows side by side; None: nothing began. A second wave shows here."""
    shares = [
        share
        for start in range(from_ns, until_ns - window_ns + 1, window_ns)
        if (share := share_good(moments_ns, good, start, start + window_ns - 1)) is not None
    ]
    return min(shares, default=None)


def share_good(moments_ns: Sequence[int], good: Sequence[bool], from_ns: int, to_ns: int) -> float | None:
    """Of what began in the window, that which was good."""
    low, high = bisect_left(moments_ns, from_ns), bisect_right(moments_ns, to_ns)
    return fmean(good[low:high]) if high > low else None


def bootstrap(values: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """Bounds of the mean at CONFIDENCE, by resampling. With few values they are rather too narrow than too wide."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (float("nan"), float("nan"))
    chance = Random(f"bootstrap/{seed}")
    means = sorted(fmean(chance.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1.0 - CONFIDENCE) / 2.0
    return means[int(tail * resamples)], means[min(resamples - 1, int((1.0 - tail) * resamples))]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, and its bounds."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Estimate | None:
        """Of those that there are; None when there are none."""
        kept = [value for value in values if value is not None]
        return cls(fmean(kept), *bootstrap(kept), len(kept)) if kept else None


def paired(ours: Sequence[float], theirs: Sequence[float], how: Callable[[float, float], float]) -> Estimate | None:
    """Of the two figures of each seed, compared."""
    return Estimate.of(how(one, other) for one, other in zip(ours, theirs, strict=True))
