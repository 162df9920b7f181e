"""Reserved places: who shows a retry ticket in time is let in before others, and no more of them than were promised."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.admission.depth import DepthConfig
from forebay.core.admission.fair_share import FairShareConfig
from forebay.core.admission.forecast import ForecastConfig
from forebay.core.admission.reserved import SECONDS_KEPT, ReservedPlaces
from forebay.core.admission.retry_budget import RetryBudgetConfig
from forebay.core.effects import Dispatch, Effect, Queued, Refuse
from forebay.core.events import EngineDown, EngineUp, Finished
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Lease, Mode, Refusal, Request, Ticket, Usage
from forebay.core.outcome import EvictReason, Outcome, ShedReason
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.quota.terms import KeyLimits
from forebay.testing import check_invariants


def pool(**fields: Any) -> PoolConfig:
    """One engine with one place, and a queue of two in hybrid mode."""
    given: dict[str, Any] = {
        "name": "p",
        "engines": ("e",),
        "limit": FixedConfig(limit=1),
        "depth": DepthConfig(depth_limit=2),
        "retry_tickets": True,
    }
    return PoolConfig(**(given | fields))


# ---- the places themselves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at_s", "left"), [(18, False), (19, True), (20, True), (25, True), (26, False)])
def test_a_place_is_kept_from_a_second_before_to_five_after(at_s: int, left: bool) -> None:
    places = ReservedPlaces()
    places.promise(20 * SECOND, 0)
    assert places.left(at_s * SECOND) is left
    assert places.take(at_s * SECOND) is left
    assert not places.take(at_s * SECOND), "it is taken once"
    assert (places.promised, places.taken) == (1, int(left))


def test_the_one_that_ends_first_is_taken_first() -> None:
    places = ReservedPlaces()
    for second in (10, 14):
        places.promise(second * SECOND, 0)
    assert places.take(14 * SECOND)
    assert places.take(19 * SECOND), "that of 14 is still there"
    assert not places.take(19 * SECOND)


@given(
    st.lists(st.tuples(st.integers(0, 130), st.integers(0, 4)), max_size=300),
    st.lists(st.booleans(), min_size=300, max_size=300),
)
def test_never_more_are_taken_than_were_promised_for_about_then(
    promises: list[tuple[int, int]], takes: list[bool]
) -> None:
    places, now, told, taken = ReservedPlaces(), 0, [], 0
    for (ahead, passed), takes_one in zip(promises, takes, strict=False):
        now += passed * SECOND
        places.promise(now + ahead * SECOND, now)
        told.append(now + ahead * SECOND)
        if takes_one and places.take(now):
            taken += 1
        assert taken <= sum(at <= now + SECOND for at in told), "nobody comes before the place"
        assert taken == places.taken <= places.promised == len(told)
        assert len(places._due) <= SECONDS_KEPT + 1


# ---- what a holder gets --------------------------------------------------------------------------------------------


class World:
    """A pool with one place, whose calendar has promised some."""

    def __init__(self, promised: int = 5, keys: dict[str, KeyLimits] | None = None, **fields: Any) -> None:
        from .conftest import Bench

        self.bench = Bench(pool(**fields), keys=keys)
        (self.pool,) = self.bench.pipeline.pools
        assert self.pool.returns.reserved is not None
        self.reserved = self.pool.returns.reserved
        for _ in range(promised):
            self.reserved.promise(0, 0)

    def fill(self) -> Lease:
        """The one place is taken."""
        (dispatch,) = self.offer()
        assert isinstance(dispatch, Dispatch)
        return dispatch.leases[0]

    def offer(self, key: str = "k", *, held: bool = False, retries: int | None = None, **fields: Any) -> list[Effect]:
        return self.bench.offer(key, holds_place=held, retries=retries, **fields)

    def wait(self, *args: Any, **fields: Any) -> Ticket:
        """Offer one that must be let in to wait."""
        first = self.offer(*args, **fields)[0]
        assert isinstance(first, Queued), first
        return first.ticket

    def refused(self, *args: Any, **fields: Any) -> Refusal:
        first = self.offer(*args, **fields)[0]
        assert isinstance(first, Refuse), first
        return first.refusal

    def finish(self, lease: Lease) -> list[Ticket]:
        """The lease ends; the tickets that start instead."""
        effects = self.bench.report(Finished(lease, Usage(10, 0)))
        return [started.ticket for e in effects if isinstance(e, Dispatch) for started in e.leases]


def running(ticket: Ticket) -> Lease:
    assert ticket.lease is not None
    return ticket.lease


@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.ADMISSION])
def test_a_holder_waits_where_others_are_refused(mode: Mode) -> None:
    world = World(mode=mode, depth=DepthConfig(depth_limit=0))
    lease = world.fill()
    assert world.refused().reason is ShedReason.QUEUE_FULL
    ticket = world.wait(held=True)
    assert ticket.request.holds_place
    assert ticket.expires == world.pool.config.hold_ns, "as long as anything is held"
    assert world.finish(lease) == [ticket]
    assert (world.reserved.promised - world.reserved.taken) == 5  # one was taken, another was told to come back


def test_a_holder_goes_before_new_requests_of_its_priority_and_behind_those_above() -> None:
    world = World(depth=DepthConfig(depth_limit=9))
    lease = world.fill()
    new = world.wait("other")
    own = world.wait("k")
    held = [world.wait("k", held=True), world.wait("other", held=True)]
    above = world.wait("k", priority=1)
    below = world.wait("k", priority=-1, held=True)
    order = []
    while (started := world.finish(lease)) and len(order) < 10:
        order += started
        lease = running(started[0])
    assert order[:3] == [above, *held]
    assert {order[3], order[4]} == {new, own}
    assert order[5:] == [below]


def test_one_of_its_own_flow_whose_time_is_up_sooner_does_not_take_its_turn() -> None:
    """Turns within a flow are exchanged, the earliest end first; a reserved place is nobody else's."""
    world = World(depth=DepthConfig(depth_limit=9))
    lease = world.fill()
    held = world.wait(held=True)
    hasty = world.wait(deadline=world.bench.clock.now + 20 * MILLISECOND, mode=Mode.BACKPRESSURE)
    assert hasty.expires < held.expires
    assert world.finish(lease) == [held]


