"""The corridor: every request passes the rooms in this order, and this file is the only place that knows it.

    quota ▶ admission ▶ queueing ▶ batching ▶ dispatch

Everything is synchronous. `offer` asks every room for its verdict before it changes anything (check all, then charge
all), so a refusal costs nothing anywhere and no lock is needed. What must be done outside is returned as effects.
Invariants (docs/invariants.md) are asserted here: offered = outcomes + queued + in flight, one outcome per ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from forebay.core import depths, picture, returning, verdicts
from forebay.core.admission.estimate import DemandEstimator, EstimateConfig
from forebay.core.admission.forecast import Outlook
from forebay.core.dispatch.leases import Engine
from forebay.core.effects import Abort, Dispatch, Effect, Queued, Refuse
from forebay.core.events import (
    EngineDown,
    EngineUp,
    EngineWarming,
    Event,
    Failed,
    Finished,
    FirstToken,
    MemoryRead,
    Observer,
    Signalled,
    Undelivered,
)
from forebay.core.exits import Exits
from forebay.core.instant import FOREVER, MILLISECOND, SECOND, Chance, Instant
from forebay.core.limits.limit import UNBOUNDED
from forebay.core.model import (
    BACKPRESSURE,
    CLOSED,
    HYBRID,
    IN_FLIGHT,
    QUEUED,
    Batch,
    Demand,
    Lease,
    Refusal,
    Request,
    Ticket,
    Usage,
)
from forebay.core.outcome import COMPLETED, QUEUE_WAIT, SHED, EvictReason, Outcome, ShedReason
from forebay.core.pool import Pool, PoolConfig
from forebay.core.quota.budget import KeyBudget, Quota
from forebay.core.quota.path import FRAME_EVENTS, FREE, Path, Prices
from forebay.core.quota.terms import KeyLimits, KeyTerms, OverBudget
from forebay.core.shadows import moments, reload
from forebay.core.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """All rooms."""

    pools: tuple[PoolConfig, ...]
    keys: dict[str, KeyTerms] = field(default_factory=dict)
    groups: dict[str, KeyLimits] = field(default_factory=dict)  # team:NAME, class:NAME, all
    over_budget: OverBudget = OverBudget.DEBT
    estimate: EstimateConfig = field(default_factory=EstimateConfig)


class Pipeline:
    """The decision state of one gateway. One owner, one thread; see the module for the rules."""

    def __init__(self, config: PipelineConfig, chance: Chance, observer: Observer) -> None:
        self.pools = tuple(Pool(pool, chance) for pool in config.pools)
        self.estimator = DemandEstimator(config.estimate)
        self.draining = False
        self.offered = 0
        self._exits = Exits(observer)
        self.outcomes = self._exits.outcomes
        self._observer = observer
        self.quota = Quota(config.keys, config.groups)
        self._budgets = self.quota.budgets
        self.over_budget = config.over_budget
        self._engines = {e.name: (pool, e) for pool in self.pools for e in pool.engines}
        self._by_model = {model: pool for pool in reversed(self.pools) for model in pool.config.models}
        self.learning = tuple((pool, engine) for pool in self.pools for engine in pool.learning)
        self.tune_at: Instant = FOREVER  # when the tuner of a pool looks next
        self._in_flight = 0
        self.asks_prefixes = False
        self.on_admitted: Callable[[Ticket, Instant], None] | None = None  # told while the pool is as it was decided in
        for pool in self.pools:
            pool.shadows = reload.build(pool)
        self._look_at_balancers()

    # ---- what a driver may ask -------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Tickets that wait, in all pools."""
        return self._exits.queued

    def pool_for(self, model: str) -> Pool | None:
        """The pool that serves a model, or None."""
        return self._by_model.get(model) or self._by_model.get("*")

    def screen(self, request: Request, now: Instant) -> Refuse | None:
        """The verdict on a request whose body is not here yet, from its declared size. Passing charges nothing.

        A refusal is final and counted; a request that passes must be offered once its body is whole.
        """
        pool = self._pool(request)
        path = self.budget(request.key).path_for(request.model)
        demand = self.estimator.estimate(request)
        verdict = self._verdict(request, demand, path, path.prices(demand), pool, now)
        return self._shed(request, demand, verdict, pool, now) if isinstance(verdict, Refusal) else None

    def offer(self, request: Request, now: Instant) -> list[Effect]:
        """Decide a request: refuse it, dispatch it, or queue it."""
        by_model, key = self._by_model, request.key
        pool = by_model.get(request.model) or by_model["*"]
        budget = self._budgets.get(key) or self.quota.budget(key)
        path = budget.path if budget.models is None else budget.path_for(request.model)
        demand = self.estimator.estimate(request)
        prices = path.prices(demand) if path.limited else FREE
        verdict = self._verdict(request, demand, path, prices, pool, now)
        if isinstance(verdict, Refusal):
            return [self._shed(request, demand, verdict, pool, now)]
        self.offered += 1
        if request.holds_place:
            verdicts.take_place(pool, request, now)
        if request.retries:
            verdicts.pay_retry(pool, request, now, holds=request.holds_place)
        paid = path.charge(prices, now)
        ticket = Ticket(request, demand, pool, self.offered, now, request.mode or pool.mode, path, paid)
        if request.retries and isinstance(verdict, Outlook):
            ticket.gives_way = verdict.gives_way
        if pool.shadows is not None:
            moments.admitted(pool.shadows, ticket, verdict, now)
        if self.on_admitted is not None:
            self.on_admitted(ticket, now)
        if pool.tuning.resting:
            self.tune_at = min(self.tune_at, depths.begin(pool, now))
        pool.returns.admitted(request.retries, now)
        turn: float | None = None
        if pool.shares and (fair := pool.fair(request.priority)) is not None:
            ticket.fair = fair
            turn = fair.admitted(request.flow or key, request.weight, demand.work, now)
        if isinstance(verdict, Outlook):
            return self._enqueue(ticket, verdict, pool, turn, now)
        if pool.single:
            return [Dispatch((self._dispatch(ticket, verdict, None, now),))]
        ahead = verdicts.outlook(pool, pool.forecast, request, ticket.mode, pool.queue.waiting + 1, now)
        return self._enqueue(ticket, ahead, pool, turn, now)

    def cancel(self, ticket: Ticket, now: Instant, usage: Usage | None = None) -> list[Effect]:
        """The client left; `usage` is what was generated for it. Cancelling a closed ticket does nothing."""
        if ticket.state is CLOSED:
            return []
        pool: Pool = ticket.pool
        if ticket.state is QUEUED:
            self._exits.leave_queue(ticket, pool)
            self._exits.close(ticket, Outcome.CANCELLED, None, None, now)
            effects: list[Effect] = []
            self._pump(pool, now, effects)  # behind it one may wait that fits
            return effects
        lease = ticket.lease
        assert lease is not None
        self._end_lease(lease, pool, now)
        self._exits.close(ticket, Outcome.CANCELLED, None, usage, now)
        effects = [Abort(lease)]
        self._pump(pool, now, effects)
        return effects

    def report(self, event: Event, now: Instant) -> list[Effect]:
        """Take in what happened outside. Reports on a closed lease are late and change nothing."""
        if isinstance(event, Finished):
            return self._finished(event, now)
        if isinstance(event, FirstToken):
            return self._began(event.lease, now)
        if isinstance(event, Failed):
            return self._failed(event, now)
        if isinstance(event, Undelivered):
            return self._undelivered(event, now)
        if isinstance(event, Signalled):
            pool, engine = self._engines[event.engine]
            pool.signalled(engine, event.signal, now)
            return []
        if isinstance(event, MemoryRead):
            pool, engine = self._engines[event.engine]
            engine.memory_read(event.share, now)
            effects: list[Effect] = []
            self._pump(pool, now, effects)
            return effects
        return self._engine_changed(event, now)

    def meter(self, lease: Lease, now: Instant) -> int:
        """Debit what a stream generated beyond what its key has paid for; to be called when it has.

        Returns for how long the driver must not read on, in ns: 0 for not at all, FOREVER when the stream has to end.
        """
        ticket = lease.ticket
        excess = lease.generated - FRAME_EVENTS - ticket.paid_output
        if excess <= 0 or not lease.open:
            return 0
        ticket.paid_output += excess
        path: Path = ticket.path
        return path.meter(excess, ticket.arrived, self.over_budget, now)

    def poll(self, now: Instant) -> list[Effect]:
        """Do what the passing of time asks for: expire, let batches leave, try ejected engines."""
        effects: list[Effect] = []
        if self.tune_at <= now:
            self.tune_at = depths.look(self.pools, now)
        for pool, engine in self.learning:
            if 0 < engine.view_at <= now:
                engine.show(pool.waiting > 0, now)
            if (slack := engine.slack) is not None and slack.short and slack.look_at <= now and pool.waiting:
                slack.look(engine.leases, now)  # somebody waits for just that
        for pool in self.pools:
            if pool.waiting:
                self._exits.expire(pool, now, effects)
                self._pump(pool, now, effects)
        return effects

    def next_wakeup(self, now: Instant) -> Instant | None:
        """When `poll` must be called, unless something else happens first."""
        soonest: Instant | None = self.tune_at if self.tune_at < FOREVER else None
        for _, engine in self.learning:
            if engine.view_at and (soonest is None or engine.view_at < soonest):
                soonest = engine.view_at
        if not self._exits.queued:
            return soonest
        for pool in self.pools:
            if pool.waiting:
                for at in pool.wakeups(now):
                    if soonest is None or at < soonest:
                        soonest = at
        return soonest

    def drain(self, now: Instant) -> list[Effect]:
        """Admit nothing more; what was admitted goes on."""
        self.draining = True
        return self.poll(now)

    def abandon(self, now: Instant) -> list[Effect]:
        """The drain's time is up: evict whatever still waits. The driver aborts what is in flight."""
        effects: list[Effect] = []
        for pool in self.pools:
            self._exits.evict_all(pool, EvictReason.DRAINING, now, effects)
        return effects

    def reconfigure(self, config: PipelineConfig, now: Instant) -> list[Effect]:
        """Take other settings for the same pools and engines: nothing that waits or runs is lost, no bucket refilled.
        Raises ValueError, with nothing changed, when a pool, an engine or the batching differs."""
        for pool, wanted in zip(self.pools, config.pools, strict=True):
            pool.check_reconfigurable(wanted)
        self.over_budget = config.over_budget
        self.estimator.reconfigure(config.estimate)
        self.quota.reconfigure(config.keys, config.groups, now)
        effects: list[Effect] = []
        for pool, wanted in zip(self.pools, config.pools, strict=True):
            reload.reconfigure(pool, wanted, now)
            self._pump(pool, now, effects)
        self._look_at_balancers()
        self.learning = tuple((pool, engine) for pool in self.pools for engine in pool.learning)
        self.tune_at = min((pool.tuning.due for pool in self.pools), default=FOREVER)
        return effects

    def budget(self, key: str) -> KeyBudget:
        """The state of a key's limits."""
        return self._budgets.get(key) or self.quota.budget(key)

    def snapshot(self, now: Instant) -> Snapshot:
        """A frozen picture; the conservation equation is checked while it is taken."""
        ended = sum(self.outcomes.values())
        assert self.offered == ended + self._exits.queued + self._in_flight, (
            "pipeline: requests were lost or counted twice"
        )
        return Snapshot(
            draining=self.draining,
            offered=self.offered,
            outcomes={outcome.value: count for outcome, count in self.outcomes.items()},
            queued=self._exits.queued,
            in_flight=self._in_flight,
            keys=len(self._budgets),
            pools=tuple(picture.of_pool(pool, now) for pool in self.pools),
        )

    # ---- the verdict: quota, then admission; nothing is charged ----------------------------------------------

    def _verdict(
        self, request: Request, demand: Demand, path: Path, prices: Prices, pool: Pool, now: Instant
    ) -> Refusal | Engine | Outlook:
        """The refusal, or the engine that would take the request at once, or, when it may wait, what to expect."""
        if self.draining:
            return Refusal(ShedReason.DRAINING, SECOND)
        if path.limited and (refusal := path.check(prices, pool.forecast.service_ns, now)) is not None:
            return refusal
        holds = request.holds_place and verdicts.holds_place(pool, now)
        if request.retries and not holds and not verdicts.may_retry(pool, request, now):
            return Refusal(ShedReason.RETRY_BUDGET, None)
        queue = pool.queue
        waiting = queue.waiting
        engine: Engine | None = None
        if waiting < pool.batcher.max_size:
            forming = queue.tokens + demand.tokens
            if not waiting or forming <= pool.batcher.max_tokens:
                engine = pool.room(request, forming, demand.input_tokens, now)
        mode = request.mode or pool.mode
        shares = pool.shares and not holds and mode is not BACKPRESSURE
        if shares and (fair := pool.fair(request.priority)) is not None:
            excess_ns = fair.excess_ns(request.flow or request.key, request.weight, now)
            if excess_ns and (
                engine is None
                or waiting
                or pool.free(now) <= fair.reserve(pool.places)
                or not engine.leaves(fair.reserve_share(pool.places), demand.input_tokens, request.priority, now)
            ):
                return Refusal(ShedReason.KEY_SHARE, excess_ns)
        if request.retries and not holds and returning.gives_way(pool, request, mode, now):
            return returning.verdict(pool, request, demand, now)
        if engine is not None and not pool.held_back(request, now):
            return engine  # it leaves at once, or with the batch that is forming
        if mode is not BACKPRESSURE:
            serving_from = pool.serving_from(now)
            if serving_from is None or serving_from > now:
                if serving_from is not None or not verdicts.waits_for_warmup(
                    pool, pool.config.waiting_room, request, now
                ):
                    return verdicts.away(pool, serving_from, now)
                mode = BACKPRESSURE
        if holds:
            mode = BACKPRESSURE  # it was promised a place: it may wait for it, whatever is predicted
        line = pool.returning
        tokens, size = queue.tokens + line.tokens, queue.bytes + line.bytes
        full = waiting >= pool.depth.depth_limit
        places = pool.depth.depth_limit - 1 if full and verdicts.makes_way(pool, request, mode) else waiting
        refusal = pool.depth.check(request, demand, mode, waiting=places, tokens=tokens, size=size)
        return refusal or verdicts.wait_verdict(pool, pool.forecast, request, demand, mode, now)

    # ---- the changes -----------------------------------------------------------------------------------------

    def _look_at_balancers(self) -> None:
        """Does any of them want to know how a prompt begins?"""
        self.asks_prefixes = any(pool.prefix_bytes for pool in self.pools)

    def _pool(self, request: Request) -> Pool:
        pool = self._by_model.get(request.model) or self._by_model.get("*")
        assert pool is not None, "pipeline: offered a request for a model that no pool serves"
        return pool

    def _shed(self, request: Request, demand: Demand, refusal: Refusal, pool: Pool, now: Instant) -> Refuse:
        self.offered += 1
        self.outcomes[SHED] += 1
        if request.retries and refusal.reason in verdicts.LOOKED_AT:
            holds = request.holds_place and verdicts.holds_place(pool, now)
            verdicts.pay_retry(pool, request, now, holds=holds)
        if pool.shadows is None:
            refusal = verdicts.timed(pool, refusal, request, now)
        else:
            refusal = moments.refused(pool, request, demand, refusal, now)
        predicted = int(refusal.actual * MILLISECOND) if refusal.reason is QUEUE_WAIT else 0
        self._observer.shed(request, refusal, predicted)
        return Refuse(request, refusal)

    def _line_up(self, ticket: Ticket, ahead: Outlook, pool: Pool, now: Instant) -> list[Effect]:
        """It came back, and waits for what new requests leave."""
        ticket.met_queue = True
        ticket.wait_budget_ns = ahead.budget_ns
        ticket.expires = now + ahead.budget_ns
        pool.returning.push(ticket)
        self._exits.queued += 1
        return [Queued(ticket)]

    def _enqueue(self, ticket: Ticket, ahead: Outlook, pool: Pool, turn: float | None, now: Instant) -> list[Effect]:
        if ahead.gives_way:
            return self._line_up(ticket, ahead, pool, now)
        request, hold = ticket.request, pool.config.hold_ns
        ticket.predicted_wait_ns = ahead.predicted_ns
        ticket.met_queue = True
        if pool.floor is not None:
            pool.floor.above(request.priority)
        ticket.band = pool.band(request.priority)
        if request.holds_place and pool.up:
            ticket.band += verdicts.AHEAD  # and it waits in its own mode for as long as anything is held
        elif ahead.mode is HYBRID:
            # The linger of a forming batch is the operator's wish, not the engine's lateness.
            hold = ticket.wait_budget_ns = ahead.budget_ns + pool.batcher.linger_ns
        elif ahead.mode is not ticket.mode:  # it has a place in the waiting room
            ticket.mode, hold = ahead.mode, pool.config.waiting_room.hold_ns
        expires, deadline, patience = now + hold, request.deadline, request.patience
        if deadline is not None and deadline < expires:
            expires = deadline
        ticket.expires = expires if patience is None or patience > expires else patience
        pool.queue.push(ticket, turn)
        self._exits.queued += 1
        effects: list[Effect] = [Queued(ticket)]
        self._pump(pool, now, effects)
        for tuning in pool.tuning.looking:
            tuning.waited(pool.queue.waiting)
        if ticket.state is QUEUED and ticket.mode is HYBRID:
            if len(effects) > 1 or request.holds_place:  # some have left the line meanwhile; it had no budget
                ahead = verdicts.outlook(pool, pool.forecast, request, ticket.mode, pool.queue.waiting, now)
            if (victim := verdicts.displaced(pool, ticket, ahead)) is not None:
                self._exits.leave_queue(victim, pool)
                self._exits.evict(victim, EvictReason.DISPLACED, pool, now, effects)
        return effects

    def _dispatch(self, ticket: Ticket, engine: Engine, batch: Batch | None, now: Instant) -> Lease:
        ticket.state = IN_FLIGHT
        ticket.dispatched = now
        lease = ticket.lease = engine.open(ticket, batch, now)
        self._in_flight += 1
        pool: Pool = ticket.pool
        if pool.floor is not None:
            pool.floor.served(ticket.request.priority)
        if ticket.wait_budget_ns and ticket.predicted_wait_ns and not ticket.redispatched:
            waited = now - ticket.arrived
            pool.forecast.observe(waited, ticket.predicted_wait_ns, ticket.wait_budget_ns, now)
        return lease

    def _pump(self, pool: Pool, now: Instant, effects: list[Effect]) -> None:
        """Dispatch from the queue for as long as an engine has room and the batcher lets go."""
        queue = pool.queue
        while queue.waiting:
            self._exits.expire(pool, now, effects)
            if (head := queue.head()) is None:
                return
            engine = pool.room(head.request, head.demand.tokens, head.demand.input_tokens, now)
            if engine is None or pool.batch_leaves_at(now) > now or pool.held_back(head.request, now):
                return
            if pool.single:
                queue.pop(now)
                self._exits.queued -= 1
                if pool.shadows is not None:
                    moments.turned(pool.shadows, head, engine, now)
                effects.append(Dispatch((self._dispatch(head, engine, None, now),)))
            else:
                effects.append(Dispatch(tuple(self._dispatch_batch(pool, engine, now))))
        if pool.returning.waiting:
            self._take_returns(pool, now, effects)

    def _take_returns(self, pool: Pool, now: Instant, effects: list[Effect]) -> None:
        """Dispatch those who came back for as long as new requests leave something."""
        line = pool.returning
        while line.waiting:
            self._exits.expire(pool, now, effects)
            head = line.head()
            engine = None if head is None else returning.spare(pool, head.request, head.demand, now)
            if head is None or engine is None:
                return
            line.pop(now)
            self._exits.queued -= 1
            if pool.shadows is not None:
                moments.turned(pool.shadows, head, engine, now)
            effects.append(Dispatch((self._dispatch(head, engine, None, now),)))

    def _dispatch_batch(self, pool: Pool, engine: Engine, now: Instant) -> Iterable[Lease]:
        queue, batcher = pool.queue, pool.batcher
        batch = Batch(0, 0)
        tokens = 0
        while batch.size < batcher.max_size:
            head = queue.head()
            if head is None:
                return
            more = head.demand.tokens
            if batch.size and (tokens + more > batcher.max_tokens or engine.tokens + more > engine.limit.tokens):
                return
            queue.pop(now)
            self._exits.queued -= 1
            if pool.shadows is not None:
                moments.turned(pool.shadows, head, engine, now, led=batch.size > 0)
            batch.size += 1
            tokens += more
            yield self._dispatch(head, engine, batch, now)

    def _began(self, lease: Lease, now: Instant) -> list[Effect]:
        if not lease.open:
            return []
        lease.engine.began(lease, now)
        pool: Pool = lease.ticket.pool
        pool.forecast.began(now - lease.opened)
        effects: list[Effect] = []
        if self._exits.queued and (lease.engine.limit.prefill_tokens < UNBOUNDED or lease.engine.restrained):
            self._pump(pool, now, effects)  # its prompt stands in nobody's way any more
        return effects

    def _finished(self, event: Finished, now: Instant) -> list[Effect]:
        lease = event.lease
        if not lease.open:
            return []
        ticket, usage = lease.ticket, event.usage
        pool: Pool = ticket.pool
        if event.healthy:
            lease.engine.succeeded()
        else:
            lease.engine.failed(lease, now)
        if lease.engine.limit.learns and event.healthy and usage is not None:
            lease.engine.answered(lease, usage, now)
        self._end_lease(lease, pool, now)
        if usage is not None and usage.exact:
            usage = self.estimator.learn(ticket.request, usage)
        for times in pool.tuning.timed:
            times.add((ticket.first_token or now) - ticket.arrived)
        self._exits.close(ticket, COMPLETED, None, usage, now)
        if not self._exits.queued:
            return []
        effects: list[Effect] = []
        self._pump(pool, now, effects)
        return effects

    def _failed(self, event: Failed, now: Instant) -> list[Effect]:
        lease = event.lease
        if not lease.open:
            return []
        pool: Pool = lease.ticket.pool
        if event.blame:
            lease.engine.failed(lease, now, lost=True)
        self._end_lease(lease, pool, now)
        self._exits.close(lease.ticket, Outcome.FAILED, event.reason, event.usage, now)
        effects: list[Effect] = []
        self._pump(pool, now, effects)
        return effects

    def _undelivered(self, event: Undelivered, now: Instant) -> list[Effect]:
        """The engine is away: the ticket goes back to its place once, or to nobody."""
        lease = event.lease
        if not lease.open:
            return []
        ticket = lease.ticket
        pool: Pool = ticket.pool
        if event.away:
            lease.engine.went(warming=False)
        else:
            lease.engine.failed(lease, now)
        self._end_lease(lease, pool, now)
        effects: list[Effect] = []
        if (pool.up and not ticket.redispatched) or ticket.mode is BACKPRESSURE:
            self._requeue(ticket, pool)
            self._pump(pool, now, effects)
        else:
            ticket.lease = None
            self._exits.evict(ticket, EvictReason.NO_ENGINE, pool, now, effects)
        if not pool.up:
            self._exits.evict_all(pool, EvictReason.NO_ENGINE, now, effects)
        return effects

    def _requeue(self, ticket: Ticket, pool: Pool) -> None:
        ticket.state = QUEUED
        ticket.lease = None
        ticket.dispatched = ticket.first_token = 0
        ticket.redispatched = True
        if not ticket.expires:
            ticket.expires = ticket.arrived + pool.config.hold_ns
        ticket.met_queue, ticket.gives_way = True, False
        pool.queue.push_back(ticket)
        self._exits.queued += 1

    def _engine_changed(self, event: EngineUp | EngineWarming | EngineDown, now: Instant) -> list[Effect]:
        pool, engine = self._engines[event.engine]
        effects: list[Effect] = []
        places = pool.up_places
        if isinstance(event, EngineUp):
            if engine.came(now):
                pool.warmup.ended(now)
                self._resized(pool, places, now)
            self._pump(pool, now, effects)
            return effects
        warming = isinstance(event, EngineWarming)
        engine.went(warming=warming)
        if warming:
            pool.warmup.started(now)
        self._resized(pool, places, now)
        if not pool.up:
            self._exits.evict_all(pool, EvictReason.NO_ENGINE, now, effects)
        return effects

    @staticmethod
    def _resized(pool: Pool, places: int, now: Instant) -> None:
        """An engine came or went, of a pool that had so many places."""
        after = pool.up_places
        if places and after and places != after:
            pool.forecast.resized(after / places, pool.in_flight, now)

    def _end_lease(self, lease: Lease, pool: Pool, now: Instant) -> None:
        lease.engine.close(lease, now)
        self._in_flight -= 1
        pool.forecast.released(lease.opened, now)
