"""Queue-depth tuners at work on a simulated pool: what they find, what they leave alone, and what they say of it."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from forebay.core import depths
from forebay.core.admission.depth import DepthConfig
from forebay.core.admission.forecast import ForecastConfig
from forebay.core.events import EngineDown, EngineUp
from forebay.core.instant import FOREVER, MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode, Request
from forebay.core.outcome import ShedReason
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.tuning import TunerConfig
from forebay.core.tuning.depth import TuningConfig
from forebay.core.tuning.derived import DerivedConfig
from forebay.core.tuning.fixed import FixedConfig as FixedDepthConfig
from forebay.core.tuning.stepwise import StepwiseConfig
from forebay.testing import EventWorld, ExponentialServers, check_empty, check_invariants, poisson

# ---- at work ------------------------------------------------------------------------------------------------------


def pool(tuner: TunerConfig, *, depth: int = 16, shadow: TunerConfig | None = None, **fields: Any) -> PoolConfig:
    fields.setdefault("limit", FixedConfig(limit=10))
    fields.setdefault("forecast", ForecastConfig(wait_budget_ns=50 * MILLISECOND))
    tuning = TuningConfig(tuner=tuner, shadow=shadow, frozen=fields.pop("frozen", False))
    return PoolConfig(name="p", engines=("e",), depth=DepthConfig(depth_limit=depth), tuning=tuning, **fields)


def world(config: PoolConfig, *rates: tuple[float, float], mean_ms: float = 100, seed: int = 1) -> EventWorld:
    """Ten servers behind the pool, that hold each request 100 ms: 100 releases a second. Rates are (from s, per s)."""
    made = EventWorld(PipelineConfig((config,)), {"e": ExponentialServers(int(mean_ms * MILLISECOND))}, seed=seed)
    made.report(EngineUp("e"))
    chance, ends = Random(seed), [*(start for start, _ in rates[1:]), 30.0]
    for (start, rate), end in zip(rates, ends, strict=True):
        if rate:
            made.arrivals(
                (at, Request(key="k", counted_tokens=10, generates=False))
                for at in poisson(chance, rate, int(start * SECOND), int(end * SECOND))
            )
    return made


def test_the_depth_follows_the_drain_rate_and_the_gate_the_depth() -> None:
    made = world(pool(DerivedConfig(), depth=256), (0, 300))
    made.run(30 * SECOND)
    (at,) = made.pipeline.pools
    assert 10 <= at.depth.depth_limit <= 17, "5 within the budget, and room"
    assert at.depth.limit(Mode.HYBRID) == at.tuning.acting.depth
    assert at.depth.limit(Mode.BACKPRESSURE) == at.config.depth.held_limit, "held requests have a bound of their own"
    first = at.tuning.acting.log[0]
    assert (first.old, first.new, first.why) == (256, 64, "rate")
    assert first.reading is not None
    assert 80 <= first.reading.rate_per_s <= 120
    assert first.reading.busy == pytest.approx(1.0, abs=0.05)
    assert check_invariants(made.pipeline, made.now) is None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rate", [120, 300])
def test_a_constant_load_moves_nothing_to_and_fro(seed: int, rate: float) -> None:
    """Settled after ten seconds; in the 20 s after them it may turn round twice at most."""
    made = world(pool(DerivedConfig(), depth=256), (0, rate), seed=seed)
    made.run(30 * SECOND)
    late = [change for change in made.pipeline.pools[0].tuning.acting.log if change.at > 10 * SECOND]
    moves = [change.new > change.old for change in late]
    assert sum(one != other for one, other in pairwise(moves)) <= 2, late


def test_little_load_moves_nothing() -> None:
    """F-04, F-09: a third of the capacity: the engines say nothing of what they could do."""
    made = world(pool(DerivedConfig(), depth=256), (0, 33))
    made.run(30 * SECOND)
    acting = made.pipeline.pools[0].tuning.acting
    assert acting.looks > 10
    assert acting.changes == 0
    assert acting.advice is not None
    assert acting.advice.why == "app_limited"
    assert all(refusal.reason is not ShedReason.QUEUE_FULL for _, _, refusal in made.refused)


def test_it_rests_while_nothing_runs_and_goes_on_after() -> None:
    """F-05: no timer while there is nothing to see; the silence is not read as a rate."""
    made = world(pool(DerivedConfig(), depth=256), (0, 300), (8, 0), (22, 300))
    made.run(15 * SECOND)
    acting = made.pipeline.pools[0].tuning.acting
    looks, depth = acting.looks, acting.depth
    assert made.pipeline.tune_at == FOREVER
    check_empty(made.pipeline, made.now)
    made.run(22 * SECOND)
    assert acting.looks == looks
    made.run(30 * SECOND)
    assert acting.looks > looks
    assert acting.looked_at is not None
    assert made.now - acting.looked_at <= 3 * SECOND
    assert abs(acting.depth - depth) <= 4


def test_an_engine_that_is_away_is_no_signal() -> None:
    made = world(pool(DerivedConfig(), depth=256, mode=Mode.BACKPRESSURE), (0, 300))
    made.run(5 * SECOND)
    depth = made.pipeline.pools[0].tuning.acting.depth
    made.report(EngineDown("e"))
    made.run(30 * SECOND)
    acting = made.pipeline.pools[0].tuning.acting
    assert acting.advice is not None
    assert acting.advice.why == "no_signal"
    assert acting.depth >= depth // 4, "at most the look in which it went"


def test_frozen_it_looks_and_leaves_the_depth() -> None:
    made = world(pool(DerivedConfig(), depth=256, frozen=True), (0, 300))
    made.run(8 * SECOND)
    acting = made.pipeline.pools[0].tuning.acting
    assert (acting.depth, acting.changes) == (256, 0)
    assert acting.advice is not None
    assert acting.advice.depth == 64
    depths.freeze(made.pipeline.pools, False)
    made.run(22 * SECOND)
    assert acting.depth < 30
    depths.freeze(made.pipeline.pools, True)
    held = acting.depth
    made.run(30 * SECOND)
    assert acting.depth == held


def test_the_stepwise_tuner_at_work() -> None:
    """Every 10 s, by the gateway's own counts; the wait budget is ample, so the depth is felt."""
    config = pool(StepwiseConfig(interval_ns=10 * SECOND), forecast=ForecastConfig(wait_budget_ns=10 * SECOND))
    made = world(config, (0, 600), mean_ms=20)
    made.run(30 * SECOND)
    first = made.pipeline.pools[0].tuning.acting.log[0]
    assert (first.old, first.new, first.why) == (16, 20, "early")
    assert first.reading is not None
    assert first.reading.answers > 4_000
    assert 10 * SECOND <= first.reading.elapsed_ns <= 11 * SECOND


