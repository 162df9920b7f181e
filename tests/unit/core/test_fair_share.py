"""Fair admission: shares of the completed work, kept at the door."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from forebay.core.admission.fair_share import FLOWS_MAX, FairShare, FairShareConfig
from forebay.core.admission.forecast import ForecastConfig
from forebay.core.events import Finished
from forebay.core.instant import SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode, Usage
from forebay.core.outcome import ShedReason
from forebay.core.pool import PoolConfig


def pool(limit: int, **fields: Any) -> PoolConfig:
    fair = FairShareConfig(burst_s=1.0)
    return PoolConfig(name="p", engines=("e",), limit=FixedConfig(limit=limit), fair=fair, **fields)


def test_a_flow_that_is_alone_is_within_its_share() -> None:
    share = FairShare(FairShareConfig())
    for _ in range(100):
        share.admitted("a", 1.0, 1000, 0)
        share.ended("a", 1000, 1000, 0)
        share.admitted("a", 1.0, 1000, 0)
    assert share.excess_ns("a", 1.0, 0) == 0


def test_who_is_ahead_waits_for_exactly_as_long_as_the_clock_needs() -> None:
    share = FairShare(FairShareConfig(burst_s=1.0, rate_window_s=5.0, run_ahead_s=1000.0))
    share.admitted("b", 1.0, 100, 0)
    share.admitted("a", 1.0, 5000, 0)
    share.ended("b", 0, 5000, 0)
    share._rate_since = -3600 * SECOND  # as if it had been at work for long
    # 5000 done for b: 1000 per second over the window of 5 s, and the clock at 2500
    # a is 2500 ahead; its share of 1000/s beside b is 500/s: a second of that is its due, the rest takes 4 s.
    assert share.clock == 2500
    assert share.excess_ns("a", 1.0, 0) == 4 * SECOND
    assert share.excess_ns("c", 1.0, 0) == 0, "a newcomer is never ahead"


def test_who_was_here_a_moment_ago_still_counts_among_those_that_share() -> None:
    """Seven calm keys that have caught up are about to come again: a flood beside them is due an eighth, not all."""
    share = FairShare(FairShareConfig(present_s=5.0))
    for number in range(7):
        share.admitted(f"calm{number}", 1.0, 10, 0)
        share.ended(f"calm{number}", 10, 10, 0)
    assert share.part(1.0) == pytest.approx(1 / 7)
    share.ended("before", 0, 7 * 100, 0)
    share.admitted("flood", 1.0, 10_000, SECOND)
    assert share.part(1.0) == pytest.approx(1 / 8)
    assert share.excess_ns("flood", 1.0, SECOND) > 0, "it is not alone"
    for tenths in (70, 71):
        share.admitted("flood", 1.0, 10, tenths * SECOND // 10)
    assert share.part(1.0) == 1.0, "they have not been here for five seconds"
    assert share.excess_ns("flood", 1.0, 7 * SECOND) == 0


def test_who_is_kept_out_is_not_gone() -> None:
    share = FairShare(FairShareConfig(present_s=5.0))
    share.admitted("flood", 1.0, 1e9, 0)
    for second in range(20):
        share.admitted("calm", 1.0, 10, second * SECOND)
        share.ended("calm", 10, 10, second * SECOND)
    assert len(share) == 2, "its tag is far ahead: it asks, and is refused"


def test_weights_share_unevenly() -> None:
    share = FairShare(FairShareConfig())
    share.admitted("heavy", 4.0, 1000, 0)
    share.admitted("light", 1.0, 1000, 0)
    share.ended("other", 0, 500, 0)
    assert share.clock == 100
    assert share.excess_ns("heavy", 4.0, 0) < share.excess_ns("light", 1.0, 0)


def test_a_refund_brings_a_flow_back() -> None:
    share = FairShare(FairShareConfig(run_ahead_s=1000.0))
    share.admitted("b", 1.0, 10_000, 0)
    share.admitted("a", 1.0, 10_000, 0)
    share.ended("c", 0, 100, 0)
    before = share.excess_ns("a", 1.0, 0)
    share.ended("a", 10_000, 0, 0)
    assert share.excess_ns("a", 1.0, 0) == 0 < before


def test_a_burst_is_forgiven_after_the_run_ahead() -> None:
    share = FairShare(FairShareConfig(run_ahead_s=10.0, burst_s=1.0, rate_window_s=5.0))
    share.admitted("b", 1.0, 10_000, 0)
    share.ended("c", 0, 1000, 0)  # 200 per second
    for _ in range(1000):
        share.admitted("a", 1.0, 100, 0)
    # 10 s of its 100/s is the most that counts, and 1 s of it is its due.
    assert share.excess_ns("a", 1.0, 0) <= 9 * SECOND + 1


def test_flows_that_have_caught_up_are_forgotten() -> None:
    share = FairShare(FairShareConfig())
    chance = Random(1)
    for number in range(2000):
        name = f"k{number}"
        share.admitted(name, 1.0, chance.randrange(1, 1000), number)
        share.ended(name, 10, chance.randrange(1, 1000), number)
    share.ended("x", 0, 1e9, 3000)
    for number in range(500):  # a few at a time
        assert len(share) == 2000 - 4 * number
        share.admitted("k1999", 1.0, 0, 60 * SECOND + number * SECOND)
    assert len(share) == 1
    assert share.part(1.0) == 1.0


def test_the_table_is_bounded() -> None:
    share = FairShare(FairShareConfig())
    for number in range(FLOWS_MAX + 10):
        share.admitted(f"k{number}", 1.0, 10, 0)
    assert len(share) == FLOWS_MAX
    assert share.excess_ns(f"k{FLOWS_MAX + 5}", 1.0, 0) == 0


@pytest.mark.parametrize(("places", "kept"), [(1, 0), (15, 0), (16, 1), (50, 3), (200, 9)])
def test_small_pools_keep_no_place_free(places: int, kept: int) -> None:
    assert FairShare(FairShareConfig()).reserve(places) == kept


# ---- in the pipeline -----------------------------------------------------------------------------------------


def crowd(b: Any, leases: Any, key: str, count: int) -> list[Any]:
    return [lease for _ in range(count) for lease in leases(b.offer(key, tokens=100))]


def test_a_flooding_key_is_refused_while_another_wants_its_share(bench: Any, leases: Any, refusals: Any) -> None:
    b = bench(pool(4))
    first = crowd(b, leases, "flood", 3)
    first += crowd(b, leases, "calm", 1)
    b.clock.advance(SECOND)
    b.report(Finished(first[0], Usage(100, 0)))  # a place is free again; somebody completed something
    crowd(b, leases, "calm", 1)
    (refusal,) = refusals(b.offer("flood", tokens=100))
    assert refusal.reason is ShedReason.KEY_SHARE
    assert refusal.retry_after_ns > 0
    (queued,) = b.offer("calm-too", tokens=100)
    assert type(queued).__name__ == "Queued", "a flow within its share may wait"


def test_what_nobody_else_wants_may_be_had(bench: Any, leases: Any) -> None:
    b = bench(pool(8))
    running = crowd(b, leases, "calm", 1) + crowd(b, leases, "flood", 1)
    b.clock.advance(SECOND)
    b.report(Finished(running[0], Usage(100, 0)))
    assert len(crowd(b, leases, "flood", 7)) == 7, "places are free and nobody waits"


def test_backpressure_is_never_refused_for_its_share(bench: Any, leases: Any, refusals: Any) -> None:
    b = bench(pool(2, mode=Mode.BACKPRESSURE))
    crowd(b, leases, "flood", 1)
    crowd(b, leases, "calm", 1)
    for _ in range(20):
        assert refusals(b.offer("flood", tokens=100)) == []


def test_shares_of_a_saturated_pool_are_even(bench: Any, leases: Any) -> None:
    """One key sends forty times as often as each of four others: Jain's index of the work done is nearly 1."""
    b = bench(pool(20))
    chance, done, running = Random(3), dict.fromkeys(("flood", "a", "b", "c", "d"), 0), []
    for step in range(6000):
        key = chance.choices(list(done), [40, 1, 1, 1, 1])[0]
        running += leases(b.offer(key, tokens=chance.randrange(50, 150)))
        b.advance(SECOND // 500)
        if step % 25 == 0 and running:
            lease = running.pop(0)
            more = b.report(Finished(lease, Usage(lease.ticket.demand.input_tokens, 0)))
            running += leases(more)
            if step > 1000:
                done[lease.ticket.request.key] += lease.ticket.demand.input_tokens
    assert sum(done.values()) ** 2 / (len(done) * sum(work**2 for work in done.values())) > 0.95


# ---- classes that hold back ----------------------------------------------------------------------------------


def test_a_class_that_holds_back_leaves_places_to_those_above(bench: Any, leases: Any) -> None:
    b = bench(PoolConfig(name="p", engines=("e",), limit=FixedConfig(limit=10)))
    low = leases([effect for _ in range(12) for effect in b.offer("low", tokens=10, hold_back=0.2)])
    assert len(low) == 8
    assert len(leases(b.offer("high", tokens=10, priority=1))) == 1
    assert len(leases(b.offer("high", tokens=10, priority=1))) == 1
    assert leases(b.report(Finished(low[0], None))) == [], "one free place of ten is not more than a fifth"


def test_no_flow_displaces_its_own(bench: Any, leases: Any, refusals: Any) -> None:
    """What leaves the line unserved moves its flow's tag back; the flow's others in line do not pay for that."""
    budget = ForecastConfig(wait_budget_ns=SECOND // 2)
    b = bench(PoolConfig(name="p", engines=("e",), limit=FixedConfig(limit=1), forecast=budget))
    (running,) = leases(b.offer("k", tokens=10))
    for _ in range(20):  # one every 100 ms: two may wait
        b.clock.advance(SECOND // 10)
        b.report(Finished(running, Usage(10, 0)))
        (running,) = leases(b.offer("k", tokens=10))
    waiting = [b.offer("k", tokens=size)[0].ticket for size in (500, 10)]
    b.cancel(waiting[0])
    seen = [effect for size in (10, 10, 10, 10) for effect in b.offer("k", tokens=size)]
    assert [refusal.reason for refusal in refusals(seen)] == [ShedReason.QUEUE_WAIT] * 3
    assert waiting[1].outcome is None
