"""The question that a queue-depth tuner answers, and what it is told.

A tuner is a small policy: every so often it sees what the pool did since it last looked, and says how many may wait.
It never sees a clock, a queue or a single request, and keeps nothing from one look to the next.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from forebay.core.instant import SECOND

Why = Literal[
    "fixed", "no_signal", "too_few_samples", "app_limited", "near_enough", "not_felt", "late", "early", "rate"
]
"""The reason of an advice. The last three move the depth, the others hold it."""


class Reading(NamedTuple):
    """What one pool did since its tuner looked last."""

    elapsed_ns: int
    releases: int  # slots that became free
    answers: int  # requests that were answered, of those whose times are kept
    p99_ns: int  # 99th percentile of their arrival to first byte (streams) or end; 0: nothing is known
    busy: float | None  # share of the engines' places in use, mean over the time; None: no engine is ready
    waiting_most: int  # that waited at one time
    felt: bool  # did as many wait as may?
    wait_budget_ns: int  # in force at this rate of releases
    correction: float  # of the forecast: below 1, waits turn out shorter than predicted
    batch: int  # requests in the largest batch that is formed here

    @property
    def rate_per_s(self) -> float:
        """Slot releases per second."""
        return self.releases * SECOND / self.elapsed_ns if self.elapsed_ns else 0.0


class Advice(NamedTuple):
    """How many may wait, and why."""

    depth: int
    why: Why
    target: int  # where it is going; the depth itself, where it goes nowhere


class DepthTuner(Protocol):
    """How many requests may wait in hybrid mode?"""

    kind: str
    least: int
    most: int
    interval_ns: int  # between two looks; 0: it never looks
    releases_enough: int  # with fewer, the next look is over a longer time …
    longest_ns: int  # … but no longer than this
    times: bool  # does it go by response times? They are kept only for those that do

    def tuned(self, depth: int, reading: Reading) -> Advice:
        """The depth for the next interval, within `least` and `most` if `depth` is."""
        ...
