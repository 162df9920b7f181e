"""Leases, health and balance: closed once, ejected, tried again."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.core.dispatch.balance.least import Least
from forebay.core.dispatch.health import Health, HealthConfig, Readiness
from forebay.core.dispatch.leases import Engine
from forebay.core.events import EngineDown, EngineUp, EngineWarming, Failed, Finished, FirstToken, Undelivered
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import Fixed, FixedConfig
from forebay.core.model import Mode, Request
from forebay.core.outcome import EvictReason, FailReason, Outcome, ShedReason
from forebay.core.pool import PoolConfig

BROKEN = FailReason.ENGINE_ERROR


def pool(*engines: str, limit: int = 1, mode: Mode = Mode.HYBRID, **fields: Any) -> PoolConfig:
    return PoolConfig(name="p", engines=engines or ("e",), mode=mode, limit=FixedConfig(limit=limit), **fields)


def engine(name: str = "e", limit: int = 2, tokens: int = 1_000) -> Engine:
    made = Engine(name, Fixed(FixedConfig(limit=limit, tokens=tokens)), HealthConfig())
    made.health.readiness = Readiness.UP
    return made


@pytest.fixture
def health() -> Health:
    made = Health(HealthConfig(failures_max=3, ejection_ns=2 * SECOND, ejection_most_ns=30 * SECOND))
    made.readiness = Readiness.UP
    return made


# ---- health ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readiness", [Readiness.WARMING, Readiness.DOWN])
def test_only_a_ready_engine_is_available(health: Health, readiness: Readiness) -> None:
    assert health.available(0)
    health.readiness = readiness
    assert not health.available(0)


def test_failures_in_a_row_eject_and_a_success_between_does_not(health: Health) -> None:
    for verdict in (False, False, True, False, False):
        health.succeeded() if verdict else health.failed(0, 0)
    assert health.available(0)
    assert health.failed(0, 0), "the third in a row ejects"
    assert not health.available(2 * SECOND - 1)
    assert health.available(2 * SECOND)


def test_ejection_doubles_at_each_repeat_up_to_its_most(health: Health) -> None:
    now, spans = 0, []
    for _ in range(3):
        health.failed(now, now)
    for _ in range(7):
        spans.append((health.ejected_until - now) // SECOND)
        now = health.ejected_until
        assert health.failed(now, now), "on trial, one failure is enough"
    assert spans == [2, 4, 8, 16, 30, 30, 30]


def test_one_incident_is_one_ejection(health: Health) -> None:
    """Sixty requests in flight fail together: that is no reason to double five times, however late the last fails."""
    for now in range(60):
        health.failed(0, now)
    assert health.ejected_until == 2 * SECOND + 2
    assert not health.failed(1, 3 * SECOND), "it was in flight since before"
    assert health.available(3 * SECOND)


def test_whoever_answers_after_nobody_did_is_forgiven_but_not_for_ever(health: Health) -> None:
    for _ in range(3):
        health.failed(0, 0)
    health.gone()
    health.readiness = Readiness.UP
    assert health.available(0)
    for _ in range(3):
        health.failed(0, 0)
    assert health.ejected_until == 4 * SECOND, "how often is remembered until one succeeds"


# ---- engines --------------------------------------------------------------------------------------------------


def test_room_is_counted_in_places_and_tokens_and_an_idle_engine_takes_anything(bench: Any, leases: Any) -> None:
    config = PoolConfig(name="p", engines=("e",), mode=Mode.BACKPRESSURE, limit=FixedConfig(limit=3, tokens=100))
    b = bench(config)
    (whale,) = leases(b.offer(tokens=5_000))
    assert leases(b.offer(tokens=1)) == []
    (minnow,) = leases(b.report(Finished(whale, None)))
    (second,) = leases(b.offer(tokens=99))
    assert leases(b.offer(tokens=1)) == []
    (third,) = leases(b.report(Finished(second, None)))
    (fourth,) = leases(b.offer(tokens=1))
    assert {minnow.ticket.sequence, third.ticket.sequence, fourth.ticket.sequence} == {2, 4, 5}
    e = b.pipeline.pools[0].engines[0]
    assert (e.places, e.in_flight, e.tokens) == (3, 3, 3)


def test_a_lease_is_closed_once(bench: Any, leases: Any) -> None:
    """A-11: whatever is reported later changes nothing."""
    b = bench(pool())
    (lease,) = leases(b.offer())
    b.report(Finished(lease, None))
    before = b.pipeline.snapshot(b.clock.now)
    for event in (Finished(lease, None), Failed(lease, BROKEN), Undelivered(lease), FirstToken(lease)):
        assert b.report(event) == []
    assert b.cancel(lease.ticket) == []
    assert b.pipeline.snapshot(b.clock.now) == before
    with pytest.raises(AssertionError, match="closed twice"):
        lease.engine.close(lease, 0)


def test_the_place_is_held_until_the_end_of_the_answer(bench: Any, leases: Any) -> None:
    """A-10: a first token frees nothing."""
    b = bench(pool(mode=Mode.BACKPRESSURE))
    (lease,) = leases(b.offer())
    b.offer()
    assert b.report(FirstToken(lease)) == []
    assert b.pipeline.pools[0].engines[0].places == 1
    assert len(leases(b.report(Finished(lease, None)))) == 1


@pytest.mark.parametrize(
    ("loads", "tokens", "chosen"),
    [
        ([(0, 0), (0, 0)], 10, "e0"),
        ([(1, 500), (1, 100)], 10, "e1"),
        ([(2, 2), (1, 900)], 10, "e1"),  # the first has no place
        ([(1, 995), (1, 999)], 10, None),  # neither has tokens
        ([(1, 100), (0, 0)], 5_000, "e1"),  # only an idle one takes a whale
        ([(0, 0), (1, 0)], 1, "e0"),
    ],
)
def test_least_outstanding(loads: list[tuple[int, int]], tokens: int, chosen: str | None) -> None:
    engines = [engine(f"e{index}") for index in range(len(loads))]
    for made, (places, held) in zip(engines, loads, strict=True):
        made.places = made.in_flight = places
        made.tokens = held
    best = Least().choose(engines, Request("k"), tokens, 0)
    assert (best and best.name) == chosen


def test_prompts_that_are_to_be_read_first_weigh_more() -> None:
    reading, writing = engine("reading"), engine("writing")
    reading.tokens, reading.prefill_tokens, writing.tokens = 400, 300, 900
    reading.places = writing.places = 1
    assert Least().choose([reading, writing], Request("k"), 1, 0) is writing
    reading.prefill_tokens = 0
    assert Least().choose([reading, writing], Request("k"), 1, 0) is reading


def test_an_unavailable_engine_is_passed_over() -> None:
    down, full, free = engine("down"), engine("full", limit=1), engine("free")
    down.health.readiness = Readiness.DOWN
    full.places = 1
    free.tokens = free.places = 1
    assert Least().choose([down, full, free], Request("k"), 1, 0) is free


# ---- in the pipeline ------------------------------------------------------------------------------------------


def test_an_ejected_engine_is_tried_again_though_another_one_is_up(bench: Any, leases: Any) -> None:
    """The end of an ejection is a wake-up of its own: the queue does not wait for the other engine's next release."""
    b = bench(pool("a", "b", mode=Mode.BACKPRESSURE))
    (busy,) = leases(b.offer())
    assert busy.engine.name == "a"
    for _ in range(3):
        (lease,) = leases(b.offer())
        b.report(Failed(lease, BROKEN))
    b.offer()
    assert b.pipeline.next_wakeup(b.clock.now) == 2 * SECOND
    (lease,) = leases(b.advance(2 * SECOND))
    assert lease.engine.name == "b"


