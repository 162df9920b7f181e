"""The event heap, and a gateway's one timer on it."""

from __future__ import annotations

from random import Random

import pytest

from forebay.core.events import EngineUp, Finished
from forebay.core.instant import MILLISECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Lease, Mode, Request, Ticket
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.sim.world import ARRIVAL, COMPLETION, STEP, TIMER, World
from forebay.testing import EventWorld


def test_equal_instants_are_settled_by_order_then_by_the_order_of_calls() -> None:
    world, seen = World(), list[str]()
    for name, order in (
        ("t", TIMER),
        ("s", STEP),
        ("a1", ARRIVAL),
        ("c1", COMPLETION),
        ("a2", ARRIVAL),
        ("c2", COMPLETION),
    ):
        world.at(5, lambda name=name: seen.append(name), order)
    world.at(4, lambda: seen.append("before"), TIMER)
    world.run_out()
    assert seen == ["before", "c1", "c2", "a1", "a2", "s", "t"]
    assert world.events == 7


def test_run_stops_after_its_instant_and_stands_there() -> None:
    world, seen = World(), list[int]()
    for at in (1, 5, 6):
        world.at(at, lambda at=at: seen.append(at))
    world.run(5)
    assert (seen, world.now) == ([1, 5], 5)
    world.run_out()
    assert (seen, world.now) == ([1, 5, 6], 6)


def test_nothing_is_scheduled_in_the_past() -> None:
    world = World()
    world.run(10)
    with pytest.raises(ValueError, match="cannot schedule at 9, it is 10"):
        world.at(9, lambda: None)


def test_any_schedule_is_run_in_order_and_never_back_in_time() -> None:
    chance, world, seen = Random(3), World(), list[tuple[int, int]]()

    def act() -> None:
        seen.append((world.now, len(seen)))
        if len(seen) < 500:
            for _ in range(chance.randrange(3)):
                world.at(world.now + chance.randrange(4), act, chance.randrange(4))

    for _ in range(20):
        world.at(chance.randrange(50), act)
    world.run_out()
    assert [at for at, _ in seen] == sorted(at for at, _ in seen)
    assert world.events == len(seen)


class _Slow:
    """Answers nothing by itself."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []

    def start(self, leases: object, world: EventWorld) -> None:
        self.leases += leases  # type: ignore[operator]

    def abort(self, lease: Lease, world: EventWorld) -> None:
        pass


def test_a_gateway_keeps_its_earliest_timer_and_polls_when_it_is_due() -> None:
    pool = PoolConfig("p", ("e",), mode=Mode.BACKPRESSURE, hold_ns=100 * MILLISECOND, limit=FixedConfig(limit=1))
    engine = _Slow()
    world = EventWorld(PipelineConfig((pool,)), {"e": engine}, seed=1)
    world.report(EngineUp("e"))
    tickets: list[Ticket] = []
    for at in (0, 10, 20):
        world.at(at * MILLISECOND, lambda: tickets.extend(_tickets(world)), ARRIVAL)
    world.run(30 * MILLISECOND)
    assert world.gateway.armed == 110 * MILLISECOND
    world.cancel(tickets[0])  # the one that expires first: its timer stays, and polls for nothing
    assert world.gateway.armed == 110 * MILLISECOND
    world.run(115 * MILLISECOND)
    assert world.gateway.armed == 120 * MILLISECOND
    assert len(world.ended) == 1
    world.run(120 * MILLISECOND)
    assert [ticket.reason for ticket in world.ended[1:]] == ["expired"]
    assert world.gateway.armed is None
    world.report(Finished(engine.leases[0], None))
    assert world.pipeline.snapshot(world.now).in_flight == 0


def _tickets(world: EventWorld) -> list[Ticket]:
    effects = world.offer(Request(key="k", counted_tokens=1, generates=False))
    return [effect.ticket for effect in effects if hasattr(effect, "ticket")]
