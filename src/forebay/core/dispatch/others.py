"""Work that reached an engine past this gateway: what its metrics page counts beyond our own.

It is carried along from page to page and our own exact count is added to it (dead reckoning). It is averaged over ten
seconds on purpose: gateways on the same engines all read the same pages, and would all send to whoever was idle on the
last one. What lasts is seen, what moves from second to second is not: against that, our own counts do better alone.

It loses weight with age, and what is lost is replaced by what is usual among the pool's engines, so that silence is
neither load nor the lack of it.
"""

from __future__ import annotations

from forebay.core.instant import SECOND, Instant

AVERAGED_NS = 10 * SECOND
TRUSTED_NS = 3 * SECOND // 2
FORGOTTEN_NS = 4 * SECOND
"""A page counts fully for as long as the next one is not overdue, and not at all any more after four seconds."""

NOISE = 2
NOISE_SHARE = 0.1
"""Pages and counters are not read at the same instant: so many requests, or this share of ours, are no others' work."""


class Others:
    """What one engine was found to hold of others, in requests."""

    __slots__ = ("_at", "_found", "usual")

    def __init__(self) -> None:
        self.usual = 0.0  # mean over the pool's engines, as last found
        self._found = 0.0
        self._at: Instant = -FORGOTTEN_NS

    def read(self, total: int, own: int, now: Instant) -> None:
        """Its page counts `total` requests while we have `own` there."""
        more = total - own
        found = float(more) if more > max(NOISE, NOISE_SHARE * own) else 0.0
        elapsed_ns = now - self._at
        if elapsed_ns < FORGOTTEN_NS:
            found = self._found + (found - self._found) * min(1.0, elapsed_ns / AVERAGED_NS)
        self._found, self._at = found, now

    def forget(self) -> None:
        """Whoever answers next is another process."""
        self._at = -FORGOTTEN_NS
        self._found = 0.0

    def found(self, now: Instant) -> float | None:
        """What the pages of the last while counted; None when there are none that still count."""
        return self._found if now - self._at < FORGOTTEN_NS else None

    def requests(self, now: Instant) -> float:
        """How many it is taken to hold now."""
        age = now - self._at
        if age <= TRUSTED_NS:
            return self._found
        weight = max(0.0, (FORGOTTEN_NS - age) / (FORGOTTEN_NS - TRUSTED_NS))
        return weight * self._found + (1.0 - weight) * self.usual
