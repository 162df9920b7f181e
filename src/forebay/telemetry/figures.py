"""Every figure that a decision on a request compares, as it was when it was decided.

They are taken in one go, as plain numbers, and put into words when somebody asks. Taking them changes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from forebay.core.instant import MILLISECOND, Instant
from forebay.core.model import Demand, Request
from forebay.core.pool import Pool
from forebay.core.quota.path import Left, Path, described

ENGINES_MOST = 16
"""Whose figures are taken; with dozens of engines the others would cost more than they say."""


class Figures(NamedTuple):
    """In nanoseconds, tokens, bytes and requests; rates are per second."""

    pool: str
    waiting: int
    depth_limit: int
    tokens: int
    tokens_limit: int
    bytes: int
    bytes_limit: int
    in_flight: int
    places: int
    free: int
    rate: float
    correction: float
    predicted_ns: int
    budget_ns: int
    ttft_ns: int
    prefill_ns: int
    own_prefill_ns: int
    first_ns: int
    service_ns: int
    deadline_ns: int | None
    patience_ns: int | None
    share: tuple[int, int, float] | None  # ahead of it in ns, places in reserve, its part of the pool
    hold_back: float
    floor_due: bool
    retries: int | None
    strained: bool
    retries_left: float | None
    returns: tuple[float, float, float, bool, int]  # capacity, usual rate, share who return, overloaded?, waiting
    serving_from_ns: int | None  # 0: an engine may be given work now; None: none is ready
    warmup_ns: int | None  # None: none is on its way
    room_places: int
    limits: Left | None  # None: its key has none
    engines: tuple[tuple[str, float, int, int, bool, int | None], ...]
    # name, tokens before it, places taken, window, places and memory for it?, what its streams can spare in ns


def taken(pool: Pool, request: Request, demand: Demand, path: Path, now: Instant, *, engines: bool) -> tuple[Any, ...]:
    """Those of a request that is being decided, as `Figures` names them; `engines`: of each engine too."""
    config, forecast, returns, queue, depth = pool.config, pool.forecast, pool.returns, pool.queue, pool.depth
    rate = pool.drain_rate(now)
    share = None
    if pool.shares and (fair := pool.fair(request.priority)) is not None:
        ahead_ns = fair.ahead_ns(request.flow or request.key, request.weight, now)
        share = ahead_ns, fair.reserve(pool.places), fair.part(request.weight)
    from_now = pool.serving_from(now)
    budgets = returns.budgets
    return (  # a plain tuple: it is made at every refusal
        config.name,
        queue.waiting,
        depth.limit(request.mode or pool.mode),
        queue.tokens + pool.returning.tokens,
        depth.config.tokens_limit,
        queue.bytes + pool.returning.bytes,
        depth.config.bytes_limit,
        pool.in_flight,
        pool.places,
        pool.free(now),
        rate,
        forecast.correction,
        forecast.predict_ns(queue.waiting + 1, rate),
        forecast.budget_ns(rate, request.wait_budget_ns),
        request.ttft_ns or config.ttft_ns,
        pool.prefill_ns(0),
        pool.prefill_ns(demand.input_tokens) if request.stream or request.patience is not None else 0,
        forecast.first_ns,
        forecast.service_ns,
        None if request.deadline is None else request.deadline - now,
        None if request.patience is None else request.patience - now,
        share,
        request.hold_back,
        pool.floor is not None and pool.floor.due(request.priority),
        request.retries,
        returns.strained,
        None if budgets is None else budgets.left(request.key, now),
        (pool.capacity.rate, returns.usual_rate, returns.shows, returns.overloaded, pool.returning.waiting),
        None if from_now is None else max(0, from_now - now),
        pool.warmup.eta_ns(now) if from_now is None and pool.warming else None,
        config.waiting_room.places,
        path.left(now) if path.limited else None,
        tuple(
            (
                e.name,
                e.load(now),
                e.places,
                e.window(now),
                e.has_room(demand.tokens, now),
                None if e.slack is None else e.slack.spare_ns(request.priority, now),
            )
            for e in pool.engines[:ENGINES_MOST]
        )
        if engines
        else (),
    )


def in_words(figures: tuple[Any, ...]) -> dict[str, Any]:
    """The same for people: milliseconds, and names that say what was compared with what."""
    f = Figures._make(figures)
    capacity, usual, shows, overloaded, returning = f.returns
    return {
        "pool": {
            "name": f.pool,
            "queue_depth": f.waiting,
            "queue_depth_limit": f.depth_limit,
            "queue_tokens": f.tokens,
            "queue_tokens_limit": f.tokens_limit,
            "queue_bytes": f.bytes,
            "queue_bytes_limit": f.bytes_limit,
            "in_flight": f.in_flight,
            "places": f.places,
            "free_places": f.free,
            "drain_rate_per_s": round(f.rate, 3),
            "wait_correction": round(f.correction, 3),
            "wait_budget_ms": f.budget_ns / MILLISECOND,
        },
        "wait": {
            "predicted_ms": f.predicted_ns / MILLISECOND,
            "budget_ms": f.budget_ns / MILLISECOND,
            "ttft_ms": f.ttft_ns / MILLISECOND,
            "prefill_ms": f.prefill_ns / MILLISECOND,
            "own_prefill_ms": f.own_prefill_ns / MILLISECOND,
            "usual_first_token_ms": f.first_ns / MILLISECOND,
            "usual_service_ms": f.service_ns / MILLISECOND,
            "deadline_ms": _ms(f.deadline_ns),
            "patience_ms": _ms(f.patience_ns),
        },
        "share": None if f.share is None else _share(*f.share),
        "hold_back": {"share": f.hold_back, "places": f.hold_back * f.places, "floor_due": f.floor_due},
        "retries": {"attempt": f.retries, "strained": f.strained, "budget_left": f.retries_left},
        "returns": {
            "capacity_per_s": round(capacity, 3),
            "usual_per_s": round(usual, 3),
            "come_back_share": shows,
            "overloaded": overloaded,
            "waiting": returning,
        },
        "readiness": {
            "serving_in_ms": _ms(f.serving_from_ns),
            "warm_in_ms": _ms(f.warmup_ns),
            "waiting_room_places": f.room_places,
        },
        "limits": [
            {"level": level, "counts": counts, "limit": most, "left": left}
            for level, counts, most, left in (() if f.limits is None else described(f.limits))
        ],
        "engines": [
            {
                "name": name,
                "tokens_before": load,
                "places": places,
                "window": window,
                "room": room,
                "streams_spare_ms": _ms(spare_ns),
            }
            for name, load, places, window, room, spare_ns in f.engines
        ],
    }


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / MILLISECOND


def _share(ahead_ns: int, reserve: int, part: float) -> dict[str, Any]:
    return {"ahead_ms": ahead_ns / MILLISECOND, "reserve_places": reserve, "part": round(part, 6)}
