"""One level of the hierarchy: the limits of a key, a team, a class or all, and what is left of them."""

from __future__ import annotations

from forebay.core.instant import Instant
from forebay.core.quota.bucket import Bucket
from forebay.core.quota.calendar import CalendarQuota, Wall
from forebay.core.quota.terms import DAY, KeyLimits, windows

Meter = Bucket | CalendarQuota


class Level:
    """The meters of one level, for any model or for one, and the count of the requests that are open in it."""

    __slots__ = ("concurrency", "meters", "name", "open")

    def __init__(self, name: str, limits: KeyLimits, wall: Wall, now: Instant) -> None:
        self.name = name
        self.open = 0
        self.meters: tuple[Meter, ...] = ()
        self.relimit(limits, wall, now)

    def relimit(self, limits: KeyLimits, wall: Wall, now: Instant) -> None:
        """Take other limits. What is open stays open, and what was spent of a limit that stays is still spent."""
        self.concurrency = limits.concurrency
        before = {(meter.counts, meter.window_ns): meter for meter in self.meters} if self.meters else {}
        meters: list[Meter] = []
        for counts, window_ns, limit, burst in windows(limits):
            meter = before.get((counts, window_ns))
            if meter is not None:
                meter.relimit(limit, burst, now)
            elif window_ns >= DAY:
                meter = CalendarQuota(limit, window_ns, self.name, wall)
            else:
                meter = Bucket(limit, window_ns, burst, counts, self.name)
            meters.append(meter)
        self.meters = tuple(meters)

    @property
    def counts_days(self) -> bool:
        """Has it a quota of a day or a month?"""
        return any(isinstance(meter, CalendarQuota) for meter in self.meters)

    def restore(self, day_tokens: int, month_tokens: int, at: Instant) -> None:
        """Count what was used of the day and month of `at` before this process began."""
        for meter in self.meters:
            if isinstance(meter, CalendarQuota):
                meter.charge(day_tokens if meter.window_ns == DAY else month_tokens, at)


class Holder:
    """A key or a group of keys: its level for any model, and those for single models."""

    __slots__ = ("level", "models")

    def __init__(self, name: str, limits: KeyLimits, wall: Wall, now: Instant) -> None:
        self.level = Level(name, limits, wall, now)
        self.models: dict[str, Level] | None = None
        self._relimit_models(limits, wall, now)

    def relimit(self, limits: KeyLimits, wall: Wall, now: Instant) -> None:
        """Take other limits; see Level."""
        self.level.relimit(limits, wall, now)
        self._relimit_models(limits, wall, now)

    def of(self, model: str) -> Level | None:
        """The level of a model alone, if it has limits here; that for any model has the name ''."""
        if not model:
            return self.level
        return None if self.models is None else self.models.get(model)

    def _relimit_models(self, limits: KeyLimits, wall: Wall, now: Instant) -> None:
        before, self.models = self.models or {}, None
        for model, of_model in limits.models.items():
            level = before.get(model)
            if level is None:
                level = Level(f"{self.level.name} for model {model}", of_model, wall, now)
            else:
                level.relimit(of_model, wall, now)
            self.models = self.models or {}
            self.models[model] = level
