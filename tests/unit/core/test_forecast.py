"""The predicted wait: its formula, its release rate, its budget and its tracker."""

from __future__ import annotations

from math import exp, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.admission.forecast import CORRECTION_LEAST, CORRECTION_MOST, ForecastConfig, WaitForecast
from forebay.core.instant import MILLISECOND, SECOND

CONFIG = ForecastConfig()


@pytest.fixture
def forecast() -> WaitForecast:
    return WaitForecast(CONFIG)


def releases(forecast: WaitForecast, every_ns: int, start: int, end: int, held_ns: int) -> None:
    for at in range(start, end, every_ns):
        forecast.released(at - held_ns, at)


@pytest.mark.parametrize("position", [1, 2, 10, 100])
@pytest.mark.parametrize("rate", [0.5, 20.0, 3_000.0])
def test_formula(forecast: WaitForecast, position: int, rate: float) -> None:
    expected = position / rate * (1 + 1.28 / sqrt(position)) * SECOND
    assert forecast.predict_ns(position, rate) == pytest.approx(expected, abs=1)
    forecast.correction = 3.0
    assert forecast.predict_ns(position, rate) == pytest.approx(3 * expected, abs=3)


def test_nothing_is_predicted_from_nothing(forecast: WaitForecast) -> None:
    """D-13: an untrained forecast refuses nobody."""
    assert forecast.drain_rate(0, 0) == forecast.drain_rate(8, SECOND) == 0.0
    assert forecast.predict_ns(5, 0.0) == forecast.predict_ns(0, 10.0) == 0
    assert forecast.service_ns == 0
    assert forecast.budget_ns(0.0) == CONFIG.wait_budget_ns


def test_rate_is_counted_over_the_window(forecast: WaitForecast) -> None:
    releases(forecast, 25 * MILLISECOND, 0, 5 * SECOND, SECOND)
    assert forecast.drain_rate(40, 5 * SECOND) == pytest.approx(40.0, rel=0.03)
    assert forecast.service_ns == SECOND


