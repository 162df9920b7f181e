"""The queue of one pool: who is next, who has waited too long, and how much is in it.

A sorted list of turns (band, then fairness tag), a heap by expiry, a line by arrival and one per flow share the
tickets. One that leaves is taken out of the turns at once; the heap and the line by arrival skip it when it surfaces,
and are rebuilt when the leftovers outnumber the living. When it is a flow's turn, ordering.py says which of its
tickets has it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from forebay.core.instant import Instant
from forebay.core.model import QUEUED, Request, Ticket
from forebay.core.queueing.fairness import Flow, VirtualClock
from forebay.core.queueing.ordering import Line, OrderConfig, standing

LEFTOVERS_MAX = 192

Turn: TypeAlias = tuple[float, float, int]
"""Minus the band, the tag, and the number of the turn: lower goes first."""
Held: TypeAlias = tuple[float, float, int, Ticket]
"""A turn, and who has it."""
NUMBERS_END = 1 << 62
"""Beyond the number of any turn."""


class FairQueue:
    """Tickets in state QUEUED. Its bounds are kept by the depth gate; it keeps the sums that the gate asks for."""

    def __init__(self, order: OrderConfig | None = None) -> None:
        self.waiting = 0  # requests: as `len` says, for those who ask often
        self.tokens = 0
        self.bytes = 0
        self._clock = VirtualClock()
        self.standing = standing(order) if order is not None else None
        """Says whether the newest of a flow go first; None: they never do. It may be exchanged at any time."""
        self._lines: dict[Flow, Line] = {}
        self._uneven = False  # was any line, since the queue was last empty?
        self._numbers = 0  # turns given
        self._turns: list[Held] = []  # sorted: most newcomers go last
        self._expiries: list[tuple[Instant, int, Ticket]] = []
        self._arrivals: deque[Ticket] = deque()

    def __len__(self) -> int:
        return self.waiting

    def __iter__(self) -> Iterator[Ticket]:
        """Those that wait, by their turns."""
        return (held[3] for held in self._turns)

    def push(self, ticket: Ticket, tag: float | None = None) -> None:
        """Add a ticket; its `expires` must be set. `tag` is its turn, where somebody with a longer memory keeps turns;
        a queue that runs empty again and again remembers nothing."""
        flow = _flow(ticket.request)
        ticket.start_tag = self._clock.start_tag(flow, ticket.demand.tokens) if tag is None else tag
        self._numbers += 1
        self._arrivals.append(ticket)
        self._join(ticket, flow, self._numbers)

    def push_back(self, ticket: Ticket) -> None:
        """Return a ticket that was dispatched but not delivered to the place it had.

        Its turn had come. When the queue ran empty meanwhile, tags began anew and its old one would put it last.
        """
        ticket.start_tag = min(ticket.start_tag, self._clock.now)
        self._numbers += 1
        self._arrivals.appendleft(ticket)
        self._join(ticket, _flow(ticket.request), -self._numbers)  # before all others of the same tag

    def _join(self, ticket: Ticket, flow: Flow, number: int) -> None:
        turns, held = self._turns, (-ticket.band, ticket.start_tag, number, ticket)
        ticket.turn = number
        if turns and held < turns[-1]:
            insort(turns, held)
        else:
            turns.append(held)
        heappush(self._expiries, (ticket.expires, ticket.sequence, ticket))
        line = self._lines.get(flow)
        if line is None:
            line = self._lines[flow] = Line()
        line.add(ticket)
        if line.uneven:
            self._uneven = True
        self.waiting += 1
        self.tokens += ticket.demand.tokens
        self.bytes += ticket.request.body_bytes

    def head(self) -> Ticket | None:
        """The ticket whose turn it is."""
        turns = self._turns
        if not turns:
            return None
        ticket = turns[0][3]
        if not self._uneven and (self.standing is None or not self.standing.now):
            return ticket
        return self._exchange(ticket)

    def _exchange(self, ticket: Ticket) -> Ticket:
        """Give this ticket's turn to the one of its flow that goes first, and it that one's: turns within a flow are
        worth the same. Returns who has the turn now."""
        first = self._first(ticket)
        if first is not ticket:
            turns, mine, its = self._turns, self._place(ticket), self._place(first)
            ticket.start_tag, first.start_tag = first.start_tag, ticket.start_tag
            ticket.turn, first.turn = first.turn, ticket.turn
            turns[mine], turns[its] = (*turns[mine][:3], first), (*turns[its][:3], ticket)
        return first

    def _place(self, ticket: Ticket) -> int:
        """Where among the turns its own is."""
        return bisect_left(self._turns, (-ticket.band, ticket.start_tag, ticket.turn))

    def _first(self, ticket: Ticket) -> Ticket:
        """Which ticket of this one's flow goes first. One that stands above its flow is not exchanged."""
        line = self._lines[_flow(ticket.request)]
        if self.standing is not None and self.standing.now:
            first = line.newest()
        else:
            first = line.earliest() if line.uneven else ticket
        return first if first.band == ticket.band else ticket

    def ahead_of(self, request: Request, band: float, tag: float | None = None) -> int:
        """How many would be served before this request, were it to wait too: none of its own flow's goes behind it.
        O(what its flow has waiting)."""
        flow = _flow(request)
        mine = self._turn_now(flow, band, tag)
        ahead, line = bisect_right(self._turns, mine), self._lines.get(flow)
        if line is None or ahead == self.waiting:
            return ahead
        return ahead + sum(1 for own in line.tickets if (-own.band, own.start_tag, own.turn) > mine)

    def last_behind(self, request: Request, band: float, tag: float | None = None) -> Ticket | None:
        """The ticket whose turn comes last, of flows other than this request's, if that is after this request's turn.
        Asks no more than the last of all, save those of its own flow."""
        flow = _flow(request)
        mine, line = self._turn_now(flow, band, tag), None
        for held in reversed(self._turns):
            if held < mine:
                break
            if line is None and (line := self._lines.get(flow)) is None:
                return held[3]
            if held[3] not in line.tickets:
                return held[3]
        return None

    def _turn_now(self, flow: Flow, band: float, tag: float | None) -> Turn:
        """The turn that a request of this flow would get: after all others of the same tag."""
        return -band, self._clock.tag_now(flow) if tag is None else tag, NUMBERS_END

    def oldest(self) -> Instant:
        """When the longest-waiting ticket arrived. The queue must not be empty."""
        return self.first_arrived().arrived

    def first_arrived(self) -> Ticket:
        """The longest-waiting ticket. The queue must not be empty."""
        arrivals = self._arrivals
        while arrivals[0].state is not QUEUED:
            arrivals.popleft()
        return arrivals[0]

    def pop(self, now: Instant) -> Ticket:
        """Take the head out, to be dispatched: `head` was asked just before. The caller sets its state."""
        if self.standing is not None:
            oldest = self.first_arrived()
            self.standing.seen(now - oldest.arrived, oldest.expires - oldest.arrived, now)
        ticket = self._turns[0][3]
        self._clock.served(ticket.start_tag)
        del self._turns[0]
        self._leave(ticket, _flow(ticket.request))
        return ticket

    def instead_of(self, ticket: Ticket, *, newest: bool) -> Ticket:
        """Who would have had the turn of a ticket that was just taken out, with the newest of a flow first, or not."""
        line = self._lines.get(_flow(ticket.request))
        if line is None or ticket.redispatched:  # what an engine gave back goes first in any order
            return ticket
        if newest:
            other = line.newest()
            before = other.sequence > ticket.sequence
        elif line.uneven:
            other = line.earliest()
            before = (other.expires, other.sequence) < (ticket.expires, ticket.sequence)
        else:
            other = line.oldest()
            before = other.sequence < ticket.sequence
        return other if before and other.band == ticket.band else ticket

    def remove(self, ticket: Ticket) -> None:
        """Take out a ticket that leaves unserved. The caller sets its state."""
        flow = _flow(ticket.request)
        self._clock.withdrawn(flow, ticket.demand.tokens)
        del self._turns[self._place(ticket)]
        self._leave(ticket, flow)

    def _leave(self, ticket: Ticket, flow: Flow) -> None:
        line = self._lines[flow]
        del line.tickets[ticket]
        if not line.tickets:
            del self._lines[flow]
        self.waiting = waiting = self.waiting - 1
        self.tokens -= ticket.demand.tokens
        self.bytes -= ticket.request.body_bytes
        if not waiting:
            self._clock.idle()
            self._uneven = False
            self._expiries.clear()
            self._arrivals.clear()
            return
        self.first_arrived()  # those that left before it go
        if len(self._expiries) + len(self._arrivals) > 5 * waiting + LEFTOVERS_MAX:
            # Each may hold leftovers that never surface, behind a ticket that waits for long.
            self._sweep(ticket)

    def expired(self, now: Instant) -> Ticket | None:
        """A ticket whose time is up, or None."""
        expires = self.next_expiry()
        return self._expiries[0][2] if expires is not None and expires <= now else None

    def next_expiry(self) -> Instant | None:
        """When the next ticket expires; None when none waits."""
        expiries = self._expiries
        while expiries and expiries[0][2].state is not QUEUED:
            heappop(expiries)
        return expiries[0][0] if expiries else None

    def _sweep(self, leaving: Ticket) -> None:
        """Drop leftovers (the leaving ticket's state is about to change)."""
        self._expiries = [e for e in self._expiries if e[2].state is QUEUED and e[2] is not leaving]
        self._arrivals = deque(t for t in self._arrivals if t.state is QUEUED and t is not leaving)
        heapify(self._expiries)


def _flow(request: Request) -> Flow:
    return request.flow or request.key, request.priority
