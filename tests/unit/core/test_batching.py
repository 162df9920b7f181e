"""Dynamic batching in the pipeline: who leaves together, and when."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.core.batching import DynamicConfig
from forebay.core.effects import Queued
from forebay.core.events import EngineDown, EngineUp, Failed, Finished
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode
from forebay.core.outcome import EvictReason, FailReason, Outcome
from forebay.core.pool import PoolConfig


def pool(limit: FixedConfig | None = None, mode: Mode = Mode.HYBRID, **batching: Any) -> PoolConfig:
    return PoolConfig(
        name="p",
        engines=("e",),
        mode=mode,
        limit=limit or FixedConfig(limit=1),
        batching=DynamicConfig(**batching),
    )


@pytest.mark.parametrize("linger_ms", [1, 50, 400])
def test_a_lone_request_leaves_after_the_linger(bench: Any, leases: Any, linger_ms: int) -> None:
    """E-03: not before, not much later, and a linger longer than the wait budget is no eviction."""
    b = bench(pool(max_size=8, linger_ns=linger_ms * MILLISECOND))
    assert [type(e) for e in b.offer()] == [Queued]
    assert leases(b.advance(linger_ms * MILLISECOND - 1)) == []
    (lease,) = leases(b.advance(1))
    assert lease.ticket.queue_wait_ns == linger_ms * MILLISECOND


def test_a_linger_is_not_held_against_the_forecast(bench: Any) -> None:
    b = bench(pool(max_size=8, linger_ns=200 * MILLISECOND))
    for _ in range(50):
        b.offer()
        b.advance(200 * MILLISECOND)
        b.report(Finished(b.effects[0].leases[0], None))
    assert b.pipeline.pools[0].forecast.correction <= 1.0


def test_a_caller_with_less_patience_than_the_linger_is_served(bench: Any, leases: Any) -> None:
    b = bench(pool(max_size=8, linger_ns=100 * MILLISECOND))
    b.offer(deadline=20 * MILLISECOND)
    (lease,) = leases(b.advance(20 * MILLISECOND))
    assert lease.ticket.queue_wait_ns < 20 * MILLISECOND


def test_a_full_batch_leaves_at_once_and_the_ninth_is_in_the_next(bench: Any, leases: Any) -> None:
    """E-03: eight at once, nine at once."""
    b = bench(pool(FixedConfig(limit=2), max_size=8, linger_ns=50 * MILLISECOND))
    for _ in range(7):
        assert leases(b.offer()) == []
    first = leases(b.offer())
    assert [lease.ticket.sequence for lease in first] == list(range(1, 9))
    assert leases(b.offer()) == []
    assert [lease.ticket.sequence for lease in leases(b.advance(50 * MILLISECOND))] == [9]


def test_without_linger_a_batch_leaves_as_soon_as_the_engine_is_free(bench: Any, leases: Any) -> None:
    """E-04: four that arrive while the first is served form one batch of four."""
    b = bench(pool(mode=Mode.BACKPRESSURE, max_size=8))
    (running,) = leases(b.offer())
    for _ in range(4):
        assert leases(b.offer()) == []
    b.advance(2 * SECOND)
    batch = leases(b.report(Finished(running, None)))
    assert [lease.ticket.sequence for lease in batch] == [2, 3, 4, 5]
    assert len({id(lease.batch) for lease in batch}) == 1
    assert b.pipeline.pools[0].engines[0].places == 1


def test_the_place_is_free_when_the_last_of_the_batch_has_ended(bench: Any, leases: Any) -> None:
    """E-06, E-07: each member ends by itself, whatever happens to the others."""
    b = bench(pool(mode=Mode.BACKPRESSURE, max_size=4))
    (first,) = leases(b.offer())
    for _ in range(3):
        b.offer()
    one, two, three = leases(b.report(Finished(first, None)))
    b.offer()
    assert leases(b.report(Failed(one, FailReason.ENGINE_ERROR, blame=False))) == []
    assert leases(b.cancel(two.ticket)) == []
    (last,) = leases(b.report(Finished(three, None)))
    assert last.ticket.sequence == 5
    assert [t.outcome for t in b.ended] == [
        Outcome.COMPLETED,
        Outcome.FAILED,
        Outcome.CANCELLED,
        Outcome.COMPLETED,
    ]


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [([40, 40, 40], [[1, 2], [3]]), ([150, 10], [[1], [2]]), ([10, 150, 10], [[1], [2], [3]]), ([50, 50], [[1, 2]])],
)
def test_a_batch_holds_at_most_its_tokens_and_a_larger_request_goes_alone(
    bench: Any, leases: Any, sizes: list[int], batches: list[list[int]]
) -> None:
    b = bench(pool(mode=Mode.BACKPRESSURE, max_size=8, max_tokens=100), up=False)
    for size in sizes:
        b.offer(tokens=size)
    seen = []
    now = leases(b.report(EngineUp("e")))
    while now:
        seen.append([lease.ticket.sequence for lease in now])
        following = []
        for lease in now:
            following += leases(b.report(Finished(lease, None)))
        now = following
    assert seen == batches


def test_a_batch_stays_within_the_tokens_of_its_engine(bench: Any, leases: Any) -> None:
    b = bench(pool(FixedConfig(limit=2, tokens=100), Mode.BACKPRESSURE, max_size=8), up=False)
    for _ in range(5):
        b.offer(tokens=40)
    assert len(leases(b.report(EngineUp("e")))) == 2


def test_fewer_than_a_batch_never_wait_for_one_that_cannot_form(bench: Any, leases: Any) -> None:
    """E-08: there is no minimum size; two leave together when the linger is over."""
    b = bench(pool(max_size=8, linger_ns=10 * MILLISECOND))
    b.offer()
    b.offer()
    assert len(leases(b.advance(10 * MILLISECOND))) == 2


def test_a_tiny_budget_does_not_spin_or_starve(bench: Any, leases: Any) -> None:
    """E-05: budget 1 ms, service 20 ms, arrivals every 5 ms: work goes on, one timer at a time."""
    config = pool(max_size=8, linger_ns=MILLISECOND)
    b = bench(config)
    served, running, until = 0, [], 0
    for step in range(1_000):
        at = step * 5 * MILLISECOND
        found = leases(b.advance(at - b.clock.now))
        if running and until <= at:
            for lease in running:
                found += leases(b.report(Finished(lease, None)))
            served += len(running)
            running = []
        found += leases(b.offer())
        if found:
            running, until = found, at + 20 * MILLISECOND
    assert served > 600, "at four arrivals per service nearly all are served"


def test_a_cancelled_member_leaves_the_forming_batch(bench: Any, leases: Any) -> None:
    b = bench(pool(max_size=3, linger_ns=50 * MILLISECOND))
    gone = b.offer()[0].ticket
    b.offer()
    b.cancel(gone)
    assert leases(b.offer()) == []
    assert [lease.ticket.sequence for lease in leases(b.offer())] == [2, 3, 4]


def test_admission_mode_joins_a_forming_batch_and_refuses_when_the_engine_is_busy(
    bench: Any, leases: Any, refusals: Any
) -> None:
    b = bench(pool(mode=Mode.ADMISSION, max_size=2, linger_ns=50 * MILLISECOND))
    assert refusals(b.offer()) == []
    assert len(leases(b.offer())) == 2
    assert len(refusals(b.offer())) == 1


def test_a_forming_batch_is_evicted_when_its_engine_goes(bench: Any, refusals: Any) -> None:
    b = bench(pool(max_size=8, linger_ns=50 * MILLISECOND))
    b.offer()
    (refusal,) = refusals(b.report(EngineDown("e")))
    assert refusal.reason is EvictReason.NO_ENGINE


def test_admission_mode_refuses_what_the_forming_batch_has_no_tokens_for(
    bench: Any, leases: Any, refusals: Any
) -> None:
    """It would be left behind, and wait although this mode has no waiting room."""
    b = bench(pool(mode=Mode.ADMISSION, max_size=8, max_tokens=100, linger_ns=50 * MILLISECOND))
    assert refusals(b.offer(tokens=80)) == []
    assert len(refusals(b.offer(tokens=80))) == 1
    assert refusals(b.offer(tokens=20)) == []
    assert [lease.ticket.sequence for lease in leases(b.effects)] == [1, 3]
