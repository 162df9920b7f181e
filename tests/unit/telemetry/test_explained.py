"""For every reason, explain has the figures that the decision compared: the verdict follows from what it says."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from forebay.core.admission.depth import DepthConfig
from forebay.core.admission.fair_share import FairShareConfig
from forebay.core.admission.forecast import ForecastConfig
from forebay.core.admission.retry_budget import RetryBudgetConfig
from forebay.core.admission.waiting_room import WaitingRoomConfig
from forebay.core.effects import Dispatch, Effect, Refuse
from forebay.core.events import EngineDown, EngineUp, EngineWarming, Failed, Finished, FirstToken
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.limits.guarded import GuardedConfig
from forebay.core.model import Lease, Mode, Refusal, Request, Usage
from forebay.core.outcome import EvictReason, FailReason, ShedReason
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.telemetry.recent import Recent

SLOW = ForecastConfig(wait_budget_ns=20 * MILLISECOND, budget_floor_slots=0.0)


class World:
    """A pipeline, every decision of which is explained and compared with what was decided."""

    def __init__(self, limits: KeyLimits | None = None, *, up: bool = True, **pool: Any) -> None:
        self.now = SECOND
        self.recent = Recent(
            100,
            completed=True,
            identify=lambda request: request.owner,
            estimate=lambda request: self.pipeline.estimator.estimate(request),
            pool_of=lambda request: self.pipeline.pool_for(request.model),
            path_of=lambda request: self.pipeline.budget(request.key).path_for(request.model),
            clock=lambda: self.now,
        )
        pool.setdefault("limit", FixedConfig(limit=1))
        config = PoolConfig("p", pool.pop("engines", ("p/0",)), **pool)
        keys = {} if limits is None else {"k": KeyTerms(limits)}
        self.pipeline = Pipeline(PipelineConfig((config,), keys), Random(1), self.recent)
        self.pipeline.on_admitted = self.recent.admitted
        self.names = 0
        self.effects: list[Effect] = []
        for engine in config.engines if up else ():
            self.pipeline.report(EngineUp(engine), self.now)

    def offer(self, key: str = "k", tokens: int = 100, **fields: Any) -> str:
        """Offer a request; its name."""
        self.names += 1
        fields.setdefault("generates", False)
        owner = b"%d" % self.names
        self.effects = self.pipeline.offer(Request(key, owner=owner, counted_tokens=tokens, **fields), self.now)
        return owner.decode()

    def lease(self, **fields: Any) -> Lease:
        self.offer(**fields)
        (dispatch,) = self.effects
        assert isinstance(dispatch, Dispatch)
        return dispatch.leases[0]

    def finish(self, lease: Lease, output: int = 0) -> None:
        self.effects = self.pipeline.report(Finished(lease, Usage(100, output)), self.now)

    def serve(self, requests: int, took_ns: int, key: str = "k") -> None:
        """One after the other, so that the rate of releases is known."""
        for _ in range(requests):
            lease = self.lease(key=key)
            self.now += took_ns
            self.finish(lease)

    def refused(self, reason: str, **fields: Any) -> dict[str, Any]:
        """Offer one that is refused for this; what is said of it, beside what it was told."""
        name = self.offer(**fields)
        (refuse,) = self.effects
        assert isinstance(refuse, Refuse)
        return self.compared(name, refuse.refusal, reason)

    def compared(self, name: str, refusal: Refusal, reason: str) -> dict[str, Any]:
        said = self.explain(name)
        assert (said["reason"], refusal.reason.value) == (reason, reason)
        assert (said["limit"], said["actual"], said["unit"], said["level"]) == (
            refusal.limit, refusal.actual, refusal.unit, refusal.level,
        )  # fmt: skip
        retry = refusal.retry_after_ns
        assert said["retry_after_ms"] == (None if retry is None else retry / MILLISECOND)
        assert said["should_retry"] is (retry is not None and refusal.obeyed)
        return said

    def explain(self, name: str) -> dict[str, Any]:
        found = self.recent.explain(name)
        assert found is not None
        return found


def key_requests() -> None:
    world = World(KeyLimits(requests_per_minute=2))
    world.offer()
    world.offer(mode=Mode.BACKPRESSURE)
    said = world.refused("key_requests")
    (limit,) = said["limits"]
    assert (limit["limit"], limit["left"], limit["counts"]) == (2, 0, "requests/min")
    assert said["actual"] == limit["limit"] - limit["left"] + 1 > said["limit"]


def key_tokens() -> None:
    world = World(KeyLimits(tokens_per_minute=250))
    world.offer(mode=Mode.BACKPRESSURE)
    world.offer(mode=Mode.BACKPRESSURE)
    said = world.refused("key_tokens")
    (limit,) = said["limits"]
    assert (limit["limit"], limit["left"], limit["counts"]) == (250, 50, "tokens/min")
    assert said["estimate"]["input_tokens"] + said["estimate"]["output_reserved"] > limit["left"]


def key_concurrency() -> None:
    world = World(KeyLimits(concurrency=2))
    for _ in range(2):
        world.offer(mode=Mode.BACKPRESSURE)
    said = world.refused("key_concurrency")
    assert said["limits"] == [{"level": "this key", "counts": "open requests", "limit": 2, "left": 0}]
    assert (said["limit"], said["actual"]) == (2, 3)


def key_credits() -> None:
    world = World()
    world.pipeline.quota.set_key("k", KeyTerms(prepaid=True), world.now)
    world.pipeline.quota.lease_credit("k", 60)
    said = world.refused("key_credits")
    assert said["limits"] == [{"level": "", "counts": "prepaid tokens", "limit": 60, "left": 60}]
    assert said["limit"] == 60 < said["actual"] == said["estimate"]["input_tokens"]


def key_share() -> None:
    world = World(limit=FixedConfig(limit=2), fair=FairShareConfig(burst_s=0.1))
    for _ in range(80):
        lease, other = world.lease(key="flood", tokens=900), world.lease(key="small", tokens=10)
        world.now += 20 * MILLISECOND
        world.finish(lease)
        world.finish(other)
    world.lease(key="flood", tokens=5000)
    world.lease(key="flood", tokens=5000)
    said = world.refused("key_share", key="flood", tokens=5000)
    assert said["share"]["ahead_ms"] > 0, "it is ahead …"
    assert said["pool"]["free_places"] <= said["share"]["reserve_places"], "… and no place is left that nobody wants"
    assert said["retry_after_ms"] >= said["share"]["ahead_ms"]
    assert 0 < said["share"]["part"] <= 1


def retry_budget() -> None:
    world = World(retry_budget=RetryBudgetConfig(), mode=Mode.ADMISSION)
    world.offer(retries=0)
    for _ in range(30):
        world.offer(retries=0)
    for _ in range(50):
        world.offer(retries=1)
    said = world.refused("retry_budget", retries=3)
    assert said["retries"]["attempt"] == 3
    assert said["retries"]["strained"] is True
    assert said["retries"]["budget_left"] < 1


def never_fits() -> None:
    world = World(depth=DepthConfig(tokens_limit=500))
    world.offer()
    said = world.refused("never_fits", tokens=600)
    assert (said["limit"], said["actual"]) == (500, said["estimate"]["input_tokens"])
    assert said["pool"]["queue_tokens_limit"] == 500


@pytest.mark.parametrize(
    ("bound", "fields"),
    [({"depth_limit": 1}, {}), ({"tokens_limit": 150}, {}), ({"bytes_limit": 100}, {"body_bytes": 60})],
)
def test_queue_full(bound: dict[str, int], fields: dict[str, int]) -> None:
    world = World(depth=replace(DepthConfig(), **bound))
    world.offer(**fields)
    world.offer(**fields)
    said = world.refused("queue_full", **fields)
    pool = said["pool"]
    asked = {
        "depth_limit": ("queue_depth", 0),
        "tokens_limit": ("queue_tokens", said["estimate"]["input_tokens"]),
        "bytes_limit": ("queue_bytes", 60),
    }
    ((name, limit),) = bound.items()
    what, more = asked[name]
    assert pool[f"{what}_limit"] == said["limit"] == limit
    assert pool[what] + more == said["actual"] >= limit


@pytest.mark.parametrize("bound", ["budget", "ttft", "deadline", "patience"])
def test_queue_wait(bound: str) -> None:
    guarded = GuardedConfig(initial=1, least=1, most=1)
    wide = ForecastConfig(wait_budget_ns=MILLISECOND, budget_floor_slots=50.0, budget_ceiling_ns=60 * SECOND)
    forecast = SLOW if bound == "budget" else wide
    world = World(limit=guarded if bound == "ttft" else FixedConfig(limit=1), forecast=forecast, ttft_ns=SECOND // 8)
    world.serve(40, 100 * MILLISECOND)
    world.lease(stream=bound == "ttft")
    world.offer(mode=Mode.BACKPRESSURE)
    world.offer(mode=Mode.BACKPRESSURE)
    ends = {bound: world.now + 300 * MILLISECOND} if bound in {"deadline", "patience"} else {}
    said = world.refused("queue_wait", stream=bound == "ttft", **ends)
    wait = said["wait"]
    assert said["actual"] == said["predicted_wait_ms"] == wait["predicted_ms"]
    assert wait["predicted_ms"] == pytest.approx(
        said["pool"]["wait_correction"] * 3 * (1 + forecast.tail_z / 3**0.5) / said["pool"]["drain_rate_per_s"] * 1000,
        rel=0.01,
    )
    bounds = {
        "budget": wait["budget_ms"],
        "ttft": max(forecast.wait_budget_ns / MILLISECOND, wait["ttft_ms"] - wait["prefill_ms"]),
        "deadline": (wait["deadline_ms"] or 1e9) - wait["usual_service_ms"],
        "patience": (wait["patience_ms"] or 1e9) - max(wait["usual_service_ms"], wait["usual_first_token_ms"]),
    }
    if bound != "ttft":
        del bounds["ttft"]
    assert said["limit"] == pytest.approx(max(0, min(bounds.values())))
    assert min(bounds, key=bounds.__getitem__) == bound


def warming() -> None:
    world = World(up=False, waiting_room=WaitingRoomConfig(places=1))
    world.pipeline.report(EngineWarming("p/0"), world.now)
    world.offer()
    said = world.refused("warming")
    ready = said["readiness"]
    assert (ready["serving_in_ms"], ready["waiting_room_places"]) == (None, 1)
    assert said["pool"]["queue_depth"] == 1, "the one place is taken"
    assert 0 < ready["warm_in_ms"] <= said["retry_after_ms"]


def no_engine() -> None:
    world = World()
    world.pipeline.report(EngineDown("p/0"), world.now)
    said = world.refused("no_engine")
    assert said["readiness"] == {"serving_in_ms": None, "warm_in_ms": None, "waiting_room_places": 0}
    ejected = World()
    for _ in range(3):
        ejected.pipeline.report(Failed(ejected.lease(), FailReason.ENGINE_ERROR), ejected.now)
    said = ejected.refused("no_engine")
    assert 0 < said["readiness"]["serving_in_ms"] <= said["retry_after_ms"]


def draining() -> None:
    world = World()
    world.pipeline.drain(world.now)
    assert world.refused("draining")["outcome"] == "shed"


SHED = {
    check.__name__: check
    for check in (
        key_requests, key_tokens, key_concurrency, key_credits, key_share, retry_budget, never_fits, warming, no_engine,
        draining,
    )
}  # fmt: skip


@pytest.mark.parametrize("reason", SHED)
def test_a_refusal(reason: str) -> None:
    SHED[reason]()


def test_every_reason_is_here() -> None:
    assert set(SHED) | {"queue_full", "queue_wait"} == {reason.value for reason in ShedReason}


def evicted(world: World, name: str, reason: EvictReason) -> dict[str, Any]:
    refuse = next(e for e in world.effects if isinstance(e, Refuse) and e.request.owner.decode() == name)
    assert refuse.ticket is not None
    return world.compared(name, refuse.refusal, reason.value)


def test_one_that_expired() -> None:
    world = World(forecast=ForecastConfig(wait_budget_ns=80 * MILLISECOND))
    world.offer()
    name = world.offer()
    world.now += 90 * MILLISECOND
    world.effects = world.pipeline.poll(world.now)
    said = evicted(world, name, EvictReason.EXPIRED)
    assert (said["limit"], said["actual"]) == (said["wait_budget_ms"], said["queue_wait_ms"]) == (80, 90)


def test_one_that_made_way() -> None:
    world = World(depth=DepthConfig(depth_limit=1))
    world.offer()
    name = world.offer()
    world.offer(priority=1)
    said = evicted(world, name, EvictReason.DISPLACED)
    assert said["pool"]["queue_depth_limit"] == 1


def test_those_that_waited_for_an_engine_that_went_and_for_a_gateway_that_stops() -> None:
    world = World()
    world.offer()
    name = world.offer()
    world.effects = world.pipeline.report(EngineDown("p/0"), world.now)
    evicted(world, name, EvictReason.NO_ENGINE)
    world = World()
    world.offer()
    name = world.offer()
    world.effects = world.pipeline.abandon(world.now)
    evicted(world, name, EvictReason.DRAINING)


def test_one_that_started_at_once_and_why_there() -> None:
    world = World(engines=("a", "b", "c"), limit=FixedConfig(limit=2))
    world.lease(tokens=500)
    lease = world.lease(tokens=10)
    name = world.offer(tokens=10)
    world.finish(lease)
    (dispatch,) = [lease for lease in world.pipeline.pools[0].engines if lease.name == "c"]
    (third,) = dispatch.leases
    world.finish(third)
    said = world.explain(name)
    able = {one["name"]: one["tokens_before"] for one in said["engines"] if one["room"]}
    assert said["engine"] == min(able, key=able.__getitem__) == "c"
    assert [one["places"] for one in said["engines"]] == [1, 1, 0]
    assert said["pool"]["free_places"] == 4


def test_one_that_had_to_wait() -> None:
    world = World(fair=FairShareConfig(), floors=((0, 0.1),), forecast=ForecastConfig(wait_budget_ns=SECOND))
    world.serve(40, 100 * MILLISECOND)
    first = world.lease(key="other")
    name = world.offer(hold_back=0.5, patience=world.now + 5 * SECOND, stream=True)
    world.now += 60 * MILLISECOND
    world.finish(first)
    (lease,) = world.pipeline.pools[0].engines[0].leases
    world.pipeline.report(FirstToken(lease), world.now)
    world.finish(lease)
    said = world.explain(name)
    wait = said["wait"]
    assert said["met_queue"] is True
    assert wait["predicted_ms"] == said["predicted_wait_ms"] <= wait["budget_ms"] == said["wait_budget_ms"]
    assert wait["predicted_ms"] <= wait["patience_ms"] - wait["usual_first_token_ms"]
    assert said["pool"]["queue_depth"] < said["pool"]["queue_depth_limit"]
    assert said["pool"]["free_places"] == 0 <= said["hold_back"]["places"] == 0.5
    assert said["share"]["ahead_ms"] == 0
    assert said["retries"] == {"attempt": None, "strained": False, "budget_left": None}
    assert said["readiness"]["serving_in_ms"] == 0


def test_to_explain_changes_nothing() -> None:
    """The same trace with and without: the same refusals, to the nanosecond."""
    told: list[list[Refusal]] = []
    for explained in (True, False):
        world = World(fair=FairShareConfig(burst_s=0.2), retry_budget=RetryBudgetConfig(), limit=FixedConfig(limit=3))
        if not explained:
            world.pipeline.on_admitted = None
            world.recent._pool_of = lambda request: None
        chance, found = Random(3), []
        for _ in range(600):
            world.now += chance.randrange(20 * MILLISECOND)
            world.offer(key=chance.choice("abc"), tokens=chance.randrange(1, 900), retries=chance.choice([None, 0, 1]))
            found += [e.refusal for e in world.effects if isinstance(e, Refuse)]
            leases = list(world.pipeline.pools[0].engines[0].leases)
            if leases and chance.random() < 0.5:
                world.finish(chance.choice(leases))
                found += [e.refusal for e in world.effects if isinstance(e, Refuse)]
        told.append(found)
    assert len(told[0]) > 100
    assert [(r.reason, r.retry_after_ns, r.actual) for r in told[0]] == [
        (r.reason, r.retry_after_ns, r.actual) for r in told[1]
    ]
