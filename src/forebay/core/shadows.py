"""What settings in shadow would have said of a request: asked beside the acting verdict, which is never changed.

Each question is put at the state in which the request came, which is the work of the acting settings. A request that
none of these questions concerns (over its key's limits, say) is not asked about.
"""

from __future__ import annotations

from collections.abc import Iterator

from forebay.core.admission.forecast import Outlook
from forebay.core.admission.shadow import Policy, Said, Verdict
from forebay.core.dispatch.leases import Engine
from forebay.core.instant import MILLISECOND, Instant
from forebay.core.limits.limit import Limit
from forebay.core.limits.shadow import Shadowed
from forebay.core.model import Demand, Mode, Refusal, Request, Ticket, Usage
from forebay.core.outcome import ShedReason
from forebay.core.pool import Pool

CONCERNED = frozenset({ShedReason.QUEUE_FULL, ShedReason.QUEUE_WAIT, ShedReason.KEY_SHARE})
"""Refusals by settings that may have a shadow."""


def judge(pool: Pool, request: Request, demand: Demand, verdict: Refusal | Engine | Outlook, now: Instant) -> None:
    """Ask every shadow of the pool, count what they say, and leave it with the request."""
    shadows = pool.shadows
    if shadows is None or (isinstance(verdict, Refusal) and verdict.reason not in CONCERNED):
        return
    said = tuple(_ask(pool, request, demand, verdict, now))
    shadows.count(said)
    request.shadow = said


def admitted(pool: Pool, request: Request, demand: Demand, engine: Engine | Outlook, now: Instant) -> None:
    """The request was admitted, to start at once or to wait: every shadow is asked, and the shares that one keeps are
    charged."""
    judge(pool, request, demand, engine, now)
    if pool.shadows is not None and (fair := pool.shadows.fair(request.priority)) is not None:
        fair.admitted(request.flow or request.key, request.weight, demand.work, now)


def ended(pool: Pool, ticket: Ticket, usage: Usage | None, now: Instant) -> None:
    """An admitted request ended, having used this."""
    request = ticket.request
    if pool.shadows is not None and (fair := pool.shadows.fair(request.priority)) is not None:
        fair.ended(request.flow or request.key, ticket.demand.work, 0 if usage is None else usage.work, now)


def _ask(
    pool: Pool, request: Request, demand: Demand, verdict: Refusal | Engine | Outlook, now: Instant
) -> Iterator[Said]:
    mode = request.mode or pool.mode
    if pool.config.limit_shadow is not None:
        yield _window(pool, demand, now)
    if mode is not Mode.BACKPRESSURE and (fair := _fair_share(pool, request, verdict, now)) is not None:
        yield fair
    if mode is not Mode.HYBRID or isinstance(verdict, Engine) or _is_share(verdict):
        return
    waiting = len(pool.queue)
    if (tuning := pool.tuning.shadow) is not None:
        yield _said("depth", waiting >= pool.depth.depth_limit, waiting >= tuning.depth, tuning.depth, waiting)
    budget_ns = pool.shadows.config.wait_budget_ns if pool.shadows is not None else None
    if budget_ns is not None:
        yield _wait(pool, request, budget_ns, now)


def _is_share(verdict: Refusal | Engine | Outlook) -> bool:
    return isinstance(verdict, Refusal) and verdict.reason is ShedReason.KEY_SHARE


def _said(
    policy: Policy, refuses: bool, would_refuse: bool, limit: float, actual: float, unit: str = "requests waiting"
) -> Said:
    verdict: Verdict = "same" if refuses == would_refuse else "stricter" if would_refuse else "looser"
    return Said(policy, verdict, limit, actual, unit)


def _window(pool: Pool, demand: Demand, now: Instant) -> Said:
    """Is there a place for it, on any engine?"""
    full = would_be = True
    places = used = 0
    for engine in pool.engines:
        both = engine.limit
        if isinstance(both, Shadowed) and engine.health.available(now):
            full = full and not _has_room(engine, both.acting, demand.tokens)
            would_be = would_be and not _has_room(engine, both.shadow, demand.tokens)
            places += both.shadow.requests
            used += engine.places
    return _said("window", full, would_be, places, used, "requests in flight")


def _has_room(engine: Engine, limit: Limit, tokens: int) -> bool:
    if engine.places >= limit.requests:
        return False
    within = engine.tokens + tokens <= limit.tokens and engine.prefill_tokens < limit.prefill_tokens
    return within or not engine.places


def _fair_share(pool: Pool, request: Request, verdict: Refusal | Engine | Outlook, now: Instant) -> Said | None:
    fair = None if pool.shadows is None else pool.shadows.fair(request.priority)
    if fair is None:
        return None
    excess_ns = fair.excess_ns(request.flow or request.key, request.weight, now)
    starts = isinstance(verdict, Engine) and not len(pool.queue) and pool.free(now) > fair.reserve(pool.places)
    refuses = excess_ns > 0 and not starts
    return _said("fair_share", _is_share(verdict), refuses, 0, excess_ns / MILLISECOND, "ms ahead of its share")


def _wait(pool: Pool, request: Request, budget_ns: int, now: Instant) -> Said:
    forecast, rate = pool.forecast, pool.drain_rate(now)
    predicted_ns = forecast.predict_ns(len(pool.queue) + 1, rate)
    acting_ns, shadow_ns = forecast.budget_ns(rate, request.wait_budget_ns), forecast.budget_ns(rate, budget_ns)
    return _said(
        "wait_budget", predicted_ns > acting_ns, predicted_ns > shadow_ns, shadow_ns / MILLISECOND,
        predicted_ns / MILLISECOND, "ms of predicted wait",
    )  # fmt: skip
