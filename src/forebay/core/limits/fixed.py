"""A limit that the operator sets and nobody moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.core.instant import Instant


@dataclass(frozen=True, slots=True)
class FixedConfig:
    """Most that may be in flight on one engine."""

    kind: Literal["fixed"] = "fixed"
    limit: int = 64  # requests
    tokens: int = 1 << 62  # expected tokens; a single larger request still runs, alone


class Fixed:
    """Always the same."""

    def __init__(self, config: FixedConfig) -> None:
        self.requests = config.limit
        self.tokens = config.tokens

    def released(self, held_ns: int, in_flight: int, now: Instant) -> None:
        """Nothing to learn."""
