"""What an engine holds: leases opened and closed once, counted in places and tokens.

An engine whose limit learns also keeps its open leases, counts what they stream, and shows that to the limit every so
often. One with a fixed limit pays for none of it.
"""

from __future__ import annotations

from forebay.core.dispatch.health import UP, Health, HealthConfig, Readiness
from forebay.core.dispatch.others import Others
from forebay.core.dispatch.pressure import MemoryPressure, PressureConfig
from forebay.core.dispatch.ramp import Ramp, RampConfig
from forebay.core.dispatch.slack import Slack
from forebay.core.dispatch.totals import Totals
from forebay.core.dispatch.watch import Watch
from forebay.core.instant import SECOND, Instant
from forebay.core.limits.limit import Answer, Limit
from forebay.core.model import Batch, EngineSignal, Lease, Ticket, Usage

PROMPT_FIRST = 4
"""What a prompt token counts for beside its own place while it is still to be read: it stands before the first token
of whoever comes next, where those of streams under way only make every step a little longer."""

DEFAULT_RAMP, DEFAULT_PRESSURE = RampConfig(), PressureConfig()
OUTPUTS_KEPT = 64
"""Answers over which their mean length is taken."""


class Engine:
    """One engine of a pool, as the core sees it."""

    __slots__ = (
        "_most", "_ramp", "_totals", "_was_away", "_watch", "counts_prompts", "health", "in_flight", "leases", "limit",
        "name", "others", "output_tokens", "place_ns", "places", "prefill_tokens", "pressure", "restrained", "shared",
        "slack", "tokens", "tokens_each", "view_at",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        limit: Limit,
        health: HealthConfig,
        ramp: RampConfig = DEFAULT_RAMP,
        pressure: PressureConfig = DEFAULT_PRESSURE,
        *,
        counts_prompts: bool = False,
        totals: Totals | None = None,
    ) -> None:
        """`counts_prompts`: keep the tokens of prompts that are being prefilled, though its limit does not ask.
        `totals`: those of its pool."""
        self.name = name
        self.limit = limit
        self.health = Health(health)
        self.pressure = MemoryPressure(pressure)
        self.others = Others()
        self.shared = False  # do others send to it, as far as its metrics page says?
        self.tokens_each = 0.0  # of a request, on average over the pool; kept only where engines are shared
        self.restrained = False  # may it hold less than its limit?
        self.counts_prompts = counts_prompts or limit.learns
        self._ramp, self._was_away = Ramp(ramp), False
        self.places = 0  # of the concurrency limit: leases, or batches
        self.place_ns = 0  # ends of their use, less the beginnings: with `places * now` the time that they were in use
        self.in_flight = 0  # leases
        self.tokens = 0  # expected tokens of the leases
        self.prefill_tokens = 0  # prompt tokens of streams whose first token is to come
        self.output_tokens = 0.0  # of an answer, on average; kept for limits that learn
        self.slack = None if limit.slack is None else Slack(limit.slack)
        self.view_at: Instant = 0  # when the limit wants its next view; 0: not while nothing is in flight
        self.leases: dict[Lease, None] = {}  # the open ones
        self._watch = Watch()
        self._totals = totals or Totals()
        self._most = 0  # places of its limit, as counted in the totals
        self.recount()

    def reconfigure(self, ramp: RampConfig, pressure: PressureConfig) -> None:
        """Take other settings; what is under way goes on by them."""
        self._ramp.config, self.pressure.config = ramp, pressure

    def has_room(self, tokens: int, now: Instant, prompt: int | None = None, priority: int = 0) -> bool:
        """May it take this much more? Idle, any single request. `prompt`: tokens to be read; None asks no streams."""
        limit = self.limit
        health = self.health
        if self.places >= limit.requests or health.readiness is not UP or health.ejected_until > now:
            return False
        if self.restrained and self.places >= self.window(now):
            return False
        if not self.places:
            return True
        within = self.tokens + tokens <= limit.tokens and self.prefill_tokens < limit.prefill_tokens
        return within and (prompt is None or self.slack is None or self.leaves(0.0, prompt, priority, now))

    def leaves(self, share: float, prompt: int, priority: int, now: Instant) -> bool:
        """Can its streams of that priority and above spare a prompt's time, and a share of an average answer's too?"""
        slack, limit = self.slack, self.limit
        if slack is None or not slack.asked(limit.gap_ns, self.places) or limit.prefill_rate <= 0.0:
            return True
        more_ns = int(share * self.output_tokens * slack.config.objective_ns)
        prompts_ns = (self.prefill_tokens + slack.fair_size(prompt)) / limit.prefill_rate
        return slack.spares(prompts_ns, more_ns, priority, self.leases, now)

    def window(self, now: Instant) -> int:
        """Places that it may hold now: those of its limit, or fewer while it is restrained; never none."""
        limit = self.limit.requests
        if not self.restrained:
            return limit
        places = int(limit * self.pressure.factor)
        if self._ramp.active:
            places = min(places, self._ramp.places(limit, now, on_trial=self.health.ejected_until > 0))
        self.restrained = self._ramp.active or self.pressure.factor < 1.0
        return max(1, places)

    def grows_at(self, now: Instant) -> Instant | None:
        """When time alone gives it another place."""
        return self._ramp.grows_at(self.limit.requests, now) if self.restrained else None

    def load(self, now: Instant) -> float:
        """Work before it, in tokens: those it holds of ours, prompts that are to be read first for more, and what is
        known of others'."""
        ours = self.tokens + PROMPT_FIRST * self.prefill_tokens
        return ours + self.others.requests(now) * self.tokens_each if self.shared else ours

    def open(self, ticket: Ticket, batch: Batch | None, now: Instant) -> Lease:
        """Give the ticket a lease. For a batch, the first one takes the place."""
        lease = Lease(ticket, self, ticket.demand.tokens, now, batch)
        if batch is None or batch.open == 0:
            self.places += 1
            self.place_ns -= now
            if self.places == self._most:
                self._totals.below_limit -= 1
        if batch is not None:
            batch.open += 1
        self.in_flight += 1
        self._totals.in_flight += 1
        self.tokens += lease.tokens
        if self.counts_prompts and ticket.request.stream:
            if not self.prefill_tokens:
                self._watch.prefill_since = now
            self.prefill_tokens += ticket.demand.input_tokens
        self.leases[lease] = None
        if self.limit.learns:
            self._opened(ticket.demand.input_tokens, now)
        return lease

    def close(self, lease: Lease, now: Instant) -> None:
        """End a lease, once."""
        assert lease.open, "dispatch: a lease was closed twice"
        ticket = lease.ticket
        if self.counts_prompts and ticket.request.stream and not ticket.first_token:
            self._end_prefill(ticket, now)
        if self.limit.learns:
            self._watch.count(lease, now)
        del self.leases[lease]
        if not self.leases:
            self.view_at = self._watch.prefilled = 0  # an idle engine asks for no timer; the next lease begins anew
        lease.open = False
        self.in_flight -= 1
        self._totals.in_flight -= 1
        self.tokens -= lease.tokens
        batch = lease.batch
        if batch is not None:
            batch.open -= 1
        if batch is None or not batch.open:
            if self.places == self._most:
                self._totals.below_limit += 1
            self.places -= 1
            self.place_ns += now
        assert self.places >= 0, "dispatch: more leases ended than were opened"

    def began(self, lease: Lease, now: Instant) -> None:
        """The first token of a stream came."""
        if lease.open and not lease.ticket.first_token:
            lease.ticket.first_token = now
            if self.counts_prompts and lease.ticket.request.stream:
                self._watch.prefilled += lease.ticket.demand.input_tokens
                self._end_prefill(lease.ticket, now)
            if self.slack is not None:
                self.slack.changed()
            if self.restrained:
                self._ramp.answered()

    # ---- what is heard of it ---------------------------------------------------------------------------------

    def succeeded(self) -> None:
        """A request was answered as it should."""
        self.health.succeeded()
        if self.restrained:
            self._ramp.answered()

    def failed(self, lease: Lease, now: Instant, *, lost: bool = False) -> None:
        """A request failed in a way that speaks against it; `lost` while it worked on it, which its limit is told."""
        if self.health.failed(lease.opened, now):
            self._ramp.ejected(self.health.ejected_until)
            self.restrained = True
        if lost:
            self.limit.failed(now)
            self.recount()

    def came(self, now: Instant) -> bool:
        """A probe found it up. Was it not, before?"""
        if self.health.readiness is UP:
            return False
        self.health.readiness = UP
        self.limit.restarted(now)
        self.recount()
        if self._was_away:
            self._ramp.returned(self.limit.requests, now)
            self.restrained = self._ramp.active or self.pressure.factor < 1.0
        return True

    def went(self, *, warming: bool) -> None:
        """Nobody is there, or somebody who is not ready yet."""
        self._was_away = True
        self.others.forget()
        if warming:
            self.health.readiness = Readiness.WARMING
        else:
            self.health.gone()

    def signalled(self, signal: EngineSignal, now: Instant) -> None:
        """What it says of itself."""
        if signal.running is not None:
            self.others.read(signal.running + (signal.waiting or 0), self.in_flight, now)
        self.limit.signalled(signal, self.in_flight, now)
        self.recount()

    def memory_read(self, share: float | None, now: Instant) -> None:
        """So much of its GPUs' memory is used, 0 to 1; None: it is not known."""
        self.pressure.read(share, now)
        if self.pressure.factor < 1.0:
            self.restrained = True

    # ---- for limits that learn -------------------------------------------------------------------------------

    def answered(self, lease: Lease, usage: Usage | None, now: Instant) -> None:
        """A lease is about to end with a proper answer."""
        first = lease.ticket.first_token
        if usage is not None and usage.output_tokens > 0:
            mean = self.output_tokens
            self.output_tokens = mean + (usage.output_tokens - mean) / OUTPUTS_KEPT if mean else usage.output_tokens
        self.limit.answered(
            Answer(
                now - lease.opened,
                first - lease.opened if first else 0,
                0 if usage is None else usage.output_tokens,
                self.in_flight,
            ),
            now,
        )
        self.recount()

    def capacity(self, first_ns: int) -> float:
        """Requests per second with every place taken, at the pace of now; 0.0 when that is not known."""
        held_ns = first_ns + self.output_tokens * self.limit.gap_ns
        return self.limit.requests * SECOND / held_ns if self.output_tokens and self.limit.gap_ns else 0.0

    def show(self, waiting: bool, now: Instant) -> None:
        """Let the limit see what the engine holds."""
        kept_out = self.slack is not None and self.slack.take_kept_out()
        seen = self._watch.view(self.leases, self.prefill_tokens, self.tokens, now)
        view = seen._replace(waiting=waiting, restrained=self.restrained, kept_out=kept_out)
        self.view_at = now + self.limit.interval_ns if self.in_flight else 0
        self.limit.viewed(view, now)
        self.recount()

    def recount(self) -> None:
        """Its limit may have moved: the totals follow."""
        before, most = self._most, self.limit.requests
        if most != before:
            self._most, totals, places = most, self._totals, self.places
            totals.places += most - before
            totals.below_limit += (places < most) - (places < before)

    def relimit(self, limit: Limit, now: Instant) -> None:
        """Go by another limit, which may want to be told more than the old one."""
        before, self.limit = self.limit, limit
        self.slack = None if limit.slack is None else Slack(limit.slack)
        self.recount()
        if limit.learns and not self.counts_prompts:
            self.counts_prompts, self._watch.prefill_since = True, now
            coming = [ticket for ticket in (lease.ticket for lease in self.leases) if not ticket.first_token]
            self.prefill_tokens = sum(t.demand.input_tokens for t in coming if t.request.stream)
        if limit.learns and not before.learns:
            self._watch.begin(self.in_flight, now)
            for lease in self.leases:
                lease.counted = max(1, lease.generated)
        if limit.interval_ns != before.interval_ns:
            self.view_at = now + limit.interval_ns if self.leases and limit.interval_ns else 0

    def _opened(self, prompt: int, now: Instant) -> None:
        if self.slack is not None:
            self.slack.opened(prompt)
        self._watch.in_flight_most = max(self._watch.in_flight_most, self.in_flight)
        if not self.view_at and self.limit.interval_ns:
            self._watch.seen_at = now
            self.view_at = now + self.limit.interval_ns

    def _end_prefill(self, ticket: Ticket, now: Instant) -> None:
        self.prefill_tokens -= ticket.demand.input_tokens
        if not self.prefill_tokens:
            self._watch.prefilling_ns += now - self._watch.prefill_since
