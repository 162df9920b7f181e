"""The invariants of a pipeline that can be seen from its state; numbers are those of docs/invariants.md.

Slow on purpose: every sum is taken again from the tickets themselves, so that a counter that drifts is found.
"""

from __future__ import annotations

from math import isfinite

from forebay.core.instant import Instant
from forebay.core.model import Ticket, TicketState
from forebay.core.pipeline import Pipeline
from forebay.core.pool import Pool
from forebay.core.queueing.bounded import FairQueue


class InvariantError(AssertionError):
    """An invariant does not hold; the message names it and shows the figures."""


def _hold(number: int, condition: bool, what: str) -> None:
    if not condition:
        raise InvariantError(f"invariant {number}: {what}")


def check_invariants(pipeline: Pipeline, now: Instant) -> None:
    """Raise InvariantError unless the pipeline's state is consistent at `now`.

    Call it after an entry point returned and its effects were carried out. Invariant 7 (no idle engine) is claimed
    only for tickets that have not expired: between an expiry and the poll for it there is nothing to claim.
    """
    snapshot = pipeline.snapshot(now)
    ended = sum(snapshot.outcomes.values())
    _hold(
        1,
        snapshot.offered == ended + snapshot.queued + snapshot.in_flight,
        f"offered {snapshot.offered} != ended {ended} + queued {snapshot.queued} + in flight {snapshot.in_flight}",
    )
    waiting = sum(pool.waiting for pool in pipeline.pools)
    running = sum(pool.in_flight for pool in pipeline.pools)
    _hold(1, waiting == snapshot.queued, f"queues hold {waiting}, the pipeline counts {snapshot.queued}")
    _hold(1, running == snapshot.in_flight, f"engines hold {running}, the pipeline counts {snapshot.in_flight}")
    opened = sum(budget.open for _, budget in pipeline.quota.all())
    _hold(6, opened == waiting + running, f"keys hold {opened} open requests, rooms hold {waiting} + {running}")
    for key, budget in pipeline.quota.all():
        _hold(6, budget.open >= 0, f"key {key!r} has {budget.open} open requests")
        most = budget.concurrency
        _hold(6, most is None or budget.open <= most, f"key {key!r} has {budget.open} open of {most} allowed")
        for name, limit, remaining, reset_ns in budget.path.headers(now):
            _hold(6, remaining >= 0 and reset_ns >= 0, f"key {key!r}: {remaining} {name} of {limit} left")
        if (credit := budget.credit) is not None:
            _hold(14, 0 <= credit.spent <= credit.leased, f"key {key!r} spent {credit.spent} of {credit.leased}")
            _hold(14, credit.held >= 0 and credit.owed >= 0, f"key {key!r} holds {credit.held}, owes {credit.owed}")
    for level in pipeline.quota.groups():
        _hold(6, 0 <= level.open <= opened, f"{level.name} has {level.open} of {opened} open requests")
    for pool in pipeline.pools:
        _check_engines(pool)
        _check_queue(pool, pool.queue, now)
        _check_queue(pool, pool.returning, now)
        _check_no_idle_engine(pool, now)
        _check_reserved(pool)
    _check_wakeup(pipeline, now)


def check_empty(pipeline: Pipeline, now: Instant) -> None:
    """Raise InvariantError unless nothing is left anywhere: invariant 10, after a drain all is zero."""
    check_invariants(pipeline, now)
    snapshot = pipeline.snapshot(now)
    _hold(10, snapshot.queued == 0 and snapshot.in_flight == 0, f"{snapshot.queued} wait, {snapshot.in_flight} run")
    for pool in snapshot.pools:
        _hold(10, not (pool.queue_depth or pool.queue_tokens or pool.queue_bytes), f"pool {pool.name}: {pool}")
        for engine in pool.engines:
            held = engine.in_flight or engine.tokens_in_flight or engine.places
            _hold(10, not held, f"engine {engine.name}: {engine}")
    _hold(10, all(b.open == 0 for _, b in pipeline.quota.all()), "a key still has open requests")
    at = pipeline.next_wakeup(now)
    looks = [pool.tuning.due for pool in pipeline.pools if not pool.tuning.resting]
    _hold(10, at is None or at in looks, f"a timer is armed for nothing, at {at}")


