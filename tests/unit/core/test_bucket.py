"""GCRA: exact waits, exact bursts, refunds, debts."""

from __future__ import annotations

from random import Random

import pytest

from forebay.core.instant import FOREVER, MINUTE, SECOND
from forebay.core.quota.bucket import Bucket


@pytest.mark.parametrize("limit", [1, 7, 10, 60, 997, 70_001, 1_234_567, 10**9])
@pytest.mark.parametrize("window_ns", [SECOND, MINUTE])
def test_the_whole_burst_can_be_spent_one_by_one_and_not_one_more(limit: int, window_ns: int) -> None:
    bucket = Bucket(limit, window_ns)
    units = min(limit, 200)
    bucket.charge(limit - units, 1)
    for _ in range(units):
        assert bucket.wait_ns(1, 1) == 0
        bucket.charge(1, 1)
    assert bucket.wait_ns(1, 1) == -(-window_ns // limit)
    assert bucket.remaining(1) == 0


@pytest.mark.parametrize(
    ("limit", "window_ns", "burst", "spent", "cost", "wait_ns"),
    [
        (60, MINUTE, None, 60, 1, SECOND),
        (60, MINUTE, None, 60, 60, MINUTE),
        (60, MINUTE, None, 59, 1, 0),
        (7, MINUTE, None, 7, 1, 8_571_428_572),  # rounded up: at 8_571_428_571.4 it would be too early
        (100, SECOND, 200, 200, 50, SECOND // 2),
        (100, SECOND, 200, 150, 50, 0),
        (100, SECOND, 200, 150, 51, SECOND // 100),
        (100, SECOND, 200, 0, 201, FOREVER),
        (0, MINUTE, None, 0, 1, FOREVER),
        (0, MINUTE, None, 0, 0, FOREVER),
    ],
)
def test_wait_is_exact(limit: int, window_ns: int, burst: int | None, spent: int, cost: int, wait_ns: int) -> None:
    bucket = Bucket(limit, window_ns, burst)
    bucket.charge(spent, 0)
    assert bucket.wait_ns(cost, 0) == wait_ns
    if 0 < wait_ns < FOREVER:
        assert bucket.wait_ns(cost, wait_ns - 1) == 1, "a nanosecond earlier is too early"
        assert bucket.wait_ns(cost, wait_ns) == 0, "the promised instant is late enough"


@pytest.mark.parametrize("seed", range(5))
def test_no_window_admits_more_than_limit_and_burst(seed: int) -> None:
    chance = Random(seed)
    limit, burst = chance.randrange(5, 500), chance.randrange(1, 800)
    bucket = Bucket(limit, SECOND, burst)
    now, admitted = 0, []
    for _ in range(1_500):
        now += chance.randrange(4_000_000)
        cost = chance.randrange(1, 1 + min(burst, 40))
        if not bucket.wait_ns(cost, now):
            bucket.charge(cost, now)
            admitted.append((now, cost))
    for index in range(0, len(admitted), 7):
        start, total = admitted[index][0], 0
        for at, cost in admitted[index:]:
            total += cost
            assert total <= burst + limit * (at - start) / SECOND + 1e-6
    spent = sum(cost for _, cost in admitted)
    assert spent >= 0.95 * min(limit * now / SECOND, spent + 1), "an eager caller gets its whole rate"


def test_the_window_edge_does_not_double_the_allowance() -> None:
    """B-22: sixty in the last second of one minute leave only the refill for the next second."""
    bucket = Bucket(60, MINUTE)
    admitted = 0
    for at in (59 * SECOND, 60 * SECOND, 61 * SECOND):
        for _ in range(60):
            if not bucket.wait_ns(1, at):
                bucket.charge(1, at)
                admitted += 1
    assert admitted == 62


def test_a_flood_of_refusals_digs_no_debt() -> None:
    """B-23: burst 5, one per second; 2,000 asked at once, quiet, then five are admitted."""
    bucket = Bucket(1, SECOND, burst=5)
    admitted = 0
    for _ in range(2_000):
        if not bucket.wait_ns(1, 0):
            bucket.charge(1, 0)
            admitted += 1
        assert bucket.remaining(0) >= 0
    assert admitted == 5
    later = 6 * SECOND
    for _ in range(5):
        assert bucket.wait_ns(1, later) == 0
        bucket.charge(1, later)
    assert bucket.wait_ns(1, later) == SECOND


def test_a_refund_gives_back_what_was_taken_and_never_more_than_the_burst() -> None:
    bucket = Bucket(100, SECOND, burst=100)
    bucket.charge(80, 0)
    bucket.charge(-30, 0)
    assert bucket.remaining(0) == 50
    bucket.charge(-500, 0)
    assert bucket.remaining(0) == 100
    assert bucket.wait_ns(100, 0) == 0
    bucket.charge(100, 0)
    assert bucket.wait_ns(1, 0) == SECOND // 100


def test_a_debt_refills_first_and_is_never_shown_as_negative() -> None:
    """B-25: 500 used against a limit of 100."""
    bucket = Bucket(100, MINUTE)
    bucket.charge(500, 0)
    assert bucket.remaining(0) == 0
    assert bucket.wait_ns(50, 0) == 450 * MINUTE // 100
    assert bucket.reset_ns(0) == 5 * MINUTE
    assert bucket.remaining(5 * MINUTE) == 100


@pytest.mark.parametrize("at", [0, 1, SECOND, 3 * MINUTE])
def test_a_limit_of_zero_allows_nothing_ever(at: int) -> None:
    bucket = Bucket(0, MINUTE)
    bucket.charge(-5, at)
    assert bucket.wait_ns(1, at) == FOREVER
    assert bucket.remaining(at) == bucket.reset_ns(at) == 0


def test_an_untouched_bucket_is_full_at_any_instant() -> None:
    bucket = Bucket(10, SECOND)
    for now in (0, 5, 10**18):
        assert bucket.remaining(now) == 10
        assert bucket.reset_ns(now) == 0
        assert bucket.wait_ns(10, now) == 0
