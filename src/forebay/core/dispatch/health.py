"""Whether an engine may be given work.

Two sources, kept apart: readiness probes (up, warming, down) and the fate of real requests. An engine whose requests
fail several times in a row is ejected for a while, though its probe still answers; after that it is on trial: a few
requests are let through, more with every answer that begins (ramp.py), and their fate decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from forebay.core.instant import SECOND, Instant


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """When an engine is ejected, and for how long."""

    failures_max: int = 3  # in a row
    ejection_ns: int = 2 * SECOND  # doubled at each repeat
    ejection_most_ns: int = 30 * SECOND


class Readiness(StrEnum):
    """What the last readiness probe said."""

    UP = "up"
    WARMING = "warming"
    DOWN = "down"


UP: Final = Readiness.UP


class Health:
    """State of one engine."""

    __slots__ = ("_config", "_ejections", "_failures", "ejected_until", "readiness")

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._failures = 0
        self._ejections = 0
        self.readiness = Readiness.WARMING
        self.ejected_until: Instant = 0  # in the past: it is on trial; 0: nothing is held against it

    def available(self, now: Instant) -> bool:
        """May it be given work?"""
        return self.readiness is UP and self.ejected_until <= now

    def succeeded(self) -> None:
        """A request was answered as it should: all is forgiven."""
        self._failures = 0
        self._ejections = 0
        self.ejected_until = 0

    def failed(self, opened: Instant, now: Instant) -> bool:
        """A request that it was given at `opened` failed in a way that speaks against it. Is it ejected for that?"""
        if opened < self.ejected_until:
            return False  # one incident: it was in flight when the engine was ejected
        self._failures += 1
        if not self.ejected_until and self._failures < self._config.failures_max:
            return False
        span = min(self._config.ejection_most_ns, self._config.ejection_ns << min(self._ejections, 10))
        self.ejected_until = now + span
        self._ejections += 1
        self._failures = 0
        return True

    def gone(self) -> None:
        """Nobody is there. Whoever answers next is another process, and what this one did is not held against it; how
        often it was ejected is, should that one fail too."""
        self.readiness = Readiness.DOWN
        self._failures = 0
        self.ejected_until = 0
