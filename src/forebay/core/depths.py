"""Lets the tuners of the pools' depths look when it is time, and puts what they say in force."""

from __future__ import annotations

from functools import partial

from forebay.core.dispatch.health import Readiness
from forebay.core.instant import FOREVER, Instant
from forebay.core.pool import Pool
from forebay.core.tuning.depth import Seen


def begin(pool: Pool, now: Instant) -> Instant:
    """There is work again: look from here on. Returns when."""
    pool.tuning.begin(_seen(pool, now), now)
    return pool.tuning.due


def look(pools: tuple[Pool, ...], now: Instant) -> Instant:
    """Let those look whose time it is. Returns when the next one does; far away when none does."""
    for pool in pools:
        if pool.tuning.due <= now:
            idle = not pool.in_flight and not len(pool.queue)
            pool.tuning.look(_seen(pool, now), partial(_budget_ns, pool), now, idle=idle)
            pool.depth.depth_limit = pool.tuning.acting.depth
    return min((pool.tuning.due for pool in pools), default=FOREVER)


def freeze(pools: tuple[Pool, ...], frozen: bool) -> None:
    """Let no tuner move a depth, or let them again, until the next call or a reload that changes their settings."""
    for pool in pools:
        pool.tuning.acting.frozen = frozen


def _seen(pool: Pool, now: Instant) -> Seen:
    ready = [engine for engine in pool.engines if engine.health.readiness is Readiness.UP]
    return Seen(
        releases=pool.forecast.releases,
        place_ns=sum(engine.place_ns + engine.places * now for engine in pool.engines),
        places=sum(engine.window(now) for engine in ready),
        depth=pool.depth.depth_limit,
        correction=pool.forecast.correction,
        batch=pool.batcher.max_size,
    )


def _budget_ns(pool: Pool, rate: float) -> int:
    return pool.forecast.budget_ns(rate, pool.config.tuning.wait_budget_ns) + pool.batcher.linger_ns
