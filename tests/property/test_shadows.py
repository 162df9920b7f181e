"""Whatever is in shadow, the acting settings decide as they would alone: the same answers, draws and books.

Two pipelines are told the same. One has a shadow of every setting, put in, exchanged and taken out while it works.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.core.admission.depth import DepthConfig
from forebay.core.admission.fair_share import FairShareConfig
from forebay.core.admission.forecast import ForecastConfig
from forebay.core.admission.retry_after import RetryConfig
from forebay.core.admission.retry_budget import RetryBudgetConfig
from forebay.core.admission.waiting_room import WaitingRoomConfig
from forebay.core.batching.dynamic import DynamicConfig
from forebay.core.dispatch.balance import AffinityConfig, BalanceConfig, LeastConfig, P2cConfig, RandomConfig
from forebay.core.dispatch.health import HealthConfig
from forebay.core.effects import Abort, Dispatch, Effect, Queued, Refuse
from forebay.core.events import (
    EngineDown,
    EngineUp,
    EngineWarming,
    Failed,
    Finished,
    FirstToken,
    MemoryRead,
    Undelivered,
)  # fmt: skip
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.limits.guarded import GuardedConfig
from forebay.core.model import Lease, Mode, Refusal, Request, Ticket, Usage
from forebay.core.outcome import FailReason
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.queueing.ordering import OrderConfig
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.core.shadows.shadow import POLICIES, ShadowConfig
from forebay.core.tuning.depth import TuningConfig
from forebay.core.tuning.derived import DerivedConfig
from forebay.core.tuning.fixed import FixedConfig as FixedDepth
from forebay.testing import check_invariants

EVERYTHING = ShadowConfig(
    forecast=ForecastConfig(wait_budget_ns=20 * MILLISECOND, tail_z=0.5, late_share=0.1, budget_floor_slots=1.0),
    fair=FairShareConfig(burst_s=0.2),
    retry=RetryConfig(headroom=0.5, share_most=0.5),
    retry_budget=RetryBudgetConfig(share=0.5, per_s=0.2),
    waiting_room=WaitingRoomConfig(places=1),
    balance=P2cConfig(),
    order=OrderConfig(adaptive=True, target_share=0.1, interval_ns=10 * MILLISECOND),
    floors=((0, 0.2),),
    hold_backs=(("low", 0.6), ("high", 0.1)),
)
SWAPPED = ShadowConfig(
    forecast=ForecastConfig(wait_budget_ns=200 * MILLISECOND),
    order=OrderConfig(),
    balance=AffinityConfig(),
    retry_budget=RetryBudgetConfig(),
    retry=RetryConfig(),
)
ACTING: dict[str, Any] = {
    "depth": DepthConfig(depth_limit=6, held_limit=9),
    "tuning": TuningConfig(DerivedConfig(least=1, most=9, interval_ns=SECOND, releases_min=1, releases_enough=2)),
    "hold_ns": 3 * SECOND,
    "health": HealthConfig(failures_max=1),
    "limit": FixedConfig(limit=2, tokens=900),
    "retry_budget": RetryBudgetConfig(),
    "waiting_room": WaitingRoomConfig(places=2, hold_ns=40 * SECOND),
    "fair": FairShareConfig(reserve_from=4, burst_s=0.5),
    "floors": ((0, 0.1),),
}
CHAT = PoolConfig("chat", ("a", "b", "c"), ("chat",), **ACTING)
EMBED = PoolConfig("embed", ("d",), ("*",), batching=DynamicConfig(max_size=3, linger_ns=5 * MILLISECOND), **ACTING)


def shaded(pool: PoolConfig, shadow: ShadowConfig, tried: bool) -> PoolConfig:
    tuning = replace(pool.tuning, shadow=FixedDepth() if tried else None, shadow_depth=3 if tried else None)
    return replace(pool, shadow=shadow, limit_shadow=GuardedConfig(initial=3) if tried else None, tuning=tuning)


class World:
    """A pipeline whose every word is kept; leases and tickets go by their number."""

    def __init__(self, config: PipelineConfig, seed: int) -> None:
        self.chance = Random(seed)
        self.log: list[Any] = []
        self.pipeline = Pipeline(config, self.chance, self)
        self.tickets: dict[int, Ticket] = {}
        self.leases: dict[int, Lease] = {}

    def closed(self, ticket: Ticket) -> None:
        self.log.append(("closed", ticket.sequence, ticket.outcome, ticket.reason, ticket.wait_budget_ns))
        self.leases.pop(ticket.sequence, None)
        self.tickets.pop(ticket.sequence, None)

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        self.log.append(("shed", request.key, refusal, predicted_wait_ns))

    def took(self, effects: list[Effect], now: int) -> None:
        for effect in effects:
            if isinstance(effect, Dispatch):
                for lease in effect.leases:
                    self.leases[lease.ticket.sequence] = lease
                    self.log.append(("dispatch", lease.ticket.sequence, lease.engine.name))
            elif isinstance(effect, Queued):
                self.tickets[effect.ticket.sequence] = effect.ticket
                self.log.append(("queued", effect.ticket.predicted_wait_ns, effect.ticket.expires))
            elif isinstance(effect, Refuse):
                self.log.append(("refuse", effect.refusal))
            else:
                assert isinstance(effect, Abort)
        check_invariants(self.pipeline, now)


def request(chance: Random) -> Request:
    low = chance.random() < 0.5
    return Request(
        key=chance.choice(["k", "l", "m"]),
        model=chance.choice(["chat", "chat", "embed"]),
        counted_tokens=chance.randrange(1, 400),
        max_output_tokens=chance.randrange(1, 50),
        stream=chance.random() < 0.7,
        priority=0 if low else 1,
        priority_class="low" if low else "high",
        hold_back=0.4 if low else 0.0,
        mode=chance.choice([None, None, None, Mode.BACKPRESSURE, Mode.ADMISSION]),
        retries=chance.choice([None, 0, 0, 1]),
        prefix=chance.randrange(4),
    )


def happen(world: World, kind: int, chance: Random, now: int) -> None:
    """One thing, drawn from a chance of its own, that is the same in both worlds."""
    pipeline = world.pipeline
    world.took(pipeline.poll(now), now)
    engine = chance.choice("abcd")
    leases, tickets = sorted(world.leases), sorted(world.tickets)
    if kind < 6:
        asked = request(chance)
        ends = chance.choice([None, None, now + chance.randrange(1, 2000) * MILLISECOND])
        asked.deadline, asked.patience = (ends, None) if chance.random() < 0.5 else (None, ends)
        world.took(pipeline.offer(asked, now), now)
    elif kind < 9 and leases:
        lease = world.leases[chance.choice(leases)]
        if not lease.ticket.first_token:
            world.took(pipeline.report(FirstToken(lease), now), now)
        usage = Usage(lease.ticket.demand.input_tokens, chance.randrange(60))
        world.took(pipeline.report(Finished(lease, usage), now), now)
    elif kind == 9 and leases:
        lease = world.leases[chance.choice(leases)]
        if chance.random() < 0.5:
            world.took(pipeline.report(Failed(lease, FailReason.ENGINE_ERROR), now), now)
        else:
            world.took(pipeline.report(Undelivered(lease, away=chance.random() < 0.3), now), now)
    elif kind == 10 and tickets:
        world.took(pipeline.cancel(world.tickets[chance.choice(tickets)], now), now)
    elif kind == 11:
        event: Any = chance.choice([EngineUp, EngineUp, EngineUp, EngineWarming, EngineDown])
        world.took(pipeline.report(event(engine), now), now)
    elif kind == 12:
        world.took(pipeline.report(MemoryRead(engine, chance.random()), now), now)


def config(*pools: PoolConfig) -> PipelineConfig:
    return PipelineConfig(pools, {"l": KeyTerms(KeyLimits(concurrency=3))})


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    seed=st.integers(0, 1 << 30),
    balance=st.sampled_from([LeastConfig(), P2cConfig(), AffinityConfig(), RandomConfig()]),
    order=st.booleans(),
    moves=st.sets(st.integers(0, 199), max_size=4),
)
def test_no_shadow_changes_a_decision(seed: int, balance: BalanceConfig, order: bool, moves: set[int]) -> None:
    pools = tuple(replace(pool, balance=balance, order=OrderConfig(adaptive=order)) for pool in (CHAT, EMBED))
    alone = World(config(*pools), seed)
    beside = World(config(*(shaded(pool, EVERYTHING, True) for pool in pools)), seed)
    worlds, chance, now, put_in = (alone, beside), Random(seed + 1), SECOND, True
    for name in "abcd":
        for world in worlds:
            world.took(world.pipeline.report(EngineUp(name), now), now)
    for step in range(200):
        now += chance.randrange(40 * MILLISECOND)
        if step in moves:
            put_in = not put_in
            alone.took(alone.pipeline.reconfigure(config(*pools), now), now)
            others = (shaded(pool, EVERYTHING if put_in else SWAPPED, put_in) for pool in pools)
            beside.took(beside.pipeline.reconfigure(config(*others), now), now)
        kind, drawn = chance.randrange(13), chance.randrange(1 << 30)
        for world in worlds:
            happen(world, kind, Random(drawn), now)
        assert alone.log == beside.log
        alone.log.clear()
        beside.log.clear()
    assert alone.chance.getstate() == beside.chance.getstate()
    assert alone.pipeline.outcomes == beside.pipeline.outcomes
    for one, other in zip(alone.pipeline.pools, beside.pipeline.pools, strict=True):
        assert one.forecast.correction == other.forecast.correction
        assert other.shadows is not None
        assert sum(other.shadows.counts.values()) > 0


@pytest.mark.parametrize("pool", [CHAT, EMBED], ids=["chat", "embed"])
def test_settings_beside_themselves_say_the_same_of_everything(pool: PoolConfig) -> None:
    """What learns in shadow by the acting settings learns what the acting ones do, to the last bit."""
    acting = replace(pool, models=("*",), order=OrderConfig(adaptive=True), balance=LeastConfig())
    beside = ShadowConfig(
        forecast=acting.forecast, fair=acting.fair, retry=acting.retry, retry_budget=acting.retry_budget,
        waiting_room=acting.waiting_room, balance=acting.balance, order=acting.order, floors=acting.floors,
        hold_backs=(("low", 0.4),),
    )  # fmt: skip
    tuning = replace(acting.tuning, shadow=None)
    world = World(config(replace(acting, shadow=beside, tuning=tuning, limit_shadow=acting.limit)), 5)
    counts = world.pipeline.pools[0].shadows.counts  # type: ignore[union-attr]
    chance, now = Random(9), SECOND
    for name in acting.engines:
        world.took(world.pipeline.report(EngineUp(name), now), now)
    forecast: Any = world.pipeline.pools[0].forecast
    for _ in range(4000):
        now += chance.randrange(30 * MILLISECOND)
        kind = chance.randrange(11)
        happen(world, kind, Random(chance.randrange(1 << 30)), now)
        assert forecast.shadow.correction == forecast.correction
        assert forecast.shadow.drain_rate(3, now) == forecast.drain_rate(3, now)
    told = {policy for policy, _ in counts}
    assert {(policy, verdict) for policy, verdict in counts if verdict != "same"} == set()
    assert told >= set(POLICIES) - {"depth", "waiting_room", "balance"}