def test_a_holder_is_not_displaced_and_the_last_of_the_others_makes_way_for_it() -> None:
    world = World(forecast=ForecastConfig(wait_budget_ns=10 * SECOND))
    world.fill()
    first, last = world.wait("a"), world.wait("b")
    effects = world.offer("k", held=True)
    evicted = [e.ticket for e in effects if isinstance(e, Refuse)]
    assert evicted == [last]
    assert evicted[0] is not None
    assert evicted[0].reason is EvictReason.DISPLACED
    held = [world.wait("k", held=True) for _ in range(2)]
    assert first.outcome is Outcome.EVICTED, "and so does the next"
    assert world.refused("c").reason is ShedReason.QUEUE_FULL
    above = world.refused("d", priority=1)
    assert above.reason is ShedReason.QUEUE_FULL, "not even a higher class takes the place of a holder"
    assert all(ticket.outcome is None for ticket in held)


def overloaded(world: World) -> None:
    """Much is refused, so that retries are counted."""
    for _ in range(12):
        world.refused(retries=0)


def test_a_holder_spends_no_retry_budget() -> None:
    world = World(depth=DepthConfig(depth_limit=0), retry_budget=RetryBudgetConfig(per_s=0.0, share=0.0))
    world.fill()
    overloaded(world)
    found = [world.refused(retries=1).reason for _ in range(13)]
    assert found[-1] is ShedReason.RETRY_BUDGET, "the few that were told to come at once have come"
    assert world.wait(held=True, retries=1)


