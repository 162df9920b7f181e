"""Verdicts that need several rooms of a pool: is the wait worth it, who makes way, and when to come back.

Each asks and changes nothing, save what is kept of returns: every caller is told another time, a retry uses it up.
"""

from __future__ import annotations

from forebay.core.admission.forecast import Outlook, WaitForecast
from forebay.core.admission.waiting_room import WaitingRoomConfig, may_wait
from forebay.core.instant import MILLISECOND, SECOND, Instant
from forebay.core.model import BACKPRESSURE, HYBRID, Demand, Mode, Refusal, Request, Ticket
from forebay.core.outcome import QUEUE_FULL, QUEUE_WAIT, EvictReason, ShedReason
from forebay.core.pool import Pool

SHARED = frozenset({
    QUEUE_FULL, QUEUE_WAIT, ShedReason.KEY_SHARE, EvictReason.EXPIRED, EvictReason.DISPLACED
})  # the ladder says when  # fmt: skip
LOOKED_AT = frozenset({
    ShedReason.KEY_SHARE, ShedReason.NEVER_FITS, ShedReason.QUEUE_FULL, ShedReason.QUEUE_WAIT, ShedReason.WARMING,
    ShedReason.NO_ENGINE,
})  # what a retry may be refused for once its budget allows it  # fmt: skip
EXACT = frozenset({ShedReason.KEY_REQUESTS, ShedReason.KEY_TOKENS})  # their end is known
FULL_SHARE = 0.9
"""Of the places are taken when a pool is called full: some are free for a moment, or for those who come next."""
AHEAD = 0.5
"""How far the holder of a reserved place stands above its priority: before its new requests, below the next one."""


def away(pool: Pool, serving_from: Instant | None, now: Instant) -> Refusal:
    """No engine can be given work: warming, ejected or gone."""
    if serving_from is not None:
        return Refusal(ShedReason.NO_ENGINE, max(SECOND, serving_from - now))
    if pool.warming:
        return Refusal(ShedReason.WARMING, pool.warmup.eta_ns(now))
    return Refusal(ShedReason.NO_ENGINE, max(SECOND, pool.config.retry.probe_interval_ns))


def may_retry(pool: Pool, request: Request, now: Instant) -> bool:
    """Has its key a promise or a budget for this retry, or is there no need for one?"""
    budgets = pool.returns.budgets
    return budgets is None or not pool.returns.strained or budgets.allows(request.key, now)


def holds_place(pool: Pool, now: Instant) -> bool:
    """Is a place left for a return that shows a retry ticket?"""
    reserved = pool.returns.reserved
    return reserved is not None and reserved.left(now)


def pay_retry(pool: Pool, request: Request, now: Instant, *, holds: bool) -> None:
    """A retry was looked at: it uses up what its key was promised, or a part of its budget while these are asked. One
    that `holds` a reserved place spends nothing."""
    budgets = pool.returns.budgets
    if budgets is not None and (holds or pool.returns.strained):
        budgets.spend(request.key, now, free=holds)


def take_place(pool: Pool, request: Request, now: Instant) -> None:
    """It is admitted: the place that it holds is taken, or it held none."""
    reserved = pool.returns.reserved
    request.holds_place = reserved is not None and reserved.take(now)


def waits_for_warmup(pool: Pool, room: WaitingRoomConfig, request: Request, now: Instant) -> bool:
    """May it wait for the first engine to be up? One must be on its way."""
    if not room.places or not pool.warming:
        return False
    ends = [at for at in (request.deadline, request.patience) if at is not None]
    until = min(ends) if ends else None
    return may_wait(room, waiting=pool.queue.waiting, eta_ns=pool.warmup.eta_ns(now), until=until, now=now)


def outlook(pool: Pool, forecast: WaitForecast, request: Request, mode: Mode, position: int, now: Instant) -> Outlook:
    """What a forecast says that it has to expect at this place in line."""
    rate = forecast.drain_rate(pool.totals.in_flight, now)
    budget = forecast.budget_ns(rate, request.wait_budget_ns) if mode is HYBRID else 0
    return Outlook(mode, forecast.predict_ns(position, rate), budget)


def wait_verdict(
    pool: Pool, forecast: WaitForecast, request: Request, demand: Demand, mode: Mode, now: Instant
) -> Refusal | Outlook:
    """Is the wait that a forecast predicts within the wait budget, the objective for the first token, and the caller's
    patience?"""
    waiting = pool.queue.waiting
    if mode is BACKPRESSURE and request.deadline is None and request.patience is None:
        return outlook(pool, forecast, request, mode, waiting + 1, now)
    forecast.decay(now)
    ahead = outlook(pool, forecast, request, mode, waiting + 1, now)
    predicted, budget = ahead.predicted_ns, ahead.budget_ns
    if mode is not HYBRID:
        budget = pool.config.hold_ns
    elif request.stream and budget > (least := forecast.config.wait_budget_ns):
        ttft_ns = request.ttft_ns or pool.config.ttft_ns
        left_ns = ttft_ns - pool.prefill_ns(demand.input_tokens)
        if left_ns <= 0:  # one that takes longer than the objective by itself is served all the same
            left_ns = ttft_ns - pool.prefill_ns(0)
        budget = min(budget, max(least, left_ns))
    if request.deadline is not None:
        # Patience must outlast the wait and the work, or both are wasted.
        budget = min(budget, request.deadline - now - forecast.service_ns)
    if request.patience is not None:
        first_ns = pool.prefill_ns(demand.input_tokens) if request.stream else forecast.service_ns
        budget = min(budget, request.patience - now - max(first_ns, forecast.first_ns))
    if predicted <= budget or (budget >= 0 and not predicted):
        return ahead
    if waiting and mode is HYBRID:
        # Its turn may come before that of others, who then make way for it.
        band, turn = pool.band(request.priority), pool.turn(request)
        if last_behind(pool, request, band, turn) is not None:
            before = pool.queue.ahead_of(request, band, turn)
            if forecast.predict_ns(before + 1, forecast.drain_rate(pool.totals.in_flight, now)) <= budget:
                return ahead
    limit_ns = budget if budget > 0 else 0
    return Refusal(QUEUE_WAIT, 0, limit_ns / MILLISECOND, predicted / MILLISECOND, "ms of predicted wait")


