"""A key's limits, alone and together: all are checked before any is charged."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.core.instant import MINUTE, SECOND
from forebay.core.model import Demand, Usage
from forebay.core.outcome import ShedReason
from forebay.core.quota.budget import Quota
from forebay.core.quota.path import UNMETERED, Path, Prices
from forebay.core.quota.terms import KeyLimits, KeyTerms


def path(**limits: Any) -> Path:
    return Quota({"k": KeyTerms(KeyLimits(**limits))}, {}).budget("k").path


def demand(tokens: int) -> Prices:
    """The prices of so many tokens in."""
    return 1, tokens, tokens, 0, tokens


def admit(path: Path, tokens: int, now: int = 0) -> ShedReason | None:
    refusal = path.check(demand(tokens), 2 * SECOND, now)
    if refusal is None:
        assert path.charge(demand(tokens), now) in {0, UNMETERED}
        return None
    assert isinstance(refusal.reason, ShedReason)
    return refusal.reason


def settle(path: Path, reserved: int, used: int, now: int = 0) -> None:
    path.settle(reserved, 0, Usage(used, 0), 0, now)


@pytest.mark.parametrize(
    ("limits", "reason", "admitted"),
    [
        ({}, None, 50),
        ({"requests_per_minute": None, "tokens_per_minute": None, "concurrency": None}, None, 50),
        ({"requests_per_minute": 10}, ShedReason.KEY_REQUESTS, 10),
        ({"tokens_per_minute": 100}, ShedReason.KEY_TOKENS, 10),
        ({"input_tokens_per_minute": 100}, ShedReason.KEY_TOKENS, 10),
        ({"output_tokens_per_minute": 100}, None, 50),
        ({"weighted_tokens_per_minute": 100}, ShedReason.KEY_TOKENS, 10),
        ({"tokens_per_second": 50, "burst_s": 2.0}, ShedReason.KEY_TOKENS, 10),
        ({"tokens_per_day": 100}, ShedReason.KEY_TOKENS, 10),
        ({"tokens_per_month": 100}, ShedReason.KEY_TOKENS, 10),
        ({"concurrency": 10}, ShedReason.KEY_CONCURRENCY, 10),
        ({"requests_per_minute": 0}, ShedReason.KEY_REQUESTS, 0),
        ({"tokens_per_minute": 0}, ShedReason.KEY_TOKENS, 0),
        ({"tokens_per_day": 0}, ShedReason.KEY_TOKENS, 0),
        ({"concurrency": 0}, ShedReason.KEY_CONCURRENCY, 0),
    ],
)
def test_each_limit_works_alone(limits: dict[str, Any], reason: ShedReason | None, admitted: int) -> None:
    """B-06: one limit is enough, absent is unlimited, zero allows nothing. B-02: a burst passes no limit."""
    budget = path(**limits)
    verdicts = [admit(budget, 10) for _ in range(50)]
    assert verdicts == [None] * admitted + [reason] * (50 - admitted)
    assert budget.levels[0].open == admitted
    assert budget.limited == any(value is not None for value in limits.values())


@pytest.mark.parametrize(
    "limits", [{"requests_per_minute": 0}, {"tokens_per_minute": 0}, {"tokens_per_month": 0}, {"concurrency": 0}]
)
def test_nothing_allowed_means_no_retry(limits: dict[str, int]) -> None:
    refusal = path(**limits).check(demand(1), SECOND, 0)
    assert refusal is not None
    assert refusal.retry_after_ns is None


def test_limits_do_not_share_a_clock() -> None:
    """B-05: with or without a request limit the tokens of every window are the same."""
    alone = path(tokens_per_minute=1_000)
    both = path(tokens_per_minute=1_000, requests_per_minute=600)
    for window in range(4):
        for budget in (alone, both):
            verdicts = [admit(budget, 100, window * MINUTE) for _ in range(8)]
            assert verdicts == [None] * 8, f"window {window}"


def test_a_refusal_by_the_last_limit_charges_none_of_the_others() -> None:
    budget = path(requests_per_minute=5, tokens_per_minute=100, tokens_per_second=1_000, concurrency=9)
    before = budget.headers(0)
    for _ in range(100):
        assert admit(budget, 101) is ShedReason.NEVER_FITS
    assert admit(budget, 90) is None
    after = budget.headers(0)
    for _ in range(100):
        assert admit(budget, 20) is ShedReason.KEY_TOKENS
    assert budget.headers(0) == after
    assert [row[2] for row in before] == [5, 100]
    assert [row[2] for row in after] == [4, 10]
    assert budget.levels[0].open == 1


def test_a_parallel_burst_does_not_walk_past_the_token_limit() -> None:
    """B-01: five of about 70 tokens against 100 a minute: one is admitted."""
    budget = path(tokens_per_minute=100)
    assert [admit(budget, 70) for _ in range(5)] == [None] + [ShedReason.KEY_TOKENS] * 4


def test_the_retry_time_is_when_it_fits() -> None:
    budget = path(tokens_per_minute=6_000)
    admit(budget, 6_000)
    refusal = budget.check(demand(500), SECOND, 0)
    assert refusal is not None
    assert refusal.retry_after_ns == 5 * SECOND
    assert (refusal.limit, refusal.actual, refusal.unit, refusal.level) == (6_000, 6_500, "tokens/min", "this key")
    assert budget.check(demand(500), SECOND, 5 * SECOND - 1) is not None
    assert budget.check(demand(500), SECOND, 5 * SECOND) is None


def test_of_several_limits_the_one_that_refuses_longest_is_named() -> None:
    """A caller that came back after the shorter wait would be refused by the other."""
    budget = path(requests_per_minute=60, tokens_per_minute=600)
    for _ in range(60):
        assert admit(budget, 10) is None
    refusal = budget.check(demand(300), SECOND, 0)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_ns) == (ShedReason.KEY_TOKENS, 30 * SECOND)
    assert budget.check(demand(300), SECOND, 30 * SECOND) is None


def test_concurrency_is_given_back_at_the_end_and_retry_is_the_expected_completion() -> None:
    budget = path(concurrency=1)
    assert admit(budget, 1) is None
    refusal = budget.check(demand(1), 7 * SECOND, 0)
    assert refusal is not None
    assert refusal.retry_after_ns == 7 * SECOND
    settle(budget, 1, 1)
    assert admit(budget, 1) is None
    settle(budget, 1, 1)
    with pytest.raises(AssertionError, match="settled twice"):
        settle(budget, 1, 1)


@pytest.mark.parametrize(
    ("reserved", "used", "left", "wait_s"),
    [
        (900, 0, 1_000, 0.0),  # B-26: a failure gives the reservation back
        (900, 100, 900, 0.0),
        (900, 900, 100, 24.0),
        (50, 500, 500, 0.0),  # B-25: more than reserved
        (50, 1_400, 0, 54.0),  # a debt of 400 and then 500
        (50, 10**15, 0, 90.0),  # an engine that lies: the debt is one burst
        (50, -(10**15), 1_000, 0.0),  # and mints nothing
    ],
)
def test_settlement(reserved: int, used: int, left: int, wait_s: float) -> None:
    budget = path(tokens_per_minute=1_000)
    assert admit(budget, reserved) is None
    settle(budget, reserved, used)
    assert budget.headers(0)[0][2] == left
    refusal = budget.check(demand(500), SECOND, 0)
    waits = 0 if refusal is None else refusal.retry_after_ns
    assert waits == int(wait_s * SECOND)


def test_each_kind_of_token_is_charged_for_its_own() -> None:
    budget = path(
        tokens_per_minute=1_000,
        input_tokens_per_minute=1_000,
        output_tokens_per_minute=1_000,
        weighted_tokens_per_minute=1_000,
    )
    prices = budget.prices(Demand(100, 50, 50))
    assert budget.check(prices, SECOND, 0) is None
    assert budget.charge(prices, 0) == 50
    assert [bucket.remaining(0) for bucket in budget._rates] == [850, 900, 950, 800]
    budget.settle(100, 50, Usage(110, 20), 0, 0)
    assert [bucket.remaining(0) for bucket in budget._rates] == [870, 890, 980, 850]


def test_headers_fall_by_what_was_used_and_show_the_tightest_token_limit() -> None:
    """B-27: remaining requests fall by one each, remaining tokens by the settled cost."""
    budget = path(requests_per_minute=10, tokens_per_minute=1_000, tokens_per_second=100, burst_s=3.0)
    for number in range(1, 4):
        assert admit(budget, 60) is None
        settle(budget, 60, 40)
        requests, tokens = budget.headers(0)
        assert requests == ("requests", 10, 10 - number, number * 6 * SECOND)
        assert tokens == ("tokens", 100, 300 - number * 40, number * 40 * SECOND // 100)


def test_a_key_without_limits_shows_no_headers() -> None:
    assert path().headers(0) == []


def test_a_missing_output_cap_never_makes_a_request_unfit() -> None:
    """B-14: the default guess of 256 is more than this key may spend at once, but it is only a guess."""
    budget = path(tokens_per_second=50, burst_s=2.0)
    guessed = Demand(20, 256, 256, output_guessed=True)
    prices = budget.prices(guessed)
    assert budget.check(prices, SECOND, 0) is None
    assert budget.charge(prices, 0) == 80
    assert budget.headers(0)[0][2] == 0
    budget.settle(20, 80, Usage(20, 10), 0, 0)
    assert budget.headers(0)[0][2] == 70
    stated = budget.check(budget.prices(Demand(20, 256, 256)), SECOND, 10 * SECOND)
    assert stated is not None
    assert stated.reason is ShedReason.NEVER_FITS
    too_long = budget.check(budget.prices(Demand(101, 256, 256, output_guessed=True)), SECOND, 10 * SECOND)
    assert too_long is not None
    assert too_long.reason is ShedReason.NEVER_FITS


def test_a_request_that_never_ran_does_not_count_as_one() -> None:
    budget = path(requests_per_minute=2)
    assert [admit(budget, 1), admit(budget, 1)] == [None, None]
    budget.settle(1, 0, None, 0, 0, ran=False)
    assert budget.headers(0)[0][2] == 1