def test_what_a_key_was_told_is_used_up_by_the_return_that_holds_the_place() -> None:
    world = World(promised=0, depth=DepthConfig(depth_limit=0), retry_budget=RetryBudgetConfig(per_s=0.0, share=0.0))
    world.fill()
    wait_ns = world.refused(retries=0).retry_after_ns
    assert wait_ns is not None
    overloaded(world)
    world.bench.advance(wait_ns)
    assert world.wait(held=True, retries=1)
    told = sum(world.pool.returns.budgets._of("k", world.bench.clock.now).due.values())  # type: ignore[union-attr]
    assert told == 12, "of thirteen"


def test_a_holder_is_not_refused_for_its_share() -> None:
    world = World(limit=FixedConfig(limit=2), fair=FairShareConfig(burst_s=0.0), depth=DepthConfig(depth_limit=50))
    leases = [world.fill(), world.fill()]
    for lease in leases:
        world.bench.clock.advance(10 * MILLISECOND)
        world.finish(lease)
    world.offer("other")
    for _ in range(80):
        effects = world.offer("k", tokens=1_000)
        if isinstance(effects[0], Refuse):
            break
    assert world.refused("k").reason is ShedReason.KEY_SHARE
    assert world.wait("k", held=True)


def test_its_own_limits_and_its_own_time_count_for_a_holder_too() -> None:
    keys = {"k": KeyLimits(requests_per_minute=1)}
    world = World(keys=keys)
    lease = world.fill()
    assert world.refused(held=True).reason is ShedReason.KEY_REQUESTS
    world.bench.clock.advance(2 * SECOND)
    world.finish(lease)  # what it takes is known now
    assert isinstance(world.offer("other")[0], Dispatch)
    soon = world.bench.clock.now + 10 * MILLISECOND
    assert world.refused("other", held=True, deadline=soon).reason is ShedReason.QUEUE_WAIT
    world.bench.pipeline.drain(world.bench.clock.now)
    assert world.refused("other", held=True).reason is ShedReason.DRAINING
    assert world.reserved.taken == 0, "who is refused has taken nothing"


def test_a_holder_is_not_kept_for_an_engine_that_is_gone() -> None:
    world = World()
    world.fill()
    ticket = world.wait(held=True)
    world.bench.report(EngineDown("e"))
    assert (ticket.outcome, ticket.reason) == (Outcome.EVICTED, EvictReason.NO_ENGINE)
    assert world.refused(held=True).reason is ShedReason.NO_ENGINE


def test_without_a_promise_a_ticket_is_worth_nothing() -> None:
    world = World(promised=1, depth=DepthConfig(depth_limit=0))
    world.fill()
    assert world.wait(held=True)
    assert world.refused(held=True).reason is ShedReason.QUEUE_FULL, "the one place is taken"
    assert world.reserved.taken == 1


# ---- which refusals reserve one ------------------------------------------------------------------------------------


def test_a_refusal_that_promises_a_place_reserves_it() -> None:
    world = World(promised=0, depth=DepthConfig(depth_limit=0))
    lease = world.fill()
    refusal = world.refused()
    assert refusal.reserved
    assert refusal.retry_after_ns is not None
    assert world.reserved.promised == 1
    world.bench.advance(refusal.retry_after_ns)
    ticket = world.wait(held=True)
    assert world.finish(lease) == [ticket]


@pytest.mark.parametrize("why", ["switched off", "its own limit", "no place in time"])
def test_other_refusals_reserve_none(why: str) -> None:
    keys = {"k": KeyLimits(requests_per_minute=1)} if why == "its own limit" else None
    tickets = why != "switched off"
    from .conftest import Bench

    bench = Bench(pool(retry_tickets=tickets, depth=DepthConfig(depth_limit=0)), keys=keys)
    bench.offer()
    (refuse,) = bench.offer(obeys_ns=SECOND if why == "no place in time" else 60 * SECOND)
    assert isinstance(refuse, Refuse)
    assert not refuse.refusal.reserved
    reserved = bench.pipeline.pools[0].returns.reserved
    assert reserved is None if why == "switched off" else reserved is not None and reserved.promised == 0


