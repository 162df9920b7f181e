"""Whose turn it is within one flow: the earliest end first, or the newest first while a queue stands.

Turns between flows are the fair queue's business; what its flow's turn is used for is decided here. A flow whose
callers all have the same patience is served in order of arrival by either rule. Serving the earliest end first is
best while all can be served and worst when not, so it stands behind an admission test that asks whether they can.

A queue *stands* when the oldest of it has waited longer than a target for a whole interval (CoDel, Nichols and
Jacobson 2012). Serving its newest first then gives some callers a short wait, where serving the oldest first would
give all of them a long one; the oldest leave by their deadlines. Back in order once it has not stood for an interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from forebay.core.instant import MILLISECOND, Instant
from forebay.core.model import QUEUED, Ticket


@dataclass(frozen=True, slots=True)
class OrderConfig:
    """`adaptive`: newest first while the queue stands, which is worth it where waits are seconds."""

    adaptive: bool = False
    target_share: float = 0.25  # of the longest that a ticket may wait is too old for the oldest
    interval_ns: int = 100 * MILLISECOND


class Line:
    """The waiting tickets of one flow."""

    __slots__ = ("_ends", "_last_end", "tickets", "uneven")

    def __init__(self) -> None:
        self.tickets: dict[Ticket, None] = {}  # in order of arrival
        self.uneven = False  # did one come that must go before an earlier one?
        self._ends: list[tuple[Instant, int, Ticket]] = []
        self._last_end: Instant = 0

    def add(self, ticket: Ticket) -> None:
        """It joins at the end."""
        self.tickets[ticket] = None
        if self.uneven:
            heappush(self._ends, (ticket.expires, ticket.sequence, ticket))
        elif ticket.expires < self._last_end:
            self.uneven = True
            self._ends = sorted((t.expires, t.sequence, t) for t in self.tickets)
        self._last_end = ticket.expires

    def earliest(self) -> Ticket:
        """The one whose time is up first. The line must be uneven and not empty."""
        ends = self._ends
        while ends[0][2].state is not QUEUED or ends[0][2] not in self.tickets:
            heappop(ends)
        return ends[0][2]

    def oldest(self) -> Ticket:
        """The one that came first. The line must not be empty."""
        return next(iter(self.tickets))

    def newest(self) -> Ticket:
        """The one that came last. The line must not be empty."""
        return next(reversed(self.tickets))


class Standing:
    """Does the queue stand? Told at every turn how long the oldest has waited."""

    __slots__ = ("_config", "_since", "now")

    def __init__(self, config: OrderConfig) -> None:
        self._config = config
        self._since: Instant | None = None  # since when it has been the other way
        self.now = False

    def seen(self, oldest_ns: int, hold_ns: int, at: Instant) -> None:
        """`oldest_ns`: how long the oldest has waited; `hold_ns`: the longest that it may."""
        if (oldest_ns > self._config.target_share * hold_ns) == self.now:
            self._since = None
        elif self._since is None:
            self._since = at
        elif at - self._since >= self._config.interval_ns:
            self.now, self._since = not self.now, None


def standing(config: OrderConfig) -> Standing | None:
    """What tells whether the queue stands; None where that makes no difference."""
    return Standing(config) if config.adaptive else None
