"""Who may wait for a pool that is warming up, instead of being sent away.

Scale to zero and cold starts: no engine is up, one is on its way, and how long that takes is known from the times
before. A bounded number may wait until then, as in backpressure mode; those beyond it, and those who would not be there
any more, are told when to come.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.core.instant import SECOND, Instant


@dataclass(frozen=True, slots=True)
class WaitingRoomConfig:
    """Its bounds."""

    places: int = 0  # requests; 0: nobody waits
    hold_ns: int = 60 * SECOND  # longest that one is held


def may_wait(config: WaitingRoomConfig, *, waiting: int, eta_ns: int, until: Instant | None, now: Instant) -> bool:
    """Is there a place, and is the engine expected before the hold is over and before the caller leaves (`until`)?"""
    if waiting >= config.places or eta_ns > config.hold_ns:
        return False
    return until is None or now + eta_ns < until
