"""Frozen pictures of pools and engines, for status pages, metrics and tests."""

from __future__ import annotations

from forebay.core.dispatch.leases import Engine
from forebay.core.instant import Instant
from forebay.core.limits.pair import Shadowed
from forebay.core.pool import Pool
from forebay.core.snapshot import EngineSnapshot, PoolSnapshot


def of_pool(pool: Pool, now: Instant) -> PoolSnapshot:
    """All of its rooms."""
    rate = pool.drain_rate(now)
    return PoolSnapshot(
        name=pool.config.name,
        models=pool.config.models,
        mode=pool.mode.value,
        queue_depth=pool.waiting,
        queue_tokens=pool.queue.tokens + pool.returning.tokens,
        queue_bytes=pool.queue.bytes + pool.returning.bytes,
        queue_depth_limit=pool.depth.limit(pool.mode),
        tuner=pool.tuning.snapshot(now),
        drain_rate_per_s=rate,
        wait_budget_ns=pool.forecast.budget_ns(rate),
        predicted_wait_ns=pool.forecast.predict_ns(len(pool.queue) + 1, rate),
        wait_correction=pool.forecast.correction,
        service_ns=pool.forecast.service_ns,
        engines=tuple(_of_engine(engine, now) for engine in pool.engines),
        shadow_decisions=_decisions(pool),
    )


def _of_engine(e: Engine, now: Instant) -> EngineSnapshot:
    return EngineSnapshot(
        name=e.name,
        readiness=e.health.readiness.value,
        ejected=e.health.ejected_until > now,
        in_flight=e.in_flight,
        tokens_in_flight=e.tokens,
        places=e.places,
        concurrency_limit=e.limit.requests,
        window=e.window(now),
        others=round(e.others.requests(now)) if e.shared else 0,
        tokens_limit=e.limit.tokens,
        shadow_limit=e.limit.shadow.requests if isinstance(e.limit, Shadowed) else None,
        prefill_tokens=e.prefill_tokens,
        prefill_limit=e.limit.prefill_tokens,
        gap_ns=int(e.limit.gap_ns),
    )


def _decisions(pool: Pool) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    if pool.shadows is not None:
        for (policy, verdict), count in pool.shadows.counts.items():
            found.setdefault(policy, {})[verdict] = count
    return found