@pytest.mark.parametrize(
    ("releases_seen", "in_flight", "rate"), [(1, 10, 20.0), (3, 10, 20.0), (3, 0, 0.0), (3, 1, 2.0)]
)
def test_a_thin_window_is_filled_by_littles_law(
    forecast: WaitForecast, releases_seen: int, in_flight: int, rate: float
) -> None:
    for number in range(releases_seen):
        forecast.released(number, number + SECOND // 2)
    assert forecast.drain_rate(in_flight, SECOND) == pytest.approx(rate)


def test_a_burst_after_idleness_is_not_judged_by_an_empty_window(forecast: WaitForecast) -> None:
    """Ten releases in the first quarter second are forty a second, not five."""
    releases(forecast, 25 * MILLISECOND, 0, 3 * SECOND, 200 * MILLISECOND)
    releases(forecast, 25 * MILLISECOND, 60 * SECOND, 60 * SECOND + 250 * MILLISECOND, 200 * MILLISECOND)
    assert forecast.drain_rate(8, 60 * SECOND + 250 * MILLISECOND) == pytest.approx(40.0, rel=0.1)


def test_a_batch_that_ends_at_once_is_no_endless_rate(forecast: WaitForecast) -> None:
    for _ in range(32):
        forecast.released(0, 100 * MILLISECOND)
    assert forecast.drain_rate(32, 100 * MILLISECOND) == pytest.approx(320.0)


def test_a_very_fast_engine_is_counted_right(forecast: WaitForecast) -> None:
    releases(forecast, 100_000, 0, 3 * SECOND, MILLISECOND)
    assert forecast.drain_rate(10, 3 * SECOND) == pytest.approx(10_000, rel=0.01)


@pytest.mark.parametrize(
    ("rate", "budget_ms"),
    [(1_000.0, 50), (60.0, 50), (59.0, 50.847), (30.0, 100), (4.0, 750), (3.0, 1_000), (0.01, 1_000)],
)
def test_budget_has_a_floor_of_three_slots_and_a_ceiling(forecast: WaitForecast, rate: float, budget_ms: float) -> None:
    assert forecast.budget_ns(rate) / MILLISECOND == pytest.approx(budget_ms, rel=1e-3)


def saw(forecast: WaitForecast, late: bool, now: int) -> None:
    """A wait as it was predicted, late for its budget or not."""
    forecast.observe(10 * MILLISECOND, 10 * MILLISECOND, 9 * MILLISECOND if late else 11 * MILLISECOND, now)


def test_tracker_moves_by_the_pinball_step_and_stays_in_its_bounds(forecast: WaitForecast) -> None:
    saw(forecast, True, 1)
    assert forecast.correction == pytest.approx(exp(0.02 * 0.99))
    saw(forecast, False, 2)
    assert forecast.correction == pytest.approx(exp(0.02 * 0.98))
    for _ in range(1_000):
        saw(forecast, True, 3)
    assert forecast.correction == CORRECTION_MOST
    for _ in range(100_000):
        saw(forecast, False, 4)
    assert forecast.correction == CORRECTION_LEAST


def test_tracker_rests_where_one_in_a_hundred_is_late(forecast: WaitForecast) -> None:
    saw(forecast, False, 0)
    start = forecast.correction
    for number in range(100 * 50):
        saw(forecast, number % 100 == 0, number)
    assert forecast.correction == pytest.approx(start, rel=0.03)


@pytest.mark.parametrize("asked_every_ns", [100 * MILLISECOND, 5 * SECOND, 60 * SECOND])
@pytest.mark.parametrize("pinned", [CORRECTION_MOST, CORRECTION_LEAST])
def test_correction_fades_while_nobody_queues(forecast: WaitForecast, pinned: float, asked_every_ns: int) -> None:
    """A tracker pinned by a stall admits nobody to the queue, so it must not wait for an observation to fade."""
    saw(forecast, True, 0)
    forecast.correction = pinned
    for at in range(0, 60 * SECOND + 1, asked_every_ns):
        forecast.decay(at)
    assert forecast.correction == pytest.approx(1 + (pinned - 1) / 2, rel=0.03)


def test_observations_hold_off_the_fading(forecast: WaitForecast) -> None:
    forecast.correction = 3.0
    for number in range(1_000):
        now = number * 100 * MILLISECOND
        forecast.decay(now)
        saw(forecast, number % 100 == 0, now)
    assert forecast.correction == pytest.approx(3.0, rel=0.05)


def test_budget_leaves_room_for_one_waiter_however_late_slots_come(forecast: WaitForecast) -> None:
    """At the highest correction the next in line is still admitted, or the queue could never learn better."""
    rate = 8.0
    for correction in (1.0, 2.0, CORRECTION_MOST):
        forecast.correction = correction
        if correction * 3 / rate <= 1.0:  # below the ceiling
            assert forecast.predict_ns(1, rate) <= forecast.budget_ns(rate)


def released_steadily(forecast: WaitForecast, every_ns: int, until_ns: int, since_ns: int = 0) -> None:
    for at in range(since_ns, until_ns, every_ns):
        forecast.released(at, at)


def test_a_lost_engine_slows_the_rate_at_once_and_a_returned_one_raises_it(forecast: WaitForecast) -> None:
    released_steadily(forecast, 10 * MILLISECOND, 4 * SECOND)
    assert forecast.drain_rate(9, 4 * SECOND) == pytest.approx(100, rel=0.02)
    forecast.resized(0.75, 9, 4 * SECOND)
    assert forecast.drain_rate(9, 4 * SECOND) == pytest.approx(75, rel=0.02), "foretold, before any release"
    released_steadily(forecast, 20 * MILLISECOND, 5 * SECOND, 4 * SECOND)
    assert forecast.drain_rate(9, 5 * SECOND) == pytest.approx((75 + 50) / 2, rel=0.05), "half foretold, half counted"
    released_steadily(forecast, 20 * MILLISECOND, 7 * SECOND, 5 * SECOND)
    assert forecast.drain_rate(9, 7 * SECOND) == pytest.approx(50, rel=0.05), "counted"
    forecast.resized(4 / 3, 9, 7 * SECOND)
    assert forecast.drain_rate(9, 7 * SECOND) == pytest.approx(50 * 4 / 3, rel=0.05)


def test_waits_that_differ_for_long_shorten_the_window(forecast: WaitForecast) -> None:
    """Releases are suddenly five times as slow, and waits five times what was said: the past second is let go."""
    released_steadily(forecast, 10 * MILLISECOND, 4 * SECOND)
    released_steadily(forecast, 50 * MILLISECOND, 4 * SECOND + 500 * MILLISECOND, 4 * SECOND)
    now = 4 * SECOND + 500 * MILLISECOND
    assert forecast.drain_rate(9, now) > 75
    for _ in range(4):
        forecast.observe(20 * MILLISECOND, 20 * MILLISECOND, SECOND, now)
    assert forecast.drain_rate(9, now) > 75, "as predicted: nothing has changed"
    for _ in range(8):
        forecast.observe(200 * MILLISECOND, 20 * MILLISECOND, SECOND, now)
    assert forecast.drain_rate(9, now) == pytest.approx(20, rel=0.25)


def test_noise_about_the_prediction_changes_nothing(forecast: WaitForecast) -> None:
    released_steadily(forecast, 10 * MILLISECOND, 4 * SECOND)
    for number in range(2_000):
        waited = 10 * MILLISECOND if number % 2 else 40 * MILLISECOND
        forecast.observe(waited, 20 * MILLISECOND, SECOND, 4 * SECOND)
    assert forecast.drain_rate(9, 4 * SECOND) == pytest.approx(100, rel=0.02)


STEPS = st.tuples(
    st.sampled_from(["released", "released", "resized", "observed", "reconfigured", "nothing"]),
    st.sampled_from([0, 0, 1, 40, 700]),  # ms that pass before it
    st.integers(0, 3),  # leases open
)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_the_rate_that_is_remembered_is_the_one_that_would_be_counted(steps: list[tuple[str, int, int]]) -> None:
    forecast, now = WaitForecast(CONFIG), SECOND
    for number, (what, passed_ms, in_flight) in enumerate(steps):
        now += passed_ms * MILLISECOND
        if what == "released":
            forecast.released(now - 50 * MILLISECOND, now)
        elif what == "resized":
            forecast.resized(0.5 if number % 2 else 2.0, in_flight, now)
        elif what == "observed":
            forecast.observe(10**12, 1, SECOND, now)  # so late that what came before it counts no more
        elif what == "reconfigured":
            forecast.reconfigure(ForecastConfig(window_ns=SECOND if number % 2 else 2 * SECOND))
        assert forecast.drain_rate(in_flight, now) == forecast._count_rate(in_flight, now)
        assert forecast.drain_rate(in_flight, now) == forecast._count_rate(in_flight, now)
