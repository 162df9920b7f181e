"""What an engine holds: leases opened and closed once, counted in places and tokens.

An engine whose limit learns also keeps its open leases, counts what they stream, and shows that to the limit every so
often. One with a fixed limit pays for none of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from forebay.core.dispatch.health import Health, HealthConfig
from forebay.core.instant import Instant
from forebay.core.limits.limit import Answer, Limit, View
from forebay.core.model import Batch, Lease, Ticket, Usage


class Engine:
    """One engine of a pool, as the core sees it."""

    __slots__ = (
        "_decoding_ns",
        "_generated",
        "_in_flight_most",
        "_leases",
        "_prefill_since",
        "_prefilled",
        "_prefilling_ns",
        "_seen_at",
        "health",
        "in_flight",
        "limit",
        "name",
        "places",
        "prefill_tokens",
        "tokens",
        "view_at",
    )

    def __init__(self, name: str, limit: Limit, health: HealthConfig) -> None:
        self.name = name
        self.limit = limit
        self.health = Health(health)
        self.places = 0  # of the concurrency limit: leases, or batches
        self.in_flight = 0  # leases
        self.tokens = 0  # expected tokens of the leases
        self.prefill_tokens = 0  # prompt tokens of streams whose first token is to come; kept for limits that learn
        self.view_at: Instant = 0  # when the limit wants its next view; 0: not while nothing is in flight
        self._leases: dict[Lease, None] = {}
        self._seen_at: Instant = 0
        self._in_flight_most = self._decoding_ns = self._generated = self._prefilled = self._prefilling_ns = 0
        self._prefill_since: Instant = 0  # when the first of the prompts that are being prefilled came

    def has_room(self, tokens: int, now: Instant) -> bool:
        """May it take this much more? An idle engine takes any single request, however large."""
        limit = self.limit
        if self.places >= limit.requests or not self.health.available(now):
            return False
        if not self.places:
            return True
        return self.tokens + tokens <= limit.tokens and self.prefill_tokens < limit.prefill_tokens

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
        if self.limit.learns:
            self._watch(lease, now)
        return lease

    def close(self, lease: Lease, now: Instant) -> None:
        """End a lease, once."""
        assert lease.open, "dispatch: a lease was closed twice"
        if self.limit.learns:
            self._unwatch(lease, now)
        lease.open = False
        self.in_flight -= 1
        self.tokens -= lease.tokens
        batch = lease.batch
        if batch is not None:
            batch.open -= 1
        if batch is None or not batch.open:
            self.places -= 1
        assert self.places >= 0, "dispatch: more leases ended than were opened"

    def began(self, lease: Lease, now: Instant) -> None:
        """The first token of a stream came."""
        if lease.open and not lease.ticket.first_token:
            lease.ticket.first_token = now
            if self.limit.learns and lease.ticket.request.stream:
                self._prefilled += lease.ticket.demand.input_tokens
                self._end_prefill(lease.ticket, now)

    @property
    def leases(self) -> Iterable[Lease]:
        """The open ones, of an engine whose limit learns."""
        return self._leases

    # ---- for limits that learn -------------------------------------------------------------------------------

    def answered(self, lease: Lease, usage: Usage | None, now: Instant) -> None:
        """A lease is about to end with a proper answer."""
        first = lease.ticket.first_token
        self.limit.answered(
            Answer(
                now - lease.opened,
                first - lease.opened if first else 0,
                0 if usage is None else usage.output_tokens,
                self.in_flight,
            ),
            now,
        )

    def show(self, waiting: bool, now: Instant) -> None:
        """Let the limit see what the engine holds."""
        for lease in self._leases:
            self._count(lease, now)
        view = View(
            now - self._seen_at,
            self.in_flight,
            self._in_flight_most,
            waiting,
            self._decoding_ns,
            self._generated,
            self._prefilled,
            self._prefilling_ns + (now - self._prefill_since if self.prefill_tokens else 0),
            self.prefill_tokens,
            self.tokens,
            self._peak_tokens(),
        )
        self._seen_at = now
        self._in_flight_most = self.in_flight
        self._decoding_ns = self._generated = self._prefilled = self._prefilling_ns = 0
        self._prefill_since = now
        self.view_at = now + self.limit.interval_ns if self.in_flight else 0
        self.limit.viewed(view, now)

    def _watch(self, lease: Lease, now: Instant) -> None:
        self._leases[lease] = None
        if lease.ticket.request.stream:
            if not self.prefill_tokens:
                self._prefill_since = now
            self.prefill_tokens += lease.ticket.demand.input_tokens
        if self.in_flight > self._in_flight_most:
            self._in_flight_most = self.in_flight
        if not self.view_at and self.limit.interval_ns:
            self._seen_at = now
            self.view_at = now + self.limit.interval_ns

    def _unwatch(self, lease: Lease, now: Instant) -> None:
        self._count(lease, now)
        del self._leases[lease]
        ticket = lease.ticket
        if ticket.request.stream and not ticket.first_token:
            self._end_prefill(ticket, now)
        if not self._leases:
            self.view_at = self._prefilled = 0  # an idle engine asks for no timer; the next lease begins anew

    def _end_prefill(self, ticket: Ticket, now: Instant) -> None:
        self.prefill_tokens -= ticket.demand.input_tokens
        if not self.prefill_tokens:
            self._prefilling_ns += now - self._prefill_since

    def _count(self, lease: Lease, now: Instant) -> None:
        """Take in what a lease streamed since it was last counted, and the time that it streamed."""
        first = lease.ticket.first_token
        if first and lease.generated:
            self._decoding_ns += now - (first if first > self._seen_at else self._seen_at)
            self._generated += lease.generated - lease.counted
            lease.counted = lease.generated

    def _peak_tokens(self) -> int:
        """Most tokens that the open leases will have in the engine's memory at one time, were no other to join.

        With the leases by what they still have to write, the longest first, the memory is fullest just as one of them
        ends: all that are longer hold what they have now and as much again as that one had left.
        """
        rest = []
        for lease in self._leases:
            demand = lease.ticket.demand
            # A stream that outlived its estimate is expected to go on for a while: lengths have heavy tails.
            left = max(demand.output_tokens - lease.generated, lease.generated // 4, 1)
            rest.append((left, demand.input_tokens + lease.generated))
        rest.sort(reverse=True)
        peak = held = 0
        for number, (left, now_tokens) in enumerate(rest, start=1):
            held += now_tokens
            if held + number * left > peak:
                peak = held + number * left
        return peak
