"""A clock that moves only when it is told to."""

from __future__ import annotations

from forebay.core.instant import Instant


class ManualClock:
    """Monotonic nanoseconds; `clock()` reads it, as a driver would read the real one."""

    def __init__(self, start_ns: Instant = 0) -> None:
        self.now = start_ns

    def __call__(self) -> Instant:
        return self.now

    def advance(self, by_ns: int) -> Instant:
        """Move forward by `by_ns` and return the new instant. Raises ValueError when asked to go back."""
        if by_ns < 0:
            raise ValueError(f"a monotonic clock cannot go back ({by_ns} ns)")
        self.now += by_ns
        return self.now

    def advance_to(self, at: Instant) -> Instant:
        """Move forward to `at` and return it. Raises ValueError when `at` is in the past."""
        return self.advance(at - self.now)
