"""Quotas of days and months of UTC, in whole numbers, against the library's own calendar."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.instant import FOREVER, SECOND
from forebay.core.quota.calendar import CalendarQuota, Wall, first_day, month_of
from forebay.core.quota.terms import DAY, MONTH

SETTINGS = settings(max_examples=100, derandomize=True, deadline=None, database=None)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HOUR = 3600 * SECOND


def wall_of(*when: int) -> int:
    return int((datetime(*when, tzinfo=UTC) - EPOCH) / timedelta(microseconds=1)) * 1000  # type: ignore[misc, arg-type]


@SETTINGS
@given(st.dates())
def test_the_calendar_is_the_usual_one(date: datetime) -> None:
    day = (datetime(date.year, date.month, date.day, tzinfo=UTC) - EPOCH).days
    month = month_of(day)
    assert month == 12 * date.year + date.month - 1
    assert first_day(month) == day - date.day + 1


def quota(window_ns: int, limit: int = 1_000, *when: int) -> tuple[CalendarQuota, Wall]:
    wall = Wall()
    wall.offset_ns = wall_of(*when)
    return CalendarQuota(limit, window_ns, "this key", wall), wall


@pytest.mark.parametrize(
    ("window_ns", "when", "hours"),
    [
        (DAY, (2024, 2, 28, 21), 3),
        (DAY, (2026, 12, 31, 23), 1),
        (MONTH, (2024, 2, 28, 0), 48),  # a leap year
        (MONTH, (2023, 2, 28, 0), 24),
        (MONTH, (2100, 2, 28, 0), 24),  # not one
        (MONTH, (2026, 12, 1, 0), 31 * 24),
    ],
)
def test_it_begins_anew_with_the_period_and_says_when(window_ns: int, when: tuple[int, ...], hours: int) -> None:
    kept, _ = quota(window_ns, 1_000, *when)
    kept.charge(900, 0)
    assert kept.wait_ns(100, 0) == 0
    assert kept.wait_ns(101, 0) == hours * HOUR
    assert kept.wait_ns(1_001, 0) == FOREVER
    assert (kept.remaining(0), kept.reset_ns(0)) == (100, hours * HOUR)
    assert kept.wait_ns(101, hours * HOUR - 1) == 1
    assert kept.wait_ns(1_000, hours * HOUR) == 0
    assert kept.remaining(hours * HOUR) == 1_000


def test_what_was_reserved_yesterday_is_not_given_back_today() -> None:
    kept, _ = quota(DAY, 1_000, 2026, 5, 4, 23)
    kept.charge(800, 0)
    kept.charge(100, 2 * HOUR)
    kept.settle(-700, charged=0, now=2 * HOUR)
    assert kept.used == 100, "the refund is yesterday's"
    kept.settle(50, charged=0, now=2 * HOUR)
    assert kept.used == 150, "what was used beyond the reservation was used today"
    kept.settle(-60, charged=2 * HOUR, now=3 * HOUR)
    assert kept.used == 90


@SETTINGS
@given(
    st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 400), max_size=4)), min_size=3, max_size=12),
    st.integers(-2_000, 2_000),
    st.integers(0, 10),
    st.integers(0, 10),
)
def test_a_clock_that_is_wrong_for_a_while_reopens_nothing(
    steps: list[tuple[int, list[int]]], wrong_by: int, since: int, until: int
) -> None:
    """Over all the days that the clock ever shows, no more is granted than their quotas."""
    kept, wall = quota(DAY, 1_000, 2026, 5, 4)
    granted, days = 0, []
    for now, (hours, costs) in enumerate(steps):
        wall.offset_ns += hours * HOUR
        wall.offset_ns += wrong_by * HOUR * ((now == since) - (now == until))
        days.append((now + wall.offset_ns) // DAY)
        for cost in costs:
            if kept.wait_ns(cost, now) == 0:
                kept.charge(cost, now)
                granted += cost
        assert granted <= 1_000 * len(set(days))
        wait = kept.reset_ns(now)
        assert 0 < wait <= 2 * DAY, "never locked for longer than this day and the next"


def test_a_clock_that_was_years_ahead_locks_nobody_out_for_years() -> None:
    kept, wall = quota(MONTH, 1_000, 2026, 5, 4)
    wall.offset_ns += 4 * 365 * DAY
    kept.charge(1_000, 0)
    wall.offset_ns -= 4 * 365 * DAY
    assert kept.remaining(1) == 0, "what was used stays used"
    assert kept.reset_ns(1) == wall_of(2026, 7, 1) - wall_of(2026, 5, 4) - 1
    wall.offset_ns = wall_of(2026, 7, 1)
    assert kept.remaining(2) == 1_000


def test_another_limit_keeps_what_was_used() -> None:
    kept, _ = quota(MONTH, 1_000, 2026, 5, 4)
    kept.charge(700, 0)
    kept.relimit(800, 800, 1)
    assert (kept.remaining(1), kept.wait_ns(200, 1) > 0) == (100, True)
    kept.relimit(500, 500, 2)
    assert kept.remaining(2) == 0
