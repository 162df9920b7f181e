"""A depth that the operator sets and nobody moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.core.tuning.tuner import Advice, Reading

UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class FixedConfig:
    """The depth itself is the depth gate's."""

    kind: Literal["fixed"] = "fixed"


class Fixed:
    """Never looks."""

    kind = "fixed"
    least = 0
    most = UNBOUNDED
    interval_ns = 0
    releases_enough = 0
    longest_ns = 0
    times = False

    def __init__(self, config: FixedConfig) -> None:
        """`config` says nothing more."""

    def tuned(self, depth: int, reading: Reading) -> Advice:  # noqa: ARG002
        """The same depth."""
        return Advice(depth, "fixed", depth)
