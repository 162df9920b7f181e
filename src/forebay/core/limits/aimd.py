"""Additive increase, multiplicative decrease: one more while answers are in time, a tenth less when one is late.

Baseline. The rule is Netflix concurrency-limits' `AIMDLimit`: grow only while at least half of the limit is in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.core.instant import SECOND, Instant
from forebay.core.limits.limit import UNBOUNDED, Answer, Signal, SlackConfig, View
from forebay.core.model import EngineSignal


@dataclass(frozen=True, slots=True)
class AimdConfig:
    """The published defaults; the late response is the operator's to define."""

    kind: Literal["aimd"] = "aimd"
    initial: int = 20
    least: int = 20
    most: int = 200
    tokens: int = UNBOUNDED
    late_ns: int = 5 * SECOND
    back_off: float = 0.9
    signal: Signal = "latency"


class Aimd:
    """Moves with every answer."""

    learns = True
    interval_ns = 0
    prefill_tokens = UNBOUNDED
    prefill_rate = 0.0
    gap_ns = 0.0
    slack: SlackConfig | None = None

    def __init__(self, config: AimdConfig) -> None:
        self.requests = min(config.most, max(config.least, config.initial))
        self.tokens = config.tokens
        self._config = config

    def answered(self, answer: Answer, now: Instant) -> None:
        """In time: one more, if the limit was felt. Late: back off."""
        config = self._config
        if answer.response_ns(config.signal) > config.late_ns:
            self.failed(now)
        elif answer.in_flight * 2 >= self.requests:
            self.requests = min(config.most, self.requests + 1)

    def failed(self, now: Instant) -> None:  # noqa: ARG002
        """Back off."""
        config = self._config
        self.requests = max(config.least, min(config.most, int(self.requests * config.back_off)))

    def viewed(self, view: View, now: Instant) -> None:
        """It looks at answers only."""

    def restarted(self, now: Instant) -> None:
        """The published rule knows no restarts."""

    def signalled(self, signal: EngineSignal, in_flight: int, now: Instant) -> None:
        """It goes by answers only."""
