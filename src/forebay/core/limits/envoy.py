"""Envoy's adaptive concurrency: the least response time, measured anew at a tiny limit, over the recent one.

Baseline. The rule of Envoy's gradient controller: every 0.1 s the limit is multiplied by
(fastest * (1 + buffer)) / sampled, clipped to [0.5, 2], and a headroom of its square root is added. Every minute, and
after five windows at the least limit, the fastest is measured again at a limit of three.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from forebay.core.instant import MILLISECOND, SECOND, Chance, Instant
from forebay.core.limits.limit import UNBOUNDED, Answer, Signal, SlackConfig, View
from forebay.core.model import EngineSignal

WINDOWS_AT_LEAST = 5


@dataclass(frozen=True, slots=True)
class EnvoyConfig:
    """The published defaults."""

    kind: Literal["envoy"] = "envoy"
    least: int = 3
    most: int = 1000
    tokens: int = UNBOUNDED
    signal: Signal = "latency"
    percentile: float = 0.5
    buffer: float = 0.25
    probe_every_ns: int = 60 * SECOND
    probe_jitter: float = 0.1
    probe_answers: int = 50
    interval_ns: int = 100 * MILLISECOND


class Envoy:
    """Moves once per window; `chance` spreads the probes of several engines."""

    learns = True
    prefill_tokens = UNBOUNDED
    prefill_rate = 0.0
    gap_ns = 0.0
    slack: SlackConfig | None = None

    def __init__(self, config: EnvoyConfig, chance: Chance) -> None:
        self.requests = config.least
        self.tokens = config.tokens
        self.interval_ns = config.interval_ns
        self._config = config
        self._chance = chance
        self._before_probe = config.least
        self._fastest_ns = 0.0
        self._probing = True
        self._probe_at: Instant = 0
        self._samples: list[int] = []
        self._at_least = 0

    def answered(self, answer: Answer, now: Instant) -> None:
        """Take it into the window, or into the probe."""
        self._samples.append(answer.response_ns(self._config.signal))
        if self._probing and len(self._samples) >= self._config.probe_answers:
            self._fastest_ns = self._percentile()
            self._probing = False
            self._samples = []
            self.requests = self._before_probe
            jitter = self._config.probe_jitter * self._chance.random()
            self._probe_at = now + int(self._config.probe_every_ns * (1 + jitter))

    def failed(self, now: Instant) -> None:
        """A failure is no response time."""

    def viewed(self, view: View, now: Instant) -> None:  # noqa: ARG002
        """A window ended: move, or begin a probe."""
        config = self._config
        if self._probing or not self._samples:
            return
        sampled_ns = self._percentile()
        self._samples = []
        gradient = max(0.5, min(2.0, self._fastest_ns * (1 + config.buffer) / max(1.0, sampled_ns)))
        limit = gradient * self.requests
        self.requests = max(config.least, min(config.most, int(limit + sqrt(limit))))
        self._at_least = self._at_least + 1 if self.requests == config.least else 0
        if now >= self._probe_at or self._at_least >= WINDOWS_AT_LEAST:
            self._before_probe = self.requests
            self.requests = config.least
            self._probing = True
            self._at_least = 0

    def restarted(self, now: Instant) -> None:
        """The published rule knows no restarts."""

    def signalled(self, signal: EngineSignal, in_flight: int, now: Instant) -> None:
        """It goes by answers only."""

    def _percentile(self) -> float:
        ranked = sorted(self._samples)
        return float(ranked[min(len(ranked) - 1, int(self._config.percentile * len(ranked)))])