def test_a_reload_begins_and_ends_it() -> None:
    from .conftest import Bench

    bench = Bench(pool(retry_tickets=False, depth=DepthConfig(depth_limit=0)))
    bench.offer()
    for tickets in (True, False, True):
        bench.pipeline.reconfigure(PipelineConfig((pool(retry_tickets=tickets, depth=DepthConfig(depth_limit=0)),)), 0)
        (refuse,) = bench.offer()
        assert isinstance(refuse, Refuse)
        assert refuse.refusal.reserved is tickets


# ---- no harm -------------------------------------------------------------------------------------------------------


class Both:
    """The observer of a pipeline: what it decided."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.holders = 0

    def closed(self, ticket: Ticket) -> None:
        self.said.append((ticket.sequence, ticket.outcome, ticket.reason, ticket.closed, ticket.expires))

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        self.said.append((refusal.reason, refusal.retry_after_ns, predicted_wait_ns))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from([None, 0, 1, 2]),
        st.integers(0, 400),
        st.sampled_from([10, 100, 700]),
        st.integers(-1, 1),
    ),
    min_size=20,
    max_size=160,
)


def drive(steps: list[tuple[str, int | None, int, int, int]], *, shown: bool, promises: bool) -> tuple[Both, Pipeline]:
    """A pool under load. `shown`: every return shows a ticket, whether it was given one or not; `promises`: places are
    kept for tickets."""
    both = Both()
    config = pool(
        limit=FixedConfig(limit=2),
        fair=FairShareConfig(),
        retry_budget=RetryBudgetConfig(per_s=0.5),
        retry_tickets=promises,
        forecast=ForecastConfig(wait_budget_ns=300 * MILLISECOND),
    )
    pipeline, now, leases = Pipeline(PipelineConfig((config,)), Random(3), both), 0, []
    pipeline.report(EngineUp("e"), now)
    seen: dict[Ticket, None] = {}

    def took(effects: list[Effect]) -> None:
        admitted = [e.ticket for e in effects if isinstance(e, Queued)]
        admitted += [lease.ticket for e in effects if isinstance(e, Dispatch) for lease in e.leases]
        both.holders += sum(t.request.holds_place and t.arrived == now and t not in seen for t in admitted)
        seen.update(dict.fromkeys(admitted))
        leases.extend(lease for e in effects if isinstance(e, Dispatch) for lease in e.leases)

    for key, retries, passed, tokens, priority in steps:
        now += passed * MILLISECOND
        took(pipeline.poll(now))
        if leases and passed > 100:
            took(pipeline.report(Finished(leases.pop(0), Usage(tokens, 0)), now))
        request = Request(key, counted_tokens=tokens, retries=retries, priority=priority, generates=False)
        request.holds_place = shown and bool(retries)
        took(pipeline.offer(request, now))
        check_invariants(pipeline, now)
    return both, pipeline


@settings(max_examples=60)
@given(STEPS)
def test_tickets_that_nobody_issued_change_no_decision(steps: list[tuple[str, int | None, int, int, int]]) -> None:
    without, _ = drive(steps, shown=False, promises=False)
    forged, _ = drive(steps, shown=True, promises=False)
    assert forged.said == without.said


@settings(max_examples=60)
@given(STEPS)
def test_a_flood_of_tickets_holds_no_more_places_than_the_calendar_gave(
    steps: list[tuple[str, int | None, int, int, int]],
) -> None:
    both, pipeline = drive(steps, shown=True, promises=True)
    reserved = pipeline.pools[0].returns.reserved
    assert reserved is not None
    told = sum(1 for said in both.said if len(said) == 3 and said[1] is not None)
    assert both.holders == reserved.taken
    assert reserved.taken <= reserved.promised <= told + sum(1 for said in both.said if len(said) == 5)
