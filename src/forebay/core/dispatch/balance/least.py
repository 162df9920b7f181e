"""The engine with the least outstanding work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forebay.core.dispatch.leases import Engine
from forebay.core.instant import Instant
from forebay.core.model import Request


@dataclass(frozen=True, slots=True)
class LeastConfig:
    """Nothing to set."""

    kind: Literal["least"] = "least"


class Least:
    """Right when its counts are exact: those of a gateway that is alone with its engines are."""

    prefix_bytes = 0

    def choose(self, engines: Sequence[Engine], request: Request, tokens: int, now: Instant) -> Engine | None:  # noqa: ARG002
        """The one with room that has the least work before it; at equal work, the fewest requests."""
        best: Engine | None = None
        least = (0.0, 0)
        for engine in engines:
            if engine.has_room(tokens, now):
                load = (engine.load(now), engine.in_flight)
                if best is None or load < least:
                    best, least = engine, load
        return best
