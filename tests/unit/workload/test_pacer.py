"""Arrival processes: their rates, their shapes, their seeds."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from forebay.errors import UsageError
from forebay.workload.pacer import (
    Clumps,
    Constant,
    Gamma,
    Mmpp,
    Pacer,
    Phase,
    Poisson,
    Ramp,
    bursty,
    phase_bounds_s,
    schedule,
)

RANDOM_PACERS: dict[str, tuple[Pacer, float, float]] = {
    # name: (pacer, expected count, relative tolerance of the mean over the seeds)
    "poisson": (Poisson(50.0, 20.0), 1000.0, 0.03),
    "gamma": (Gamma(50.0, 3.0, 20.0), 1000.0, 0.10),
    "mmpp": (Mmpp(50.0, 5.0, 0.5, 20.0), 1000.0, 0.08),
    "clumps": (Clumps(50.0, 10, 20.0), 1000.0, 0.03),
    "ramp": (Ramp(20.0, 80.0, 20.0), 1000.0, 0.03),
}


@pytest.mark.parametrize("name", RANDOM_PACERS)
def test_the_mean_rate_is_the_asked_one(name: str) -> None:
    pacer, expected, tolerance = RANDOM_PACERS[name]
    counts = [sum(1 for _ in pacer.offsets_s(Random(seed))) for seed in range(12)]
    assert fmean(counts) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("name", RANDOM_PACERS)
def test_offsets_ascend_and_stay_within_the_duration(name: str) -> None:
    pacer = RANDOM_PACERS[name][0]
    offsets = list(pacer.offsets_s(Random(4)))
    assert offsets == sorted(offsets)
    assert offsets[0] >= 0
    assert offsets[-1] < pacer.duration_s


@pytest.mark.parametrize("name", RANDOM_PACERS)
def test_one_seed_gives_one_sequence(name: str) -> None:
    pacer = RANDOM_PACERS[name][0]
    first, again, other = (list(pacer.offsets_s(Random(seed))) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert list(Constant(4.0, 1.0).offsets_s(Random(1))) == [0.0, 0.25, 0.5, 0.75]


def test_constant_arrivals_do_not_drift() -> None:
    offsets = list(Constant(3.0, 1000.0).offsets_s(Random(1)))
    assert len(offsets) == 3000
    assert offsets[-1] == pytest.approx(2999 / 3)


@pytest.mark.parametrize(("cv", "low", "high"), [(0.5, 0.45, 0.55), (1.0, 0.9, 1.1), (3.0, 2.5, 3.5)])
def test_gamma_gaps_have_the_asked_variation(cv: float, low: float, high: float) -> None:
    offsets = list(Gamma(1000.0, cv, 10.0).offsets_s(Random(3)))
    gaps = [after - before for before, after in pairwise(offsets)]
    assert low < pstdev(gaps) / fmean(gaps) < high


def test_a_ramp_is_sparse_at_first_and_dense_at_last() -> None:
    offsets = list(Ramp(10.0, 90.0, 10.0).offsets_s(Random(2)))
    first_half = sum(offset < 5 for offset in offsets)
    # The mean rates of the halves are 30 and 70.
    assert first_half == pytest.approx(150, rel=0.2)
    assert len(offsets) - first_half == pytest.approx(350, rel=0.2)


def test_clumps_arrive_together() -> None:
    offsets = list(Clumps(10.0, 5, 10.0).offsets_s(Random(1)))
    together = [offsets.count(offset) for offset in set(offsets)]
    assert set(together) == {5}


def test_spread_clumps_stay_in_order_even_when_they_overlap() -> None:
    offsets = list(Clumps(100.0, 5, 5.0, spread_s=0.4).offsets_s(Random(1)))
    assert offsets == sorted(offsets)
    assert len(offsets) == pytest.approx(500, rel=0.1)


def test_mmpp_alternates_between_two_rates() -> None:
    offsets = list(Mmpp(100.0, 9.0, 5.0, 100.0).offsets_s(Random(5)))
    per_second = [sum(second <= offset < second + 1 for offset in offsets) for second in range(100)]
    # Calm 20 and busy 180 per second: seconds near the mean of 100 are rare.
    assert sum(count < 60 or count > 140 for count in per_second) > 80


def test_phases_follow_one_another() -> None:
    phases = [Phase("calm", Constant(2.0, 1.0)), Phase("busy", Constant(4.0, 0.5))]
    arrivals = schedule(phases, seed=1)
    assert [(arrival.phase, arrival.at_ns) for arrival in arrivals] == [
        ("calm", 0),
        ("calm", 500_000_000),
        ("busy", 1_000_000_000),
        ("busy", 1_250_000_000),
    ]
    assert phase_bounds_s(phases) == [("calm", 0.0, 1.0), ("busy", 1.0, 1.5)]


def test_a_changed_phase_leaves_the_others_as_they_were() -> None:
    before = schedule([Phase("a", Poisson(5.0, 5.0)), Phase("b", Poisson(9.0, 5.0))], seed=3)
    after = schedule([Phase("a", Poisson(50.0, 5.0)), Phase("b", Poisson(9.0, 5.0))], seed=3)
    assert [one for one in before if one.phase == "b"] == [one for one in after if one.phase == "b"]


def test_bursty_is_mmpp_unless_a_clump_is_given() -> None:
    assert isinstance(bursty(10.0, 5.0, None), Mmpp)
    assert bursty(10.0, 5.0, 4) == Clumps(10.0, 4, 5.0)
    with pytest.raises(UsageError, match="clump of 0"):
        bursty(10.0, 5.0, 0)
