"""Settings in shadow: told the same, counted, shown, and followed by nobody until a reload says so."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from forebay.core import limits
from forebay.core.admission.depth import DepthConfig
from forebay.core.admission.fair_share import FairShareConfig
from forebay.core.admission.forecast import ForecastConfig
from forebay.core.events import Finished, FirstToken
from forebay.core.instant import MILLISECOND, SECOND, Even
from forebay.core.limits.aimd import AimdConfig
from forebay.core.limits.envoy import EnvoyConfig
from forebay.core.limits.fixed import FixedConfig
from forebay.core.limits.gradient2 import Gradient2Config
from forebay.core.limits.guarded import GuardedConfig
from forebay.core.limits.limit import Answer, Limit, View
from forebay.core.limits.pair import Shadowed, shadowed, succeeded
from forebay.core.limits.vegas import VegasConfig
from forebay.core.model import EngineSignal, Mode, Request, Usage
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.queueing.ordering import OrderConfig
from forebay.core.shadows.shadow import POLICIES, VERDICTS, ShadowConfig
from forebay.core.tuning.depth import TuningConfig
from forebay.core.tuning.derived import DerivedConfig
from forebay.testing import check_empty, check_invariants, check_limit

CONFIGS: list[Any] = [
    FixedConfig(), AimdConfig(), VegasConfig(), Gradient2Config(), EnvoyConfig(), GuardedConfig(kv_tokens=50_000),
]  # fmt: skip


def view(elapsed_ns: int = 250 * MILLISECOND, **given: Any) -> View:
    figures: dict[str, Any] = {
        "in_flight": 4, "in_flight_most": 5, "waiting": False, "decoding_ns": 30, "generated": 3, "prefilled": 7,
        "prefilling_ns": 20, "prefilling": 9, "expected_tokens": 500, "peak_tokens": 400,
    }  # fmt: skip
    return View(elapsed_ns, **(figures | given))


def odd_history(limit: Limit, alone: Limit, steps: int = 400) -> None:
    """The same to both, views at the pace of the one alone; what they allow must never differ."""
    chance, now, seen_at = Random(5), 0, 0
    for _ in range(steps):
        now += chance.randrange(60 * MILLISECOND)
        held_ns, in_flight = chance.randrange(1, 5 * SECOND), chance.randrange(1, 100)
        answer = Answer(held_ns, chance.randrange(held_ns), chance.randrange(500), in_flight)
        signal = EngineSignal(3, chance.randrange(5), chance.random(), 50_000, chance.randrange(3))
        happened = chance.randrange(30)
        for one in (limit, alone):
            if happened == 0:
                one.failed(now)
            elif happened == 1:
                one.signalled(signal, in_flight, now)
            elif happened == 2:
                one.restarted(now)
            else:
                one.answered(answer, now)
        if alone.interval_ns and now - seen_at >= alone.interval_ns:
            shown = view(now - seen_at, in_flight=in_flight, in_flight_most=in_flight, waiting=True, generated=900)
            limit.viewed(shown, now)
            alone.viewed(shown, now)
            seen_at = now
        for name in ("requests", "tokens", "prefill_tokens", "prefill_rate", "gap_ns"):
            assert getattr(limit, name) == getattr(alone, name), name


@pytest.mark.parametrize("shadow", CONFIGS, ids=lambda config: config.kind)
@pytest.mark.parametrize("acting", CONFIGS, ids=lambda config: config.kind)
def test_a_shadow_changes_nothing_of_what_is_allowed(acting: Any, shadow: Any) -> None:
    odd_history(shadowed(acting, shadow, Random(1)), limits.build(acting, Random(1)))


def test_a_limit_with_a_shadow_is_a_limit() -> None:
    check_limit(shadowed(GuardedConfig(), Gradient2Config(least=1), Random(1)))
    check_limit(shadowed(FixedConfig(limit=1, tokens=1), GuardedConfig(least=1, kv_tokens=1), Random(1)))


class Seeing:
    """A limit that keeps its views."""

    requests = tokens = prefill_tokens = 9
    learns = True
    gap_ns = prefill_rate = 0.0
    slack = None

    def __init__(self, interval_ns: int) -> None:
        self.interval_ns = interval_ns
        self.views: list[View] = []

    def answered(self, answer: Answer, now: int) -> None: ...

    def failed(self, now: int) -> None: ...

    def viewed(self, view: View, now: int) -> None:
        self.views.append(view)

    def restarted(self, now: int) -> None: ...

    def signalled(self, signal: EngineSignal, in_flight: int, now: int) -> None: ...


def test_a_shadow_that_looks_more_rarely_is_shown_several_views_as_one() -> None:
    acting, shadow = Seeing(100), Seeing(250)
    both = Shadowed(acting, shadow)
    assert both.interval_ns == 100
    for number in range(1, 7):
        both.viewed(view(100, in_flight=number, in_flight_most=10 - number, waiting=number == 2), number * 100)
    assert len(acting.views) == 6
    first, second = shadow.views
    assert first == view(
        300, in_flight=3, in_flight_most=9, waiting=True, decoding_ns=90, generated=9, prefilled=21, prefilling_ns=60
    )
    assert (second.in_flight, second.in_flight_most, second.waiting) == (6, 6, False)


def test_one_that_looks_more_often_is_shown_what_the_acting_one_asks_for() -> None:
    acting, shadow = Seeing(1000), Seeing(100)
    both = Shadowed(acting, shadow)
    assert both.interval_ns == 1000
    both.viewed(view(1000), 1000)
    assert (len(acting.views), len(shadow.views)) == (1, 1)
    assert Shadowed(Seeing(0), Seeing(100)).interval_ns == 100
    alone = Seeing(0)
    Shadowed(alone, Seeing(100)).viewed(view(100), 100)
    assert alone.views == [], "it does not ask for any"


def test_a_promoted_limit_goes_on_with_what_it_learned() -> None:
    fixed, guarded = FixedConfig(limit=8), GuardedConfig(initial=16)
    both = shadowed(fixed, guarded, Random(1))
    assert isinstance(both, Shadowed)
    both.shadow.requests = 33
    alone = succeeded(both, (fixed, guarded), (guarded, None), Random(1))
    assert alone is both.shadow
    swapped = succeeded(both, (fixed, guarded), (guarded, fixed), Random(1))
    assert isinstance(swapped, Shadowed)
    assert (swapped.acting, swapped.shadow) == (both.shadow, both.acting)
    back = succeeded(swapped, (guarded, fixed), (fixed, None), Random(1))
    assert back is both.acting
    same = succeeded(alone, (guarded, None), (guarded, guarded), Random(1))
    assert isinstance(same, Shadowed)
    assert same.acting is alone
    assert same.shadow is not alone
    other = succeeded(alone, (guarded, None), (AimdConfig(), None), Random(1))
    assert other.requests == 33, "from where the acting one stood"


def test_even_chance_is_spread_and_the_same_again() -> None:
    one, other = Even(), Even()
    drawn = [one.random() for _ in range(100)]
    assert drawn == [other.random() for _ in range(100)]
    assert all(0.0 <= number < 1.0 for number in drawn)
    assert all(any(k / 10 <= number < (k + 1) / 10 for number in drawn) for k in range(10))


# ---- in the corridor ----------------------------------------------------------------------------------------------


def pool(**fields: Any) -> PoolConfig:
    fields.setdefault("limit", FixedConfig(limit=2))
    return PoolConfig(name="p", engines=("e",), **fields)


def said(b: Any, **fields: Any) -> dict[str, str]:
    """Offer a request; the verdicts of the shadows on it."""
    request = Request(key=fields.pop("key", "k"), counted_tokens=10, generates=False, **fields)
    b.effects = b.pipeline.offer(request, b.clock.now)
    check_invariants(b.pipeline, b.clock.now)
    return {one.policy: one.verdict for one in request.shadow}


def test_without_a_shadow_nothing_is_asked(bench: Any) -> None:
    b = bench(pool())
    assert b.pipeline.pools[0].shadows is None
    assert said(b) == {}
    assert b.pipeline.snapshot(b.clock.now).pools[0].shadow_decisions == {}


@pytest.mark.parametrize(
    ("limit", "verdicts"), [(1, ["same", "stricter", "same"]), (2, ["same"] * 3), (5, ["same", "same", "looser"])]
)
def test_a_window_in_shadow(bench: Any, limit: int, verdicts: list[str]) -> None:
    b = bench(pool(limit_shadow=FixedConfig(limit=limit)))
    assert [said(b)["window"] for _ in range(3)] == verdicts
    assert b.pipeline.pools[0].in_flight == 2
    snapshot = b.pipeline.snapshot(b.clock.now).pools[0]
    assert snapshot.engines[0].shadow_limit == limit
    assert snapshot.engines[0].concurrency_limit == 2
    assert snapshot.shadow_decisions == {"window": {one: verdicts.count(one) for one in dict.fromkeys(verdicts)}}


def test_a_window_in_shadow_goes_by_tokens_too(bench: Any) -> None:
    b = bench(pool(limit=FixedConfig(limit=9), limit_shadow=FixedConfig(limit=9, tokens=15)))
    assert [said(b)["window"] for _ in range(2)] == ["same", "stricter"]


def test_a_depth_in_shadow(bench: Any) -> None:
    config = pool(depth=DepthConfig(depth_limit=3), tuning=TuningConfig(shadow=DerivedConfig()))
    b = bench(config)
    b.pipeline.pools[0].tuning.shadow.depth = 2
    seen = [said(b).get("depth") for _ in range(7)]
    assert seen == [None, None, "same", "same", "stricter", "same", "same"]
    assert b.pipeline.queued == 3
    b.pipeline.pools[0].tuning.shadow.depth = 9
    assert said(b)["depth"] == "looser"
    assert "depth" not in said(b, mode=Mode.BACKPRESSURE), "held requests have a bound of their own"


def test_a_wait_budget_in_shadow(bench: Any, leases: Any) -> None:
    """One place, 100 ms each: three slots are the least budget, and ten seconds let more wait than 300 ms do."""
    forecast = ForecastConfig(wait_budget_ns=10 * SECOND, budget_floor_slots=3.0)
    tried = ShadowConfig(forecast=replace(forecast, wait_budget_ns=MILLISECOND))
    b = bench(pool(limit=FixedConfig(limit=1), forecast=forecast, shadow=tried))
    for _ in range(30):
        (lease,) = leases(b.offer())
        b.clock.advance(100 * MILLISECOND)
        b.report(Finished(lease, Usage(1, 1)))
    verdicts = [said(b).get("wait_budget") for _ in range(6)]
    assert verdicts[0] is None, "it starts at once"
    assert verdicts[1] == "same"
    assert verdicts[-1] == "stricter"
    assert b.pipeline.queued == 5, "the acting budget is kept"


def test_a_fair_share_in_shadow(bench: Any, leases: Any) -> None:
    """One key floods while another wants its part: the shadow would refuse it, and nobody does."""
    forecast = ForecastConfig(wait_budget_ns=10 * SECOND)
    shadow = ShadowConfig(fair=FairShareConfig(burst_s=0.01))
    b = bench(pool(limit=FixedConfig(limit=4), forecast=forecast, shadow=shadow))
    verdicts: list[str] = []
    for _ in range(60):
        verdicts += [said(b, key="flood").get("fair_share", "") for _ in range(6)]
        said(b, key="small")
        said(b, key="small")
        b.advance(50 * MILLISECOND)
        for lease in list(b.pipeline.pools[0].engines[0].leases)[:2]:
            b.report(Finished(lease, Usage(10, 0)))
    assert verdicts.count("stricter") > 20
    assert "looser" not in verdicts
    assert all(refusal.reason.value != "key_share" for refusal in b.refused)
    counts = b.pipeline.pools[0].shadows.counts
    assert {policy for policy, _ in counts} <= set(POLICIES)
    assert {verdict for _, verdict in counts} <= set(VERDICTS)


def test_a_key_over_its_limits_is_nobody_elses_question(bench: Any) -> None:
    b = bench(pool(limit_shadow=FixedConfig(limit=1)))
    b.pipeline.draining = True
    assert said(b) == {}


# ---- other kinds of limits, while it works -------------------------------------------------------------------------


def reconfigure(b: Any, config: PoolConfig) -> None:
    b.pipeline.reconfigure(PipelineConfig((config,)), b.clock.now)
    check_invariants(b.pipeline, b.clock.now)


def test_a_limit_may_begin_to_learn_while_leases_are_open(bench: Any, leases: Any) -> None:
    b = bench(pool(limit=FixedConfig(limit=8)))
    b.clock.advance(SECOND)
    opened = [leases(b.offer(stream=True, generates=True, tokens=50))[0] for _ in range(4)]
    b.report(FirstToken(opened[0]))
    opened[0].generated = 40
    reconfigure(b, pool(limit=FixedConfig(limit=8), limit_shadow=GuardedConfig()))
    engine = b.pipeline.pools[0].engines[0]
    assert engine.prefill_tokens == sum(lease.ticket.demand.input_tokens for lease in opened[1:])
    assert b.pipeline.learning == ((b.pipeline.pools[0], engine),)
    b.advance(SECOND)
    for lease in opened:
        b.report(FirstToken(lease))
        b.report(Finished(lease, Usage(50, 40)))
    assert engine.prefill_tokens == 0
    opened = [leases(b.offer(stream=True, generates=True, tokens=50))[0] for _ in range(3)]
    reconfigure(b, pool(limit=FixedConfig(limit=8)))
    assert b.pipeline.learning == ()
    assert b.pipeline.next_wakeup(b.clock.now) is None
    for lease in opened:
        b.report(Finished(lease, None))
    check_empty(b.pipeline, b.clock.now)


def test_what_shadows_counted_stays_over_a_reload(bench: Any) -> None:
    b = bench(pool(limit_shadow=FixedConfig(limit=1)))
    for _ in range(3):
        said(b)
    before = dict(b.pipeline.pools[0].shadows.counts)
    reconfigure(b, pool(limit_shadow=FixedConfig(limit=1), shadow=ShadowConfig(order=OrderConfig(adaptive=True))))
    assert b.pipeline.pools[0].shadows.counts == before


def test_shares_kept_in_shadow_act_after_a_reload(bench: Any, leases: Any) -> None:
    b = bench(pool(limit=FixedConfig(limit=9), shadow=ShadowConfig(fair=FairShareConfig())))
    (lease,) = leases(b.offer("k", tokens=500))
    kept = b.pipeline.pools[0].shadows.kept()["fair"].state[0]
    reconfigure(b, pool(limit=FixedConfig(limit=9), fair=FairShareConfig()))
    assert b.pipeline.pools[0].fair(0) is kept
    b.report(Finished(lease, Usage(500, 0)))
    assert kept.clock > 0