def test_a_failure_without_blame_does_not_eject(bench: Any, leases: Any) -> None:
    b = bench(pool())
    for _ in range(20):
        (lease,) = leases(b.offer())
        b.report(Failed(lease, BROKEN, blame=False))
    assert len(leases(b.offer())) == 1


def test_an_undelivered_request_goes_to_another_engine_once(bench: Any, leases: Any, refusals: Any) -> None:
    b = bench(pool("a", "b", "c"))
    (first,) = leases(b.offer())
    b.clock.advance(3 * MILLISECOND)
    (second,) = leases(b.report(Undelivered(first)))
    assert second.ticket is first.ticket
    assert (first.engine.name, second.engine.name) == ("a", "b")
    assert second.ticket.queue_wait_ns == 3 * MILLISECOND
    (refusal,) = refusals(b.report(Undelivered(second)))
    assert refusal.reason is EvictReason.NO_ENGINE
    assert b.ended[-1].outcome is Outcome.EVICTED


def test_a_late_connection_does_not_take_the_engine_away(bench: Any, leases: Any, refusals: Any) -> None:
    """Not refused, only slow, and perhaps by our own lateness: one of them speaks for nobody else."""
    b = bench(pool("a", limit=8))
    first, second = leases(b.offer()) + leases(b.offer())
    (again,) = leases(b.report(Undelivered(first, away=False)))
    assert again.ticket is first.ticket
    assert len(leases(b.offer())) == 1
    (refusal,) = refusals(b.report(Undelivered(again, away=False)))
    assert refusal.reason is EvictReason.NO_ENGINE
    assert refusal.unit == ""  # it never waited: there is no wait to speak of
    assert second.open


def test_an_undelivered_request_keeps_its_place_in_the_queue(bench: Any, leases: Any) -> None:
    """Its turn had come: it goes before those that wait, also before those of its own flow."""
    b = bench(pool("a", "b", mode=Mode.BACKPRESSURE))
    first, second = leases(b.offer(tokens=100)) + leases(b.offer(tokens=100))
    for _ in range(3):
        b.offer(tokens=100)
    assert b.report(Undelivered(first)) == []
    order = []
    found = leases(b.report(Finished(second, None)))
    while found:
        order.append(found[0].ticket.sequence)
        found = leases(b.report(Finished(found[0], None)))
    assert order == [1, 3, 4, 5]