def last_behind(pool: Pool, request: Request, band: float, turn: float | None) -> Ticket | None:
    """The last of the others, if it comes after this request and may be displaced: what is held for its sender may
    not, nor what an engine gave back or holds a reserved place."""
    last = pool.queue.last_behind(request, band, turn)
    if last is None or last.mode is not HYBRID or last.redispatched or last.request.holds_place:
        return None
    return last


def makes_way(pool: Pool, request: Request, mode: Mode) -> bool:
    """The queue is full: is the last in turn one who makes way for this request?"""
    if mode is not HYBRID or not pool.queue.waiting:
        return False
    return last_behind(pool, request, pool.band(request.priority), pool.turn(request)) is not None


def displaced(pool: Pool, newcomer: Ticket, ahead: Outlook) -> Ticket | None:
    """Who makes way for a newcomer in hybrid mode: the last in turn, if more wait than the budget or the depth allows.

    `ahead` is of the end of the line as it is now.
    """
    if ahead.predicted_ns <= ahead.budget_ns and pool.queue.waiting <= pool.depth.depth_limit:
        return None
    return last_behind(pool, newcomer.request, newcomer.band, newcomer.start_tag)


def timed(pool: Pool, refusal: Refusal, request: Request, now: Instant) -> Refusal:
    """The refusal with its time to come back, spread."""
    reason, retry = refusal.reason, refusal.retry_after_ns
    if retry is None:
        return refusal
    place: int | None = None  # of the calendar
    if reason in SHARED:
        place = come_back_ns(pool, request, now)
        if place > retry:
            retry = place
    elif reason is ShedReason.WARMING and retry < request.obeys_ns:
        # When the engine is there they would all be, were they told the same.
        place = retry = come_back_ns(pool, request, now, least_ns=retry)
    elif reason in EXACT:
        retry = pool.ladder.exact_ns(retry)
    else:
        retry = pool.ladder.spread_ns(retry)
    obeyed = retry <= request.obeys_ns
    returns = pool.returns
    if (budgets := returns.budgets) is not None and request.retries is not None:
        if not request.retries:
            budgets.refused(request.key, now)
        if obeyed:
            budgets.promised(request.key, now + retry, now)
    reserved = False
    if returns.reserved is not None and obeyed and retry == place:
        returns.reserved.promise(now + retry, now)
        reserved = True
    return Refusal(reason, retry, refusal.limit, refusal.actual, refusal.unit, obeyed, refusal.level, reserved)


def come_back_ns(pool: Pool, request: Request, now: Instant, least_ns: int = 0) -> int:
    """When the calendar of returns has a place for this caller, at the soonest after `least_ns`."""
    flow, part, returns, obeys_ns = "", 1.0, pool.returns, request.obeys_ns
    if pool.shares and (fair := pool.fair(request.priority)) is not None:
        flow, part = request.flow or request.key, fair.part(request.weight)
    returns.refused(request.retries, now)
    if returns.overloaded:
        # Who comes back into the overload, or as soon as it has ended, is refused or keeps a new request out.
        passed_ns, most_ns = 2 * pool.forecast.service_ns, obeys_ns // 4
        if passed_ns > most_ns:
            passed_ns = most_ns
        if passed_ns > least_ns:
            least_ns = passed_ns
    wait_ns = pool.ladder.next_ns(
        capacity(pool, now),
        now,
        usual_rate=returns.usual_rate,
        obeys_ns=obeys_ns,
        flow=flow,
        part=part,
        least_ns=least_ns,
        shows=returns.shows,
    )
    if request.retries is not None and wait_ns <= obeys_ns:
        returns.promised(now + wait_ns)
    return wait_ns


def capacity(pool: Pool, now: Instant) -> float:
    """Requests per second that the pool can serve with every place taken; 0.0 when nothing is known."""
    forecast, totals = pool.forecast, pool.totals
    places = totals.places
    return pool.capacity.look(
        now,
        full=totals.in_flight >= FULL_SHARE * places,
        places=places,
        service_ns=forecast.service_ns,
        paced=pool.paced,
        drain_rate=pool.drain_rate(now),
        best_rate=forecast.best_rate,
    )
