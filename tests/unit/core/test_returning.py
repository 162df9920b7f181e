"""Who comes back waits for what new requests leave: when it is let in, and what ends its wait."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.admission.retry_after import RetryConfig
from forebay.core.effects import Dispatch, Queued
from forebay.core.events import EngineDown, Finished
from forebay.core.instant import SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Lease, Mode, Ticket
from forebay.core.outcome import EvictReason
from forebay.core.pool import PoolConfig
from forebay.testing import check_empty
from tests.unit.core.conftest import Bench

PLACES = 10
RETRY = RetryConfig(hold_ns=6 * SECOND, spare_places=0.15)  # one that is let in leaves another place free


def pool(**fields: Any) -> PoolConfig:
    fields.setdefault("mode", Mode.HYBRID)
    return PoolConfig(name="p", engines=("e",), limit=FixedConfig(limit=PLACES), retry=RETRY, **fields)


def busy(b: Any, taken: int) -> list[Lease]:
    """So many new requests are being served."""
    return [b.offer()[0].leases[0] for _ in range(taken)]


def waiting(b: Any, **fields: Any) -> Ticket:
    """A return that found too little free."""
    (effect,) = b.offer(retries=1, **fields)
    assert isinstance(effect, Queued)
    return effect.ticket


def test_a_return_is_served_at_once_where_new_requests_leave_enough(bench: Any) -> None:
    b = bench(pool())
    busy(b, PLACES - 2)
    (effect,) = b.offer(retries=1)
    assert isinstance(effect, Dispatch)


def test_new_requests_pass_a_return_that_waits(bench: Any) -> None:
    b = bench(pool())
    leases = busy(b, PLACES - 1)
    ticket = waiting(b)
    (passing,) = b.offer()
    assert isinstance(passing, Dispatch), "the last free place is a new request's"
    assert b.report(Finished(leases[0], None)) == [], "and so is the next one that is free"
    (effect,) = b.report(Finished(leases[1], None))
    assert isinstance(effect, Dispatch)
    assert effect.leases[0].ticket is ticket


def test_returns_are_served_in_the_order_in_which_they_came(bench: Any, leases: Any) -> None:
    b = bench(pool())
    running = busy(b, PLACES)
    tickets = [waiting(b) for _ in range(3)]
    served = [lease.ticket for one in running for lease in leases(b.report(Finished(one, None)))]
    assert served == tickets


def test_a_return_that_waited_in_vain_is_told_another_time(bench: Any, refusals: Any) -> None:
    b = bench(pool())
    busy(b, PLACES)
    waiting(b)
    assert refusals(b.advance(RETRY.hold_ns - 1)) == []
    (refusal,) = refusals(b.advance(1))
    assert refusal.reason is EvictReason.EXPIRED
    assert refusal.retry_after_ns >= SECOND


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        (Mode.HYBRID, {"retries": 0}),
        (Mode.HYBRID, {"retries": None}),
        (Mode.HYBRID, {"retries": 1, "patience": RETRY.hold_ns - 1}),
        (Mode.HYBRID, {"retries": 1, "deadline": RETRY.hold_ns - 1}),
        (Mode.BACKPRESSURE, {"retries": 1}),
        (Mode.ADMISSION, {"retries": 1}),
    ],
)
def test_others_take_the_last_place(bench: Any, mode: Mode, fields: dict[str, Any]) -> None:
    """New requests, those whose caller would not wait, and those of pools where all wait, or nobody."""
    b = bench(pool(mode=mode))
    busy(b, PLACES - 1)
    (effect,) = b.offer(**fields)
    assert isinstance(effect, Dispatch)


def test_a_return_that_waits_may_leave(bench: Any) -> None:
    b = bench(pool())
    leases = busy(b, PLACES)
    b.cancel(waiting(b))
    for lease in leases:
        b.report(Finished(lease, None))
    check_empty(b.pipeline, b.clock.now)


def test_returns_that_wait_are_told_when_the_engine_is_gone(bench: Any, refusals: Any) -> None:
    b = bench(pool())
    busy(b, PLACES)
    waiting(b)
    (refusal,) = refusals(b.report(EngineDown("e")))
    assert refusal.reason is EvictReason.NO_ENGINE


def test_the_line_is_no_longer_than_the_places(bench: Any) -> None:
    b = bench(pool())
    busy(b, PLACES)
    for _ in range(PLACES):
        waiting(b)
    (effect,) = b.offer(retries=1)
    assert b.pipeline.pools[0].returning.waiting == PLACES, "the next one is like any other"
    assert not isinstance(effect, Dispatch)


@given(st.lists(st.sampled_from(["new", "return", "end", "leave", "wait"]), max_size=60))
def test_whatever_comes_nobody_is_lost_and_new_requests_find_what_is_free(steps: list[str]) -> None:
    b = Bench(pool())
    running: list[Lease] = []
    queued: list[Ticket] = []

    def take(effects: list[Any]) -> None:
        running.extend(lease for e in effects if isinstance(e, Dispatch) for lease in e.leases)
        queued.extend(e.ticket for e in effects if isinstance(e, Queued))

    for step in steps:
        if step == "new":
            free = len([one for one in running if one.open]) < PLACES
            effects = b.offer()
            assert isinstance(effects[0], Dispatch) or not free
            take(effects)
        elif step == "return":
            take(b.offer(retries=1))
        elif step == "end" and running:
            take(b.report(Finished(running.pop(0), None)))
        elif step == "leave" and queued:
            take(b.cancel(queued.pop(0)))
        else:
            take(b.advance(SECOND))
    while running:
        take(b.report(Finished(running.pop(0), None)))
    take(b.advance(60 * SECOND))
    while running:
        take(b.report(Finished(running.pop(0), None)))
    check_empty(b.pipeline, b.clock.now)
