"""When requests are sent: arrival processes as pure functions of a seeded generator.

Every pacer yields ascending offsets in seconds within `[0, duration_s)`. They are drawn before the run, so nothing
that happens during it (a slow answer, a busy client) can move an intended send time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import NamedTuple, Protocol

from forebay.errors import UsageError
from forebay.workload.arrival import NS_PER_S, Arrival


class Pacer(Protocol):
    """An arrival process of a known length."""

    @property
    def duration_s(self) -> float:
        """Length of the process in seconds."""
        ...

    def offsets_s(self, rng: Random) -> Iterator[float]:
        """Ascending send times in seconds from the start, all below `duration_s`."""
        ...


class Phase(NamedTuple):
    """A named stretch of the run; `pacer` times count from the phase's own start."""

    name: str
    pacer: Pacer


@dataclass(frozen=True, slots=True)
class Constant:
    """Evenly spaced arrivals at `rate` per second."""

    rate: float
    duration_s: float

    def offsets_s(self, rng: Random) -> Iterator[float]:  # noqa: ARG002
        step = 1.0 / self.rate
        index = 0
        while (at := index * step) < self.duration_s:
            yield at
            index += 1


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals at `rate` per second: exponential gaps."""

    rate: float
    duration_s: float

    def offsets_s(self, rng: Random) -> Iterator[float]:
        at = rng.expovariate(self.rate)
        while at < self.duration_s:
            yield at
            at += rng.expovariate(self.rate)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed gaps with mean `1/rate` and coefficient of variation `cv` (1 is Poisson, above is burstier)."""

    rate: float
    cv: float
    duration_s: float

    def offsets_s(self, rng: Random) -> Iterator[float]:
        shape = 1.0 / (self.cv * self.cv)
        scale = 1.0 / (self.rate * shape)
        at = rng.gammavariate(shape, scale)
        while at < self.duration_s:
            yield at
            at += rng.gammavariate(shape, scale)


@dataclass(frozen=True, slots=True)
class Mmpp:
    """Markov-modulated Poisson with two states: calm and busy, `ratio` times apart, mean `rate`.

    Both states last `sojourn_s` on average (exponential), so calm = 2·rate/(1+ratio) and busy = ratio·calm.
    """

    rate: float
    ratio: float
    sojourn_s: float
    duration_s: float

    def offsets_s(self, rng: Random) -> Iterator[float]:
        calm = 2.0 * self.rate / (1.0 + self.ratio)
        rates = (calm, calm * self.ratio)
        state = rng.randrange(2)
        at, switch = 0.0, rng.expovariate(1.0 / self.sojourn_s)
        while True:
            gap = rng.expovariate(rates[state])
            if at + gap < switch:
                at += gap
                if at >= self.duration_s:
                    return
                yield at
                continue
            # Memoryless: the gap is drawn anew from the moment the state changes.
            at, state = switch, 1 - state
            if at >= self.duration_s:
                return
            switch = at + rng.expovariate(1.0 / self.sojourn_s)


@dataclass(frozen=True, slots=True)
class Clumps:
    """Batch arrivals: clumps of `size` requests within `spread_s`, at a mean of `rate` requests per second.

    Gaps between clumps are uniform within ±`jitter` of their mean, so the mean rate is met even in a short phase.
    """

    rate: float
    size: int
    duration_s: float
    jitter: float = 0.3
    spread_s: float = 0.0

    def offsets_s(self, rng: Random) -> Iterator[float]:
        gap = self.size / self.rate
        pending: list[float] = []
        at = gap * rng.uniform(0.0, 0.5)
        while at < self.duration_s:
            pending = sorted(pending + [at + rng.uniform(0.0, self.spread_s) for _ in range(self.size)])
            at += gap * rng.uniform(1.0 - self.jitter, 1.0 + self.jitter)
            # A wide spread lets clumps overlap: only what no later clump can precede is final.
            ready = [offset for offset in pending if offset < at]
            pending = pending[len(ready) :]
            for offset in ready:
                if offset < self.duration_s:
                    yield offset
        yield from (offset for offset in pending if offset < self.duration_s)


@dataclass(frozen=True, slots=True)
class Ramp:
    """Poisson arrivals whose rate moves linearly from `rate_from` to `rate_to` per second (thinning)."""

    rate_from: float
    rate_to: float
    duration_s: float

    def offsets_s(self, rng: Random) -> Iterator[float]:
        top = max(self.rate_from, self.rate_to)
        slope = (self.rate_to - self.rate_from) / self.duration_s
        at = rng.expovariate(top)
        while at < self.duration_s:
            if rng.random() * top < self.rate_from + slope * at:
                yield at
            at += rng.expovariate(top)


