"""A configuration becomes the core's settings, in the core's units."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from random import Random

import pytest

from forebay.config import Config, loads
from forebay.config.build import KeyEntry, anonymous_entry, guarded, key_table, pipeline_config
from forebay.config.summary import derived, plain
from forebay.core.admission.fair_share import FairShareConfig
from forebay.core.batching.dynamic import DynamicConfig
from forebay.core.batching.passthrough import PassThroughConfig
from forebay.core.events import EngineUp
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.limits.guarded import GuardedConfig
from forebay.core.model import Mode, Refusal, Request, Ticket
from forebay.core.pipeline import Pipeline
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.core.shadows.shadow import ShadowConfig
from forebay.core.tuning.depth import TuningConfig
from forebay.core.tuning.derived import DerivedConfig
from forebay.core.tuning.fixed import FixedConfig as FixedDepthConfig
from forebay.core.tuning.stepwise import StepwiseConfig
from forebay.errors import ConfigError

TEXT = """\
[slo]
ttft_ms = 300
[admission]
mode = "backpressure"
[queue]
depth_limit = 9
held_limit = 99
deadline_s = 1.5
[batching]
kind = "dynamic"
max_size = 4
linger_ms = 2.5
[limits.default]
requests_per_minute = 60
[classes.gold]
priority = 5
mode = "hybrid"
[[engines]]
name = "a"
urls = ["http://x", "http://y"]
models = ["m", "n"]
concurrency = { limit = 3, tokens = 1000 }
batching = {}
[[engines]]
name = "b"
kind = "simulated"
[[keys.static]]
id = "k"
secret = "sk-k"
class = "gold"
models = ["m"]
routes = ["chat", "embeddings"]
limits = { tokens_per_second = 10, burst_s = 3 }
[[keys.static]]
id = "l"
secret = "sk-l"
class = "gold"
mode = "admission"
"""


class Silence:
    def closed(self, ticket: Ticket) -> None: ...

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None: ...


def config() -> Config:
    return loads(TEXT, environment={}).config


def test_pools_engines_and_units() -> None:
    built = pipeline_config(config())
    a, b = built.pools
    assert (a.name, a.engines, a.models) == ("a", ("a/0", "a/1"), ("m", "n"))
    assert (b.engines, b.models) == (("b/0",), ("*",))
    assert a.mode is Mode.BACKPRESSURE
    assert a.hold_ns == 1_500_000_000
    assert a.forecast.wait_budget_ns == 30_000_000
    assert (a.depth.depth_limit, a.depth.held_limit) == (9, 99)
    assert (a.limit.limit, a.limit.tokens) == (3, 1000)
    assert a.batching == PassThroughConfig()
    assert b.batching == DynamicConfig(max_size=4, linger_ns=2_500_000)
    assert built.keys["k"] == KeyTerms(KeyLimits(tokens_per_second=10, burst_s=3))
    assert built.keys["anonymous"] == KeyTerms(KeyLimits(requests_per_minute=60))


def test_the_pipeline_takes_it() -> None:
    pipeline = Pipeline(pipeline_config(config()), Random(1), Silence())
    pipeline.report(EngineUp("a/1"), 0)
    pipeline.offer(Request(key="k", model="m", max_output_tokens=1), 0)
    assert pipeline.snapshot(0).in_flight == 1


def test_keys_are_found_by_the_digest_of_their_secret() -> None:
    table = key_table(config())
    assert table[sha256(b"sk-k").digest()] == KeyEntry(
        "k", 5, "gold", Mode.HYBRID, frozenset({"m"}), frozenset({"chat", "embeddings"})
    )
    assert table[sha256(b"sk-l").digest()] == KeyEntry("l", 5, "gold", Mode.ADMISSION, None, None)
    assert anonymous_entry(config()) == KeyEntry("anonymous", 0, "default", None, None, None)
    assert anonymous_entry(loads("[keys]\nanonymous = false", environment={}).config) is None


def test_plain_data_masks_secrets() -> None:
    data = plain(config())
    assert data["keys"]["static"][0]["secret"] == "***"
    assert data["keys"]["static"][0]["class"] == "gold"
    assert "sk-" not in str(data)


def test_a_depth_that_is_set_is_fixed_and_one_that_is_not_is_derived() -> None:
    def tuning(text: str) -> tuple[int, TuningConfig]:
        config = loads(text + '[[engines]]\nname = "e"\nkind = "embedded"', environment={}).config
        (pool,) = pipeline_config(config).pools
        return pool.depth.depth_limit, pool.tuning

    depth, unset = tuning("")
    assert (depth, unset.tuner, unset.shadow, unset.frozen) == (256, DerivedConfig(), None, False)
    depth, told = tuning('[queue]\ndepth_limit = 9\n[tuner]\nkind = "stepwise"\nshadow = "derived"\nwait_ms = 200\n')
    assert (depth, told.tuner, told.shadow) == (9, FixedDepthConfig(), DerivedConfig(wait_ns=200 * MILLISECOND))
    depth, other = tuning('[tuner]\nkind = "stepwise"\ninterval_s = 5\nleast = 2\nmost = 99\nfrozen = true\nlog = 7\n')
    assert depth == 16
    assert (other.tuner, other.frozen, other.kept) == (StepwiseConfig("stepwise", 2, 99, 5 * SECOND), True, 7)
    assert tuning("[slo]\nttft_ms = 400\n[classes.slow]\nttft_ms = 450\n")[1].wait_budget_ns == 45 * MILLISECOND
    with pytest.raises(ConfigError, match=r"\[tuner\] most: is 3, below tuner.least \(4\)"):
        tuning("[tuner]\nleast = 4\nmost = 3\n")


def test_what_is_tried_in_shadow() -> None:
    text = """
        [admission]
        fair_share = false
        [admission.shadow]
        wait_budget_ms = 80
        fair_share = true
        [[engines]]
        name = "e"
        kind = "embedded"
        concurrency = { limit = 8, shadow = { kind = "guarded", kv_tokens = 9000 } }
    """
    config = loads(text, environment={}).config
    (pool,) = pipeline_config(config).pools
    assert pool.limit == FixedConfig(limit=8)
    assert isinstance(pool.limit_shadow, GuardedConfig)
    assert pool.limit_shadow.kv_tokens == 9000
    assert pool.shadow == ShadowConfig(replace(pool.forecast, wait_budget_ns=80 * MILLISECOND), FairShareConfig())
    assert pool.fair is None
    assert guarded(config, config.engines[0])


CLASSES = """
[slo]
ttft_ms = 1000
tpot_ms = 50
[classes.realtime]
priority = 10
ttft_ms = 300
tpot_ms = 30
[classes.batch]
priority = -5
ttft_ms = 20000
[classes.crawl]
priority = -9
[[engines]]
name = "e"
urls = ["http://x"]
[[keys.static]]
id = "k"
secret = "sk-k"
class = "realtime"
"""


def test_the_objectives_of_classes_become_their_budgets_and_the_shortest_pace() -> None:
    config = loads(CLASSES, environment={}).config
    entry = key_table(config)[sha256(b"sk-k").digest()]
    assert (entry.ttft_ns, entry.wait_budget_ns) == (300 * MILLISECOND, 30 * MILLISECOND)
    (pool,) = pipeline_config(config).pools
    assert isinstance(pool.limit, GuardedConfig), "nothing else is set"
    assert pool.limit.tpot_ns == 30 * MILLISECOND
    assert pool.limit.ttft_ns == 300 * MILLISECOND
    assert pool.limit.latency_ns == SECOND


def test_all_but_the_highest_and_the_lowest_priority_keep_a_floor() -> None:
    (pool,) = pipeline_config(loads(CLASSES, environment={}).config).pools
    assert pool.floors == ((-5, 0.02), (0, 0.02)), "realtime goes first, crawl is what is shed"
    told = CLASSES.replace("priority = -9", "priority = -9\nfloor_share = 0.05")
    (pool,) = pipeline_config(loads(told, environment={}).config).pools
    assert pool.floors == ((-9, 0.05), (-5, 0.02), (0, 0.02))


def test_what_derives_for_classes_is_shown() -> None:
    shown = derived(loads(CLASSES, environment={}).config)
    assert shown["tpot_ms"] == 30
    realtime, batch, _ = shown["classes"]
    assert (realtime["wait_budget_ms"], batch["wait_budget_ms"]) == (30, 50)
    assert (realtime["floor_share"], batch["floor_share"]) == (0.0, 0.02)


def test_a_key_shares_the_limits_of_its_team_its_class_and_all() -> None:
    shared = """
