"""Time and chance as the core knows them: both are passed in, never read.

An instant is an integer count of nanoseconds on a monotonic clock that the caller owns. Integers keep the same
trace giving the same decisions on every machine, live or simulated.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

Instant: TypeAlias = int

MICROSECOND = 1_000
MILLISECOND = 1_000_000
SECOND = 1_000_000_000
MINUTE = 60 * SECOND

_MASK = (1 << 64) - 1

FOREVER = 1 << 62
"""A wait that no refill ends: what is asked for is never allowed."""


class Chance(Protocol):
    """A seeded source of chance; each user of chance is handed a stream of its own."""

    def random(self) -> float:
        """A float in [0, 1)."""
        ...


class Even:
    """Chance for what is not acted on: spread evenly, the same in every run, and nothing from anybody's stream."""

    def __init__(self) -> None:
        self._last = 0.0

    def random(self) -> float:
        """A float in [0, 1)."""
        self._last = (self._last + 0.6180339887498949) % 1.0  # the golden ratio leaves no gap for long
        return self._last


class Scattered:
    """Chance for what is not acted on, where one choice takes several draws (splitmix64, Steele et al. 2014)."""

    def __init__(self) -> None:
        self._state = 0

    def random(self) -> float:
        """A float in [0, 1)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = (self._state ^ self._state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        return ((mixed ^ mixed >> 31) >> 11) * 2.0**-53
