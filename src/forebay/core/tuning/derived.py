"""The depth that follows from the objective: what the engines release within the wait budget, and room for its tail.

By Little's law D * B requests wait when each waits for B and D slots a second become free; more than that cannot be
served within the budget, so waiting would be for nothing. Releases come in clumps, so the depth has room for the upper
end of a Poisson count, and a headroom, since the predicted wait is to refuse before the depth does. Where the depth is
to bound the wait by itself, it is D * B and no more. It never falls below a batch, where batches are formed here.

D is only known while the engines have enough to do, so the depth holds while they do not, and while nothing is
released; it goes down quickly, goes up slowly and only while it is felt, and stays where it is when it is near enough.
Described in docs/policies/depth-derived.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from typing import Literal

from forebay.core.instant import SECOND
from forebay.core.tuning.tuner import Advice, Reading


@dataclass(frozen=True, slots=True)
class DerivedConfig:
    """Nothing here needs a hand: what matters is the wait budget, and that is the objective's."""

    kind: Literal["derived"] = "derived"
    least: int = 1
    most: int = 4096
    interval_ns: int = 2 * SECOND
    wait_ns: int | None = None  # the wait behind a full queue; None: the wait budget in force, and the room
    headroom: float = 1.25
    tail_z: float = 2.33  # the 99th percentile of the count of releases
    near: float = 0.2  # of the depth is no reason to move
    down_most: float = 0.25  # of the depth is left after one look, at least
    up_most: float = 1.25  # of it after one look, at most, and one
    busy: float = 0.75  # share of the places in use from which on releases speak of capacity, not of demand
    releases_min: int = 8
    releases_enough: int = 64  # a rate from so many is about an eighth wrong
    longest_ns: int = 10 * SECOND


class Derived:
    """Moves towards its target in proportion."""

    kind = "derived"
    times = False

    def __init__(self, config: DerivedConfig) -> None:
        self.least = max(1, config.least)
        self.most = max(self.least, config.most)
        self.interval_ns = config.interval_ns
        self.releases_enough = config.releases_enough
        self.longest_ns = config.longest_ns
        self._config = config

    def tuned(self, depth: int, reading: Reading) -> Advice:
        """Towards what can be served in time."""
        config = self._config
        if reading.busy is None:
            return Advice(depth, "no_signal", depth)
        if reading.releases < config.releases_min:
            return Advice(depth, "too_few_samples", depth)
        if reading.busy < config.busy:
            return Advice(depth, "app_limited", depth)
        target = self._target(reading)
        if abs(target - depth) <= config.near * depth:
            return Advice(depth, "near_enough", target)
        if target < depth:
            return Advice(max(target, int(config.down_most * depth)), "rate", target)
        if not reading.felt:
            return Advice(depth, "not_felt", target)
        return Advice(min(target, int(config.up_most * depth) + 1), "rate", target)

    def _target(self, reading: Reading) -> int:
        config = self._config
        if config.wait_ns is not None:
            room = reading.rate_per_s * config.wait_ns / SECOND
        else:
            served = reading.rate_per_s * reading.wait_budget_ns / SECOND / min(1.0, reading.correction)
            room = config.headroom * (served + config.tail_z * sqrt(served))
        if reading.batch > 1:
            room = max(room, config.headroom * reading.batch)
        return max(self.least, min(self.most, ceil(room)))
