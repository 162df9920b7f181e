"""The way out: the one place that gives a ticket its outcome, and how those that wait are evicted."""

from __future__ import annotations

from forebay.core import verdicts
from forebay.core.admission.fair_share import FairShare
from forebay.core.effects import Effect, Refuse
from forebay.core.events import Observer
from forebay.core.instant import MILLISECOND, SECOND, Instant
from forebay.core.model import BACKPRESSURE, CLOSED, IN_FLIGHT, QUEUED, Refusal, Ticket, Usage
from forebay.core.outcome import EVICTED, EvictReason, Outcome, Reason
from forebay.core.pool import Pool
from forebay.core.quota.path import Path
from forebay.core.shadows import moments


class Exits:
    """Counts outcomes, and what still waits for one in the queues."""

    __slots__ = ("_observer", "outcomes", "queued")

    def __init__(self, observer: Observer) -> None:
        self.outcomes: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.queued = 0
        self._observer = observer

    def close(self, ticket: Ticket, outcome: Outcome, reason: Reason | None, usage: Usage | None, now: Instant) -> None:
        """Give a ticket its outcome, and settle its key."""
        assert ticket.outcome is None, "pipeline: a ticket was given two outcomes"
        ticket.state = CLOSED
        ticket.outcome = outcome
        ticket.reason = reason
        ticket.closed = now
        ticket.usage = usage
        self.outcomes[outcome] += 1
        path: Path = ticket.path
        ran = outcome is not EVICTED
        path.settle(ticket.demand.input_tokens, ticket.paid_output, usage, ticket.arrived, now, ran)
        request = ticket.request
        if ticket.pool.shares:
            done = 0 if usage is None else usage.work
            fair: FairShare = ticket.fair or ticket.pool.fair(request.priority)  # it came before shares were kept
            fair.ended(request.flow or request.key, ticket.demand.work, done, now)
        if ticket.pool.shadows is not None:
            moments.ended(ticket.pool.shadows, ticket, usage, now)
        self._observer.closed(ticket)
        ticket.lease = None  # they refer to each other: broken here, ended requests need no garbage collector

    def leave_queue(self, ticket: Ticket, pool: Pool) -> None:
        """Take out one that waits and will not be served; its outcome is to follow."""
        queue = pool.returning if ticket.gives_way else pool.queue
        queue.remove(ticket)
        self.queued -= 1

    def expire(self, pool: Pool, now: Instant, effects: list[Effect]) -> None:
        """Evict those that have waited as long as they may."""
        while (ticket := pool.queue.expired(now) or pool.returning.expired(now)) is not None:
            self.leave_queue(ticket, pool)
            if ticket.wait_budget_ns and ticket.predicted_wait_ns and not ticket.redispatched:
                waited = max(now - ticket.arrived, ticket.wait_budget_ns + 1)
                pool.forecast.observe(waited, ticket.predicted_wait_ns, ticket.wait_budget_ns, now)
            if pool.shadows is not None:
                moments.expired(pool.shadows, ticket, now)
            self.evict(ticket, EvictReason.EXPIRED, pool, now, effects)

    def evict_all(self, pool: Pool, reason: EvictReason, now: Instant, effects: list[Effect]) -> None:
        """Evict all that wait. Those in backpressure mode may not be dropped for an engine that is away."""
        held: list[Ticket] = []
        while (ticket := pool.queue.head() or pool.returning.head()) is not None:
            self.leave_queue(ticket, pool)
            if reason is EvictReason.NO_ENGINE and ticket.mode is BACKPRESSURE:
                ticket.state = IN_FLIGHT  # out of the heaps while they are walked
                held.append(ticket)
            else:
                self.evict(ticket, reason, pool, now, effects)
        for ticket in sorted(held, key=lambda t: t.sequence):
            ticket.state = QUEUED
            pool.queue.push(ticket)
            self.queued += 1

    def evict(self, ticket: Ticket, reason: EvictReason, pool: Pool, now: Instant, effects: list[Effect]) -> None:
        """End one that has left the queue, or never got back to it, and say when to come back."""
        retry: int | None = 0
        if reason is EvictReason.DRAINING:
            retry = SECOND
        elif reason is EvictReason.NO_ENGINE or not pool.up:
            retry = verdicts.away(pool, pool.serving_from(now), now).retry_after_ns
        refusal = Refusal(reason, retry)
        if reason is EvictReason.EXPIRED:
            limit, waited = ticket.expires - ticket.arrived, now - ticket.arrived
            refusal = Refusal(reason, retry, limit / MILLISECOND, waited / MILLISECOND, "ms of queue wait")
        ticket.refusal = refusal = verdicts.timed(pool, refusal, ticket.request, now)
        if pool.shadows is not None:
            moments.told(pool.shadows, ticket.request, ticket.demand, refusal, now)
        self.close(ticket, EVICTED, reason, None, now)
        effects.append(Refuse(ticket.request, refusal, ticket))
