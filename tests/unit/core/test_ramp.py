"""Slow start: how an engine comes back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.dispatch.ramp import Ramp, RampConfig
from forebay.core.events import EngineDown, EngineUp, EngineWarming, Failed, Finished, FirstToken, Undelivered
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode
from forebay.core.outcome import FailReason
from forebay.core.pool import PoolConfig

BROKEN = FailReason.ENGINE_ERROR


def pool(*engines: str, limit: int = 64, **fields: Any) -> PoolConfig:
    return PoolConfig(
        name="p", engines=engines or ("e",), mode=Mode.BACKPRESSURE, limit=FixedConfig(limit=limit), **fields
    )


def test_it_grows_with_time_and_with_every_answer_and_ends_at_the_limit() -> None:
    ramp = Ramp(RampConfig(span_ns=10 * SECOND, least=4, share=0.125))
    assert not ramp.active
    ramp.returned(64, 0)
    assert ramp.places(64, 0, on_trial=False) == 8, "an eighth"
    assert ramp.places(64, 5 * SECOND, on_trial=False) == 8 + 28
    for _ in range(10):
        ramp.answered()
    assert ramp.places(64, 5 * SECOND, on_trial=False) == 46
    assert ramp.active
    assert ramp.places(64, 10 * SECOND, on_trial=False) == 64
    assert not ramp.active


def test_a_small_limit_begins_with_a_few_and_without_a_span_there_is_none() -> None:
    ramp = Ramp(RampConfig(least=4))
    ramp.returned(6, 0)
    assert ramp.places(6, 0, on_trial=False) == 4
    ramp = Ramp(RampConfig(span_ns=0))
    ramp.returned(64, 0)
    assert not ramp.active


def test_on_trial_only_answers_count() -> None:
    ramp = Ramp(RampConfig(span_ns=10 * SECOND, trial=2))
    ramp.ejected(2 * SECOND)
    assert ramp.places(64, 9 * SECOND, on_trial=True) == 2
    ramp.answered()
    assert ramp.places(64, 20 * SECOND, on_trial=True) == 3
    assert ramp.places(64, 20 * SECOND, on_trial=False) == 3, "time counts from when it was forgiven"
    assert ramp.places(64, 25 * SECOND, on_trial=False) == 3 + 31


@given(
    limit=st.integers(1, 300),
    now=st.integers(0, 12 * SECOND),
    answers=st.integers(0, 50),
    span_ns=st.integers(1, 20 * SECOND),
)
def test_the_next_place_comes_when_it_is_said_to(limit: int, now: int, answers: int, span_ns: int) -> None:
    ramp = Ramp(RampConfig(span_ns=span_ns))
    ramp.returned(limit, 0)
    for _ in range(answers):
        ramp.answered()
    before = ramp.places(limit, now, on_trial=False)
    at = ramp.grows_at(limit, now)
    if at is None:
        assert before == limit
        return
    assert at > now
    assert ramp.places(limit, at - 1, on_trial=False) == before
    assert ramp.places(limit, at, on_trial=False) == min(limit, before + 1) or span_ns < limit


# ---- in the pipeline ------------------------------------------------------------------------------------------


def test_a_gateway_that_starts_holds_nothing_against_engines_that_run(bench: Any, leases: Any) -> None:
    b = bench(pool())
    assert len(leases([effect for _ in range(64) for effect in b.offer()])) == 64


@pytest.mark.parametrize("away", [EngineDown("e"), EngineWarming("e")])
def test_what_waited_for_an_engine_does_not_come_at_once(bench: Any, leases: Any, away: Any) -> None:
    b = bench(pool())
    b.report(away)
    for _ in range(100):
        b.offer()
    first = leases(b.report(EngineUp("e")))
    assert len(first) == 8
    more = leases(b.report(FirstToken(first[0])))
    assert len(more) == 1, "the first answer makes room for one more"
    assert len(leases(b.report(Finished(first[0], None)))) == 2, "its own place, and another one"
    assert len(leases(b.advance(5 * SECOND))) == 28
    assert len(leases(b.advance(5 * SECOND))) == 64 - 38
    assert b.pipeline.pools[0].engines[0].places == 64


def test_a_refused_connection_is_an_engine_that_was_away(bench: Any, leases: Any) -> None:
    """Killed and back within one probe interval: the next process is on no trial for what the last one did."""
    b = bench(pool("e", "f"))
    for lease in leases([effect for _ in range(6) for effect in b.offer(tokens=10)]):
        if lease.engine.name == "e":
            b.report(Failed(lease, BROKEN))
    e = b.pipeline.pools[0].engines[0]
    assert e.health.ejected_until
    b.clock.advance(2 * SECOND)
    (lease,) = leases(b.offer())
    assert lease.engine is e
    b.report(Undelivered(lease))
    b.report(EngineUp("e"))
    assert not e.health.ejected_until
    assert e.window(b.clock.now) == 8


def test_on_trial_a_few_are_let_through_and_more_with_every_answer(bench: Any, leases: Any) -> None:
    b = bench(pool(limit=32))
    for lease in leases([effect for _ in range(3) for effect in b.offer()]):
        b.report(Failed(lease, BROKEN))
    for _ in range(40):
        b.offer()
    tried = leases(b.advance(2 * SECOND))
    assert len(tried) == 2
    assert leases(b.advance(8 * SECOND)) == [], "time alone says nothing"
    tried += leases(b.report(FirstToken(tried[0]))) + leases(b.report(FirstToken(tried[1])))
    assert len(tried) == 4
    assert len(leases(b.report(Finished(tried[0], None)))) == 2
    assert b.pipeline.pools[0].engines[0].health.ejected_until == 0, "forgiven"
    assert len(leases(b.advance(10 * SECOND))) == 32 - 5, "the rest within the span"


def test_an_engine_that_stays_broken_gets_two_per_trial(bench: Any, leases: Any) -> None:
    b = bench(pool(limit=32, hold_ns=600 * SECOND))
    for lease in leases([effect for _ in range(3) for effect in b.offer()]):
        b.report(Failed(lease, BROKEN))
    for _ in range(40):
        b.offer()
    eaten = []
    for wait_s in (2, 4, 8, 16, 30, 30):
        tried = leases(b.advance(wait_s * SECOND))
        eaten.append(len(tried))
        for lease in tried:
            assert leases(b.report(Failed(lease, BROKEN))) == []
    assert eaten == [2] * 6


def test_a_failure_from_before_ends_no_trial(bench: Any, leases: Any) -> None:
    b = bench(pool(limit=4))
    old, *broken = leases([effect for _ in range(4) for effect in b.offer()])
    for lease in broken:
        b.report(Failed(lease, BROKEN))
    b.clock.advance(2 * SECOND)
    (tried,) = leases(b.offer())
    b.report(Failed(old, BROKEN))
    assert b.pipeline.pools[0].engines[0].health.available(b.clock.now)
    b.report(Failed(tried, BROKEN))
    assert not b.pipeline.pools[0].engines[0].health.available(b.clock.now + 3 * SECOND)


def test_a_client_that_left_decides_nothing(bench: Any, leases: Any) -> None:
    b = bench(pool(limit=4))
    for lease in leases([effect for _ in range(3) for effect in b.offer()]):
        b.report(Failed(lease, BROKEN))
    b.clock.advance(2 * SECOND)
    (tried,) = leases(b.offer())
    b.cancel(tried.ticket)
    b.clock.advance(MILLISECOND)
    assert len(leases(b.offer() + b.offer() + b.offer())) == 2
