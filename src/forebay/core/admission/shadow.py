"""Settings of the admission room that are tried without being followed, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from forebay.core.admission.fair_share import FairShare, FairShareConfig

Policy = Literal["window", "depth", "wait_budget", "fair_share"]
Verdict = Literal["same", "stricter", "looser"]
"""Beside the acting setting, for one request: would the shadow have kept it out, or let it in, where that did not?"""

POLICIES: tuple[Policy, ...] = ("window", "depth", "wait_budget", "fair_share")
VERDICTS: tuple[Verdict, ...] = ("same", "stricter", "looser")


class Said(NamedTuple):
    """What one shadow said of one request."""

    policy: Policy
    verdict: Verdict
    limit: float  # what it would have allowed
    actual: float  # what it held against that
    unit: str


@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """None: that setting has no shadow."""

    wait_budget_ns: int | None = None
    fair: FairShareConfig | None = None


class Shadows:
    """The shares of the flows as a shadow keeps them, and the counts of what all shadows of a pool said."""

    def __init__(self, config: ShadowConfig, counts: dict[tuple[Policy, Verdict], int]) -> None:
        self.config = config
        self.counts = counts
        self.shares: dict[int, FairShare] = {}  # by priority

    def fair(self, priority: int) -> FairShare | None:
        """The shares among the flows of one priority; None when no shadow keeps them."""
        share = self.shares.get(priority)
        if share is None and self.config.fair is not None:
            share = self.shares[priority] = FairShare(self.config.fair)
        return share

    def count(self, said: tuple[Said, ...]) -> None:
        """Take into the counts what they said."""
        counts = self.counts
        for one in said:
            counts[one.policy, one.verdict] = counts.get((one.policy, one.verdict), 0) + 1
