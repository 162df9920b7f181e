"""A tuner at work on one pool: when it looks, what happened since, what it decided and on which figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from forebay.core.instant import Chance, Instant
from forebay.core.tuning import TunerConfig, build
from forebay.core.tuning.fixed import FixedConfig
from forebay.core.tuning.times import Times
from forebay.core.tuning.tuner import Advice, Reading

JITTER = 0.1
"""Of the interval is added at most, by chance: gateways that share engines must not move in step."""


@dataclass(frozen=True, slots=True)
class TuningConfig:
    """Who tunes the depth, and who only says what it would do."""

    tuner: TunerConfig = field(default_factory=FixedConfig)
    shadow: TunerConfig | None = None
    shadow_depth: int | None = None  # where that one begins, and a fixed one stays; None: where this one stands
    frozen: bool = False  # it looks, and moves nothing
    kept: int = 64  # changes
    wait_budget_ns: int = 0  # the longest of any class; 0: the pool's


class Seen(NamedTuple):
    """What a pool counts, at one instant."""

    releases: int  # slots that became free, ever
    place_ns: int  # time in use of all places, ever
    places: int  # of the engines that are ready; 0 when none is
    depth: int  # the depth in force
    correction: float
    batch: int


class Change(NamedTuple):
    """One line of the log."""

    at: Instant
    old: int
    new: int
    why: str  # the tuner's reason, or `reload`, or `promoted`
    target: int
    reading: Reading | None  # None: no tuner was asked


class DepthTuning:
    """Holds the depth as one tuner would have it. `due` is when it looks next; 0 while the pool is at rest."""

    def __init__(self, config: TunerConfig, depth: int, chance: Chance, *, kept: int, frozen: bool = False) -> None:
        self.tuner = build(config)
        self.depth = max(self.tuner.least, min(self.tuner.most, depth))
        self.frozen = frozen
        self.due: Instant = 0
        self.waiting_most = 0
        self.times = Times() if self.tuner.times else None
        self.looks = self.changes = 0
        self.looked_at: Instant | None = None
        self.changed_at: Instant | None = None
        self.advice: Advice | None = None
        self.reading: Reading | None = None
        self.log: deque[Change] = deque(maxlen=kept)
        self._chance = chance
        self._since: Instant = 0
        self._before = Seen(0, 0, 0, 0, 1.0, 1)

    def begin(self, seen: Seen, now: Instant) -> None:
        """Look from here on: there is something to see."""
        self._since, self._before = now, seen
        self.waiting_most = 0
        if self.times is not None:
            self.times.clear()
        self._expect(now)

    def waited(self, waiting: int) -> None:
        """So many wait now."""
        if waiting > self.waiting_most:
            self.waiting_most = waiting

    def look(self, seen: Seen, budget_ns: Callable[[float], int], now: Instant) -> None:
        """Take a reading and follow the tuner's advice. `budget_ns` is the wait budget at a rate of releases."""
        self.looks += 1
        self.looked_at = now
        reading = self._read(seen, budget_ns, now)
        if reading.releases < self.tuner.releases_enough and reading.elapsed_ns < self.tuner.longest_ns:
            self._expect(now)  # over a longer time it says more
            return
        self.reading = reading
        self.advice = self.tuner.tuned(self.depth, reading)
        if not self.frozen:
            self.move(self.advice.depth, self.advice.why, now, self.advice.target, reading)
        self.begin(seen, now)

    def inherit(self, before: DepthTuning, why: str, now: Instant) -> None:
        """Go on from the log of a predecessor."""
        self.log.extend(before.log)
        self.looks, self.looked_at = before.looks, before.looked_at
        self.changes, self.changed_at = before.changes, before.changed_at
        depth, self.depth = self.depth, before.depth
        self.move(depth, why, now)

    def move(
        self, depth: int, why: str, now: Instant, target: int | None = None, reading: Reading | None = None
    ) -> None:
        """Set the depth; a change is logged."""
        if depth == self.depth:
            return
        self.log.append(Change(now, self.depth, depth, why, depth if target is None else target, reading))
        self.depth = depth
        self.changes += 1
        self.changed_at = now

    def _expect(self, now: Instant) -> None:
        self.due = now + int(self.tuner.interval_ns * (1.0 + JITTER * self._chance.random()))

    def _read(self, seen: Seen, budget_ns: Callable[[float], int], now: Instant) -> Reading:
        before, elapsed_ns, times = self._before, now - self._since, self.times
        busy = None
        if seen.places and elapsed_ns > 0:
            busy = (seen.place_ns - before.place_ns) / (elapsed_ns * seen.places)
        reading = Reading(
            elapsed_ns=elapsed_ns,
            releases=seen.releases - before.releases,
            answers=0 if times is None else times.count,
            p99_ns=0 if times is None else times.percentile_ns(0.99),
            busy=busy,
            waiting_most=self.waiting_most,
            felt=self.waiting_most >= min(self.depth, seen.depth),
            wait_budget_ns=0,
            correction=seen.correction,
            batch=seen.batch,
        )
        return reading._replace(wait_budget_ns=budget_ns(reading.rate_per_s))