def test_a_shadow_sees_the_same_and_moves_nothing() -> None:
    alone = world(pool(FixedDepthConfig(), depth=40), (0, 300))
    beside = world(pool(FixedDepthConfig(), depth=40, shadow=DerivedConfig()), (0, 300))
    for made in (alone, beside):
        made.run(30 * SECOND)
    assert [line.rsplit(" ", 1)[0] for line in beside.log] == [line.rsplit(" ", 1)[0] for line in alone.log]
    tuning = beside.pipeline.pools[0].tuning
    assert (tuning.acting.depth, tuning.acting.looks) == (40, 0)
    assert tuning.shadow is not None
    assert 10 <= tuning.shadow.depth <= 17
    assert tuning.shadow.log[-1].new == tuning.shadow.depth


def test_a_reload_promotes_a_shadow_with_what_it_found() -> None:
    before = pool(FixedDepthConfig(), depth=40, shadow=DerivedConfig())
    made = world(before, (0, 300))
    made.run(20 * SECOND)
    shadow = made.pipeline.pools[0].tuning.shadow
    assert shadow is not None
    after = pool(DerivedConfig(), depth=256)
    made.gateway.apply(made.pipeline.reconfigure(PipelineConfig((after,)), made.now))
    tuning = made.pipeline.pools[0].tuning
    assert tuning.acting.depth == shadow.depth == made.pipeline.pools[0].depth.depth_limit
    assert (tuning.acting.log[-1].old, tuning.acting.log[-1].why) == (40, "promoted")
    made.run(30 * SECOND)
    assert tuning.acting.looks > 0


def test_a_reload_that_sets_the_depth_sets_it_and_one_of_other_things_leaves_it() -> None:
    config = pool(DerivedConfig(), depth=256)
    made = world(config, (0, 300))
    made.run(20 * SECOND)
    found = made.pipeline.pools[0].depth.depth_limit
    depths.freeze(made.pipeline.pools, True)
    other = pool(DerivedConfig(), depth=256, hold_ns=SECOND)
    made.gateway.apply(made.pipeline.reconfigure(PipelineConfig((other,)), made.now))
    assert made.pipeline.pools[0].depth.depth_limit == found
    assert made.pipeline.pools[0].tuning.acting.frozen
    made.gateway.apply(made.pipeline.reconfigure(PipelineConfig((pool(FixedDepthConfig(), depth=99),)), made.now))
    tuning = made.pipeline.pools[0].tuning
    assert made.pipeline.pools[0].depth.depth_limit == 99
    assert tuning.acting.log[-1][1:4] == (found, 99, "reload")
    assert made.pipeline.tune_at == FOREVER
    changed = pool(StepwiseConfig(), depth=16)
    made.gateway.apply(made.pipeline.reconfigure(PipelineConfig((changed,)), made.now))
    assert made.pipeline.pools[0].depth.depth_limit == 64, "from where it was, within its bounds"


def test_the_log_is_bounded() -> None:
    config = PoolConfig(
        name="p", engines=("e",), limit=FixedConfig(limit=10),
        tuning=TuningConfig(DerivedConfig(near=0.0, interval_ns=SECOND), kept=3),
    )  # fmt: skip
    made = world(config, (0, 300))
    made.run(30 * SECOND)
    acting = made.pipeline.pools[0].tuning.acting
    assert acting.changes > 3
    assert len(acting.log) == 3
    assert acting.changed_at == acting.log[-1].at
