"""GCRA, the generic cell rate algorithm: a token bucket kept as a single instant.

The theoretical arrival time `tat` is when the bucket would be full again. A cost moves it forward by
`cost * window / limit`; a cost fits when that leaves `tat` no further ahead of now than the bucket's span
(burst * window / limit). One integer of state, exact waits, no timers. Source: ITU-T I.371, "virtual scheduling".
"""

from __future__ import annotations

from forebay.core.instant import FOREVER, Instant
from forebay.core.quota.terms import REQUESTS


class Bucket:
    """`limit` units per `window_ns`, of which `burst` may be spent at once. A limit of 0 allows nothing."""

    __slots__ = ("_span", "_tat", "burst", "counts", "level", "limit", "window_ns")

    def __init__(
        self, limit: int, window_ns: int, burst: int | None = None, counts: int = REQUESTS, level: str = ""
    ) -> None:
        self.limit = limit
        self.window_ns = window_ns
        self.counts = counts  # which of a request's prices it takes
        self.level = level  # whose limit it is, for the refusal
        self.burst = limit if burst is None else burst
        # Both are kept in nanoseconds times limit: every price is then a whole number, and a burst spent in small
        # coins is worth exactly as much as one spent at once.
        self._span = self.burst * window_ns
        self._tat = 0

    def relimit(self, limit: int, burst: int | None, now: Instant) -> None:
        """Take another limit. What was spent stays spent: a reload refills no bucket."""
        spent = max(0, self._tat - now * self.limit)  # times the window
        self.limit = limit
        self.burst = limit if burst is None else burst
        self._span = self.burst * self.window_ns
        self._tat = now * limit + spent

    def wait_ns(self, cost: int, now: Instant) -> int:
        """Nanoseconds until `cost` fits; 0 when it does now, FOREVER when it never can."""
        limit = self.limit
        if cost > self.burst or not limit:
            return FOREVER
        ahead = self._tat - now * limit
        if ahead < 0:
            ahead = 0
        excess = ahead + cost * self.window_ns - self._span
        return -(-excess // limit) if excess > 0 else 0

    def charge(self, cost: int, now: Instant) -> None:
        """Spend `cost`, which may be negative (a refund) or more than is left (a debt that refills first)."""
        at = now * self.limit
        tat = self._tat if self._tat > at else at
        self._tat = tat + cost * self.window_ns

    def settle(self, difference: int, now: Instant) -> None:
        """Correct an earlier charge by `difference`. What is owed after that is at most one burst: an engine that
        reports absurd usage must not lock its caller out for years."""
        at = now * self.limit
        tat = (self._tat if self._tat > at else at) + difference * self.window_ns
        most = at + 2 * self._span
        self._tat = tat if tat < most else most

    def remaining(self, now: Instant) -> int:
        """Whole units that could be spent now, never negative."""
        if not self.limit:
            return 0
        ahead = self._tat - now * self.limit
        if ahead <= 0:
            return self.burst
        return max(0, (self._span - ahead) // self.window_ns)

    def figures(self, now: Instant) -> tuple[int, int]:
        """(remaining, reset_ns) in one go."""
        limit = self.limit
        ahead = self._tat - now * limit
        if ahead <= 0:
            return (self.burst if limit else 0), 0
        left = (self._span - ahead) // self.window_ns
        return (left if left > 0 else 0), -(-ahead // limit)

    def reset_ns(self, now: Instant) -> int:
        """Nanoseconds until the bucket is full again."""
        if not self.limit:
            return 0
        return max(0, -((now * self.limit - self._tat) // self.limit))
