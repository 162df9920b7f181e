"""Quotas of calendar days and months in UTC. The core has no wall clock: it is told how far apart the two clocks are.

The arithmetic is whole numbers: days since 1970, and the proleptic Gregorian calendar in eras of 400 years, whose
years begin in March so that the leap day is the last. Source: H. Hinnant,
"chrono-Compatible Low-Level Date Algorithms".
"""

from __future__ import annotations

from forebay.core.instant import FOREVER, Instant
from forebay.core.quota.terms import DAY, TOKENS

_ERA_DAYS = 146_097
_MARCH_0000 = -719_468  # days since 1970 of the first of March of year 0


def month_of(day: int) -> int:
    """The month, counted from January of year 0, of a day counted from 1970-01-01."""
    era, of_era = divmod(day - _MARCH_0000, _ERA_DAYS)
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153  # 0 is March
    return 12 * (400 * era + year) + month + 2


def first_day(month: int) -> int:
    """The first day of a month, counted as in `month_of`."""
    year, from_march = divmod(month - 2, 12)
    era, of_era = divmod(year, 400)
    of_year = (153 * from_march + 2) // 5
    return _MARCH_0000 + era * _ERA_DAYS + 365 * of_era + of_era // 4 - of_era // 100 + of_year


class Wall:
    """The wall clock as an offset: nanoseconds since 1970 are an instant and this."""

    __slots__ = ("offset_ns",)

    def __init__(self) -> None:
        self.offset_ns = 0


class CalendarQuota:
    """Tokens of one day or month. It begins anew with each, and never because a clock was set back.

    After a step back it goes on in the period that it was in. If that lies further ahead than the next, one of the two
    readings was a mistake: what was used counts until the next ends, and again should the clock return there.
    """

    __slots__ = (
        "_ends", "_left", "_period", "_since", "_turned", "_wall", "burst", "counts", "level", "limit", "used",
        "window_ns",
    )  # fmt: skip

    def __init__(self, limit: int, window_ns: int, level: str, wall: Wall) -> None:
        """`window_ns` is DAY or MONTH."""
        self.counts, self.window_ns, self.level = TOKENS, window_ns, level
        self.limit = self.burst = limit
        self.used = 0
        self._wall = wall
        self._period = -FOREVER
        self._left = (-FOREVER, 0)  # the latest period that it was called back from, and what was used in it
        self._since = self._ends = 0  # wall time between which it need not look at the calendar
        self._turned: Instant = 0  # when the period began for it

    def relimit(self, limit: int, burst: int, now: Instant) -> None:
        """Take another limit; what was used stays used."""
        self.limit, self.burst = limit, burst
        self._at(now)

    def _at(self, now: Instant) -> int:
        """The wall time, with the period of it begun."""
        wall_ns = now + self._wall.offset_ns
        if not self._since <= wall_ns < self._ends:
            day = wall_ns // DAY
            period = day if self.window_ns == DAY else month_of(day)
            if period > self._period:
                left, used = self._left
                self._period, self.used, self._turned = period, used if period == left else 0, now
            else:
                self._left = max(self._left, (self._period, self.used))
                self._period = period + 1
            self._since, self._ends = self._begin(self._period - 1), self._begin(self._period + 1)
        return wall_ns

    def _begin(self, period: int) -> int:
        return (period if self.window_ns == DAY else first_day(period)) * DAY

    def wait_ns(self, cost: int, now: Instant) -> int:
        """Nanoseconds until `cost` fits; 0 when it does now, FOREVER when it never can."""
        wall_ns = self._at(now)
        if cost > self.limit or not self.limit:
            return FOREVER
        return 0 if self.used + cost <= self.limit else self._ends - wall_ns

    def charge(self, cost: int, now: Instant) -> None:
        """Spend `cost`."""
        self._at(now)
        self.used += cost

    def settle(self, difference: int, charged: Instant, now: Instant) -> None:
        """Correct by `difference` what was charged then. What was reserved in an earlier period is not given back in
        this one; what was used beyond it counts now."""
        self._at(now)
        if difference > 0 or charged >= self._turned:
            self.used = max(0, self.used + difference)

    def remaining(self, now: Instant) -> int:
        """Tokens that could be spent now, never negative."""
        self._at(now)
        return max(0, self.limit - self.used)

    def reset_ns(self, now: Instant) -> int:
        """Nanoseconds until the next period begins."""
        wall_ns = self._at(now)
        return self._ends - wall_ns
