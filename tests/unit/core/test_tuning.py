"""Queue-depth tuners: each rule, when they look, and what they say of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.admission.depth import DepthConfig
from forebay.core.events import Finished
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode, Usage
from forebay.core.pool import PoolConfig
from forebay.core.tuning import TunerConfig, build
from forebay.core.tuning.depth import TuningConfig
from forebay.core.tuning.derived import DerivedConfig
from forebay.core.tuning.stepwise import StepwiseConfig
from forebay.core.tuning.times import Times
from forebay.core.tuning.tuner import Reading, Why


def reading(**given: Any) -> Reading:
    figures: dict[str, Any] = {
        "elapsed_ns": 2 * SECOND, "releases": 200, "answers": 200, "p99_ns": 100 * MILLISECOND, "busy": 1.0,
        "waiting_most": 10, "felt": True, "wait_budget_ns": 50 * MILLISECOND, "correction": 1.0, "batch": 1,
    }  # fmt: skip
    return Reading(**(figures | given))


STEPWISE = [
    ({}, 20, "early"),
    ({"p99_ns": 199 * MILLISECOND}, 20, "early"),
    ({"p99_ns": 200 * MILLISECOND}, 16, "near_enough"),
    ({"p99_ns": 500 * MILLISECOND}, 16, "near_enough"),
    ({"p99_ns": 501 * MILLISECOND}, 14, "late"),
    ({"p99_ns": 501 * MILLISECOND, "busy": 0.1}, 14, "late"),
    ({"busy": 0.9}, 16, "app_limited"),
    ({"busy": None}, 16, "no_signal"),
    ({"felt": False}, 16, "not_felt"),
    ({"answers": 0, "p99_ns": 0}, 16, "too_few_samples"),
    ({"answers": 19, "p99_ns": 9 * SECOND}, 16, "too_few_samples"),
]


@pytest.mark.parametrize(("figures", "depth", "why"), STEPWISE)
def test_the_stepwise_rule(figures: dict[str, Any], depth: int, why: str) -> None:
    """The published figures: 90 %, 200 ms, 500 ms, four up, two down; and what was repaired."""
    advice = build(StepwiseConfig()).tuned(16, reading(**figures))
    assert (advice.depth, advice.why) == (depth, why)


def test_the_stepwise_rule_at_its_ends() -> None:
    stepwise = build(StepwiseConfig(least=1, most=18))
    assert stepwise.tuned(16, reading()).depth == 18
    assert stepwise.tuned(2, reading(p99_ns=SECOND)).depth == 1
    assert stepwise.tuned(1, reading(p99_ns=SECOND)).depth == 1, "traffic is never blocked"
    assert build(StepwiseConfig(least=0, most=0)).tuned(1, reading(p99_ns=SECOND)).depth == 1


def test_derived_is_littles_law_with_room() -> None:
    """100 releases a second and 50 ms: five are served in time, 2.33 deviations more in a good moment, a quarter."""
    advice = build(DerivedConfig()).tuned(10, reading(releases=200, felt=False))
    assert advice.target == 13  # 1.25 * (5 + 2.33 * sqrt(5)) = 12.8
    assert (advice.depth, advice.why) == (10, "not_felt")
    assert build(DerivedConfig()).tuned(10, reading(releases=200)).depth == 13


DERIVED = [
    ({}, 64, "rate"),
    ({"busy": 0.74}, 256, "app_limited"),
    ({"busy": None}, 256, "no_signal"),
    ({"releases": 7}, 256, "too_few_samples"),
    ({"releases": 7_300}, 256, "near_enough"),
    ({"releases": 20_000}, 321, "rate"),
    ({"releases": 20_000, "felt": False}, 256, "not_felt"),
    ({"batch": 128}, 160, "rate"),
    ({"correction": 0.2, "releases": 1_400}, 256, "near_enough"),
    ({"correction": 5.0, "releases": 7_300}, 256, "near_enough"),
    ({"wait_budget_ns": 10 * SECOND, "releases": 40_000}, 321, "rate"),
]


@pytest.mark.parametrize(("figures", "depth", "why"), DERIVED)
def test_the_derived_rule(figures: dict[str, Any], depth: int, why: str) -> None:
    """A quarter is left on the way down, a quarter on the way up; a hold for each thing that is missing."""
    advice = build(DerivedConfig()).tuned(256, reading(**figures))
    assert (advice.depth, advice.why) == (depth, why)


def test_derived_takes_a_wait_of_its_own() -> None:
    derived = build(DerivedConfig(wait_ns=SECOND))
    assert derived.tuned(100, reading()).target == 100, "and no room beyond it"


configs = st.one_of(
    st.builds(StepwiseConfig, least=st.integers(0, 50), most=st.integers(0, 300)),
    st.builds(DerivedConfig, least=st.integers(0, 50), most=st.integers(0, 300)),
)
readings = st.builds(
    Reading,
    elapsed_ns=st.integers(0, 60 * SECOND),
    releases=st.integers(0, 1_000_000),
    answers=st.integers(0, 1_000_000),
    p99_ns=st.integers(0, 1_000 * SECOND),
    busy=st.none() | st.floats(0, 10),
    waiting_most=st.integers(0, 100_000),
    felt=st.booleans(),
    wait_budget_ns=st.integers(0, 100 * SECOND),
    correction=st.floats(0.01, 20),
    batch=st.integers(1, 1000),
)


@given(configs, st.lists(readings, max_size=30), st.integers(0, 500))
def test_bounds_are_kept_whatever_is_read(config: TunerConfig, seen: list[Reading], depth: int) -> None:
    tuner = build(config)
    depth = max(tuner.least, min(tuner.most, depth))
    for one in seen:
        depth, why, target = tuner.tuned(depth, one)
        assert 1 <= tuner.least <= depth <= tuner.most
        assert type(depth) is int
        assert type(target) is int
        assert why in get_args(Why)


@given(configs, readings, st.integers(1, 300))
def test_a_missing_signal_is_never_read_as_load(config: TunerConfig, one: Reading, depth: int) -> None:
    """Nothing released and answered, or no engine: the depth stays, whatever else the figures say."""
    tuner = build(config)
    depth = max(tuner.least, min(tuner.most, depth))
    assert tuner.tuned(depth, one._replace(busy=None)).depth == depth
    assert tuner.tuned(depth, one._replace(releases=0, answers=0, p99_ns=0)).depth == depth


@given(readings, st.integers(1, 300))
def test_the_same_reading_again_and_again_settles(one: Reading, depth: int) -> None:
    """No two depths in turn: under a load that does not change it goes one way, and then stays."""
    for config in (DerivedConfig(), StepwiseConfig()):
        tuner = build(config)
        series = [max(tuner.least, min(tuner.most, depth))]
        for _ in range(200):
            series.append(tuner.tuned(series[-1], one).depth)
        moves = [after - before for before, after in pairwise(series) if after != before]
        assert all(move > 0 for move in moves) or all(move < 0 for move in moves)
        assert series[-1] == series[-20]


@given(st.lists(st.integers(0, 10**14), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_a_sixteenth_off_at_most(times: list[int], share: float) -> None:
    kept = Times()
    for took in times:
        kept.add(took)
    ranked = sorted(times)
    exact = ranked[max(0, -(-len(ranked) * int(share * 100) // 100) - 1)]
    found = kept.percentile_ns(share)
    assert exact <= found <= exact * 17 / 16 + 2 * 65_536
    assert kept.count == len(times)
    kept.clear()
    assert (kept.count, kept.percentile_ns(share)) == (0, 0)


def test_a_lower_depth_turns_nobody_out(bench: Any, leases: Any) -> None:
    """What waits beyond a depth that went down stays; a newcomer finds the queue full."""
    b = bench(
        PoolConfig(
            name="p",
            engines=("e",),
            limit=FixedConfig(limit=1),
            depth=DepthConfig(depth_limit=12),
            tuning=TuningConfig(DerivedConfig()),
        )
    )
    b.offer()
    lease = leases(b.effects)[0]
    for _ in range(12):
        b.offer(mode=Mode.BACKPRESSURE)
    b.pipeline.pools[0].depth.depth_limit = 5
    b.offer()
    assert b.refused[-1].limit == 5
    assert b.pipeline.queued == 12
    for _ in range(12):
        (lease,) = leases(b.report(Finished(lease, Usage(1, 1))))