def _check_engines(pool: Pool) -> None:
    kept = pool.totals.in_flight, pool.totals.places, pool.totals.below_limit
    found = (
        sum(engine.in_flight for engine in pool.engines),
        sum(engine.limit.requests for engine in pool.engines),
        sum(engine.places < engine.limit.requests for engine in pool.engines),
    )
    _hold(4, kept == found, f"pool {pool.config.name}: totals of {kept}, the engines have {found}")
    for engine in pool.engines:
        name, limit = engine.name, engine.limit
        lowered = limit.learns or pool.reconfigured  # a limit that went down takes nothing back
        within = engine.places <= limit.requests or lowered
        _hold(4, engine.places >= 0 and within, f"engine {name} holds {engine.places} of {limit.requests}")
        _hold(4, engine.places <= engine.in_flight, f"engine {name}: {engine.places} places, {engine.in_flight} leases")
        _hold(4, (engine.in_flight == 0) == (engine.places == 0), f"engine {name}: places without leases")
        _hold(4, engine.tokens >= 0, f"engine {name} holds {engine.tokens} tokens")
        over = engine.tokens > limit.tokens and engine.in_flight > 1 and not lowered
        _hold(4, not over, f"engine {name} holds {engine.tokens} of {limit.tokens} tokens")


def _waiting(pool: Pool) -> list[Ticket]:
    return [*pool.queue, *pool.returning]


def _check_queue(pool: Pool, queue: FairQueue, now: Instant) -> None:
    tickets, name = list(queue), pool.config.name
    returning = queue is pool.returning
    _hold(5, all(t.gives_way is returning for t in tickets), f"pool {name}: a ticket waits in the wrong line")
    _hold(5, len(tickets) == len({id(t) for t in tickets}), f"pool {name}: a ticket waits twice")
    _hold(5, len(tickets) == len(queue), f"pool {name}: {len(tickets)} tickets wait, the queue counts {len(queue)}")
    tokens, size = sum(t.demand.tokens for t in tickets), sum(t.request.body_bytes for t in tickets)
    _hold(5, tokens == queue.tokens, f"pool {name}: {tokens} tokens wait, the queue counts {queue.tokens}")
    _hold(5, size == queue.bytes, f"pool {name}: {size} bytes wait, the queue counts {queue.bytes}")
    beyond = sum(1 for t in tickets if t.redispatched or t.request.holds_place)
    depth = pool.depth
    tuner = pool.tuning.acting.tuner
    moves = tuner.interval_ns > 0
    within = not moves or 1 <= tuner.least <= depth.depth_limit <= tuner.most
    _hold(5, within and type(depth.depth_limit) is int, f"pool {name}: a depth of {depth.depth_limit}")
    lowered = tuner.most if moves else 0  # a depth that went down takes nothing back
    most = max([pool.batcher.max_size, lowered, *(depth.limit(t.mode) for t in tickets)])
    _hold(5, len(tickets) - beyond <= most, f"pool {name}: {len(tickets)} wait, at most {most} may")
    living = {id(e[2]) for e in queue._expiries if e[2].state is TicketState.QUEUED}
    _hold(5, living == {id(t) for t in tickets}, f"pool {name}: a waiting ticket has no expiry")
    turns = sorted(((-t.band, t.start_tag, t.turn, t) for t in tickets), key=lambda held: held[:3])
    _hold(5, turns == queue._turns, f"pool {name}: the turns are {queue._turns}, those that wait have {turns}")
    leftovers = max(len(queue._expiries), len(queue._arrivals)) - len(queue)
    _hold(5, leftovers <= 5 * len(queue) + 512, f"pool {name}: {leftovers} leftovers beside {len(queue)} tickets")
    _hold(8, all(t.arrived <= now for t in tickets), f"pool {name}: a ticket waits since the future")
    correction = pool.forecast.correction
    _hold(9, isfinite(correction) and 0.2 <= correction <= 20.0, f"pool {name}: correction {correction}")


def _check_reserved(pool: Pool) -> None:
    reserved = pool.returns.reserved
    if reserved is not None:
        figures = f"pool {pool.config.name}: {reserved.taken} places were taken of {reserved.promised} promised"
        _hold(15, reserved.taken <= reserved.promised, figures)
        holders = sum(1 for t in _waiting(pool) if t.request.holds_place)
        _hold(15, holders <= reserved.taken or pool.reconfigured, f"{figures}, {holders} wait for theirs")


def _check_no_idle_engine(pool: Pool, now: Instant) -> None:
    head = pool.queue.head()
    if head is None or head.expires <= now:
        return
    engine = pool.room(head.request, head.demand.tokens, head.demand.input_tokens, now)
    if engine is None or pool.held_back(head.request, now):
        return
    _hold(
        7,
        pool.batch_leaves_at(now) > now,
        f"pool {pool.config.name}: an engine has room for ticket {head.sequence}, which waits",
    )


def _check_wakeup(pipeline: Pipeline, now: Instant) -> None:
    at = pipeline.next_wakeup(now)
    waiting = any(pool.waiting for pool in pipeline.pools)
    waiting = waiting or any(e.in_flight and e.limit.interval_ns for _, e in pipeline.learning)
    waiting = waiting or any(pool.tuning.looking and not pool.tuning.resting for pool in pipeline.pools)
    _hold(11, (at is not None) == waiting, f"{'tickets wait' if waiting else 'nothing waits'}, next wakeup is {at}")
