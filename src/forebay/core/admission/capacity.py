"""What a pool can serve when every place is taken, known from the first overload on.

A full pool shows it, but only once the requests that filled it have ended: what ends before that was begun at another
load. Until then limits that look at the pace of streams say it ahead (places / time of a request at this pace); where
there is none, it is put between what was shown and places / time of a request, nearer to the first: a fuller engine is
slower.
It begins at the most that was shown and follows with a delay: in the first moments of an overload streams still run at
the pace of a pool that was nearly empty. Between overloads the last figure stands, if one lasted as long as a request.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp

from forebay.core.instant import SECOND, Instant

KEPT_NS = 4 * SECOND
"""Time constant of the figure while it moves."""
SETTLED = 3
"""Times of a request that a pool was full, after which what ends was begun at the load of a full one."""
APART_NS = 2 * SECOND
"""A pool that was not looked at for so long may have been anything but full meanwhile."""


class Capacity:
    """Looked at whenever a request is refused."""

    def __init__(self) -> None:
        self.rate = 0.0
        """Requests per second; 0.0 before the first overload."""
        self._full_since: Instant = 0
        self._looked_at: Instant = 0
        self._known = False  # was it ever full for as long as a request takes?

    def look(
        self,
        now: Instant,
        *,
        full: bool,
        places: int,
        service_ns: int,
        paced: Callable[[], float],
        drain_rate: float,
        best_rate: float,
    ) -> float:
        """Requests per second, as far as is known; 0.0 when nothing is.

        `paced` asks what the limits say ahead, or 0.0. `drain_rate`: what ends now; `best_rate`: the most lately.
        """
        shown = drain_rate if drain_rate > best_rate else best_rate
        if not full:
            self._full_since = 0
            return self.rate if self._known else shown or self.rate
        if not self._full_since or now - self._looked_at > APART_NS:
            self._full_since = self._looked_at = now
            if not self._known:
                self.rate = shown  # what was guessed in a moment, at the start say, stands no longer
        if now - self._full_since > SETTLED * service_ns and drain_rate:
            seen = drain_rate
        elif said := paced():
            seen = said
        else:
            seen = max(shown, (shown * shown * places * SECOND / service_ns) ** (1 / 3)) if service_ns else shown
        if not self.rate:
            self.rate = shown or seen
        self._known = self._known or now - self._full_since > service_ns > 0
        keep = exp(-(now - self._looked_at) / KEPT_NS)
        self.rate = keep * self.rate + (1.0 - keep) * seen
        self._looked_at = now
        return self.rate
