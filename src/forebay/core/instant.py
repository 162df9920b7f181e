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