@dataclass(frozen=True, slots=True)
class Table:
    """Arrivals at a rate that changes every `step_s` seconds, as a table of `rates` says; it starts anew at its end.

    Gaps are gamma-distributed with coefficient of variation `cv` in operational time, which passes as fast as the rate
    is high: bursts are as bursty at night as by day. The process was running long before time 0.
    """

    rates: tuple[float, ...]
    step_s: float
    duration_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not self.rates or not self.step_s > 0 or min(self.rates) < 0 or not 0 < max(self.rates) < math.inf:
            raise UsageError("a table of rates needs a step above 0 s and rates of 0 or more, one of them above 0")

    def offsets_s(self, rng: Random) -> Iterator[float]:
        shape = 1.0 / (self.cv * self.cv)
        next_at = _stationary(rng, shape)  # operational: in expected arrivals since time 0
        passed = 0.0
        for step in count():
            from_s, rate = step * self.step_s, self.rates[step % len(self.rates)]
            until_s = min(from_s + self.step_s, self.duration_s)
            ends = passed + rate * (until_s - from_s)
            while next_at < ends:
                yield from_s + (next_at - passed) / rate
                next_at += rng.gammavariate(shape, 1.0 / shape)
            passed = ends
            if until_s >= self.duration_s:
                return


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A sinusoid of mean `rate` over `period_s`, its peak `peak_to_trough` times its trough; it starts at the trough.

    The curve is followed in 288 steps per period: five minutes of a day.
    """

    rate: float
    peak_to_trough: float
    period_s: float
    duration_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.peak_to_trough < math.inf or not self.period_s > 0:
            raise UsageError("a day needs a period above 0 s, and a peak of at least its trough")

    def offsets_s(self, rng: Random) -> Iterator[float]:
        swing = (self.peak_to_trough - 1.0) / (self.peak_to_trough + 1.0)
        steps = 288
        rates = tuple(self.rate * (1.0 - swing * math.cos(math.tau * (step + 0.5) / steps)) for step in range(steps))
        return Table(rates, self.period_s / steps, self.duration_s, self.cv).offsets_s(rng)


@dataclass(frozen=True, slots=True)
class Spike:
    """Arrivals at `rate`, and at `factor` times that from `at_s` on for `lasts_s` seconds."""

    rate: float
    factor: float
    at_s: float
    lasts_s: float
    duration_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if self.at_s < 0 or not self.lasts_s > 0 or self.factor < 0:
            raise UsageError("a spike begins at 0 s or later, lasts, and has a factor of 0 or more")

    def offsets_s(self, rng: Random) -> Iterator[float]:
        shape = 1.0 / (self.cv * self.cv)
        # In the order of time: what was expected by its begin and by its end.
        begins, ends = self.rate * self.at_s, self.rate * (self.at_s + self.factor * self.lasts_s)
        at = _stationary(rng, shape)
        while True:
            if at < begins:
                offset = at / self.rate
            elif at < ends:
                offset = self.at_s + (at - begins) / (self.rate * self.factor)
            else:
                offset = self.at_s + self.lasts_s + (at - ends) / self.rate
            if offset >= self.duration_s:
                return
            yield offset
            at += rng.gammavariate(shape, 1.0 / shape)


def _stationary(rng: Random, shape: float) -> float:
    """The first arrival at or after 0 of a unit-rate renewal process that has been running for long.

    One that began at 0 would have too many arrivals at its start where gaps vary much: most gaps are short then, and
    nobody would be within a long one.
    """
    at = -10.0 * (1.0 + 1.0 / shape)
    while at < 0.0:
        at += rng.gammavariate(shape, 1.0 / shape)
    return at


def schedule(phases: list[Phase], seed: int) -> list[Arrival]:
    """All arrivals of a run, in order. Each phase draws from its own stream, so changing one leaves the others."""
    arrivals: list[Arrival] = []
    start_s = 0.0
    for index, phase in enumerate(phases):
        rng = Random(f"{seed}/arrivals/{index}")
        arrivals.extend(
            Arrival(int((start_s + offset) * NS_PER_S), phase.name) for offset in phase.pacer.offsets_s(rng)
        )
        start_s += phase.pacer.duration_s
    return arrivals


def phase_bounds_s(phases: list[Phase]) -> list[tuple[str, float, float]]:
    """`(name, from_s, to_s)` of each phase."""
    bounds = []
    start_s = 0.0
    for phase in phases:
        bounds.append((phase.name, start_s, start_s + phase.pacer.duration_s))
        start_s += phase.pacer.duration_s
    return bounds


def bursty(rate: float, duration_s: float, clump: int | None) -> Pacer:
    """The `bursty` arrivals of the commands: clumps of a given size, or else MMPP-2 (ratio 5, mean stay 5 s)."""
    if clump is None:
        return Mmpp(rate, ratio=5.0, sojourn_s=5.0, duration_s=duration_s)
    if clump < 1:
        raise UsageError(f"a clump of {clump} requests is not a clump: use 1 or more")
    return Clumps(rate, clump, duration_s)
