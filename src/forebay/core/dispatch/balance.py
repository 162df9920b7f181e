"""Which engine gets the work: the one with the least outstanding, by the gateway's own exact counters."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.core.dispatch.leases import Engine
from forebay.core.instant import Instant


def least_outstanding(engines: Sequence[Engine], tokens: int, now: Instant) -> Engine | None:
    """The engine with room that holds the fewest expected tokens, or None when none has room."""
    best: Engine | None = None
    for engine in engines:
        if engine.has_room(tokens, now) and (
            best is None or (engine.tokens, engine.in_flight) < (best.tokens, best.in_flight)
        ):
            best = engine
    return best
