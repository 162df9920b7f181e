"""What the depth tuners found and why, in words: for /api/v1/tuner."""

from __future__ import annotations

from typing import Any

from forebay.core.instant import MILLISECOND, SECOND, Instant
from forebay.core.pipeline import Pipeline
from forebay.core.tuning.depth import Change, DepthTuning
from forebay.core.tuning.tuner import Advice, Reading


def tuners(pipeline: Pipeline, now: Instant) -> dict[str, Any]:
    """Each pool's tuner and the one in its shadow, with their last changes, the latest first."""
    return {
        "pools": [
            {
                "name": pool.config.name,
                "depth": pool.depth.depth_limit,
                "acting": _tuning(pool.tuning.acting, now),
                "shadow": None if pool.tuning.shadow is None else _tuning(pool.tuning.shadow, now),
            }
            for pool in pipeline.pools
        ]
    }


def _tuning(tuning: DepthTuning, now: Instant) -> dict[str, Any]:
    tuner, advice = tuning.tuner, tuning.advice
    moves = tuner.interval_ns > 0
    return {
        "kind": tuner.kind,
        "depth": tuning.depth,
        "least": tuner.least if moves else None,
        "most": tuner.most if moves else None,
        "frozen": tuning.frozen,
        "looks": tuning.looks,
        "changes": tuning.changes,
        "looked_s_ago": _ago_s(tuning.looked_at, now),
        "changed_s_ago": _ago_s(tuning.changed_at, now),
        "advice": None if advice is None else _advice(advice),
        "reading": None if tuning.reading is None else _reading(tuning.reading),
        "log": [_change(change, now) for change in reversed(tuning.log)],
    }


def _ago_s(at: Instant | None, now: Instant) -> float | None:
    return None if at is None else round((now - at) / SECOND, 3)


def _advice(advice: Advice) -> dict[str, Any]:
    return {"depth": advice.depth, "why": advice.why, "target": advice.target}


def _change(change: Change, now: Instant) -> dict[str, Any]:
    return {
        "s_ago": _ago_s(change.at, now),
        "old": change.old,
        "new": change.new,
        "why": change.why,
        "target": change.target,
        "reading": None if change.reading is None else _reading(change.reading),
    }


def _reading(reading: Reading) -> dict[str, Any]:
    return {
        "over_s": round(reading.elapsed_ns / SECOND, 3),
        "releases": reading.releases,
        "releases_per_s": round(reading.rate_per_s, 3),
        "busy": None if reading.busy is None else round(reading.busy, 4),
        "answers": reading.answers,
        "p99_ms": round(reading.p99_ns / MILLISECOND, 1) if reading.p99_ns else None,
        "waiting_most": reading.waiting_most,
        "felt": reading.felt,
        "wait_budget_ms": round(reading.wait_budget_ns / MILLISECOND, 3),
        "wait_correction": round(reading.correction, 3),
        "batch": reading.batch,
    }
