"""A kit for testing policies and pipelines: a clock moved by hand, a simulated world, and the invariants.

Everything here is deterministic: time is passed in, chance is seeded.
"""

from __future__ import annotations

from forebay.testing.clock import ManualClock
from forebay.testing.conformance import check_balancer, check_batching, check_limit, check_tuner
from forebay.testing.invariants import InvariantError, check_empty, check_invariants
from forebay.testing.world import BatchServer, EventWorld, ExponentialServers, ModelHands, ServingModel, bursts, poisson

__all__ = [
    "BatchServer",
    "EventWorld",
    "ExponentialServers",
    "InvariantError",
    "ManualClock",
    "ModelHands",
    "ServingModel",
    "bursts",
    "check_balancer",
    "check_batching",
    "check_empty",
    "check_invariants",
    "check_limit",
    "check_tuner",
    "poisson",
]
