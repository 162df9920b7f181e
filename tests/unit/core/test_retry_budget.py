"""Budgets for retries: who comes when told pays nothing, who storms is refused, nobody else is touched."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.admission.retry_budget import RetryBudgetConfig, RetryBudgets
from forebay.core.events import Finished
from forebay.core.instant import SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode, Request, Usage
from forebay.core.outcome import ShedReason
from forebay.core.pool import PoolConfig


def budgets(**config: Any) -> RetryBudgets:
    return RetryBudgets(RetryBudgetConfig(**config))


def retried(of: RetryBudgets, key: str, at: int) -> bool:
    """A retry that pays if it may be looked at."""
    if not of.allows(key, at):
        return False
    of.spend(key, at)
    return True


def allowed(of: RetryBudgets, tries: int, at: int = 0, key: str = "k") -> int:
    return sum(retried(of, key, at) for _ in range(tries))


def test_a_key_may_retry_one_per_second_and_ten_seconds_worth_at_once() -> None:
    made = budgets()
    assert allowed(made, 50) == 10
    assert allowed(made, 50, 3 * SECOND) == 3
    assert allowed(made, 50, 1_000 * SECOND) == 10


def test_a_tenth_of_the_refused_first_attempts_may_come_back_within_ten_seconds() -> None:
    made = budgets()
    for _ in range(200):
        made.refused("k", 0)
    assert allowed(made, 500) == 10 + 20
    for _ in range(200):
        made.refused("k", 0)
    assert allowed(made, 500, 60 * SECOND) == 10, "what is not used in time is lost"


def test_who_comes_when_told_needs_no_budget() -> None:
    made = budgets(per_s=0.0)
    for _ in range(30):
        made.promised("k", 20 * SECOND, 0)
    assert allowed(made, 50, 20 * SECOND) == 30
    assert allowed(made, 50, 20 * SECOND) == 0, "a promise is good for one"


@pytest.mark.parametrize(("at_s", "kept"), [(19, True), (18, False), (25, True), (26, False)])
def test_a_promise_is_kept_for_some_seconds(at_s: int, kept: bool) -> None:
    made = budgets(per_s=0.0)
    made.promised("k", 20 * SECOND, 0)
    assert made.allows("k", at_s * SECOND) is kept


def test_asking_costs_nothing() -> None:
    made = budgets()
    assert all(made.allows("k", 0) for _ in range(50))
    assert allowed(made, 50) == 10


def test_what_holds_a_place_uses_up_its_promise_and_nothing_else() -> None:
    made = budgets()
    made.promised("k", 0, 0)
    for _ in range(50):
        made.spend("k", 0, free=True)
    assert allowed(made, 50) == 10


def test_one_key_spends_nothing_of_another() -> None:
    made = budgets()
    allowed(made, 500, key="storm")
    assert allowed(made, 50, key="calm") == 10


def test_what_is_kept_is_bounded() -> None:
    made = budgets()
    for number in range(12_000):
        made.allows(f"k{number}", 0)
    assert len(made._keys) == 10_000
    for second in range(5_000):
        made.promised("k", second * SECOND, second * SECOND)
    assert len(made._keys["k"].due) <= 257


@given(st.lists(st.tuples(st.integers(0, 2 * SECOND), st.booleans()), max_size=300))
def test_never_more_than_the_floor_and_a_share(events: list[tuple[int, bool]]) -> None:
    made, now, refused, passed = budgets(), 0, 0, 0
    for after, first in events:
        now += after
        if first:
            made.refused("k", now)
            refused += 1
        else:
            passed += retried(made, "k", now)
    assert passed <= 10 + now / SECOND + 0.1 * refused + 1e-6


# ---- in the pipeline ------------------------------------------------------------------------------------------


def full(bench: Any, *, budget: bool = True) -> Any:
    """A pool of one place, taken, with ten of a key's first attempts refused."""
    config = RetryBudgetConfig() if budget else None
    b = bench(PoolConfig("p", ("e",), limit=FixedConfig(limit=1), mode=Mode.ADMISSION, retry_budget=config))
    b.clock.advance_to(SECOND)
    b.offer()
    for _ in range(10):
        b.offer("storm", retries=0)
    return b


def reasons(b: Any) -> list[ShedReason]:
    return [refusal.reason for refusal in b.refused]


def test_a_storm_is_refused_for_good_and_others_are_not(bench: Any) -> None:
    b = full(bench)
    for _ in range(20):
        b.offer("storm", retries=1)
    assert reasons(b)[10:].count(ShedReason.RETRY_BUDGET) == 9, "ten at once, and a tenth of ten"
    assert b.refused[-1].retry_after_ns is None
    b.offer("calm", retries=1)
    b.offer("old", retries=None)
    b.offer("storm", retries=0)
    assert ShedReason.RETRY_BUDGET not in reasons(b)[-3:]


def test_a_retry_that_was_screened_before_its_body_came_pays_once(bench: Any) -> None:
    b = full(bench)
    (engine,) = b.pipeline.pools[0].engines
    (lease,) = engine.leases
    b.report(Finished(lease, Usage(10, 0)))
    for _ in range(30):
        assert b.pipeline.screen(Request("storm", retries=1), b.clock.now) is None
    b.offer()
    for _ in range(20):
        b.offer("storm", retries=1)
    assert reasons(b)[10:].count(ShedReason.RETRY_BUDGET) == 9, "as if nothing had been screened"


def test_a_retry_that_is_refused_when_it_is_screened_pays(bench: Any) -> None:
    b = full(bench)
    for _ in range(20):
        b.pipeline.screen(Request("storm", retries=1), b.clock.now)
    assert reasons(b)[10:].count(ShedReason.RETRY_BUDGET) == 9


def test_no_budget_is_asked_for_by_default_of_the_core_or_without_overload(bench: Any) -> None:
    b = full(bench, budget=False)
    for _ in range(20):
        b.offer("storm", retries=1)
    assert ShedReason.RETRY_BUDGET not in reasons(b)
    b = bench(
        PoolConfig("p", ("e",), limit=FixedConfig(limit=1), mode=Mode.ADMISSION, retry_budget=RetryBudgetConfig())
    )
    b.offer()
    for _ in range(50):
        b.offer("k", retries=1)
    assert ShedReason.RETRY_BUDGET not in reasons(b), "nothing new was refused: this is no overload"


def test_returns_at_the_times_told_are_never_refused_for_the_budget(bench: Any) -> None:
    b = full(bench)
    waits = sorted(r.retry_after_ns for r in b.refused if r.obeyed)
    assert waits
    start = b.clock.now
    for _ in range(30):
        b.offer("storm", retries=1)  # the budget is gone
    before = len(b.refused)
    for wait in waits:
        b.clock.advance_to(start + wait)
        for _ in range(10):
            b.offer("others", retries=0)
        b.offer("storm", retries=1)
    assert ShedReason.RETRY_BUDGET not in reasons(b)[before:]
