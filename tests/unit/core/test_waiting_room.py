"""Cold starts: who may wait for the first engine to be up, and when the others are told to come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.admission.waiting_room import WaitingRoomConfig, may_wait
from forebay.core.effects import Queued
from forebay.core.events import EngineDown, EngineUp, EngineWarming
from forebay.core.instant import SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode
from forebay.core.outcome import EvictReason, ShedReason
from forebay.core.pool import PoolConfig

ROOM = WaitingRoomConfig(places=3, hold_ns=40 * SECOND)


def cold(bench: Any, mode: Mode = Mode.HYBRID, places: int = 3) -> Any:
    room = WaitingRoomConfig(places=places, hold_ns=40 * SECOND)
    b = bench(PoolConfig("p", ("e",), mode=mode, limit=FixedConfig(limit=2), waiting_room=room), up=False)
    b.report(EngineWarming("e"))
    return b


@given(st.integers(0, 5), st.integers(0, 60), st.none() | st.integers(0, 60))
def test_there_is_a_place_while_the_engine_is_expected_in_time(waiting: int, eta_s: int, until_s: int | None) -> None:
    until = None if until_s is None else until_s * SECOND
    let_in = may_wait(ROOM, waiting=waiting, eta_ns=eta_s * SECOND, until=until, now=0)
    assert let_in == (waiting < 3 and eta_s <= 40 and (until_s is None or eta_s < until_s))


@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.ADMISSION])
def test_a_bounded_number_waits_for_the_engine_and_is_served_first(
    bench: Any, mode: Mode, refusals: Any, leases: Any
) -> None:
    b = cold(bench, mode)
    waiting = [b.offer(f"k{number}") for number in range(3)]
    assert all(isinstance(effects[0], Queued) for effects in waiting)
    (refusal,) = refusals(b.offer("k9"))
    assert refusal.reason is ShedReason.WARMING
    b.advance(20 * SECOND)
    assert not b.ended
    served = leases(b.report(EngineUp("e")))
    assert [lease.ticket.request.key for lease in served] == ["k0", "k1"], "as many as the engine has places"
    assert b.pipeline.queued == 1


def test_without_a_room_nobody_waits(bench: Any, refusals: Any) -> None:
    (refusal,) = refusals(cold(bench, places=0).offer())
    assert refusal.reason is ShedReason.WARMING


def test_repeated_probes_of_a_warming_engine_turn_nobody_out(bench: Any) -> None:
    b = cold(bench)
    b.offer()
    for _ in range(5):
        b.advance(SECOND)
        b.report(EngineWarming("e"))
    assert b.pipeline.queued == 1


def test_who_cannot_stay_until_the_engine_is_expected_is_told_so_at_once(bench: Any, refusals: Any) -> None:
    b = cold(bench)
    (refusal,) = refusals(b.offer(deadline=b.clock.now + 10 * SECOND))
    assert refusal.reason is ShedReason.WARMING
    assert refusals(b.offer(patience=b.clock.now + 60 * SECOND)) == []


def test_an_engine_that_is_down_is_not_waited_for(bench: Any, refusals: Any) -> None:
    b = cold(bench)
    b.report(EngineDown("e"))
    (refusal,) = refusals(b.offer())
    assert refusal.reason is ShedReason.NO_ENGINE


def test_who_waited_as_long_as_may_be_is_told_when_the_engine_is_expected(bench: Any, refusals: Any) -> None:
    b = cold(bench)
    b.offer()
    (refusal,) = refusals(b.advance(41 * SECOND))
    assert refusal.reason is EvictReason.EXPIRED
    assert refusal.retry_after_ns >= b.pipeline.pools[0].warmup.eta_ns(b.clock.now)


def test_refused_while_warming_they_do_not_all_come_at_once(bench: Any, refusals: Any) -> None:
    b = cold(bench, places=0)
    told: list[int] = []
    for _ in range(25):
        waits = [refusals(b.offer(retries=0))[0].retry_after_ns for _ in range(4)]
        told += [(b.clock.now + wait) // SECOND for wait in waits]
        b.advance(SECOND)
    soon = [second for second in told if second <= 60]
    assert min(told) >= 30, "the warm-up takes thirty seconds, as far as is known"
    assert max(soon.count(second) for second in soon) <= 5
    assert len(soon) > 60


def test_a_warm_up_longer_than_any_library_waits_is_told_as_it_is(bench: Any, refusals: Any) -> None:
    b = cold(bench, places=0)
    b.advance(300 * SECOND)
    b.report(EngineUp("e"))
    b.report(EngineWarming("e"))
    (refusal,) = refusals(b.offer())
    assert refusal.retry_after_ns >= 300 * SECOND
    assert not refusal.obeyed