def test_a_wait_that_an_engine_caused_starts_anew_in_the_figures(bench: Any, leases: Any) -> None:
    b = bench(pool("a", "b", limit=1, mode=Mode.BACKPRESSURE, hold_ns=SECOND))
    b.clock.advance(MILLISECOND)
    (first,) = leases(b.offer())
    b.offer()
    b.report(FirstToken(first))
    b.report(EngineDown("b"))
    b.clock.advance(10 * MILLISECOND)
    b.report(Undelivered(first))
    ticket = first.ticket
    assert (ticket.dispatched, ticket.first_token, ticket.lease) == (0, 0, None)
    b.advance(SECOND)
    assert ticket.outcome is Outcome.EVICTED
    assert ticket.queue_wait_ns == SECOND, "not the millisecond before the engine was tried"


def test_what_is_held_through_an_outage_keeps_its_order(bench: Any, leases: Any) -> None:
    b = bench(pool(mode=Mode.BACKPRESSURE))
    (running,) = leases(b.offer("x", tokens=100))
    for _ in range(4):
        b.offer("x", tokens=100)
    b.report(EngineDown("e"))
    b.offer("x", tokens=100)
    b.report(Finished(running, None))
    order = []
    found = leases(b.report(EngineUp("e")))
    while found:
        order.append(found[0].ticket.sequence)
        found = leases(b.report(Finished(found[0], None)))
    assert order == [2, 3, 4, 5, 6], "one flow is first come, first served"


def test_a_cancelled_head_lets_the_next_one_go(bench: Any, leases: Any) -> None:
    config = PoolConfig(name="p", engines=("e",), mode=Mode.BACKPRESSURE, limit=FixedConfig(limit=3, tokens=100))
    b = bench(config)
    b.offer(tokens=60)
    whale = b.offer(tokens=80)[0].ticket
    b.offer(tokens=30)
    assert [lease.ticket.sequence for lease in leases(b.cancel(whale))] == [3]


def test_engines_gone_release_the_queue_at_once(bench: Any, refusals: Any) -> None:
    """D-06: nobody waits for an engine that is away, except in backpressure mode."""
    b = bench(pool(limit=1))
    b.offer()
    b.offer()
    held = b.offer(mode=Mode.BACKPRESSURE)[0].ticket
    (refusal,) = refusals(b.report(EngineDown("e")))
    assert refusal.reason is EvictReason.NO_ENGINE
    assert refusal.retry_after_ns is not None
    assert held.outcome is None
    (refusal,) = refusals(b.offer())
    assert refusal.reason is ShedReason.NO_ENGINE


# ---- warming --------------------------------------------------------------------------------------------------


def test_warming_is_learned_and_promised(bench: Any, refusals: Any) -> None:
    b = bench(pool(), up=False)
    b.report(EngineWarming("e"))
    (refusal,) = refusals(b.offer())
    assert refusal.reason is ShedReason.WARMING
    assert 30 * SECOND <= refusal.retry_after_ns <= 37.5 * SECOND
    b.clock.advance(12 * SECOND)
    b.report(EngineUp("e"))
    b.report(EngineDown("e"))
    b.report(EngineWarming("e"))
    b.clock.advance(2 * SECOND)
    (refusal,) = refusals(b.offer())
    assert 10 * SECOND <= refusal.retry_after_ns <= 12.5 * SECOND


def test_the_probe_of_another_engine_ends_no_warm_up(bench: Any, refusals: Any) -> None:
    b = bench(pool("a", "b"), up=False)
    b.report(EngineUp("a"))
    b.report(EngineWarming("b"))
    b.clock.advance(5 * SECOND)
    b.report(EngineUp("a"))  # as every second, from its probe
    b.clock.advance(15 * SECOND)
    b.report(EngineUp("b"))
    b.report(EngineDown("a"))
    b.report(EngineWarming("b"))
    (refusal,) = refusals(b.offer())
    assert 20 * SECOND <= refusal.retry_after_ns <= 25 * SECOND


def test_a_new_process_does_not_pay_for_the_one_that_died(bench: Any, leases: Any) -> None:
    """Three requests died with the engine, which ejects it; what answers on its port afterwards is another engine."""
    b = bench(PoolConfig(name="p", engines=("e",), limit=FixedConfig(limit=4)))
    for lease in leases([effect for _ in range(3) for effect in b.offer()]):
        b.report(Failed(lease, FailReason.ENGINE_ERROR))
    assert b.pipeline.pools[0].engines[0].health.ejected_until > b.clock.now
    b.report(EngineDown("e"))
    b.clock.advance(100 * MILLISECOND)
    b.report(EngineUp("e"))
    assert len(leases([effect for _ in range(4) for effect in b.offer()])) == 4