[limits.all]
tokens_per_month = 9
models = { big = { tokens_per_minute = 5 } }
[classes.gold.limits]
concurrency = 3
[teams.ops.limits]
weighted_tokens_per_minute = 7
[teams.free]
[[keys.static]]
id = "a"
secret = "sk-a"
class = "gold"
team = "ops"
[[keys.static]]
id = "b"
secret = "sk-b"
team = "free"
[[engines]]
name = "e"
urls = ["http://127.0.0.1:8000"]
"""
    built = pipeline_config(loads(shared, environment={}).config)
    assert built.groups == {
        "all": KeyLimits(tokens_per_month=9, models={"big": KeyLimits(tokens_per_minute=5)}),
        "class:gold": KeyLimits(concurrency=3),
        "team:ops": KeyLimits(weighted_tokens_per_minute=7),
    }
    assert built.keys["a"].groups == ("team:ops", "class:gold", "all")
    assert built.keys["b"].groups == built.keys["anonymous"].groups == ("all",)


@pytest.mark.parametrize(
    ("everybody", "own", "caps"), [(None, None, None), (9, None, 9), (None, 4, 4), (9, 4, 4), (3, 4, 3)]
)
def test_the_lower_cap_of_output_counts(everybody: int | None, own: int | None, caps: int | None) -> None:
    text = TEXT + (f"cap_output_tokens = {own}\n" if own else "")
    text += f"[estimate]\ncap_output_tokens = {everybody}\n" if everybody else ""
    entries = {entry.id: entry for entry in key_table(loads(text, environment={}).config).values()}
    assert (entries["l"].max_output_tokens, entries["k"].max_output_tokens) == (caps, everybody)


def test_retry_tickets_reserve_places_and_their_secret_is_not_shown() -> None:
    text = f"""
    [admission]
    retry_tickets = true
    retry_ticket_secret = "{"s" * 40}"
    [[engines]]
    name = "e"
    urls = ["http://127.0.0.1:1"]
    """
    config = loads(text, environment={}).config
    (pool,) = pipeline_config(config).pools
    assert pool.retry_tickets
    shown = f"{plain(config)} {derived(config)} {config!r}"
    assert "s" * 40 not in shown
    assert plain(config)["admission"]["retry_ticket_secret"] == "***"


def test_every_setting_that_can_be_tried_is_built_as_the_acting_one_would_be() -> None:
    """What is written under `shadow` gives what it would give in its own section: that is what promotes it."""
    text = """
        [admission{shadow}]
        wait_budget_ms = 80
        late_share = 0.05
        tail_z = 2.0
        floor_slots = 1.5
        fair_share = true
        retry_budget = true
        waiting_room = 9
        waiting_room_s = 20
        [admission{shadow}.retry]
        headroom = 0.2
        share_least = 0.1
        share_most = 0.8
        beyond_s = 30
        [queue{shadow}]
        depth_limit = 7
        order = "adaptive"
        [classes.low{shadow}]
        hold_back = 0.2
        floor_share = 0.1
        [classes.high]
        priority = 1
        [[engines]]
        name = "e"
        urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        {engine}
        balance = "p2c"
    """
    beside = loads(text.format(shadow=".shadow", engine="[engines.shadow]"), environment={}).config
    acting = loads(text.format(shadow="", engine=""), environment={}).config
    (tried,), (promoted,) = pipeline_config(beside).pools, pipeline_config(acting).pools
    for name in ("forecast", "fair", "retry", "retry_budget", "waiting_room", "balance", "order", "floors"):
        assert getattr(tried.shadow, name) == getattr(promoted, name), name
        if name not in {"fair", "retry_budget"}:  # they are on by default
            assert getattr(tried.shadow, name) != getattr(tried, name), name
    assert tried.shadow.hold_backs == (("low", 0.2),)
    assert acting.classes["low"].hold_back == 0.2
    assert (tried.tuning.shadow, tried.tuning.shadow_depth) == (FixedDepthConfig(), 7)
    assert (promoted.tuning.tuner, promoted.depth.depth_limit) == (FixedDepthConfig(), 7)
    assert promoted.shadow == ShadowConfig()


def test_shares_of_returns_must_fit_each_other() -> None:
    with pytest.raises(ConfigError, match=r"\[admission\] shadow.retry.share_most: is 0.01, below share_least"):
        loads("[admission.shadow.retry]\nshare_most = 0.01\n", environment={})
