"""Closed form of a run of steps: ends, what has begun when, and being cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engines.simulated.stretch import FRACTION_BITS, Stretch

NS = 1 << FRACTION_BITS


def stretch(took: float, growth: float, steps: int, start: int = 0, fraction: int = 0) -> Stretch:
    one = Stretch(start, fraction, round(took * NS), round(growth * NS), 2, 2)
    one.lengthen(steps)
    return one


def test_each_step_takes_longer_than_the_last_by_the_same_time() -> None:
    one = stretch(100, 3, 4, start=1_000)
    assert [one.end_of(step) for step in range(5)] == [1_000, 1_100, 1_203, 1_309, 1_418]
    assert one.end == 1_418


def test_fractions_of_a_nanosecond_are_handed_on() -> None:
    one = stretch(10.5, 0, 1)
    assert (one.end, one.fraction_left) == (10, NS // 2)
    two = stretch(10.5, 0, 1, start=one.end, fraction=one.fraction_left)
    assert (two.end, two.fraction_left) == (21, 0)


def test_a_step_has_begun_from_the_instant_at_which_the_one_before_is_over() -> None:
    one = stretch(100, 10, 3, start=50)  # over at 150, 260 and 380
    assert [one.begun(now) for now in (50, 149, 150, 259, 260, 379, 380, 10_000)] == [1, 1, 2, 2, 3, 3, 3, 3]


@given(
    took=st.floats(1, 1e9),
    growth=st.floats(0, 1e5),
    steps=st.integers(1, 5_000),
    fraction=st.integers(0, NS - 1),
    share=st.floats(0, 1.1),
)
def test_what_has_begun_agrees_with_the_ends(
    took: float, growth: float, steps: int, fraction: int, share: float
) -> None:
    one = stretch(took, growth, steps, start=7, fraction=fraction)
    now = 7 + int((one.end - 7) * share)
    begun = one.begun(now)
    assert one.end_of(begun - 1) <= now
    assert begun == steps or one.end_of(begun) > now


def test_cut_short_nothing_finishes_and_an_aborted_sequence_is_not_named() -> None:
    one = stretch(100, 0, 5)
    one.decodes, one.finished = 2, ["a", "b"]
    assert one.tokens == 10
    one.forget("a")
    assert one.finished == ["b"]
    one.shorten(3)
    assert (one.steps, one.end, one.finished, one.tokens) == (3, 300, [], 6)


@pytest.mark.parametrize("growth", [0.0, 2.0**-20, 43.75])
def test_long_runs_stay_exact(growth: float) -> None:
    one = stretch(1e7, growth, 100_000)
    assert one.end == pytest.approx(1e12 + growth * 1e5 * (1e5 - 1) / 2, rel=1e-12)
