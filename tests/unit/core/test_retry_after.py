"""When refused callers are told to come back: the calendar, what it goes by, and what comes of it."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.admission.capacity import Capacity
from forebay.core.admission.retry_after import WHOLE, RetryConfig, RetryLadder, _Calendar
from forebay.core.admission.returns import Returns
from forebay.core.instant import SECOND


class Latest(Random):
    """Always the latest of what may be drawn."""

    def random(self) -> float:
        """As near to one as there is."""
        return 1.0 - 2**-53


def ladder(seed: int = 1, **config: Any) -> RetryLadder:
    return RetryLadder(RetryConfig(**config), Random(seed))


@pytest.mark.parametrize("rate", [0.0, 1e-9, 0.1, 5.0, 100.0, 1e6])
@pytest.mark.parametrize("obeys_s", [60, 120])
def test_promises_stay_within_what_the_library_obeys(rate: float, obeys_s: int) -> None:
    """C-03: from 1 to 55 seconds under any load, or a time at which no library retries by itself."""
    made = ladder()
    for number in range(2_000):
        wait = made.next_ns(rate, number * 1_000, obeys_ns=obeys_s * SECOND)
        assert SECOND <= wait <= (obeys_s - 5) * SECOND or wait > obeys_s * SECOND


def test_promises_are_spread_later_never_earlier() -> None:
    made = ladder()
    waits = [made.spread_ns(10 * SECOND) for _ in range(2_000)]
    assert min(waits) >= 10 * SECOND
    assert max(waits) <= 12.5 * SECOND
    assert len(set(waits)) > 1_900
    assert sum(waits) / len(waits) == pytest.approx(11.25 * SECOND, rel=0.01)


def test_the_more_are_refused_the_later_they_are_asked_back() -> None:
    made = ladder(headroom=0.0)
    waits = [made.next_ns(100.0, 0, usual_rate=90.0) for _ in range(300)]
    seconds = [wait // SECOND for wait in waits]
    assert seconds == sorted(seconds)
    assert seconds[0] == 1
    assert seconds[199] == 20, "ten places in each of twenty seconds"
    assert len(set(waits)) == 300, "nobody is told the same"


@pytest.mark.parametrize(
    ("rate", "usual", "free"), [(100.0, 80.0, 0.14), (1_000.0, 999.0, 0.02), (40.0, 0.0, 0.94), (40.0, 60.0, 0.02)]
)
def test_no_more_is_promised_than_the_usual_load_leaves_free(rate: float, usual: float, free: float) -> None:
    made = ladder()
    returns = [made.next_ns(rate, 0, usual_rate=usual) for _ in range(int(rate * free * 30))]
    for start in range(5, 25, 5):
        within = sum(start * SECOND <= at < (start + 5) * SECOND for at in returns)
        assert within <= 5 * rate * free + 1


def test_who_gets_no_place_takes_none_and_is_told_not_to_retry() -> None:
    made = ladder(headroom=0.0)
    waits = [made.next_ns(10.0, 0, usual_rate=5.0) for _ in range(10_000)]
    promised = [wait for wait in waits if wait <= 55 * SECOND]
    assert len(promised) == 54 * 5, "seconds 1 to 54"
    assert all(wait > 60 * SECOND for wait in waits[len(promised) :])
    assert made.next_ns(10.0, 20 * SECOND, usual_rate=5.0) <= 55 * SECOND, "as time passes there are places again"
    assert made.next_ns(10.0, 500 * SECOND, usual_rate=5.0) <= 2 * SECOND


def test_nearer_seconds_have_places_again_once_more_can_be_served() -> None:
    made = ladder(headroom=0.0)
    while made.next_ns(10.0, 0, usual_rate=9.0) <= 55 * SECOND:
        pass
    assert made.next_ns(10.0, 0, usual_rate=9.0) > 60 * SECOND, "the pool is thought to be small, and is full"
    waits = [made.next_ns(20.0, 0, usual_rate=9.0) for _ in range(600)]
    assert sum(wait <= 55 * SECOND for wait in waits) == 54 * 10
    assert min(waits) < 2 * SECOND


def test_what_a_little_more_brings_is_spread_over_all_seconds() -> None:
    made = ladder(headroom=0.0)
    while made.next_ns(10.0, 0, usual_rate=9.0) <= 55 * SECOND:
        pass
    due = Counter[int]()
    for step in range(2_000):
        if (wait := made.next_ns(10.0 + step / 1_000, 0, usual_rate=9.0)) <= 55 * SECOND:
            due[wait // SECOND] += 1
    assert due.total() == pytest.approx(54 * 2, abs=2)
    assert max(due.values()) <= 8, "two in each second, on average"
    assert sum(second * count for second, count in due.items()) / due.total() == pytest.approx(27.5, abs=5)


def test_a_trace_in_near_seconds_draws_no_places_of_far_ones() -> None:
    """A refusal every 10 ms, while it turns out little by little that more can be served, and far seconds open."""
    made, due = ladder(headroom=0.0), Counter[int]()
    for step in range(6_000):
        now = step * SECOND // 100
        if (wait := made.next_ns(100.0 + step / 10_000, now, usual_rate=90.0)) <= 55 * SECOND:
            due[(now + wait) // SECOND] += 1
    assert max(due.values()) <= 13, "10 to 10.6 in each second, and what chance adds"
    assert min(due[second] for second in range(2, 110)) >= 9


def test_nobody_is_told_to_come_into_the_overload() -> None:
    made = ladder()
    assert made.next_ns(100.0, 0, least_ns=7 * SECOND) >= 7 * SECOND
    assert made.next_ns(100.0, 0) <= 2 * SECOND, "and the nearer places are kept for those who may"


def test_when_some_stay_away_more_are_told_to_come() -> None:
    def promised(shows: float) -> int:
        made = ladder(headroom=0.0)
        return sum(made.next_ns(10.0, 0, usual_rate=5.0, shows=shows) <= 55 * SECOND for _ in range(1_000))

    assert promised(0.5) == 2 * promised(1.0)


@given(
    st.lists(
        st.tuples(st.integers(0, 3 * SECOND), st.floats(0.01, 200.0), st.floats(0.0, 1.0), st.integers(0, 30 * SECOND)),
        min_size=1,
        max_size=300,
    )
)
def test_promises_never_exceed_the_most_that_was_ever_thought_free(
    refusals: list[tuple[int, float, float, int]],
) -> None:
    made, now, due, most = RetryLadder(RetryConfig(), Latest()), 0, Counter[int](), 0.0
    for passed, rate, usual, least_ns in refusals:
        now += passed
        most = max(most, max(0.02, min(0.95, 0.94 - usual)) * rate)
        wait = made.next_ns(rate, now, usual_rate=usual * rate, least_ns=least_ns, obeys_ns=120 * SECOND)
        assert wait > 120 * SECOND or max(SECOND, least_ns) <= wait <= 115 * SECOND
        if wait <= 115 * SECOND:
            due[(now + wait) // SECOND] += 1
    # Up to any second: where less than a place is free per second, several of them make one, promised for the last.
    promised = 0
    for second in sorted(due):
        promised += due[second]
        assert promised <= (second + 1) * most + 1


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0.01, 3.0), st.sampled_from([0, 0, 3]), st.sampled_from([6, 6, 20])),
        min_size=1,
        max_size=200,
    )
)
def test_a_place_is_where_a_walk_over_all_seconds_finds_it(refusals: list[tuple[int, float, int, int]]) -> None:
    calendar, given, now = _Calendar(0), dict[int, float](), 0
    for quarters, room, least, span in refusals:
        now += quarters
        present = now // 4
        asked = room, present + 1 + least, present + span
        assert calendar.take(room, present, *asked[1:], Latest().random()) == walk(given, *asked)


def walk(given: dict[int, float], room: float, first: int, last: int) -> int | None:
    """What is left of each second is put together until it makes a place, which is of the last of them."""
    found = 0.0
    for second in range(first, last + 1):
        found += max(0.0, room - given.get(second, 0.0))
        if found >= WHOLE:
            for filled in range(first, second + 1):
                given[filled] = max(room, given.get(filled, 0.0))
            given[second] -= max(0.0, found - 1.0)
            return second
    return None


def test_a_flow_that_floods_delays_nobody_else() -> None:
    made = ladder()
    for _ in range(10_000):
        made.next_ns(10.0, 0, flow="flood", part=0.5)
    assert made.next_ns(10.0, 0, flow="calm", part=0.5) <= 2 * SECOND


def test_the_calendars_of_flows_are_bounded_and_let_go() -> None:
    made = ladder()
    for number in range(12_000):
        made.next_ns(1e6, 0, flow=f"f{number}")
    assert len(made._calendars) <= 10_000 + 1
    made.next_ns(1e6, 200 * SECOND, flow="late")
    assert len(made._calendars) == 1, "none of the others has a promise to keep"


@pytest.mark.parametrize("wait_ns", [1, 999, SECOND, 40 * SECOND, 300 * SECOND])
def test_an_exact_wait_is_never_early_and_hardly_late(wait_ns: int) -> None:
    made = ladder()
    for _ in range(200):
        assert wait_ns <= made.exact_ns(wait_ns) <= wait_ns + min(wait_ns // 20, SECOND // 2)


# ---- what a pool can serve ------------------------------------------------------------------------------------


def look(capacity: Capacity, at_s: float, **seen: Any) -> float:
    facts = {"full": True, "places": 100, "service_ns": 5 * SECOND, "drain_rate": 0.0, "best_rate": 0.0}
    paced = seen.pop("paced", 0.0)
    return capacity.look(int(at_s * SECOND), paced=lambda: paced, **(facts | seen))


def test_before_it_was_ever_full_the_capacity_is_the_most_it_has_shown() -> None:
    assert look(Capacity(), 10, full=False) == 0.0
    assert look(Capacity(), 10, full=False, drain_rate=12.0, best_rate=15.0) == 15.0


def test_the_pace_of_streams_says_ahead_what_a_pool_will_serve() -> None:
    capacity = Capacity()
    assert look(capacity, 10, paced=90.0, drain_rate=8.0) == 8.0, "the pace is that of an emptier pool"
    seen = [look(capacity, at_s, paced=40.0, drain_rate=8.0) for at_s in range(11, 25)]
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(40.0, rel=0.05)
    assert look(capacity, 400, full=False, paced=90.0, drain_rate=8.0) == seen[-1], "an emptier pool is faster"
    assert look(capacity, 401, paced=90.0, drain_rate=8.0) == seen[-1], "nor is the next overload believed at once"


def test_what_was_guessed_in_a_moment_does_not_stand() -> None:
    capacity = Capacity()
    look(capacity, 10, paced=90.0)
    look(capacity, 11, paced=90.0)
    assert look(capacity, 100, full=False, best_rate=12.0) == 12.0
    assert look(capacity, 101, paced=90.0, best_rate=12.0) == 12.0


def test_a_pool_that_was_full_for_long_enough_has_shown_it() -> None:
    capacity = Capacity()
    for at_s in range(10, 100):
        seen = look(capacity, at_s, paced=40.0, drain_rate=25.0)
    assert seen == pytest.approx(25.0, rel=0.01)


def test_without_a_pace_it_lies_between_what_was_shown_and_what_the_places_would_give() -> None:
    capacity = Capacity()
    assert look(capacity, 10, drain_rate=10.0, best_rate=12.0) == 12.0
    assert 12.0 < look(capacity, 11.9, drain_rate=10.0, best_rate=12.0) < 100 / 5
    assert look(Capacity(), 10, service_ns=0, drain_rate=3.0) == 3.0


# ---- who comes back -------------------------------------------------------------------------------------------


def test_returns_and_spikes_are_no_part_of_the_usual_load() -> None:
    returns = Returns()
    for second in range(60):
        for _ in range(10):
            returns.admitted(0, second * SECOND)
        returns.admitted(1, second * SECOND)
    assert returns.usual_rate == pytest.approx(10.0)
    for second in range(60, 80):
        for number in range(100):
            (returns.admitted if number < 20 else returns.refused)(None, second * SECOND)
    assert returns.usual_rate == pytest.approx(10.0)
    assert returns.overloaded


def test_an_overload_that_goes_on_is_the_load() -> None:
    returns = Returns()
    for second in range(300):
        for number in range(100):
            (returns.admitted if number < 20 else returns.refused)(None, second * SECOND)
    assert returns.usual_rate == pytest.approx(100.0)


def test_quiet_hours_are_part_of_the_usual_load() -> None:
    returns = Returns()
    for second in range(60):
        for _ in range(10):
            returns.admitted(None, second * SECOND)
    returns.admitted(None, 3600 * SECOND)
    assert returns.usual_rate < 1.0


@pytest.mark.parametrize(("coming", "expected"), [(100, 1.0), (75, 0.75), (20, 0.5), (200, 1.0)])
def test_how_many_of_those_told_do_come_back(coming: int, expected: float) -> None:
    returns = Returns()
    returns.refused(0, 0)
    for number in range(100):
        returns.promised(number * SECOND // 10)
    for number in range(coming):
        returns.admitted(1, number * 10 * SECOND // coming)
    returns.admitted(0, 20 * SECOND)
    assert returns.shows == pytest.approx(expected, rel=0.06)


def test_a_few_promises_say_nothing_of_who_comes_back() -> None:
    returns = Returns()
    returns.refused(0, 0)
    for _ in range(10):
        returns.promised(SECOND)
    returns.admitted(0, 60 * SECOND)
    assert returns.shows == 1.0
