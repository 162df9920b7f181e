"""The statistics that the admission study's claims rest on, and what it counts of a run."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.admission_frontier import Setting, Spot, at, compare, frontier
from benchmarks.admission_trials import BLOCKS, POLICIES, SIZE_BOUNDS, Measured, Tally, Trial, measure, plan
from forebay.report.statistics import percentile

CLASSES = len(SIZE_BOUNDS) + 1


def run(ms: list[list[float]], refused: list[int], *, tokens_refused: int = 0) -> Measured:
    """A block per list of answer times; each answer has 10 tokens."""
    tallies = [
        Tally(
            offered=[len(times) + missed, *[0] * (CLASSES - 1)],
            refused=[missed, *[0] * (CLASSES - 1)],
            tokens_offered=10 * len(times) + tokens_refused,
            tokens_refused=tokens_refused,
        )
        for times, missed in zip(ms, refused, strict=True)
    ]
    flat = [(one, block) for block, times in enumerate(ms) for one in times]
    times, blocks = array("d", (one for one, _ in flat)), array("b", (block for _, block in flat))
    return Measured(tallies, times, array("d", (2 * one for one in times)), blocks, 60.0)


@given(
    st.lists(st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=80), min_size=1, max_size=5),
    st.data(),
)
def test_a_weighted_p99_is_that_of_blocks_repeated(ms: list[list[float]], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(0, 3), min_size=len(ms), max_size=len(ms)).filter(any))
    repeated = sorted(one for times, weight in zip(ms, weights, strict=True) for one in times * weight)
    assert Setting(1.0, run(ms, [0] * len(ms))).p99_ms("ttft", weights) == percentile(repeated, 0.99)


def test_nothing_served_is_no_place() -> None:
    assert Setting(1.0, run([[]], [3])).spot("ttft", [1]) is None


def test_the_frontier_leaves_out_what_another_beats_in_both() -> None:
    spots = [Spot(100, 0.8, 0.8, 1), Spot(200, 0.5, 0.6, 2), Spot(250, 0.55, 0.5, 3), Spot(400, 0.2, 0.3, 4)]
    assert [spot.setting for spot in frontier(reversed(spots))] == [1, 2, 4]


def test_between_two_settings_lies_a_third() -> None:
    best = [Spot(100, 0.8, 0.9, 1), Spot(400, 0.2, 0.3, 4)]
    place = at(best, 200)
    assert place is not None
    assert (place.refused, place.tokens_refused, place.part) == pytest.approx((0.5, 0.6, 0.5))
    assert at(best, 99) is None, "no setting is that fast"
    lax = at(best, 5000)
    assert lax is not None
    assert lax.refused == 0.2


def test_a_policy_compared_with_itself_gains_nothing() -> None:
    chance = Random(1)
    settings = [
        Setting(limit, run([[limit * chance.random() for _ in range(200)] for _ in range(6)], [1000 // limit] * 6))
        for limit in (10, 100, 1000)
    ]
    for one in compare(settings, settings, {"ttft": (50.0, 500.0)}, resamples=50):
        assert (one.fewer.low, one.fewer.value, one.fewer.high) == (0, 0, 0)
        assert (one.tokens_more.low, one.tokens_more.high) == (0, 0)


def test_fewer_requests_refused_and_fewer_tokens_served_are_told_apart() -> None:
    ms = [[100.0] * 50, [100.0] * 50]
    counted, weighed = run(ms, [50, 50], tokens_refused=500), run(ms, [25, 25], tokens_refused=1500)
    (one,) = compare([Setting(1, counted)], [Setting(1, weighed)], {"ttft": (200.0,)}, resamples=20)
    assert one.fewer.value == pytest.approx(1 - (25 / 75) / (50 / 100))
    assert one.tokens_more.value == pytest.approx(0.25 / 0.5 - 1)
    assert one.resamples == 20


@pytest.mark.parametrize("policy", ["requests", "tokens, blind"])
def test_what_a_run_keeps_adds_up(policy: str) -> None:
    found = measure(Trial("azure_llm_2023_code", 2.0, policy, POLICIES[policy].settings[2], share=0.02))
    assert len(found.tallies) == BLOCKS - 1
    offered, refused = (sum(sum(getattr(one, name)) for one in found.tallies) for name in ("offered", "refused"))
    assert len(found.ttft_ms) == len(found.latency_ms) == len(found.block) == offered - refused
    assert 0 < refused < offered
    assert all(first <= whole for first, whole in zip(found.ttft_ms, found.latency_ms, strict=True))
    assert all(0 < one.tokens_refused <= one.tokens_offered for one in found.tallies if sum(one.refused))


def test_a_request_larger_than_the_room_is_let_in_only_by_who_is_blind() -> None:
    trials = [Trial("azure_llm_2023_code", 2.0, policy, 4000.0, share=0.02) for policy in ("tokens", "tokens, blind")]
    sighted, blind = (measure(trial) for trial in trials)
    largest = [sum(one.refused[-1] for one in run.tallies) / sum(one.offered[-1] for one in run.tallies)
               for run in (sighted, blind)]  # fmt: skip
    smallest = [sum(one.refused[0] for one in run.tallies) / sum(one.offered[0] for one in run.tallies)
                for run in (sighted, blind)]  # fmt: skip
    assert smallest[0] < smallest[1], "counting sizes at the door favours the small"
    assert smallest[0] < largest[0]


def test_every_setting_is_planned_once() -> None:
    trials = plan(("azure_llm_2023_code",), (1.2, 2.0), share=1.0, every=1, variants=("capped",))
    assert len(set(trials)) == len(trials)
    assert {trial.policy for trial in trials if trial.variant} == {"requests", "tokens"}
