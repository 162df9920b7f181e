"""Concurrency-limit algorithms: how much one engine may hold at once. One file each."""

from __future__ import annotations

from dataclasses import replace

from forebay.core.instant import Chance
from forebay.core.limits.aimd import Aimd, AimdConfig
from forebay.core.limits.envoy import Envoy, EnvoyConfig
from forebay.core.limits.fixed import Fixed, FixedConfig
from forebay.core.limits.gradient2 import Gradient2, Gradient2Config
from forebay.core.limits.guarded import Guarded, GuardedConfig
from forebay.core.limits.limit import Limit
from forebay.core.limits.vegas import Vegas, VegasConfig

LimitConfig = FixedConfig | AimdConfig | VegasConfig | Gradient2Config | EnvoyConfig | GuardedConfig

POLICIES: dict[str, type[Fixed | Aimd | Vegas | Gradient2 | Envoy | Guarded]] = {
    "fixed": Fixed,
    "aimd": Aimd,
    "vegas": Vegas,
    "gradient2": Gradient2,
    "envoy": Envoy,
    "guarded": Guarded,
}


def started_at(config: LimitConfig, requests: int) -> LimitConfig:
    """The same, beginning at so many requests where the limit moves by itself."""
    if isinstance(config, FixedConfig | EnvoyConfig):
        return config  # one is told its limit, the other measures first
    return replace(config, initial=requests)


def build(config: LimitConfig, chance: Chance) -> Limit:
    """The limit that a config asks for; `chance` is its own stream, for what must not move in step elsewhere."""
    if isinstance(config, VegasConfig):
        return Vegas(config, chance)
    if isinstance(config, EnvoyConfig):
        return Envoy(config, chance)
    if isinstance(config, AimdConfig):
        return Aimd(config)
    if isinstance(config, Gradient2Config):
        return Gradient2(config)
    if isinstance(config, GuardedConfig):
        return Guarded(config)
    return Fixed(config)
