"""The predicted queue wait, and the tracker that keeps its promise.

A request that would be k-th in line waits for k slot releases. With releases at rate D the wait is about k / D; its
upper tail for near-Poisson releases is (k / D) * (1 + z / sqrt(k)). The tracker scales that by c, moved so that a
stated share of those that met a queue (1 %) waits longer than the budget: up by `eta` on each late one, down by
`eta * target` on each that was in time. With no queue to learn from, c fades towards 1; the gate asks for that, since
a c that admits nobody to the queue is never corrected by an observation.

D is counted from the releases of the last two seconds. When these are fewer than four, or began only a moment ago
(a burst after idleness), the window says too little and D is taken from Little's law (leases open / mean service
time). Without either nothing is predicted and only the depth gate guards. Two things shorten the window, because what
came before them says nothing of now: engines that come or go, of which the change of rate is foretold in proportion
to their places; and waits that differ from what was predicted in one direction for long, by a two-sided CUSUM
(Page 1954) on the logarithm of their ratio.
A budget shorter than the time of a slot would admit nobody to the queue, so it is raised to a few slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from math import exp, log, sqrt

import msgspec

from forebay.core.instant import MILLISECOND, SECOND, Instant
from forebay.core.model import Mode

RELEASES_KEPT = 4096
USUAL_STEP_NS, USUAL_KEPT = 5 * SECOND, 0.95  # a time constant of about 100 s
BEST_KEPT = 0.994  # half of it is forgotten in ten minutes
CUSUM_ALLOWANCE, CUSUM_THRESHOLD, CUSUM_STEP = 1.0, 8.0, 0.02  # in logarithms of the ratio; step of its running mean
FRESH_NS = 500 * MILLISECOND  # that count on, once what came before them does not
CORRECTION_LEAST, CORRECTION_MOST = 0.2, 5.0  # one stall must not shut the queue for minutes


@dataclass(frozen=True, slots=True)
class ForecastConfig:
    """How waits are predicted and how strictly."""

    wait_budget_ns: int = 50 * MILLISECOND
    budget_floor_slots: float = 3.0  # the budget is never below the time of this many slot releases
    budget_ceiling_ns: int = SECOND  # unless that exceeds this
    tail_z: float = 1.28
    late_share: float = 0.01
    step: float = 0.02
    window_ns: int = 2 * SECOND
    releases_min: int = 4
    decay_half_life_ns: int = 60 * SECOND


class Outlook(msgspec.Struct, frozen=True, gc=False):
    """What a request that would wait has to expect: found for its verdict, and kept for its ticket."""

    mode: Mode  # in which it waits; that of the waiting room is backpressure
    predicted_ns: int  # as the last in line
    budget_ns: int = 0  # the wait budget in force; 0 where none is kept
    gives_way: bool = False  # a return, that waits for what new requests leave


class WaitForecast:
    """Predicts waits for one pool from its own releases; O(1) amortised."""

    def __init__(self, config: ForecastConfig) -> None:
        self.config = config
        self.correction = 1.0
        self.releases = 0  # ever
        self._releases: deque[Instant] = deque(maxlen=RELEASES_KEPT)
        self.service_ns = 0  # running mean of lease durations; 0 before the first one ended
        self.first_ns = 0  # running mean of the time to the first token of a lease; 0 before the first one
        self.usual_rate = 0.0
        """Releases per second over minutes: what is served when nothing special happens."""
        self.best_rate = 0.0
        """The most releases per second of the last while: what the pool has shown that it can serve."""
        self._counted = 0
        self._counted_from: Instant = 0
        self._observed_at: Instant = 0
        self._faded_at: Instant = 0
        self._fresh_from: Instant = -config.window_ns  # releases before this count no more
        self._carried = 0.0  # releases per second foretold for the part of the window before that
        self._usual_ratio = self._longer = self._shorter = 0.0  # of waits to what was predicted, in logarithms
        self._rated = (-1, 0)  # of which instant and leases open `_rate` is; before time: to be found anew
        self._rate = 0.0

    def reconfigure(self, config: ForecastConfig) -> None:
        """Take other settings; what was learned stays."""
        self.config, self._rated = config, (-1, 0)

    def released(self, opened: Instant, now: Instant) -> None:
        """A lease ended: a slot is free."""
        self.releases += 1
        self._releases.append(now)
        self._rated = (-1, 0)
        held = now - opened
        mean = self.service_ns
        self.service_ns = mean + (held - mean) // 20 if mean else held
        self._counted += 1
        if now - self._counted_from > USUAL_STEP_NS:
            self._count_usual(now)

    def began(self, took_ns: int) -> None:
        """The first token of a lease came."""
        mean = self.first_ns
        self.first_ns = mean + (took_ns - mean) // 20 if mean else took_ns

    def _count_usual(self, now: Instant) -> None:
        rate = self._counted * SECOND / (now - self._counted_from) if self._counted_from else 0.0
        # Work that a pause interrupted is counted over the pause too; after a long one little of the past is left.
        steps = min(60, (now - self._counted_from) // USUAL_STEP_NS)
        self.usual_rate += (1 - USUAL_KEPT**steps) * (rate - self.usual_rate) if self.usual_rate else rate
        self.best_rate = max(rate, self.best_rate * BEST_KEPT**steps)
        self._counted, self._counted_from = 0, now

    def drain_rate(self, in_flight: int, now: Instant) -> float:
        """Slot releases per second; 0.0 when nothing is known. One decision asks for it more than once."""
        asked = now, in_flight
        if asked != self._rated:
            self._rate, self._rated = self._count_rate(in_flight, now), asked
        return self._rate

    def _count_rate(self, in_flight: int, now: Instant) -> float:
        window, least = self.config.window_ns, self.config.releases_min
        releases, since = self._releases, now - window
        if self._fresh_from > since:
            since = self._fresh_from
            if self._carried:
                fresh = len(releases) - bisect_left(releases, since)
                return (self._carried * (window - now + since) + fresh * SECOND) / window
            window = max(1, now - since)
        while releases and releases[0] < since:
            releases.popleft()
        count = len(releases)
        if count == RELEASES_KEPT:  # too many to keep a whole window of
            return count * SECOND / max(1, now - releases[0])
        if count >= least and (releases[0] - since) * 4 <= window:
            return count * SECOND / window
        if self.service_ns and in_flight:
            return in_flight * SECOND / self.service_ns
        return count * SECOND / window if count >= least else 0.0

    def resized(self, ratio: float, in_flight: int, now: Instant) -> None:
        """Engines came or went: their places are now `ratio` times as many, and so will releases be."""
        rate = self.drain_rate(in_flight, now)
        self._fresh_from, self._carried, self._rated = now, rate * ratio, (-1, 0)
        if ratio < 1.0:
            self.best_rate *= ratio  # what was shown with the engines that are gone
        self._usual_ratio = self._longer = self._shorter = 0.0

    def budget_ns(self, rate: float, wait_budget_ns: int = 0) -> int:
        """The wait budget in force: the configured one, or the request's own, raised to a few slots when it is shorter
        than that."""
        config = self.config
        budget = wait_budget_ns or config.wait_budget_ns
        if rate <= 0.0:
            return budget
        # A correction above 1 says that slots come late here: a few of them take so much longer.
        late = self.correction if self.correction > 1.0 else 1.0
        floor = int(config.budget_floor_slots * late * SECOND / rate)
        if floor > config.budget_ceiling_ns:
            floor = config.budget_ceiling_ns
        return floor if floor > budget else budget

    def predict_ns(self, position: int, rate: float) -> int:
        """Wait of the request that would be `position`-th in line (1 = next); 0 when nothing is known."""
        if rate <= 0.0 or position <= 0:
            return 0
        return int(self.correction * position * (1 + self.config.tail_z / sqrt(position)) * SECOND / rate)

    def observe(self, waited_ns: int, predicted_ns: int, budget_ns: int, now: Instant) -> None:
        """Learn from a request that met a queue, or expired in it: how long it waited, and what was said of it."""
        self.decay(now)
        self._observed_at = now
        late = waited_ns > budget_ns
        self._detect_change(log((waited_ns + MILLISECOND) / (predicted_ns + MILLISECOND)), now)
        error = (1.0 if late else 0.0) - self.config.late_share
        self.correction = min(CORRECTION_MOST, max(CORRECTION_LEAST, self.correction * exp(self.config.step * error)))

    def _detect_change(self, ratio: float, now: Instant) -> None:
        difference = ratio - self._usual_ratio
        self._usual_ratio += CUSUM_STEP * difference
        self._longer = max(0.0, self._longer + difference - CUSUM_ALLOWANCE)
        self._shorter = max(0.0, self._shorter - difference - CUSUM_ALLOWANCE)
        if self._longer > CUSUM_THRESHOLD or self._shorter > CUSUM_THRESHOLD:
            self._longer = self._shorter = 0.0
            self._fresh_from, self._carried, self._rated = now - FRESH_NS, 0.0, (-1, 0)

    def decay(self, now: Instant) -> None:
        """Fade towards 1 while there is nothing to observe. Cheap enough to ask at every verdict."""
        since = self._observed_at if self._observed_at > self._faded_at else self._faded_at
        if now - since <= SECOND:
            return
        keep = 0.5 ** ((now - since) / self.config.decay_half_life_ns)
        self.correction = 1.0 + (self.correction - 1.0) * keep
        self._faded_at = now
