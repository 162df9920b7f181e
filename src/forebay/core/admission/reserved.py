"""Places of the calendar of returns that are kept for those who were promised them, and show a retry ticket.

Whoever holds one is let in before new requests, so there must never be more of them than were promised. The adapter has
checked the retry ticket, and knows its caller; the bound is kept here, where no forged, stolen or repeated ticket, no
secret that leaked and no other gateway with the same secret can lift it: each place that was promised is taken once.
"""

from __future__ import annotations

from forebay.core.admission.retry_budget import EARLY_S, LATE_S
from forebay.core.instant import SECOND, Instant

SECONDS_KEPT = 256


class ReservedPlaces:
    """Those of one pool, by the second."""

    __slots__ = ("_due", "promised", "taken")

    def __init__(self) -> None:
        self.promised = 0
        self.taken = 0
        self._due: dict[int, int] = {}  # not taken yet, by the second that they were promised for

    def promise(self, at: Instant, now: Instant) -> None:
        """Keep a place for somebody who was told to come back at an instant."""
        due, second = self._due, at // SECOND
        due[second] = due.get(second, 0) + 1
        self.promised += 1
        if len(due) > SECONDS_KEPT:
            present = now // SECOND - LATE_S
            for past in [one for one in due if one < present]:
                del due[past]

    def left(self, now: Instant) -> bool:
        """Is a place that was promised for about now still free? One keeps from a second before to five after."""
        return self._soonest(now) is not None

    def take(self, now: Instant) -> bool:
        """Take the one that ends first, if any is left."""
        second = self._soonest(now)
        if second is None:
            return False
        self._due[second] -= 1
        self.taken += 1
        return True

    def _soonest(self, now: Instant) -> int | None:
        due, second = self._due, now // SECOND
        return next((told for told in range(second - LATE_S, second + EARLY_S + 1) if due.get(told)), None)
