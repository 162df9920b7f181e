"""An acting forecast, or calendar, and the one in its shadow: both are told the same, and one decides as if alone."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from forebay.core.admission.forecast import ForecastConfig, WaitForecast
from forebay.core.admission.retry_after import RetryConfig, RetryLadder
from forebay.core.instant import Chance, Even, Instant


class ShadowedForecast(WaitForecast):
    """The acting forecast. What happens to the pool is told to the one in its shadow too.

    How long a request waited is not: the shadow learns that from those that it would have let in, against what it said
    of them itself.
    """

    def __init__(self, acting: WaitForecast, shadow: WaitForecast) -> None:
        super().__init__(acting.config)
        vars(self).update(vars(acting))
        self.shadow = shadow

    def alone(self) -> WaitForecast:
        """The acting one, with what it has learned."""
        forecast, learned = WaitForecast(self.config), dict(vars(self))
        del learned["shadow"]
        vars(forecast).update(learned)
        return forecast

    def released(self, opened: Instant, now: Instant) -> None:
        """Tell both."""
        super().released(opened, now)
        self.shadow.released(opened, now)

    def began(self, took_ns: int) -> None:
        """Tell both."""
        super().began(took_ns)
        self.shadow.began(took_ns)

    def resized(self, ratio: float, in_flight: int, now: Instant) -> None:
        """Tell both."""
        super().resized(ratio, in_flight, now)
        self.shadow.resized(ratio, in_flight, now)

    def decay(self, now: Instant) -> None:
        """Let both fade."""
        super().decay(now)
        self.shadow.decay(now)


def forked(forecast: WaitForecast, config: ForecastConfig) -> WaitForecast:
    """Another forecast, which begins with what this one has learned."""
    learned = deepcopy(vars(forecast.alone() if isinstance(forecast, ShadowedForecast) else forecast))
    fork = WaitForecast(config)
    vars(fork).update(learned)
    fork.reconfigure(config)
    return fork


def forked_ladder(ladder: RetryLadder, config: RetryConfig) -> RetryLadder:
    """Other calendars, which begin with what these have promised."""
    fork = RetryLadder(config, Even())
    fork.inherit(ladder)
    fork.apart()
    return fork


class ShadowedLadder(RetryLadder):
    """The acting calendars of returns. Whoever is given a time by them is given one by those in shadow too."""

    def __init__(self, acting: RetryLadder, shadow: RetryLadder) -> None:
        super().__init__(acting.config, acting.chance)
        self.inherit(acting)
        self.shadow = shadow
        self.last: tuple[int, int] | None = None
        """What both said last, the acting one first; whoever takes note of it sets it to None."""

    def alone(self) -> RetryLadder:
        """The acting ones, with what they promised."""
        ladder = RetryLadder(self.config, self.chance)
        ladder.inherit(self)
        return ladder

    def next_ns(self, capacity: float, now: Instant, **terms: Any) -> int:
        """By the acting ones. Those in shadow are given the same draws, so that only settings make a difference."""
        chance = self.chance
        self.chance = heard = _Heard(chance)
        said_ns = super().next_ns(capacity, now, **terms)
        self.chance, self.shadow.chance = chance, _Again(heard.drawn)
        self.last = said_ns, self.shadow.next_ns(capacity, now, **terms)
        return said_ns


class _Heard:
    """Draws from a chance, and notes what came."""

    def __init__(self, chance: Chance) -> None:
        self.drawn: list[float] = []
        self._chance = chance

    def random(self) -> float:
        drawn = self._chance.random()
        self.drawn.append(drawn)
        return drawn


class _Again(Even):
    """Gives what was drawn before, and goes on by itself."""

    def __init__(self, drawn: list[float]) -> None:
        super().__init__()
        self._drawn = drawn

    def random(self) -> float:
        """A float in [0, 1)."""
        return self._drawn.pop(0) if self._drawn else super().random()
