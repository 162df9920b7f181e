"""The statistics that the control benchmark's claims rest on."""

from __future__ import annotations

import pytest

from benchmarks.control_rows import rows
from benchmarks.control_statistics import (
    Estimate,
    Served,
    bootstrap,
    first_window,
    paired,
    rates,
    share_good,
    worst_window,
)
from benchmarks.control_targets import targets

S = 1_000_000_000


def test_a_long_answer_counts_for_the_part_that_lies_in_the_window() -> None:
    found = rates([Served(0, 40 * S, 400, 100), Served(12 * S, 14 * S, 0, 50)], 10 * S, 20 * S)
    assert found.requests == pytest.approx((0.25 + 1.0) / 10)
    assert found.tokens == pytest.approx((25 + 50) / 10)
    assert found.weighted == pytest.approx((0.25 * (100 + 100) + 50) / 10)


def test_an_answer_of_one_token_counts_where_it_is() -> None:
    one = Served(10 * S, 10 * S, 8, 1)
    assert one.share_within(10 * S, 11 * S) == 1.0
    assert one.share_within(9 * S, 10 * S) == 0.0


def test_an_even_flow_counts_the_same_in_every_window() -> None:
    flow = [Served(start * S, (start + 30) * S, 0, 300) for start in range(-60, 120)]
    assert rates(flow, 0, 10 * S).tokens == pytest.approx(300.0)
    assert rates(flow, 37 * S, 90 * S).tokens == pytest.approx(300.0)


def test_recovery_is_the_first_window_that_is_good_enough() -> None:
    moments = [number * S // 10 for number in range(200)]  # ten per second for 20 s
    good = [moment >= 7 * S for moment in moments]  # all bad before second 7
    assert first_window(moments, good, 5 * S, window_ns=3 * S, share=1.0, until_ns=20 * S) == 2 * S
    # 97 % of 30 requests leaves none that may fail, but a third of a window may.
    assert first_window(moments, good, 5 * S, window_ns=3 * S, share=0.6, until_ns=20 * S) == 8 * S // 10


def test_no_recovery_before_the_end_is_none() -> None:
    moments = [number * S for number in range(20)]
    assert first_window(moments, [False] * 20, 0, window_ns=3 * S, share=0.97, until_ns=20 * S) is None


def test_a_window_without_requests_is_no_recovery() -> None:
    assert first_window([0], [True], S, window_ns=3 * S, share=0.97, until_ns=20 * S) is None


def test_a_second_wave_shows_in_the_worst_window() -> None:
    moments = [number * S // 10 for number in range(300)]
    good = [not 12 * S <= moment < 15 * S for moment in moments]
    assert worst_window(moments, good, 0, window_ns=3 * S, until_ns=30 * S) == 0.0
    assert worst_window(moments, good, 15 * S, window_ns=3 * S, until_ns=30 * S) == 1.0
    assert share_good(moments, good, 9 * S, 15 * S - 1) == pytest.approx(0.5)


def test_the_bounds_hold_the_mean_and_repeat() -> None:
    values = [0.95, 0.97, 0.96, 0.99, 0.94]
    low, high = bootstrap(values)
    assert min(values) <= low < sum(values) / 5 < high <= max(values)
    assert bootstrap(values) == (low, high)


def test_the_bounds_cover_the_truth_about_as_often_as_they_say() -> None:
    from random import Random

    chance = Random("coverage")
    covered = 0
    for number in range(200):
        low, high = bootstrap([chance.gauss(1.0, 0.1) for _ in range(20)], resamples=200, seed=number)
        covered += low <= 1.0 <= high
    assert 0.85 <= covered / 200 <= 0.99


def test_one_seed_has_no_spread_and_none_has_no_mean() -> None:
    assert Estimate.of([0.5, None]) == Estimate(0.5, 0.5, 0.5, 1)
    assert Estimate.of([None]) is None


def test_pairs_cancel_what_the_seeds_have_in_common() -> None:
    ours, theirs = [0.90, 0.95, 0.99], [0.88, 0.93, 0.97]
    found = paired(ours, theirs, lambda one, other: one - other)
    assert found is not None
    assert found.high - found.low < 1e-9
    assert found.mean == pytest.approx(0.02)


def _spike(seed: int, recovery_s: float | None) -> dict[str, object]:
    figures = {"recovery_s": recovery_s, "recovered": float(recovery_s is not None), "spike_served": 0.7}
    return {"case": "spike", "policy": "forebay", "seed": seed, "load": 0.5, "profile": "p", "mix": "chat",
            "figures": figures}  # fmt: skip


def test_a_seed_that_never_recovers_is_not_left_out_of_the_verdict() -> None:
    lines = targets({"rows": [_spike(1, 0.0), _spike(2, None)]})
    recovery = next(line for line in lines if "recovery" in line)
    assert "never in 1 of 2 seeds" in recovery
    assert "never in 1 of 2" in rows({"rows": [_spike(1, 0.0), _spike(2, None)]}, "spike")[0].cell("recovery_s")


def test_a_target_is_met_or_missed_by_what_is_measured() -> None:
    lines = targets({"rows": [_spike(1, 0.5), _spike(2, 2.1)]})
    assert "**missed** by 0.3" in next(line for line in lines if "recovery" in line)
    assert next(line for line in lines if "spike served" in line).endswith("| met |")
