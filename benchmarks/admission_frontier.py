"""What a policy pays for a p99: its best settings, what lies between them, and how sure that is.

Every setting of a policy is a point: the p99 of what it served and the share that it refused. At a wanted p99 a policy
is worth the least refused on the line through its best points, since between two settings another one could be set.
Two policies are compared on the same blocks of requests, drawn anew with replacement for each resample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log
from random import Random
from typing import Any, Literal, NamedTuple

from benchmarks.admission_trials import Measured

Metric = Literal["ttft", "latency"]
CONFIDENCE = 0.95
Weights = Sequence[int]
"""How often each block is drawn."""


class Spot(NamedTuple):
    """One setting under one drawing of blocks."""

    p99_ms: float
    refused: float  # share of the requests
    tokens_refused: float  # share of the tokens
    setting: float


class Setting:
    """A run, made ready for being weighed many times."""

    def __init__(self, setting: float, measured: Measured) -> None:
        self.setting = setting
        self.measured = measured
        blocks = measured.block
        self._served = [0] * len(measured.tallies)
        for block in blocks:
            self._served[block] += 1
        times: dict[Metric, Iterable[float]] = {"ttft": measured.ttft_ms, "latency": measured.latency_ms}
        self._slowest = {metric: sorted(zip(ms, blocks, strict=True), reverse=True) for metric, ms in times.items()}
        self._offered = [sum(tally.offered) for tally in measured.tallies]
        self._refused = [sum(tally.refused) for tally in measured.tallies]
        self._tokens = [tally.tokens_offered for tally in measured.tallies]
        self._tokens_refused = [tally.tokens_refused for tally in measured.tallies]

    def p99_ms(self, metric: Metric, weights: Weights) -> float | None:
        """The nearest-rank p99 of all that was served, each as often as its block was drawn; None: nothing was."""
        served = _dot(self._served, weights)
        slower = served - ceil(0.99 * served - 1e-9)
        for ms, block in self._slowest[metric]:
            slower -= weights[block]
            if slower < 0:
                return ms
        return None

    def spot(self, metric: Metric, weights: Weights) -> Spot | None:
        """Where it lies; None when nothing was served."""
        p99 = self.p99_ms(metric, weights)
        if p99 is None:
            return None
        refused = _dot(self._refused, weights) / _dot(self._offered, weights)
        return Spot(p99, refused, _dot(self._tokens_refused, weights) / _dot(self._tokens, weights), self.setting)

    def figures(self) -> dict[str, Any]:
        """Of all that was counted, as plain data."""
        tallies, once = self.measured.tallies, [1] * len(self.measured.tallies)
        return {
            "setting": self.setting,
            "ttft_p99_ms": self.p99_ms("ttft", once),
            "latency_p99_ms": self.p99_ms("latency", once),
            "refused": sum(self._refused) / sum(self._offered),
            "tokens_refused": sum(self._tokens_refused) / sum(self._tokens),
            "good_per_s": sum(tally.good for tally in tallies) / self.measured.seconds,
            "good_tokens_per_s": sum(tally.good_tokens for tally in tallies) / self.measured.seconds,
            "offered_by_size": [sum(sizes) for sizes in zip(*(tally.offered for tally in tallies), strict=True)],
            "refused_by_size": [sum(sizes) for sizes in zip(*(tally.refused for tally in tallies), strict=True)],
        }


def _dot(values: Sequence[int], weights: Weights) -> int:
    return sum(value * weight for value, weight in zip(values, weights, strict=True))


def frontier(spots: Iterable[Spot]) -> list[Spot]:
    """Those that no other beats in both, the fastest first: each slower one refuses less."""
    best: list[Spot] = []
    for spot in sorted(spots):
        if not best or spot.refused < best[-1].refused:
            best.append(spot)
    return best


@dataclass(frozen=True, slots=True)
class Mixed:
    """A place on the frontier: so much of one setting, and the rest of the other."""

    refused: float
    tokens_refused: float
    low: float
    high: float
    part: float  # of `high`


def at(best: Sequence[Spot], target_ms: float) -> Mixed | None:
    """The place on a frontier at a wanted p99, between two settings evenly in its logarithm; None: it is too strict for
    every setting. Laxer than all, the laxest setting is enough."""
    if not best or target_ms < best[0].p99_ms:
        return None
    for one, other in pairwise(best):
        if target_ms < other.p99_ms:
            part = log(target_ms / one.p99_ms) / log(other.p99_ms / one.p99_ms)
            return Mixed(
                one.refused + part * (other.refused - one.refused),
                one.tokens_refused + part * (other.tokens_refused - one.tokens_refused),
                one.setting,
                other.setting,
                part,
            )
    last = best[-1]
    return Mixed(last.refused, last.tokens_refused, last.setting, last.setting, 0.0)


@dataclass(frozen=True, slots=True)
class Range:
    """A figure, and its bounds at CONFIDENCE."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two policies at one p99: what each refuses, and what counting by tokens changes, as shares of 1."""

    metric: Metric
    target_ms: float
    counted: Mixed
    weighed: Mixed
    fewer: Range  # refusals, of those by count; negative: more
    tokens_more: Range  # tokens served, of those by count; negative: less
    resamples: int  # in which both policies could keep the target


def compare(
    counted: Sequence[Setting],
    weighed: Sequence[Setting],
    targets: Mapping[Metric, Sequence[float]],
    *,
    resamples: int,
) -> list[Comparison]:
    """The two at every target that both can keep."""
    blocks = len(counted[0].measured.tallies)
    chance = Random("blocks")
    drawings = [[1] * blocks]
    for _ in range(resamples):
        weights = [0] * blocks
        for block in chance.choices(range(blocks), k=blocks):
            weights[block] += 1
        drawings.append(weights)
    found = []
    for metric, wanted in targets.items():
        pairs: dict[float, list[tuple[Mixed, Mixed]]] = {target: [] for target in wanted}
        for number, weights in enumerate(drawings):
            ours, theirs = _frontier(weighed, metric, weights), _frontier(counted, metric, weights)
            for target in wanted:
                one, other = at(theirs, target), at(ours, target)
                if one is not None and other is not None and (number == 0 or pairs[target]):
                    pairs[target].append((one, other))
        found += [_compared(metric, target, both) for target, both in pairs.items() if both]
    return found


def _frontier(settings: Sequence[Setting], metric: Metric, weights: Weights) -> list[Spot]:
    return frontier(spot for one in settings if (spot := one.spot(metric, weights)) is not None)


def _compared(metric: Metric, target_ms: float, pairs: Sequence[tuple[Mixed, Mixed]]) -> Comparison:
    """The first pair is what was measured; the others are resamples."""
    counted, weighed = pairs[0]
    return Comparison(
        metric,
        target_ms,
        counted,
        weighed,
        _range([1.0 - ours.refused / theirs.refused if theirs.refused else 0.0 for theirs, ours in pairs]),
        _range([(1.0 - ours.tokens_refused) / (1.0 - theirs.tokens_refused) - 1.0 for theirs, ours in pairs]),
        len(pairs) - 1,
    )


def _range(values: Sequence[float]) -> Range:
    ordered = sorted(values[1:]) or list(values)
    tail = (1.0 - CONFIDENCE) / 2.0
    low = ordered[int(tail * len(ordered))]
    return Range(values[0], low, ordered[min(len(ordered) - 1, int((1.0 - tail) * len(ordered)))])
