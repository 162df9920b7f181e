"""Balancers: which engine of a pool gets the work. One file each."""

from __future__ import annotations

from forebay.core.dispatch.balance.affinity import Affinity, AffinityConfig
from forebay.core.dispatch.balance.balancer import Balancer
from forebay.core.dispatch.balance.least import Least, LeastConfig
from forebay.core.dispatch.balance.p2c import P2c, P2cConfig
from forebay.core.dispatch.balance.random import Random, RandomConfig
from forebay.core.instant import Chance

__all__ = [
    "POLICIES",
    "Affinity",
    "AffinityConfig",
    "BalanceConfig",
    "Balancer",
    "Least",
    "LeastConfig",
    "P2c",
    "P2cConfig",
    "Random",
    "RandomConfig",
    "build",
]

BalanceConfig = LeastConfig | P2cConfig | AffinityConfig | RandomConfig

POLICIES: dict[str, type[Least | P2c | Affinity | Random]] = {
    "least": Least,
    "p2c": P2c,
    "affinity": Affinity,
    "random": Random,
}


def build(config: BalanceConfig, chance: Chance) -> Balancer:
    """The balancer that a config asks for; `chance` is its own stream."""
    if isinstance(config, P2cConfig):
        return P2c(chance)
    if isinstance(config, AffinityConfig):
        return Affinity(config)
    if isinstance(config, RandomConfig):
        return Random(chance)
    return Least()
