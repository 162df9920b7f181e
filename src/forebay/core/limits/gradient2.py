"""Gradient2: the ratio of a long average of response times to the latest one, with a tolerance, steers the limit.

Baseline. The rule is Netflix concurrency-limits' `Gradient2Limit` over windows of a second with at least ten answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.core.instant import SECOND, Instant
from forebay.core.limits.limit import UNBOUNDED, Answer, Signal, SlackConfig, View
from forebay.core.model import EngineSignal

LONG_WINDOW = 600
WARM_UP = 10  # windows that are averaged plainly


@dataclass(frozen=True, slots=True)
class Gradient2Config:
    """The published defaults."""

    kind: Literal["gradient2"] = "gradient2"
    initial: int = 20
    least: int = 20
    most: int = 200
    tokens: int = UNBOUNDED
    signal: Signal = "latency"
    tolerance: float = 1.5
    smoothing: float = 0.2
    queue: int = 4
    answers_min: int = 10
    interval_ns: int = SECOND


class Gradient2:
    """Moves once per window."""

    learns = True
    prefill_tokens = UNBOUNDED
    prefill_rate = 0.0
    gap_ns = 0.0
    slack: SlackConfig | None = None

    def __init__(self, config: Gradient2Config) -> None:
        self.requests = min(config.most, max(config.least, config.initial))
        self.tokens = config.tokens
        self.interval_ns = config.interval_ns
        self._config = config
        self._limit = float(self.requests)
        self._long_ns = 0.0
        self._windows = 0
        self._sum_ns = self._count = self._in_flight = 0

    def answered(self, answer: Answer, now: Instant) -> None:  # noqa: ARG002
        """Take it into the window."""
        self._sum_ns += answer.response_ns(self._config.signal)
        self._count += 1
        self._in_flight = max(self._in_flight, answer.in_flight)

    def failed(self, now: Instant) -> None:
        """A failure is no response time."""

    def viewed(self, view: View, now: Instant) -> None:  # noqa: ARG002
        """A window ended: move, if it says enough and the limit was felt."""
        config = self._config
        if self._count < config.answers_min:
            return
        short_ns, in_flight = self._sum_ns / self._count, self._in_flight
        self._sum_ns = self._count = self._in_flight = 0
        self._average(short_ns)
        if self._long_ns / short_ns > 2:
            self._long_ns *= 0.95  # it came down from a load that is over
        if in_flight < self._limit / 2:
            return
        gradient = max(0.5, min(1.0, config.tolerance * self._long_ns / short_ns))
        wanted = self._limit * gradient + config.queue
        moved = self._limit * (1 - config.smoothing) + wanted * config.smoothing
        self._limit = max(config.least, min(config.most, moved))
        self.requests = int(self._limit)

    def restarted(self, now: Instant) -> None:
        """The published rule knows no restarts."""

    def signalled(self, signal: EngineSignal, in_flight: int, now: Instant) -> None:
        """It goes by answers only."""

    def _average(self, short_ns: float) -> None:
        self._windows += 1
        if self._windows <= WARM_UP:
            self._long_ns += (short_ns - self._long_ns) / self._windows
        else:
            self._long_ns += (short_ns - self._long_ns) * 2 / (LONG_WINDOW + 1)
