"""Each policy in shadow: what it says of a request, what it learns, and that it acts with that once it is promoted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forebay.core.admission.depth import DepthConfig
from forebay.core.admission.fair_share import FairShareConfig
from forebay.core.admission.forecast import ForecastConfig
from forebay.core.admission.pairs import ShadowedForecast, ShadowedLadder
from forebay.core.admission.retry_after import RetryConfig
from forebay.core.admission.retry_budget import RetryBudgetConfig
from forebay.core.admission.waiting_room import WaitingRoomConfig
from forebay.core.dispatch.balance import AffinityConfig, LeastConfig, P2cConfig
from forebay.core.events import EngineWarming, Finished
from forebay.core.instant import MILLISECOND, SECOND, Scattered
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode, Request, Usage
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.queueing.ordering import OrderConfig
from forebay.core.shadows.reload import build
from forebay.core.shadows.shadow import POLICIES, ShadowConfig
from forebay.core.tuning.depth import TuningConfig
from forebay.core.tuning.derived import DerivedConfig
from forebay.core.tuning.fixed import FixedConfig as FixedDepth
from forebay.testing import check_invariants


def pool(*engines: str, **fields: Any) -> PoolConfig:
    fields.setdefault("limit", FixedConfig(limit=1))
    return PoolConfig(name="p", engines=engines or ("e",), **fields)


def said(b: Any, policy: str, **fields: Any) -> str | None:
    """Offer a request; what the shadow of this policy says of it."""
    request = Request(key=fields.pop("key", "k"), counted_tokens=fields.pop("tokens", 10), generates=False, **fields)
    b.effects = b.pipeline.offer(request, b.clock.now)
    check_invariants(b.pipeline, b.clock.now)
    return verdict(request, policy)


def verdict(request: Request, policy: str) -> str | None:
    return next((one.verdict for one in request.shadow if one.policy == policy), None)


def counts(b: Any, policy: str) -> dict[str, int]:
    found: dict[str, int] = b.pipeline.snapshot(b.clock.now).pools[0].shadow_decisions.get(policy, {})
    return found


def reconfigure(b: Any, config: PoolConfig) -> None:
    b.pipeline.reconfigure(PipelineConfig((config,)), b.clock.now)
    check_invariants(b.pipeline, b.clock.now)


def serve(b: Any, requests: int, took_ns: int) -> None:
    for _ in range(requests):
        b.offer()
        b.clock.advance(took_ns)
        finish(b)


def finish(b: Any, engine: int = 0) -> None:
    lease = next(iter(b.pipeline.pools[0].engines[engine].leases))
    b.report(Finished(lease, Usage(10, 0)))


# ---- the prediction ------------------------------------------------------------------------------------------------

PATIENT = ForecastConfig(wait_budget_ns=10 * SECOND)


def test_a_stricter_forecast_learns_from_what_it_would_have_let_in(bench: Any) -> None:
    """100 ms each, one after the other: its budget lets one wait, and the others are none of its business."""
    tried = replace(PATIENT, wait_budget_ns=160 * MILLISECOND, tail_z=0.0, budget_floor_slots=0.0)
    b = bench(pool(forecast=PATIENT, shadow=ShadowConfig(forecast=tried)))
    serve(b, 30, 100 * MILLISECOND)
    assert [said(b, "wait_budget") for _ in range(4)] == [None, "same", "stricter", "stricter"]
    forecast = b.pipeline.pools[0].forecast
    before = forecast.shadow.correction
    for _ in range(4):
        b.clock.advance(100 * MILLISECOND)
        finish(b)
    assert forecast.shadow.correction == pytest.approx(before * 0.9998, rel=1e-5), "one was in time"
    assert forecast.correction < forecast.shadow.correction, "the acting one saw three"
    assert forecast.shadow.drain_rate(0, b.clock.now) == forecast.drain_rate(0, b.clock.now)


def test_what_a_forecast_would_allow_is_asked_whole(bench: Any) -> None:
    """Patience counts for the shadow, too; a larger budget does not help one who leaves earlier."""
    tried = replace(PATIENT, wait_budget_ns=60 * SECOND)
    acting = replace(PATIENT, wait_budget_ns=MILLISECOND, budget_floor_slots=0.0)
    b = bench(pool(forecast=acting, shadow=ShadowConfig(forecast=tried)))
    serve(b, 30, 100 * MILLISECOND)
    b.offer()
    assert said(b, "wait_budget") == "looser"
    assert said(b, "wait_budget", deadline=b.clock.now + 50 * MILLISECOND) == "same"


def test_a_promoted_forecast_goes_on_with_what_it_learned(bench: Any) -> None:
    tried = replace(PATIENT, late_share=0.3)
    b = bench(pool(forecast=PATIENT, shadow=ShadowConfig(forecast=tried)))
    serve(b, 30, 100 * MILLISECOND)
    for _ in range(8):
        b.offer()
    for _ in range(8):
        b.clock.advance(100 * MILLISECOND)
        finish(b)
    acting, shadow = b.pipeline.pools[0].forecast, b.pipeline.pools[0].forecast.shadow
    assert acting.correction != shadow.correction
    learned, acted = shadow.correction, acting.correction
    reconfigure(b, pool(forecast=tried, shadow=ShadowConfig(forecast=PATIENT)))
    swapped = b.pipeline.pools[0].forecast
    assert (swapped.config, swapped.correction) == (tried, learned)
    assert (swapped.shadow.config, swapped.shadow.correction) == (PATIENT, acted)
    reconfigure(b, pool(forecast=tried))
    alone = b.pipeline.pools[0].forecast
    assert (type(alone).__name__, alone.correction) == ("WaitForecast", learned)
    reconfigure(b, pool(forecast=tried, shadow=ShadowConfig(forecast=PATIENT)))
    again = b.pipeline.pools[0].forecast
    assert isinstance(again, ShadowedForecast)
    assert again.shadow.correction == learned, "a new one begins with what is known"
    again.shadow.released(0, b.clock.now)
    assert again.shadow.releases == again.releases + 1, "and goes its own way"


# ---- coming back ---------------------------------------------------------------------------------------------------


def test_a_calendar_with_less_room_promises_later_and_to_fewer(bench: Any) -> None:
    b = bench(pool(mode=Mode.ADMISSION, shadow=ShadowConfig(retry=RetryConfig(share_most=0.1, headroom=0.9))))
    serve(b, 60, 100 * MILLISECOND)
    b.clock.advance(600 * SECOND)  # it is idle by now
    b.offer()
    verdicts = [said(b, "retry_after") for _ in range(500)]
    assert {"later", "stricter"} <= set(verdicts) <= {"same", "later", "stricter"}
    assert counts(b, "retry_after") == {one: verdicts.count(one) for one in dict.fromkeys(verdicts)}


def test_one_with_more_room_promises_sooner_and_to_more(bench: Any) -> None:
    acting = RetryConfig(share_most=0.1, headroom=0.9)
    b = bench(pool(mode=Mode.ADMISSION, retry=acting, shadow=ShadowConfig(retry=RetryConfig())))
    serve(b, 60, 100 * MILLISECOND)
    b.clock.advance(600 * SECOND)  # it is idle by now
    b.offer()
    verdicts = {said(b, "retry_after") for _ in range(500)}
    assert {"sooner", "looser"} <= verdicts <= {"same", "sooner", "looser"}


def test_promised_places_stay_promised_when_calendars_change_places(bench: Any) -> None:
    acting, tried = RetryConfig(share_most=0.1, headroom=0.9), RetryConfig()
    b = bench(pool(mode=Mode.ADMISSION, retry=acting, shadow=ShadowConfig(retry=tried)))
    serve(b, 60, 100 * MILLISECOND)
    b.clock.advance(600 * SECOND)
    for _ in range(100):
        b.offer()
    ladder = b.pipeline.pools[0].ladder
    chance = ladder.chance
    reconfigure(b, pool(mode=Mode.ADMISSION, retry=tried, shadow=ShadowConfig(retry=acting)))
    swapped = b.pipeline.pools[0].ladder
    assert isinstance(swapped, ShadowedLadder)
    assert swapped._calendars is ladder.shadow._calendars
    assert swapped.chance is chance, "by the chance that acts"
    assert swapped.shadow.config == acting
    assert said(b, "retry_after") == "stricter"
    reconfigure(b, pool(mode=Mode.ADMISSION, retry=tried))
    assert type(b.pipeline.pools[0].ladder).__name__ == "RetryLadder"
    assert b.pipeline.pools[0].ladder._calendars is swapped._calendars


def test_retry_budgets_that_refuse_nobody(bench: Any) -> None:
    b = bench(pool(mode=Mode.ADMISSION, shadow=ShadowConfig(retry_budget=RetryBudgetConfig())))
    b.offer()
    for _ in range(20):
        assert said(b, "retry_budget", retries=0) is None, "a first attempt needs no budget"
    verdicts = [said(b, "retry_budget", retries=1) for _ in range(40)]
    assert verdicts == ["same"] * 12 + ["stricter"] * 28, "ten, and a tenth of twenty"
    assert {refusal.reason.value for refusal in b.refused} == {"queue_full"}
    budgets = b.pipeline.pools[0].shadows.kept()["retry_budget"].state
    reconfigure(b, pool(mode=Mode.ADMISSION, retry_budget=RetryBudgetConfig()))
    assert b.pipeline.pools[0].returns.budgets is budgets
    b.offer(retries=1)
    assert b.refused[-1].reason.value == "retry_budget", "spent is spent"


# ---- engines -------------------------------------------------------------------------------------------------------


def test_another_balancer_says_where_it_had_gone(bench: Any) -> None:
    config = pool("a", "b", limit=FixedConfig(limit=9), shadow=ShadowConfig(balance=AffinityConfig()))
    b = bench(config)
    assert b.pipeline.asks_prefixes, "it needs to know how prompts begin"
    assert b.pipeline.pools[0].prefix_bytes == AffinityConfig().prefix_bytes
    verdicts = [said(b, "balance", prefix=7, tokens=1) for _ in range(8)]
    assert {"same", "other"} == set(verdicts)
    request = Request(key="k", counted_tokens=1, generates=False)
    b.pipeline.offer(request, b.clock.now)
    (one,) = request.shadow
    assert (one.verdict, one.choice) == ("same", "a")
    assert one.limit == one.actual == b.pipeline.pools[0].engines[0].tokens - 1


def test_a_balancer_is_asked_when_one_that_waited_gets_its_engine(bench: Any) -> None:
    b = bench(pool("a", "b", shadow=ShadowConfig(balance=LeastConfig())))
    b.offer()
    b.offer()
    request = Request(key="k", counted_tokens=5, generates=False)
    b.pipeline.offer(request, b.clock.now)
    assert verdict(request, "balance") is None
    finish(b, 1)
    assert verdict(request, "balance") == "same"
    assert counts(b, "balance") == {"same": 3}


def test_a_shadow_that_draws_has_a_chance_of_its_own() -> None:
    one, other = Scattered(), Scattered()
    drawn = [one.random() for _ in range(4000)]
    assert drawn == [other.random() for _ in range(4000)]
    pairs = {(int(3 * x), int(2 * y)) for x, y in zip(drawn[::2], drawn[1::2], strict=True)}
    assert len(pairs) == 6, "every pair of engines is drawn"
    assert sum(drawn) / 4000 == pytest.approx(0.5, abs=0.02)


# ---- the queue -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "verdicts"), [(2, ["same", "same", "stricter", "same"]), (4, ["same"] * 4)])
def test_a_depth_that_is_set_in_shadow(bench: Any, depth: int, verdicts: list[str]) -> None:
    tuning = TuningConfig(shadow=FixedDepth(), shadow_depth=depth)
    b = bench(pool(depth=DepthConfig(depth_limit=3), tuning=tuning))
    b.offer()
    expected = verdicts if depth < 3 else ["same", "same", "same", "looser"]
    assert [said(b, "depth") for _ in range(4)] == expected
    assert b.pipeline.snapshot(b.clock.now).pools[0].tuner.shadow_depth == depth
    while b.pipeline.pools[0].in_flight:
        finish(b)
    reconfigure(b, pool(depth=DepthConfig(depth_limit=depth)))
    assert b.pipeline.pools[0].depth.depth_limit == depth


def test_a_shadow_beside_a_tuner_does_not_begin_it_anew(bench: Any) -> None:
    tuning = TuningConfig(DerivedConfig(interval_ns=SECOND))
    b = bench(pool(tuning=tuning))
    b.offer()
    acting, due = b.pipeline.pools[0].tuning.acting, b.pipeline.pools[0].tuning.acting.due
    tried = replace(tuning, shadow=DerivedConfig(interval_ns=2 * SECOND))
    reconfigure(b, pool(tuning=tried))
    assert b.pipeline.pools[0].tuning.acting is acting
    assert acting.due == due
    b.pipeline.poll(b.clock.now)
    shadow = b.pipeline.pools[0].tuning.shadow
    assert shadow.due >= b.clock.now + 2 * SECOND, "it looks from now on"
    b.advance(3 * SECOND)
    assert (acting.looks, shadow.looks) == (2, 1)


def test_another_order_says_whose_turn_it_had_been(bench: Any) -> None:
    """The oldest waits for ever longer: the newest would go first, and in the shadow they do."""
    tried = OrderConfig(adaptive=True, target_share=0.01, interval_ns=MILLISECOND)
    b = bench(pool(mode=Mode.BACKPRESSURE, hold_ns=60 * SECOND, shadow=ShadowConfig(order=tried)))
    for _ in range(12):
        b.offer()
    verdicts = []
    for _ in range(8):
        b.clock.advance(SECOND)
        head = b.pipeline.pools[0].queue.head()
        finish(b)
        verdicts.append(verdict(head.request, "order"))
    assert verdicts[0] == "same"
    assert verdicts[-1] == "other"
    assert [one.choice for one in head.request.shadow] == ["newest first"]
    learned = b.pipeline.pools[0].shadows.kept()["order"].state
    reconfigure(b, pool(mode=Mode.BACKPRESSURE, hold_ns=60 * SECOND, order=tried))
    assert b.pipeline.pools[0].queue.standing is learned
    newest = b.pipeline.pools[0].queue.head()
    assert newest.sequence == 12, "it acts at once"


def test_an_order_may_change_while_requests_wait(bench: Any) -> None:
    b = bench(pool(mode=Mode.BACKPRESSURE))
    for _ in range(5):
        b.offer()
    reconfigure(b, pool(mode=Mode.BACKPRESSURE, order=OrderConfig(adaptive=True)))
    assert b.pipeline.pools[0].queue.standing is not None
    reconfigure(b, pool(mode=Mode.BACKPRESSURE))
    assert b.pipeline.pools[0].queue.standing is None
    for _ in range(5):
        finish(b)
    assert [ticket.sequence for ticket in b.ended] == [1, 2, 3, 4, 5]


# ---- classes -------------------------------------------------------------------------------------------------------


def test_places_that_would_be_held_back(bench: Any) -> None:
    shadow = ShadowConfig(hold_backs=(("low", 0.5),))
    b = bench(pool(limit=FixedConfig(limit=4), shadow=shadow))
    assert said(b, "hold_back", priority=1, priority_class="high") is None, "nothing is held back of it"
    verdicts = [said(b, "hold_back", priority_class="low") for _ in range(3)]
    assert verdicts == ["same", "stricter", "stricter"]
    assert b.pipeline.pools[0].in_flight == 4
    assert said(b, "hold_back", priority_class="low") is None, "no place is left to be held back"


def test_places_that_would_not_be_held_back_any_more(bench: Any) -> None:
    b = bench(pool(limit=FixedConfig(limit=4), shadow=ShadowConfig(hold_backs=(("low", 0.0),))))
    fields = {"priority_class": "low", "hold_back": 0.5}
    assert [said(b, "hold_back", **fields) for _ in range(3)] == ["same", "same", "looser"]
    assert b.pipeline.queued == 1


def test_a_floor_in_shadow_lets_one_through_for_every_turn_that_it_saves(bench: Any) -> None:
    """A quarter of the turns: twelve of the class above are worth three of the class below, of which two are kept."""
    b = bench(pool(limit=FixedConfig(limit=40), shadow=ShadowConfig(floors=((0, 0.25),))))
    fields = {"priority_class": "low", "hold_back": 0.9}
    for _ in range(12):
        b.offer(priority=1)
    verdicts = []
    for _ in range(4):
        verdicts.append(said(b, "hold_back", **fields))
        b.cancel(b.pipeline.pools[0].queue.head())  # it is held back, and those behind it would only wait for it
    assert verdicts == ["looser", "looser", "same", "same"]
    learned = b.pipeline.pools[0].shadows.kept()["floors"].state
    reconfigure(b, pool(limit=FixedConfig(limit=40), floors=((0, 0.25),)))
    assert b.pipeline.pools[0].floor is learned


def test_a_waiting_room_of_another_size(bench: Any) -> None:
    shadow = ShadowConfig(waiting_room=WaitingRoomConfig(places=1))
    b = bench(pool(waiting_room=WaitingRoomConfig(places=2), shadow=shadow), up=False)
    b.report(EngineWarming("e"))
    assert [said(b, "waiting_room") for _ in range(3)] == ["same", "stricter", "same"]
    larger = ShadowConfig(waiting_room=WaitingRoomConfig(places=9))
    reconfigure(b, pool(waiting_room=WaitingRoomConfig(places=2), shadow=larger))
    assert said(b, "waiting_room") == "looser"
    assert said(b, "waiting_room", mode=Mode.BACKPRESSURE) is None


# ---- putting them in and taking them out ---------------------------------------------------------------------------

ALL = ShadowConfig(
    forecast=replace(PATIENT, tail_z=2.0), fair=FairShareConfig(), retry=RetryConfig(headroom=0.2),
    retry_budget=RetryBudgetConfig(), waiting_room=WaitingRoomConfig(3), balance=P2cConfig(),
    order=OrderConfig(adaptive=True), floors=((0, 0.1),), hold_backs=(("low", 0.2),),
)  # fmt: skip


def test_there_is_one_for_every_policy(bench: Any) -> None:
    b = bench(pool("a", "b", shadow=ALL, limit_shadow=FixedConfig(limit=3), tuning=TuningConfig(shadow=FixedDepth())))
    assert {one.policy for one in b.pipeline.pools[0].shadows.shadows} == set(POLICIES)


def test_a_reload_that_changes_nothing_of_them_leaves_them_alone(bench: Any) -> None:
    b = bench(pool("a", "b", shadow=ALL))
    shadows = b.pipeline.pools[0].shadows
    reconfigure(b, pool("a", "b", shadow=ALL, hold_ns=7 * SECOND))
    assert b.pipeline.pools[0].shadows is shadows
    reconfigure(b, pool("a", "b"))
    assert b.pipeline.pools[0].shadows is None
    assert type(b.pipeline.pools[0].forecast).__name__ == "WaitForecast"
    assert type(b.pipeline.pools[0].ladder).__name__ == "RetryLadder"
    assert build(b.pipeline.pools[0]) is None


def test_what_stays_in_shadow_keeps_what_it_learned_when_others_come_and_go(bench: Any) -> None:
    b = bench(pool(shadow=ShadowConfig(fair=FairShareConfig(), retry_budget=RetryBudgetConfig())))
    b.offer()
    before = b.pipeline.pools[0].shadows.kept()
    reconfigure(b, pool(shadow=ShadowConfig(fair=FairShareConfig(), order=OrderConfig())))
    after = b.pipeline.pools[0].shadows.kept()
    assert after["fair"].state is before["fair"].state
    assert set(after) == {"fair", "order"}
    reconfigure(b, pool(fair=FairShareConfig(), shadow=ShadowConfig(fair=FairShareConfig(burst_s=1.0))))
    assert b.pipeline.pools[0].fair_shares is before["fair"].state
    reconfigure(b, pool(fair=FairShareConfig(burst_s=1.0), shadow=ShadowConfig(fair=FairShareConfig())))
    assert b.pipeline.pools[0].shadows.kept()["fair"].state is before["fair"].state, "and back into the shadow"
