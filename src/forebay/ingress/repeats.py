"""Requests that come again under the same `idempotency-key`: retries, whether their library numbers them or not."""

from __future__ import annotations

from forebay.core.instant import SECOND, Instant

KEPT = 65_536
LIFE_NS = 125 * SECOND
"""Of a name since it was last used: the longest time to come back that a library keeps to, and a little."""


class Repeats:
    """The names that were used last, of all API keys, each by a hash of 64 bits. When there are more the oldest are
    forgotten, and what comes again under them is new."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._seen: dict[int, tuple[Instant, int]] = {}

    def count(self, key: str, name: bytes, now: Instant) -> int:
        """How often this API key has used the name before; this time is taken in."""
        mark, seen = hash((key, name)), self._seen
        at, times = seen.pop(mark, (now, 0))
        if now - at > LIFE_NS:
            times = 0
        if len(seen) >= self._kept:
            del seen[next(iter(seen))]
        seen[mark] = now, times + 1
        return times
