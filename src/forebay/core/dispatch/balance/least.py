"""The engine with the least outstanding work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from forebay.core.dispatch.leases import PROMPT_FIRST, Engine
from forebay.core.instant import Instant
from forebay.core.model import Request


@dataclass(frozen=True, slots=True)
class LeastConfig:
    """Nothing to set."""

    kind: Literal["least"] = "least"


class Least:
    """Right when its counts are exact: those of a gateway that is alone with its engines are."""

    prefix_bytes = 0

    def choose(
        self, engines: Sequence[Engine], request: Request, tokens: int, now: Instant, prompt: int | None = None
    ) -> Engine | None:
        """The one with room that has the least work before it; at equal work, the fewest requests."""
        best: Engine | None = None
        least, fewest = inf, 0
        for engine in engines:
            # As `load` says, without a call per engine: there may be dozens.
            load = engine.load(now) if engine.shared else engine.tokens + PROMPT_FIRST * engine.prefill_tokens
            better = load < least or (load == least and engine.in_flight < fewest)
            # Asked of few: most engines have more to do than the best yet.
            if better and engine.has_room(tokens, now, prompt, request.priority):
                best, least, fewest = engine, load, engine.in_flight
        return best
