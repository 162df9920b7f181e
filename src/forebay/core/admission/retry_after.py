"""When a refused caller should come back: a control input, not a courtesy.

Refused callers are handed places on a ladder whose rungs are 1 / (share * drain rate) apart, so that the retries
that come back ask for no more than `share` of what the pool can serve. The promised time is spread by up to a
quarter, always later, so that callers refused together do not return together. It stays under what SDKs obey.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.core.instant import SECOND, Chance, Instant


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """Bounds and share of the ladder."""

    share: float = 0.1  # of the drain rate that is promised to retries
    least_ns: int = SECOND
    most_ns: int = 55 * SECOND  # SDKs ignore more than 60 s
    spread: float = 0.25
    probe_interval_ns: int = SECOND  # after which an engine that is away may be back


class RetryLadder:
    """Spreads retries of one pool over the time that it needs to serve them."""

    def __init__(self, config: RetryConfig, chance: Chance) -> None:
        self._config = config
        self._chance = chance
        self._next: Instant = 0

    def next_ns(self, drain_rate: float, now: Instant) -> int:
        """Nanoseconds after which the caller refused now should return."""
        config = self._config
        longest = int(config.most_ns / (1 + config.spread))
        rung = int(SECOND / (config.share * drain_rate)) if drain_rate > 0 else config.least_ns
        self._next = min(max(self._next, now) + rung, now + longest)
        return self.spread_ns(max(config.least_ns, self._next - now))

    def spread_ns(self, wait_ns: int) -> int:
        """The same wait, a little later for some."""
        spread = int(wait_ns * self._config.spread * self._chance.random())
        return min(self._config.most_ns, wait_ns + spread)

    def exact_ns(self, wait_ns: int) -> int:
        """A wait known exactly (a bucket's refill), later by at most 5 % or half a second."""
        return wait_ns + int(min(wait_ns // 20, SECOND // 2) * self._chance.random())
