"""Other settings for a pipeline at work: nothing is lost, nothing is refilled."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from forebay.core.admission.depth import DepthConfig
from forebay.core.admission.fair_share import FairShareConfig
from forebay.core.batching import DynamicConfig
from forebay.core.events import Finished
from forebay.core.instant import MINUTE, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.limits.guarded import GuardedConfig
from forebay.core.model import Mode, Usage
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.quota.bucket import Bucket
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.testing import check_invariants


def pool(limit: Any = None, **fields: Any) -> PoolConfig:
    return PoolConfig(name="p", engines=("e",), limit=limit or FixedConfig(limit=2), **fields)


def reconfigure(b: Any, *pools: PoolConfig, keys: dict[str, KeyLimits] | None = None) -> list[Any]:
    terms = {key: KeyTerms(limits) for key, limits in (keys or {}).items()}
    effects: list[Any] = b.pipeline.reconfigure(PipelineConfig(pools, terms), b.clock.now)
    check_invariants(b.pipeline, b.clock.now)
    return effects


@pytest.mark.parametrize("seed", range(5))
def test_what_was_spent_of_a_bucket_stays_spent(seed: int) -> None:
    chance = Random(seed)
    bucket = Bucket(600, MINUTE)
    spent, now = chance.randrange(600), chance.randrange(MINUTE)
    bucket.charge(spent, now)
    bucket.relimit(1000, None, now)
    assert bucket.remaining(now) == 1000 - spent
    bucket.relimit(600, None, now)
    assert bucket.remaining(now) == 600 - spent
    bucket.relimit(100, None, now)
    assert bucket.remaining(now) == max(0, 100 - spent)


def test_keys_take_other_limits_and_keep_what_they_spent(bench: Any) -> None:
    b = bench(pool(FixedConfig(limit=50)), keys={"k": KeyLimits(requests_per_minute=10, tokens_per_second=1000)})
    for _ in range(6):
        b.offer("k", tokens=10)
    reconfigure(b, pool(FixedConfig(limit=50)), keys={"k": KeyLimits(requests_per_minute=8, concurrency=9)})
    assert b.pipeline.budget("k").path.headers(b.clock.now)[0][1:3] == (8, 2)
    assert b.pipeline.budget("k").open == 6
    reconfigure(b, pool(FixedConfig(limit=50)), keys={"k": KeyLimits(tokens_per_second=1000, burst_s=1.0)})
    assert b.pipeline.budget("k").path.headers(b.clock.now)[0][0] == "tokens"
    reconfigure(b, pool(FixedConfig(limit=50)))
    assert not b.pipeline.budget("k").path.limited


def test_a_higher_limit_is_used_at_once_and_nothing_that_waits_is_lost(bench: Any, leases: Any) -> None:
    b = bench(pool(mode=Mode.BACKPRESSURE))
    for _ in range(6):
        b.offer()
    assert b.pipeline.queued == 4
    changed = pool(FixedConfig(limit=5), mode=Mode.HYBRID, depth=DepthConfig(depth_limit=1), fair=FairShareConfig())
    more = leases(reconfigure(b, changed))
    assert len(more) == 3
    assert b.pipeline.queued == 1
    reconfigure(b, pool(FixedConfig(limit=1)))
    assert leases(b.report(Finished(more[0], Usage(1, 1)))) == [], "still above the lower limit"


def test_a_window_that_moves_goes_on_from_where_it_stood(bench: Any) -> None:
    b = bench(pool(GuardedConfig(initial=20)))
    (engine,) = b.pipeline.pools[0].engines
    engine.limit.requests = 33
    engine.recount()
    b.offer(stream=True, generates=True)
    reconfigure(b, pool(GuardedConfig(initial=20, tpot_ns=SECOND)))
    assert b.pipeline.pools[0].engines[0].limit.requests == 33
    b.advance(SECOND)


@pytest.mark.parametrize(
    "changed",
    [
        PoolConfig(name="q", engines=("e",), limit=FixedConfig(limit=2)),
        PoolConfig(name="p", engines=("e", "f"), limit=FixedConfig(limit=2)),
        PoolConfig(name="p", engines=("e",), models=("m",), limit=FixedConfig(limit=2)),
        PoolConfig(name="p", engines=("e",), limit=FixedConfig(limit=2), batching=DynamicConfig()),
    ],
)
def test_what_cannot_change_changes_nothing(bench: Any, changed: PoolConfig) -> None:
    b = bench(pool(), keys={"k": KeyLimits(requests_per_minute=10)})
    b.offer("k")
    with pytest.raises(ValueError, match="need a restart"):
        reconfigure(b, changed)
    assert b.pipeline.pools[0].config == pool()
    assert b.pipeline.budget("k").path.headers(0)[0][1] == 10
