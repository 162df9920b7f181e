"""The queue of one pool: who is next, who has waited too long, and how much is in it.

Two heaps, one of turns (band, then fairness tag) and one by expiry, a line by arrival and one per flow share the
tickets. A ticket that leaves by one is skipped by the others when it surfaces, and all are rebuilt when the leftovers
outnumber the living. When it is a flow's turn, ordering.py says which of its tickets has it.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from forebay.core.instant import Instant
from forebay.core.model import Request, Ticket, TicketState
from forebay.core.queueing.fairness import Flow, VirtualClock
from forebay.core.queueing.ordering import Line, OrderConfig, Standing

LEFTOVERS_MAX = 192


class FairQueue:
    """Tickets in state QUEUED. Its bounds are kept by the depth gate; it keeps the sums that the gate asks for."""

    def __init__(self, order: OrderConfig | None = None) -> None:
        self.tokens = 0
        self.bytes = 0
        self._count = 0
        self._clock = VirtualClock()
        self._standing = Standing(order) if order is not None and order.adaptive else None
        self._lines: dict[Flow, Line] = {}
        self._uneven = False  # was any line, since the queue was last empty?
        self._numbers = 0  # turns given
        self._turns: list[tuple[int, float, int]] = []  # (-band, tag, number)
        self._holders: dict[int, Ticket] = {}  # by the number of their turn
        self._expiries: list[tuple[Instant, int, Ticket]] = []
        self._arrivals: deque[Ticket] = deque()

    def __len__(self) -> int:
        return self._count

    def push(self, ticket: Ticket, tag: float | None = None) -> None:
        """Add a ticket; its `expires` must be set. `tag` is its turn, where somebody with a longer memory keeps turns;
        a queue that runs empty again and again remembers nothing."""
        request = ticket.request
        flow = _flow(request)
        ticket.start_tag = self._clock.start_tag(flow, ticket.demand.tokens) if tag is None else tag
        self._numbers += 1
        self._give_turn(ticket, self._numbers)
        heappush(self._expiries, (ticket.expires, ticket.sequence, ticket))
        self._arrivals.append(ticket)
        self._join(ticket, flow)
        self._add(ticket, 1)

    def push_back(self, ticket: Ticket) -> None:
        """Return a ticket that was dispatched but not delivered to the place it had.

        Its turn had come. When the queue ran empty meanwhile, tags began anew and its old one would put it last.
        """
        ticket.start_tag = min(ticket.start_tag, self._clock.now)
        self._numbers += 1
        self._give_turn(ticket, -self._numbers)  # before all others of the same tag
        heappush(self._expiries, (ticket.expires, ticket.sequence, ticket))
        self._arrivals.appendleft(ticket)
        self._join(ticket, _flow(ticket.request))
        self._add(ticket, 1)

    def _give_turn(self, ticket: Ticket, number: int) -> None:
        ticket.turn = number
        heappush(self._turns, (-ticket.band, ticket.start_tag, ticket.turn))
        self._holders[ticket.turn] = ticket

    def _join(self, ticket: Ticket, flow: Flow) -> None:
        line = self._lines.get(flow)
        if line is None:
            line = self._lines[flow] = Line()
        line.add(ticket)
        self._uneven = self._uneven or line.uneven

    def head(self) -> Ticket | None:
        """The ticket whose turn it is."""
        turns, holders = self._turns, self._holders
        while turns:
            ticket = holders.get(turns[0][2])
            if ticket is None:
                heappop(turns)
            elif not self._uneven and (self._standing is None or not self._standing.now):
                return ticket
            else:
                return self._exchange(ticket)
        return None

    def _exchange(self, ticket: Ticket) -> Ticket:
        """Give this ticket's turn to the one of its flow that goes first, and it that one's: turns within a flow are
        worth the same. Returns who has the turn now."""
        first = self._first(ticket)
        if first is not ticket:
            ticket.start_tag, first.start_tag = first.start_tag, ticket.start_tag
            ticket.turn, first.turn = first.turn, ticket.turn
            self._holders[ticket.turn], self._holders[first.turn] = ticket, first
        return first

    def _first(self, ticket: Ticket) -> Ticket:
        """Which ticket of this one's flow goes first. One that stands above its flow is not exchanged."""
        line = self._lines[_flow(ticket.request)]
        if self._standing is not None and self._standing.now:
            first = line.newest()
        else:
            first = line.earliest() if line.uneven else ticket
        return first if first.band == ticket.band else ticket

    def ahead_of(self, request: Request, band: int, tag: float | None = None) -> int:
        """How many would be served before this request, were it to wait too. O(n), for a queue that is nearly full."""
        flow = _flow(request)
        mine = (-band, self._clock.tag_now(flow) if tag is None else tag)
        return sum(
            1
            for ticket in self._holders.values()
            if (-ticket.band, ticket.start_tag) <= mine or _flow(ticket.request) == flow
        )

    def last_of_others(self, request: Request) -> Ticket | None:
        """The ticket whose turn comes last, of flows other than this request's: none goes before its own flow's earlier
        ones. O(n)."""
        flow = _flow(request)
        others = (t for t in self._holders.values() if _flow(t.request) != flow)
        return max(others, key=lambda t: (-t.band, t.start_tag, t.turn), default=None)

    @staticmethod
    def is_behind(ticket: Ticket, other: Ticket) -> bool:
        """Does its turn come after the other's?"""
        return (-ticket.band, ticket.start_tag) > (-other.band, other.start_tag)

    def oldest(self) -> Instant:
        """When the longest-waiting ticket arrived. The queue must not be empty."""
        return self._first_arrived().arrived

    def _first_arrived(self) -> Ticket:
        arrivals = self._arrivals
        while arrivals[0].state is not TicketState.QUEUED:
            arrivals.popleft()
        return arrivals[0]

    def pop(self, now: Instant) -> Ticket:
        """Take the head out, to be dispatched: `head` was asked just before. The caller sets its state."""
        if self._standing is not None:
            oldest = self._first_arrived()
            self._standing.seen(now - oldest.arrived, oldest.expires - oldest.arrived, now)
        ticket = self._holders[heappop(self._turns)[2]]
        self._clock.served(ticket.start_tag)
        self._leave(ticket, _flow(ticket.request))
        self._add(ticket, -1)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Take out a ticket that leaves unserved. The caller sets its state."""
        flow = _flow(ticket.request)
        self._clock.withdrawn(flow, ticket.demand.tokens)
        self._leave(ticket, flow)
        self._add(ticket, -1)

    def _leave(self, ticket: Ticket, flow: Flow) -> None:
        del self._holders[ticket.turn]
        line = self._lines[flow]
        del line.tickets[ticket]
        if not line.tickets:
            del self._lines[flow]

    def expired(self, now: Instant) -> Ticket | None:
        """A ticket whose time is up, or None."""
        ticket = self._first_to_expire()
        return ticket if ticket is not None and ticket.expires <= now else None

    def next_expiry(self) -> Instant | None:
        """When the next ticket expires; None when none waits."""
        ticket = self._first_to_expire()
        return None if ticket is None else ticket.expires

    def _first_to_expire(self) -> Ticket | None:
        expiries = self._expiries
        while expiries and expiries[0][2].state is not TicketState.QUEUED:
            heappop(expiries)
        return expiries[0][2] if expiries else None

    def _add(self, ticket: Ticket, sign: int) -> None:
        self._count += sign
        self.tokens += sign * ticket.demand.tokens
        self.bytes += sign * ticket.request.body_bytes
        if not self._count:
            self._clock.idle()
            self._turns.clear()
            self._uneven = False
            self._expiries.clear()
            self._arrivals.clear()
        elif sign < 0:
            # Each may hold leftovers that never surface, behind a class above or a ticket that waits for long.
            kept = len(self._turns) + len(self._expiries) + len(self._arrivals)
            if kept > 6 * self._count + LEFTOVERS_MAX:
                self._sweep(ticket)

    def _sweep(self, leaving: Ticket) -> None:
        """Drop leftovers from both heaps (the leaving ticket's state is about to change)."""
        self._turns = [e for e in self._turns if e[2] in self._holders]
        self._expiries = [e for e in self._expiries if e[2].state is TicketState.QUEUED and e[2] is not leaving]
        self._arrivals = deque(t for t in self._arrivals if t.state is TicketState.QUEUED and t is not leaving)
        heapify(self._turns)
        heapify(self._expiries)


def _flow(request: Request) -> Flow:
    return request.flow or request.key, request.priority
