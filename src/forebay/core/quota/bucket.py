"""GCRA, the generic cell rate algorithm: a token bucket kept as a single instant.

The theoretical arrival time `tat` is when the bucket would be full again. A cost moves it forward by
`cost * window / limit`; a cost fits when that leaves `tat` no further ahead of now than the bucket's span
(burst * window / limit). One integer of state, exact waits, no timers. Source: ITU-T I.371, "virtual scheduling".
"""

from __future__ import annotations

from functools import lru_cache

from forebay.core.instant import FOREVER, Instant
from forebay.core.quota.terms import REQUESTS


@lru_cache(maxsize=1024)
def _spans(burst: int, window_ns: int) -> tuple[int, int]:
    """The span, and the most that `tat` may be ahead: what is owed is at most one burst, for an engine that reports
    absurd usage must not lock its caller out for years. Thousands of keys with the same limit hold the same numbers."""
    return burst * window_ns, 2 * burst * window_ns


class Bucket:
    """`limit` units per `window_ns`, of which `burst` may be spent at once. A limit of 0 allows nothing."""

    __slots__ = ("burst", "counts", "due", "level", "limit", "most_owed", "span", "tat", "window_ns")

    def __init__(
        self, limit: int, window_ns: int, burst: int | None = None, counts: int = REQUESTS, level: str = ""
    ) -> None:
        self.window_ns = window_ns
        self.counts = counts  # which of a request's prices it takes
        self.level = level  # whose limit it is, for the refusal
        self.tat = 0
        self.due = 0  # what `tat` becomes when the request that was checked last is charged
        self._size(limit, burst)

    def _size(self, limit: int, burst: int | None) -> None:
        self.limit = limit
        self.burst = (limit if burst is None else burst) if limit else 0
        # Spans and `tat` are in nanoseconds times limit: every price is then a whole number, and a burst spent in small
        # coins is worth exactly as much as one spent at once.
        span, self.most_owed = _spans(self.burst, self.window_ns)
        self.span = span if limit else -1  # so that not even what costs nothing fits

    def relimit(self, limit: int, burst: int | None, now: Instant) -> None:
        """Take another limit. What was spent stays spent: a reload refills no bucket."""
        spent = max(0, self.tat - now * self.limit)  # times the window
        self._size(limit, burst)
        self.tat = now * limit + spent

    def wait_ns(self, cost: int, now: Instant) -> int:
        """Nanoseconds until `cost` fits; 0 when it does now, FOREVER when it never can."""
        limit = self.limit
        if cost > self.burst or not limit:
            return FOREVER
        ahead = self.tat - now * limit
        if ahead < 0:
            ahead = 0
        excess = ahead + cost * self.window_ns - self.span
        return -(-excess // limit) if excess > 0 else 0

    def charge(self, cost: int, now: Instant) -> None:
        """Spend `cost`, which may be negative (a refund) or more than is left (a debt that refills first)."""
        at = now * self.limit
        tat = self.tat if self.tat > at else at
        self.tat = tat + cost * self.window_ns

    def settle(self, difference: int, now: Instant) -> None:
        """Correct an earlier charge by `difference`."""
        at = now * self.limit
        tat = (self.tat if self.tat > at else at) + difference * self.window_ns
        most = at + self.most_owed
        self.tat = tat if tat < most else most

    def remaining(self, now: Instant) -> int:
        """Whole units that could be spent now, never negative."""
        if not self.limit:
            return 0
        ahead = self.tat - now * self.limit
        if ahead <= 0:
            return self.burst
        return max(0, (self.span - ahead) // self.window_ns)

    def reset_ns(self, now: Instant) -> int:
        """Nanoseconds until the bucket is full again."""
        if not self.limit:
            return 0
        return max(0, -((now * self.limit - self.tat) // self.limit))
