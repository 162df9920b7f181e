"""The gateway's own promises: one armed timer, effects never nested, completions before arrivals before the timer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest

from forebay.core.events import EngineUp, Failed, Finished, Undelivered
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Lease, Mode, Refusal, Request, Ticket
from forebay.core.outcome import EvictReason, FailReason, Outcome
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.live.gateway import Gateway
from forebay.testing import check_empty
from forebay.testing.loop import JumpLoop

HOLD = 100 * MILLISECOND


class Quiet:
    """An observer that looks away."""

    def closed(self, ticket: Ticket) -> None:
        """Nothing to tell."""

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        """Nothing to tell."""


class Rig:
    """A gateway in backpressure mode over engines of one place each."""

    def __init__(self, engines: int = 1) -> None:
        self.loop = JumpLoop()
        names = tuple(f"e/{n}" for n in range(engines))
        pool = PoolConfig("e", names, mode=Mode.BACKPRESSURE, hold_ns=HOLD, limit=FixedConfig(limit=1))
        self.pipeline = Pipeline(PipelineConfig((pool,)), Random(1), Quiet())
        self.gateway = Gateway(self.pipeline, self.loop, self.loop.clock)
        for name in names:
            self.gateway.report(EngineUp(name))
        self.log: list[str] = []

    def offer(self, name: str, on_dispatch: Callable[[Lease], None] = lambda lease: None) -> Caller:
        caller = Caller(self, name, on_dispatch)
        self.gateway.offer(Request(key="k", owner=caller, generates=False, counted_tokens=1))
        return caller


class Caller:
    def __init__(self, rig: Rig, name: str, on_dispatch: Callable[[Lease], None]) -> None:
        self.rig, self.name, self.on_dispatch = rig, name, on_dispatch
        self.ticket: Ticket | None = None
        self.lease: Lease | None = None

    def queued(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.rig.log.append(f"queued {self.name}")

    def dispatched(self, lease: Lease) -> None:
        self.ticket, self.lease = lease.ticket, lease
        self.rig.log.append(f"begin {self.name}")
        self.on_dispatch(lease)
        self.rig.log.append(f"end {self.name}")

    def refused(self, refusal: Refusal) -> None:
        self.rig.log.append(f"refused {self.name} {refusal.reason} at {self.rig.loop.clock() // MILLISECOND}")

    def aborted(self, lease: Lease) -> None:
        self.rig.log.append(f"aborted {self.name}")


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.loop.close()


def test_one_timer_is_armed_and_only_while_somebody_waits(rig: Rig) -> None:
    rig.offer("runs")
    assert rig.loop.armed == []
    for number in range(50):
        rig.offer(f"waits {number}")
        assert rig.loop.armed == [0.1]
    rig.loop.run_to(60 * MILLISECOND)
    rig.offer("late")
    assert rig.loop.armed == [0.1]
    rig.loop.run_to(100 * MILLISECOND)
    assert rig.loop.armed == [0.16], "armed anew for the one that is left"
    rig.loop.run_to(SECOND)
    assert rig.loop.armed == []
    evicted = [line for line in rig.log if line.startswith("refused")]
    assert evicted[0] == "refused waits 0 expired at 100"
    assert evicted[-1] == "refused late expired at 160"
    assert len(evicted) == 51


def test_an_earlier_wakeup_replaces_the_armed_one(rig: Rig) -> None:
    rig.offer("runs")
    rig.offer("patient")
    hasty = Caller(rig, "hasty", lambda lease: None)
    rig.gateway.offer(Request(key="k", owner=hasty, generates=False, deadline=30 * MILLISECOND))
    assert rig.loop.armed == [0.03]
    rig.loop.run_to(SECOND)
    refused = [line for line in rig.log if line.startswith("refused")]
    assert refused == ["refused hasty expired at 30", "refused patient expired at 100"]


def test_a_timer_for_one_that_has_left_fires_for_nothing(rig: Rig) -> None:
    rig.offer("runs")
    gone = rig.offer("leaves")
    assert gone.ticket is not None
    rig.gateway.cancel(gone.ticket, None)
    rig.loop.run_to(SECOND)
    assert rig.log == ["begin runs", "end runs", "queued leaves"]
    assert rig.loop.armed == []


def test_stopping_disarms(rig: Rig) -> None:
    rig.offer("runs")
    rig.offer("waits")
    rig.gateway.stop()
    assert rig.loop.armed == []


def test_effects_are_never_nested(rig: Rig) -> None:
    """Engines that fail inside their own dispatch, one after the other: each is carried out after the one before."""

    def fails(lease: Lease) -> None:
        rig.gateway.report(Failed(lease, FailReason.ENGINE_ERROR, blame=False))

    first = rig.offer("first")
    for name in "abcdefgh":
        rig.offer(name, fails)
    rig.offer("last")
    assert first.lease is not None
    del rig.log[:]
    rig.gateway.report(Finished(first.lease, None))
    expected = [line for name in (*"abcdefgh", "last") for line in (f"begin {name}", f"end {name}")]
    assert rig.log == expected
    assert rig.pipeline.outcomes[Outcome.FAILED] == 8
    assert rig.pipeline.snapshot(rig.loop.clock()).in_flight == 1


def test_a_thousand_failures_in_a_row_need_no_stack(rig: Rig) -> None:
    def fails(lease: Lease) -> None:
        rig.gateway.report(Failed(lease, FailReason.ENGINE_ERROR, blame=False))

    first = rig.offer("first")
    for number in range(2_000):
        rig.offer(str(number), fails)
    assert first.lease is not None
    rig.gateway.report(Finished(first.lease, None))
    assert rig.pipeline.outcomes[Outcome.FAILED] == 2_000
    check_empty(rig.pipeline, rig.loop.clock())


def test_a_lease_that_ended_before_its_dispatch_was_carried_out_is_not_started() -> None:
    """Two dispatches are pending; carrying out the first one makes the client of the second leave."""
    rig = Rig(engines=2)
    busy = [rig.offer("x").lease, rig.offer("y").lease]
    assert busy[0] is not None
    assert busy[1] is not None
    second: list[Caller] = []

    def takes_the_other_with_it(lease: Lease) -> None:
        del lease
        assert second[0].ticket is not None
        rig.gateway.cancel(second[0].ticket, None)

    rig.offer("first", takes_the_other_with_it)
    second.append(rig.offer("second"))
    del rig.log[:]
    pending = rig.pipeline.report(Finished(busy[0], None), 0) + rig.pipeline.report(Finished(busy[1], None), 0)
    rig.gateway._apply(pending)
    assert rig.log == ["begin first", "end first", "aborted second"]
    rig.loop.close()


def test_undelivered_twice_waits_for_an_engine_that_is_up(rig: Rig) -> None:
    """The engine is away and says so at once: the request goes back to its place, and the loop is not spun."""
    rig.offer("held", lambda lease: rig.gateway.report(Undelivered(lease)))
    assert rig.log == ["begin held", "end held"]
    assert (rig.pipeline.queued, rig.loop.armed) == (1, [0.1])
    rig.loop.run_to(SECOND)
    assert rig.log[-1] == f"refused held {EvictReason.EXPIRED} at 100"
    check_empty(rig.pipeline, rig.loop.clock())


def test_at_one_instant_completions_go_before_arrivals_before_the_timer(rig: Rig) -> None:
    """The freed place goes to who waited, not to who arrives with it; and nobody expires beside a free engine."""
    first = rig.offer("first")
    rig.offer("waits")
    at = 50 * MILLISECOND
    hasty = Caller(rig, "hasty", lambda lease: None)
    rig.gateway.offer(Request(key="k", owner=hasty, generates=False, deadline=at))
    rig.loop.happen_at(at, lambda: rig.offer("arrives"), 1)
    rig.loop.happen_at(at, lambda: rig.gateway.report(Finished(first.lease, None)), 0)  # type: ignore[arg-type]
    del rig.log[:]
    rig.loop.run_to(at)
    assert rig.log == ["refused hasty expired at 50", "begin waits", "end waits", "queued arrives"]
    assert rig.loop.armed == [pytest.approx(0.15)]
