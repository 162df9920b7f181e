"""Four more while the engines are busy and answers early, two less when they are late, looked at every 30 seconds.

Baseline: the rule of a published auto-tuner, whose figures are the defaults here. As published it cannot be run beside
traffic. What is repaired: it blocks its thread between two looks, and here it is called; it reads a utilization and a
p99 that nobody provides, and here both are the gateway's own counts; a p99 over an empty or old list counts as early,
and here it holds; it raises the depth whether or not anybody waits, to its end, and here only while the depth is felt;
its bounds are written into the rule, whatever it is given, and here they are the operator's and never below one.
Described in docs/policies/depth-stepwise.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.tuning.tuner import Advice, Reading


@dataclass(frozen=True, slots=True)
class StepwiseConfig:
    """The published figures."""

    kind: Literal["stepwise"] = "stepwise"
    least: int = 4
    most: int = 64
    interval_ns: int = 30 * SECOND
    busy: float = 0.9  # share of the places in use above which the engines count as busy
    early_ns: int = 200 * MILLISECOND
    late_ns: int = 500 * MILLISECOND
    up: int = 4
    down: int = 2
    answers_min: int = 20  # fewer have no p99


class Stepwise:
    """One step per look."""

    kind = "stepwise"
    releases_enough = 0
    longest_ns = 0
    times = True

    def __init__(self, config: StepwiseConfig) -> None:
        self.least = max(1, config.least)
        self.most = max(self.least, config.most)
        self.interval_ns = config.interval_ns
        self._config = config

    def tuned(self, depth: int, reading: Reading) -> Advice:
        """A step up, a step down, or none."""
        config = self._config
        if reading.busy is None:
            return Advice(depth, "no_signal", depth)
        if reading.answers < config.answers_min:
            return Advice(depth, "too_few_samples", depth)
        if reading.p99_ns > config.late_ns:
            lower = max(self.least, depth - config.down)
            return Advice(lower, "late", lower)
        if reading.busy <= config.busy:
            return Advice(depth, "app_limited", depth)
        if reading.p99_ns >= config.early_ns:
            return Advice(depth, "near_enough", depth)
        if not reading.felt:
            return Advice(depth, "not_felt", depth)
        higher = min(self.most, depth + config.up)
        return Advice(higher, "early", higher)
