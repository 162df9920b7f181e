"""Retries that nobody asked for, bounded per key while a pool is overloaded.

A retry is an attempt that its library numbers above zero, or whose idempotency key was seen before. One that comes when
it was told to holds a place in the calendar of returns and needs no budget. Any other one is paid from the budget of
its key: a tenth of what was refused of the key's first attempts, and one per second, kept for ten seconds. A key that
storms spends it at once and is refused without a look at the pool, so that it wins nothing by asking more often.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.core.instant import SECOND, Instant

KEYS_MAX = 10_000
EARLY_S, LATE_S = 1, 5
"""How far from the time it was told a return may be; clocks and networks are not exact."""
DUE_KEPT = 256


@dataclass(frozen=True, slots=True)
class RetryBudgetConfig:
    """What a key may retry unasked."""

    share: float = 0.1  # of its first attempts that were refused
    per_s: float = 1.0
    life_s: float = 10.0  # what is not used within so long is lost


class _Key:
    __slots__ = ("at", "due", "most", "tokens")

    def __init__(self, now: Instant, tokens: float) -> None:
        self.tokens = self.most = tokens
        self.at = now
        self.due: dict[int, int] = {}  # returns that were promised, by the second

    def expected(self, now: Instant) -> int | None:
        """The first second about now for which a return was promised that has not come."""
        due, second = self.due, now // SECOND
        return next((told for told in range(second - LATE_S, second + EARLY_S + 1) if due.get(told)), None)


class RetryBudgets:
    """Those of one pool's keys."""

    def __init__(self, config: RetryBudgetConfig) -> None:
        self._config = config
        self._keys: dict[str, _Key] = {}

    def refused(self, key: str, now: Instant) -> None:
        """A first attempt of this key was refused: some of them may come back unasked."""
        held = self._of(key, now)
        held.tokens += self._config.share
        held.most += self._config.share

    def promised(self, key: str, at: Instant, now: Instant) -> None:
        """It was told to come back at an instant."""
        due = self._of(key, now).due
        second = at // SECOND
        due[second] = due.get(second, 0) + 1
        if len(due) > DUE_KEPT:
            present = now // SECOND - LATE_S
            for past in [one for one in due if one < present]:
                del due[past]

    def allows(self, key: str, now: Instant) -> bool:
        """May a retry of this key be looked at?"""
        held = self._of(key, now)
        return held.tokens >= 1.0 or held.expected(now) is not None

    def spend(self, key: str, now: Instant, *, free: bool = False) -> None:
        """A retry was looked at: it uses a promise up, or a part of the budget unless it is `free`."""
        held = self._of(key, now)
        if (told := held.expected(now)) is not None:
            held.due[told] -= 1
        elif not free:
            held.tokens = max(0.0, held.tokens - 1.0)

    def left(self, key: str, now: Instant) -> float:
        """Retries that its budget has left, promises not counted."""
        config, held = self._config, self._keys.get(key)
        if held is None:
            return config.per_s * config.life_s
        return min(held.most, held.tokens + config.per_s * max(0, now - held.at) / SECOND)

    def _of(self, key: str, now: Instant) -> _Key:
        """Its state, with what came in since it was last looked at."""
        config, keys = self._config, self._keys
        floor = config.per_s * config.life_s
        held = keys.get(key)
        if held is None:
            if len(keys) >= KEYS_MAX:
                del keys[next(iter(keys))]
            held = keys[key] = _Key(now, floor)
            return held
        passed_s = (now - held.at) / SECOND
        if passed_s > 0:
            # What a share brought lasts as long as the rest: the most that may be held fades to the floor.
            held.most = floor + max(0.0, held.most - floor) * max(0.0, 1 - passed_s / config.life_s)
            held.tokens = min(held.most, held.tokens + config.per_s * passed_s)
            held.at = now
        return held
