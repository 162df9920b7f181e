"""A limit that the operator sets and nobody moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.core.instant import Instant
from forebay.core.limits.limit import UNBOUNDED, Answer, SlackConfig, View
from forebay.core.model import EngineSignal


@dataclass(frozen=True, slots=True)
class FixedConfig:
    """Most that may be in flight on one engine."""

    kind: Literal["fixed"] = "fixed"
    limit: int = 64  # requests
    tokens: int = UNBOUNDED  # expected tokens; a single larger request still runs, alone


class Fixed:
    """Always the same."""

    learns = False
    interval_ns = 0
    prefill_tokens = UNBOUNDED
    prefill_rate = 0.0
    gap_ns = 0.0
    slack: SlackConfig | None = None

    def __init__(self, config: FixedConfig) -> None:
        self.requests = config.limit
        self.tokens = config.tokens

    def answered(self, answer: Answer, now: Instant) -> None:
        """Nothing to learn."""

    def failed(self, now: Instant) -> None:
        """Nothing to learn."""

    def viewed(self, view: View, now: Instant) -> None:
        """Nothing to learn."""

    def restarted(self, now: Instant) -> None:
        """Nothing changes."""

    def signalled(self, signal: EngineSignal, in_flight: int, now: Instant) -> None:
        """It goes by nothing."""
