"""TCP Vegas: the queue inside the engine is guessed from how much slower than the fastest answer an answer was.

Baseline. The rule is Netflix concurrency-limits' `VegasLimit`, with its thresholds of 3 and 6 times log10 of the
limit, and its probe: every so often the next answer becomes the new idea of the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log10
from typing import Literal

from forebay.core.instant import Chance, Instant
from forebay.core.limits.limit import UNBOUNDED, Answer, Signal, SlackConfig, View
from forebay.core.model import EngineSignal

PROBE_MULTIPLIER = 30


@dataclass(frozen=True, slots=True)
class VegasConfig:
    """The published defaults."""

    kind: Literal["vegas"] = "vegas"
    initial: int = 20
    least: int = 1
    most: int = 1000
    tokens: int = UNBOUNDED
    signal: Signal = "latency"


class Vegas:
    """Moves with every answer. `chance` spreads the probes of several engines."""

    learns = True
    interval_ns = 0
    prefill_tokens = UNBOUNDED
    prefill_rate = 0.0
    gap_ns = 0.0
    slack: SlackConfig | None = None

    def __init__(self, config: VegasConfig, chance: Chance) -> None:
        self.requests = min(config.most, max(config.least, config.initial))
        self.tokens = config.tokens
        self._config = config
        self._chance = chance
        self._fastest_ns = 0
        self._since_probe = 0
        self._jitter = 0.5 + 0.5 * chance.random()

    def answered(self, answer: Answer, now: Instant) -> None:  # noqa: ARG002
        """Compare with the fastest, and move by the estimated queue."""
        response_ns = answer.response_ns(self._config.signal)
        self._since_probe += 1
        if self._since_probe >= self._jitter * PROBE_MULTIPLIER * self.requests:
            self._since_probe = 0
            self._jitter = 0.5 + 0.5 * self._chance.random()
            self._fastest_ns = response_ns
            return
        if not self._fastest_ns or response_ns < self._fastest_ns:
            self._fastest_ns = response_ns
            return
        limit, unit = self.requests, self._unit()
        if answer.in_flight * 2 < limit:
            return
        queue = ceil(limit * (1 - self._fastest_ns / response_ns))
        if queue <= unit:
            limit += 6 * unit
        elif queue < 3 * unit:
            limit += unit
        elif queue > 6 * unit:
            limit -= unit
        self._set(limit)

    def failed(self, now: Instant) -> None:  # noqa: ARG002
        """A loss counts as a long queue."""
        self._set(self.requests - self._unit())

    def viewed(self, view: View, now: Instant) -> None:
        """It looks at answers only."""

    def restarted(self, now: Instant) -> None:
        """The published rule knows no restarts."""

    def signalled(self, signal: EngineSignal, in_flight: int, now: Instant) -> None:
        """It goes by answers only."""

    def _unit(self) -> int:
        return max(1, int(log10(self.requests)))

    def _set(self, limit: int) -> None:
        self.requests = max(self._config.least, min(self._config.most, limit))
