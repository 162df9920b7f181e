"""Every policy of every room keeps the contract of its protocol."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from forebay.core import batching, limits, tuning
from forebay.core.batching import DynamicConfig, PassThroughConfig
from forebay.core.dispatch import balance
from forebay.core.dispatch.balance import AffinityConfig, LeastConfig, P2cConfig, RandomConfig
from forebay.core.instant import MILLISECOND
from forebay.core.limits.aimd import AimdConfig
from forebay.core.limits.envoy import EnvoyConfig
from forebay.core.limits.fixed import FixedConfig
from forebay.core.limits.gradient2 import Gradient2Config
from forebay.core.limits.guarded import GuardedConfig
from forebay.core.limits.vegas import VegasConfig
from forebay.core.tuning.derived import DerivedConfig
from forebay.core.tuning.fixed import FixedConfig as FixedDepthConfig
from forebay.core.tuning.stepwise import StepwiseConfig
from forebay.testing import check_balancer, check_batching, check_limit, check_tuner

BATCHING: dict[str, list[Any]] = {
    "passthrough": [PassThroughConfig()],
    "dynamic": [
        DynamicConfig(),
        DynamicConfig(max_size=1),
        DynamicConfig(max_size=8, linger_ns=50 * MILLISECOND),
        DynamicConfig(max_size=64, max_tokens=5_000, linger_ns=MILLISECOND),
    ],
}
LIMITS: dict[str, list[Any]] = {
    "fixed": [FixedConfig(), FixedConfig(limit=1, tokens=1)],
    "aimd": [AimdConfig(), AimdConfig(least=1, most=1), AimdConfig(signal="ttft", late_ns=1)],
    "vegas": [VegasConfig(), VegasConfig(initial=1, signal="per_token")],
    "gradient2": [Gradient2Config(), Gradient2Config(least=1, signal="ttft")],
    "envoy": [EnvoyConfig(), EnvoyConfig(least=1, percentile=0.9)],
    "guarded": [GuardedConfig(), GuardedConfig(kv_tokens=1, least=1), GuardedConfig(kv_tokens=400_000, most=2)],
}
BALANCE: dict[str, list[Any]] = {
    "least": [LeastConfig()],
    "p2c": [P2cConfig()],
    "affinity": [AffinityConfig(), AffinityConfig(bound=0.0), AffinityConfig(detour=0.0), AffinityConfig(bound=1e9)],
    "random": [RandomConfig()],
}
TUNERS: dict[str, list[Any]] = {
    "fixed": [FixedDepthConfig()],
    "stepwise": [StepwiseConfig(), StepwiseConfig(least=0, most=1)],
    "derived": [DerivedConfig(), DerivedConfig(least=0, most=0), DerivedConfig(wait_ns=1), DerivedConfig(near=0.0)],
}


def test_every_policy_is_checked() -> None:
    assert set(BATCHING) == set(batching.POLICIES)
    assert set(LIMITS) == set(limits.POLICIES)
    assert set(BALANCE) == set(balance.POLICIES)
    assert set(TUNERS) == set(tuning.POLICIES)


@pytest.mark.parametrize(("kind", "config"), [(kind, config) for kind, many in BATCHING.items() for config in many])
def test_batching(kind: str, config: Any) -> None:
    batcher = batching.build(config)
    assert type(batcher) is batching.POLICIES[kind]
    assert config.kind == kind
    check_batching(batcher)


@pytest.mark.parametrize(("kind", "config"), [(kind, config) for kind, many in LIMITS.items() for config in many])
def test_limits(kind: str, config: Any) -> None:
    limit = limits.build(config, Random(1))
    assert type(limit) is limits.POLICIES[kind]
    assert config.kind == kind
    check_limit(limit)


@pytest.mark.parametrize(("kind", "config"), [(kind, config) for kind, many in BALANCE.items() for config in many])
def test_balance(kind: str, config: Any) -> None:
    assert type(balance.build(config, Random(1))) is balance.POLICIES[kind]
    assert config.kind == kind
    check_balancer(lambda seed: balance.build(config, Random(seed)))


@pytest.mark.parametrize(("kind", "config"), [(kind, config) for kind, many in TUNERS.items() for config in many])
def test_tuners(kind: str, config: Any) -> None:
    tuner = tuning.build(config)
    assert type(tuner) is tuning.POLICIES[kind]
    assert config.kind == tuner.kind == kind
    check_tuner(tuner)
