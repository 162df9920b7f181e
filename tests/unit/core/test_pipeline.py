"""The corridor: what each mode does, what a refusal says, and who may enter."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.core.admission.depth import DepthConfig
from forebay.core.effects import Abort, Dispatch, Queued
from forebay.core.events import EngineDown, EngineUp, Failed, Finished
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode, Request, Usage
from forebay.core.outcome import EvictReason, FailReason, Outcome, ShedReason
from forebay.core.pool import PoolConfig
from forebay.core.quota.terms import KeyLimits
from forebay.testing import check_empty


def pool(name: str = "p", limit: int = 1, mode: Mode = Mode.HYBRID, **fields: Any) -> PoolConfig:
    fields.setdefault("engines", (f"{name}-e",))
    return PoolConfig(name=name, mode=mode, limit=FixedConfig(limit=limit), **fields)


def kinds(effects: list[Any]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


@pytest.mark.parametrize("mode", list(Mode))
def test_an_idle_engine_is_given_work_in_every_mode(bench: Any, mode: Mode) -> None:
    """D-13: no refusal on an empty system, trained or not."""
    b = bench(pool(mode=mode))
    for _ in range(20):
        (effect,) = b.offer()
        assert isinstance(effect, Dispatch)
        b.clock.advance(30 * SECOND)
        b.report(Finished(effect.leases[0], None))


@pytest.mark.parametrize(
    ("limit", "depth", "offered", "run", "wait", "refused"),
    [(2, 3, 10, 2, 3, 5), (1, 0, 5, 1, 0, 4), (4, 9, 4, 4, 0, 0)],
)
def test_the_bound_holds(bench: Any, limit: int, depth: int, offered: int, run: int, wait: int, refused: int) -> None:
    """D-01: ten released together: two run, three wait, five are refused."""
    b = bench(pool(limit=limit, depth=DepthConfig(depth_limit=depth)))
    seen = [kinds(b.offer())[0] for _ in range(offered)]
    assert seen == ["Dispatch"] * run + ["Queued"] * wait + ["Refuse"] * refused
    assert {r.reason for r in b.refused} <= {ShedReason.QUEUE_FULL}


def test_a_waiter_is_refused_at_its_time_not_when_the_place_frees(bench: Any, refusals: Any) -> None:
    """D-02."""
    b = bench(pool(mode=Mode.BACKPRESSURE, hold_ns=SECOND))
    b.offer()
    b.offer()
    assert refusals(b.advance(SECOND - 1)) == []
    (refusal,) = refusals(b.advance(1))
    assert refusal.reason is EvictReason.EXPIRED
    assert (refusal.limit, refusal.actual) == (1_000, 1_000)


@pytest.mark.parametrize(("freed_at", "served"), [(SECOND - 1, True), (SECOND, False), (SECOND + 1, False)])
def test_a_place_that_frees_at_the_deadline_decides_once(
    bench: Any, leases: Any, refusals: Any, freed_at: int, served: bool
) -> None:
    """D-03: the engine gets it or the client is refused; never both, never neither."""
    b = bench(pool(mode=Mode.BACKPRESSURE, hold_ns=SECOND))
    (running,) = leases(b.offer())
    waiter = b.offer()[0].ticket
    b.clock.advance(freed_at)
    effects = b.report(Finished(running, None))
    assert bool(leases(effects)) == served
    assert bool(refusals(effects)) != served
    assert waiter.outcome is (None if served else Outcome.EVICTED)


def test_backpressure_holds_and_admission_refuses_beside_it(bench: Any) -> None:
    b = bench(pool(mode=Mode.HYBRID))
    b.offer()
    assert kinds(b.offer(mode=Mode.ADMISSION)) == ["Refuse"]
    assert kinds(b.offer(mode=Mode.BACKPRESSURE)) == ["Queued"]
    assert kinds(b.offer()) == ["Queued"]
    assert kinds(b.offer(mode=Mode.ADMISSION)) == ["Refuse"]


def train(b: Any, leases: Any, service_ns: int, count: int = 20) -> None:
    for _ in range(count):
        (lease,) = leases(b.offer())
        b.clock.advance(service_ns)
        b.report(Finished(lease, None))


def test_hybrid_admits_within_the_budget_and_refuses_beyond(bench: Any, leases: Any) -> None:
    b = bench(pool())
    train(b, leases, 10 * MILLISECOND)
    seen = [kinds(b.offer())[0] for _ in range(12)]
    waits = seen.count("Queued")
    assert seen == ["Dispatch"] + ["Queued"] * waits + ["Refuse"] * (11 - waits)
    assert 1 <= waits <= 4, "at a hundred a second at most five fit into 50 ms"
    refusal = b.refused[-1]
    assert refusal.reason is ShedReason.QUEUE_WAIT
    assert refusal.actual > refusal.limit >= 50
    assert SECOND <= refusal.retry_after_ns <= 55 * SECOND


def test_a_caller_without_the_patience_for_wait_and_work_is_refused(bench: Any, leases: Any) -> None:
    b = bench(pool(mode=Mode.BACKPRESSURE))
    train(b, leases, 100 * MILLISECOND)
    b.offer()
    now = b.clock.now
    assert kinds(b.offer(deadline=now + 150 * MILLISECOND)) == ["Refuse"]
    assert kinds(b.offer(deadline=now + 2 * SECOND)) == ["Queued"]
    assert kinds(b.offer()) == ["Queued"]


def test_a_deadline_that_has_passed_is_refused_a_place_in_line(bench: Any, leases: Any) -> None:
    b = bench(pool())
    b.offer()
    assert kinds(b.offer(deadline=b.clock.now - 1)) == ["Refuse"]


def test_a_cancelled_waiter_frees_its_place_and_a_running_one_is_aborted(bench: Any, leases: Any) -> None:
    """A-01, A-04."""
    b = bench(pool(), keys={"k": KeyLimits(tokens_per_minute=100)})
    (lease,) = leases(b.offer(tokens=40))
    waiter = b.offer(tokens=40)[0].ticket
    assert kinds(b.offer(tokens=40)) == ["Refuse"]
    assert b.cancel(waiter) == []
    assert kinds(b.offer(tokens=40)) == ["Queued"]
    effects = b.cancel(lease.ticket)
    assert kinds(effects) == ["Abort", "Dispatch"]
    assert isinstance(effects[0], Abort)
    assert effects[0].lease is lease
    assert [t.outcome for t in b.ended] == [Outcome.CANCELLED] * 2


@pytest.mark.parametrize(
    ("end", "left"),
    [
        (lambda lease: Finished(lease, Usage(30, 20)), 950),
        (lambda lease: Finished(lease, Usage(0, 0)), 1_000),  # B-11: zero is not missing
        (lambda lease: Finished(lease, None), 1_000),
        (lambda lease: Failed(lease, FailReason.ENGINE_TIMEOUT), 1_000),  # B-26
        (lambda lease: Failed(lease, FailReason.ENGINE_ERROR, Usage(30, 6)), 964),
        (lambda lease: None, 964),  # B-10: the client left after six tokens
    ],
)
def test_every_end_settles_the_key(bench: Any, leases: Any, end: Any, left: int) -> None:
    b = bench(pool(), keys={"k": KeyLimits(tokens_per_minute=1_000)})
    (lease,) = leases(b.offer(tokens=30, generates=True, max_output_tokens=870))
    assert b.pipeline.budget("k").path.headers(0)[0][2] == 100
    event = end(lease)
    if event is None:
        b.pipeline.cancel(lease.ticket, 0, Usage(30, 6))
    else:
        b.report(event)
    assert b.pipeline.budget("k").path.headers(0)[0][2] == left


def test_a_refusal_by_the_pool_charges_the_key_nothing(bench: Any) -> None:
    b = bench(pool(depth=DepthConfig(depth_limit=1)), keys={"k": KeyLimits(requests_per_minute=5, concurrency=5)})
    for _ in range(50):
        b.offer()
    assert b.pipeline.budget("k").open == 2
    assert b.pipeline.budget("k").path.headers(0)[0][2] == 3


def test_screening_is_a_verdict_without_a_charge(bench: Any) -> None:
    b = bench(pool(), keys={"k": KeyLimits(requests_per_minute=1)})
    request = Request(key="k", counted_tokens=5, generates=False)
    for _ in range(5):
        assert b.pipeline.screen(request, 0) is None
    b.offer()
    refuse = b.pipeline.screen(request, 0)
    assert refuse is not None
    assert refuse.refusal.reason is ShedReason.KEY_REQUESTS
    assert b.pipeline.snapshot(0).outcomes["shed"] == 1


def test_the_callers_own_limit_is_named_before_the_shared_one(bench: Any) -> None:
    b = bench(pool(limit=1, depth=DepthConfig(depth_limit=0)), keys={"k": KeyLimits(requests_per_minute=1)})
    b.offer()
    b.offer()
    assert b.refused[-1].reason is ShedReason.KEY_REQUESTS


def test_draining_refuses_the_new_serves_the_old_and_ends_at_zero(bench: Any, leases: Any, refusals: Any) -> None:
    b = bench(pool(mode=Mode.BACKPRESSURE))
    (running,) = leases(b.offer())
    b.offer()
    b.offer()
    b.pipeline.drain(b.clock.now)
    (refusal,) = refusals(b.offer())
    assert refusal.reason is ShedReason.DRAINING
    assert refusal.retry_after_ns >= SECOND
    (following,) = leases(b.report(Finished(running, None)))
    (refusal,) = refusals(b.pipeline.abandon(b.clock.now))
    assert refusal.reason is EvictReason.DRAINING
    b.report(Finished(following, None))
    check_empty(b.pipeline, b.clock.now)


def test_pools_are_chosen_by_model_and_the_star_takes_the_rest(bench: Any) -> None:
    b = bench(pool("one", models=("m1",)), pool("two", models=("m2", "*")))
    names = [b.pipeline.pool_for(model).config.name for model in ("m1", "m2", "m3", "")]
    assert names == ["one", "two", "two", "two"]
    alone = bench(pool("one", models=("m1",)))
    assert alone.pipeline.pool_for("m3") is None


def test_a_full_pool_holds_up_no_other(bench: Any) -> None:
    b = bench(pool("one", models=("m1",)), pool("two", models=("m2",)))
    b.offer(model="m1")
    assert kinds(b.offer(model="m1")) == ["Queued"]
    assert kinds(b.offer(model="m2")) == ["Dispatch"]


def test_backpressure_waits_out_an_engine_that_is_away(bench: Any, leases: Any) -> None:
    b = bench(pool(mode=Mode.BACKPRESSURE), up=False)
    assert kinds(b.offer()) == ["Queued"]
    b.report(EngineDown("p-e"))
    assert len(leases(b.report(EngineUp("p-e")))) == 1


def test_one_wake_up_is_the_earliest_of_all(bench: Any) -> None:
    b = bench(pool("one", models=("m1",)), pool("two", models=("m2",), mode=Mode.BACKPRESSURE, hold_ns=9 * SECOND))
    assert b.pipeline.next_wakeup(0) is None
    for model in ("m2", "m2", "m1", "m1"):
        b.offer(model=model)
    assert b.pipeline.next_wakeup(0) == 50 * MILLISECOND
    b.advance(50 * MILLISECOND)
    assert b.pipeline.next_wakeup(b.clock.now) == 9 * SECOND


def test_queued_is_returned_before_what_decides_it(bench: Any) -> None:
    b = bench(pool(limit=2, mode=Mode.BACKPRESSURE), up=False)
    for _ in range(2):
        b.offer()
    effects = b.report(EngineUp("p-e"))
    assert kinds(effects) == ["Dispatch", "Dispatch"]
    assert not any(isinstance(effect, Queued) for effect in effects)


def test_a_cold_start_under_load_does_not_pin_the_forecast(bench: Any) -> None:
    """Nothing was predicted, so nothing was promised, so nothing was broken."""
    b = bench(pool())
    b.offer()
    for _ in range(200):
        b.offer()
        b.advance(60 * MILLISECOND)
    assert b.pipeline.pools[0].forecast.correction == 1.0


def test_the_order_of_service_by_priority_and_key(bench: Any, leases: Any) -> None:
    b = bench(pool(mode=Mode.BACKPRESSURE))
    (lease,) = leases(b.offer("flood"))
    for _ in range(4):
        b.offer("flood")
    b.offer("small")
    b.offer("vip", priority=1)
    order = []
    while True:
        found = leases(b.report(Finished(lease, None)))
        if not found:
            break
        (lease,) = found
        order.append(lease.ticket.request.key)
    assert order == ["vip", "flood", "small", "flood", "flood", "flood"]
