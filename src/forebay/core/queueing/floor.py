"""A floor under the priorities: each keeps a small share of the turns, however much comes above it.

Priorities are strict, so a class would get nothing while those above it want everything. Every turn that a higher one
has is worth a small part of a turn to it; once these make a whole one, its next request goes before all others, past
what is held back and at the head of the queue. The lowest has no floor: it is what is shed.
"""

from __future__ import annotations

from collections.abc import Mapping

SAVED_MOST = 2.0  # turns: a class that wants nothing for hours does not come back with hundreds of them


class FloorShare:
    """Turns saved by the priorities that have a floor. O(floors) per turn."""

    __slots__ = ("_saved", "_shares", "top")

    def __init__(self, shares: Mapping[int, float]) -> None:
        """`shares`: part of the turns that a priority keeps, by priority; those above need none."""
        self._shares = dict(shares)
        self._saved = dict.fromkeys(shares, 0.0)
        self.top = max(shares, default=0) + 1
        """Where a turn that is due stands; `above` raises it when a request above that is seen."""

    def above(self, priority: int) -> None:
        """There are requests of this priority."""
        if priority >= self.top:
            self.top = priority + 1

    def due(self, priority: int) -> bool:
        """Is a whole turn of this priority saved up?"""
        return self._saved.get(priority, 0.0) >= 1.0

    def served(self, priority: int) -> None:
        """A request of this priority had a turn."""
        saved = self._saved
        for other, share in self._shares.items():
            if other < priority:
                saved[other] = min(SAVED_MOST, saved[other] + share)
        if priority in saved:
            saved[priority] = max(0.0, saved[priority] - 1.0)
