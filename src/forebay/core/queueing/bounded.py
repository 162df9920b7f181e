"""The queue of one pool: who is next, who has waited too long, and how much is in it.

Two heaps, one by turn (priority, then fairness tag) and one by expiry, and a line by arrival share the tickets. A
ticket that leaves by one is skipped by the others when it surfaces, and all are rebuilt when the leftovers outnumber
the living.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from forebay.core.instant import Instant
from forebay.core.model import Request, Ticket, TicketState
from forebay.core.queueing.fairness import Flow, VirtualClock

LEFTOVERS_MAX = 192


class FairQueue:
    """Tickets in state QUEUED. Its bounds are kept by the depth gate; it keeps the sums that the gate asks for."""

    def __init__(self) -> None:
        self.tokens = 0
        self.bytes = 0
        self._count = 0
        self._clock = VirtualClock()
        self._turns: list[tuple[int, float, int, Ticket]] = []
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
        heappush(self._turns, (-request.priority, ticket.start_tag, ticket.sequence, ticket))
        heappush(self._expiries, (ticket.expires, ticket.sequence, ticket))
        self._arrivals.append(ticket)
        self._add(ticket, 1)

    def push_back(self, ticket: Ticket) -> None:
        """Return a ticket that was dispatched but not delivered to the place it had.

        Its turn had come. When the queue ran empty meanwhile, tags began anew and its old one would put it last.
        """
        ticket.start_tag = min(ticket.start_tag, self._clock.now)
        heappush(self._turns, (-ticket.request.priority, ticket.start_tag, ticket.sequence, ticket))
        heappush(self._expiries, (ticket.expires, ticket.sequence, ticket))
        self._arrivals.appendleft(ticket)
        self._add(ticket, 1)

    def head(self) -> Ticket | None:
        """The ticket whose turn it is."""
        turns = self._turns
        while turns and turns[0][3].state is not TicketState.QUEUED:
            heappop(turns)
        return turns[0][3] if turns else None

    def ahead_of(self, request: Request, tag: float | None = None) -> int:
        """How many would be served before this request, were it to wait too. O(n), for a queue that is nearly full."""
        flow = _flow(request)
        mine = (-request.priority, self._clock.tag_now(flow) if tag is None else tag)
        return sum(
            1
            for priority, start_tag, _, ticket in self._turns
            if ticket.state is TicketState.QUEUED and ((priority, start_tag) <= mine or _flow(ticket.request) == flow)
        )

    def last_of_others(self, request: Request) -> Ticket | None:
        """The ticket whose turn comes last, of flows other than this request's: none goes before its own flow's earlier
        ones. O(n)."""
        flow = _flow(request)
        others = (e for e in self._turns if e[3].state is TicketState.QUEUED and _flow(e[3].request) != flow)
        last = max(others, default=None)
        return None if last is None else last[3]

    @staticmethod
    def is_behind(ticket: Ticket, other: Ticket) -> bool:
        """Does its turn come after the other's?"""
        return (-ticket.request.priority, ticket.start_tag) > (-other.request.priority, other.start_tag)

    def oldest(self) -> Instant:
        """When the longest-waiting ticket arrived. The queue must not be empty."""
        arrivals = self._arrivals
        while arrivals[0].state is not TicketState.QUEUED:
            arrivals.popleft()
        return arrivals[0].arrived

    def pop(self) -> Ticket:
        """Take the head out, to be dispatched. The caller sets its state."""
        ticket = heappop(self._turns)[3]
        self._clock.served(ticket.start_tag)
        self._add(ticket, -1)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Take out a ticket that leaves unserved. The caller sets its state."""
        request = ticket.request
        self._clock.withdrawn(_flow(request), ticket.demand.tokens)
        self._add(ticket, -1)

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
            self._expiries.clear()
            self._arrivals.clear()
        elif sign < 0:
            # Each may hold leftovers that never surface, behind a class above or a ticket that waits for long.
            kept = len(self._turns) + len(self._expiries) + len(self._arrivals)
            if kept > 6 * self._count + LEFTOVERS_MAX:
                self._sweep(ticket)

    def _sweep(self, leaving: Ticket) -> None:
        """Drop leftovers from both heaps (the leaving ticket's state is about to change)."""
        self._turns = [e for e in self._turns if e[3].state is TicketState.QUEUED and e[3] is not leaving]
        self._expiries = [e for e in self._expiries if e[2].state is TicketState.QUEUED and e[2] is not leaving]
        self._arrivals = deque(t for t in self._arrivals if t.state is TicketState.QUEUED and t is not leaving)
        heapify(self._turns)
        heapify(self._expiries)


def _flow(request: Request) -> Flow:
    return request.flow or request.key, request.priority
