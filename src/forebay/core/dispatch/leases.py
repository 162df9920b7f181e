"""What an engine holds: leases opened and closed once, counted in places and tokens."""

from __future__ import annotations

from forebay.core.dispatch.health import Health, HealthConfig
from forebay.core.instant import Instant
from forebay.core.limits.limit import Limit
from forebay.core.model import Batch, Lease, Ticket


class Engine:
    """One engine of a pool, as the core sees it."""

    __slots__ = ("health", "in_flight", "limit", "name", "places", "tokens")

    def __init__(self, name: str, limit: Limit, health: HealthConfig) -> None:
        self.name = name
        self.limit = limit
        self.health = Health(health)
        self.places = 0  # of the concurrency limit: leases, or batches
        self.in_flight = 0  # leases
        self.tokens = 0  # expected tokens of the leases

    def has_room(self, tokens: int, now: Instant) -> bool:
        """May it take this much more? An idle engine takes any single request, however large."""
        if self.places >= self.limit.requests or not self.health.available(now):
            return False
        return not self.places or self.tokens + tokens <= self.limit.tokens

    def open(self, ticket: Ticket, batch: Batch | None, now: Instant) -> Lease:
        """Give the ticket a lease. For a batch, the first one takes the place."""
        lease = Lease(ticket, self, ticket.demand.tokens, now, batch)
        if batch is None or batch.open == 0:
            self.places += 1
        if batch is not None:
            batch.open += 1
        self.in_flight += 1
        self.tokens += lease.tokens
        if self.health.ejected_until:
            self.health.dispatched()
        return lease

    def close(self, lease: Lease, now: Instant) -> None:
        """End a lease, once."""
        assert lease.open, "dispatch: a lease was closed twice"
        lease.open = False
        self.in_flight -= 1
        self.tokens -= lease.tokens
        batch = lease.batch
        if batch is not None:
            batch.open -= 1
        if batch is None or not batch.open:
            self.places -= 1
        assert self.places >= 0, "dispatch: more leases ended than were opened"
        self.limit.released(now - lease.opened, self.in_flight, now)
