"""When a refused caller should come back: a control input, not a courtesy.

Refused callers are handed places on a ladder whose rungs are as far apart as the pool can serve retries beside its
usual load: 1 / (share * drain rate), where the share is what the usual load leaves free, within bounds. The promised
time is spread by up to a quarter, always later, so that callers refused together do not return together.

Nobody is promised a place later than the caller's library would wait for. Who gets none is told a later time and that
retrying by itself cannot work: coming back in a crowd would only be refused again, and keep others out meanwhile. With
a fair share every flow has a ladder of its own, by its part of the pool, so that one that floods delays nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.core.instant import SECOND, Chance, Instant
from forebay.core.model import OBEYED_NS

FLOWS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """Bounds of the ladder."""

    share_least: float = 0.02  # of the drain rate is promised to retries, however busy the pool usually is
    share_most: float = 0.5
    least_ns: int = SECOND
    spread: float = 0.25
    margin_ns: int = 5 * SECOND  # that a promise stays below what the caller's library keeps to
    beyond_ns: int = 60 * SECOND  # those who get no place are told a time up to so much beyond what is kept to
    probe_interval_ns: int = SECOND  # after which an engine that is away may be back


class RetryLadder:
    """Spreads retries of one pool over the time that it needs to serve them."""

    def __init__(self, config: RetryConfig, chance: Chance) -> None:
        self._config = config
        self._chance = chance
        self._next: dict[str, Instant] = {}  # by flow; "" is everybody

    def next_ns(
        self,
        drain_rate: float,
        now: Instant,
        *,
        usual_rate: float = 0.0,
        obeys_ns: int = OBEYED_NS,
        flow: str = "",
        part: float = 1.0,
    ) -> int:
        """Nanoseconds after which the caller refused now should return; more than `obeys_ns` if it should not.

        `usual_rate`: requests per second that the pool serves over a longer time. `part`: the flow's part of the pool.
        """
        config = self._config
        rung = config.least_ns
        if drain_rate > 0:
            free = min(config.share_most, max(config.share_least, 1 - usual_rate / drain_rate))
            rung = int(SECOND / (free * drain_rate * part))
        at = max(self._next.get(flow, 0), now) + rung
        wait = max(config.least_ns, at - now)
        if wait * (1 + config.spread) > obeys_ns - config.margin_ns:
            return obeys_ns + SECOND + int(config.beyond_ns * self._chance.random())
        if flow not in self._next and len(self._next) >= FLOWS_MAX:
            self._next = {name: then for name, then in self._next.items() if then > now}
        if flow in self._next or len(self._next) < FLOWS_MAX:
            self._next[flow] = at
        return wait + self._spread(wait)

    def spread_ns(self, wait_ns: int) -> int:
        """The same wait, a little later for some."""
        return wait_ns + self._spread(wait_ns)

    def exact_ns(self, wait_ns: int) -> int:
        """A wait known exactly (a bucket's refill), later by at most 5 % or half a second."""
        return wait_ns + int(min(wait_ns // 20, SECOND // 2) * self._chance.random())

    def _spread(self, wait_ns: int) -> int:
        return int(wait_ns * self._config.spread * self._chance.random())
