"""The tuner that acts on a pool's depth, and the one in its shadow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forebay.core.instant import FOREVER, Chance, Even, Instant
from forebay.core.snapshot import TunerSnapshot
from forebay.core.tuning.depth import DepthTuning, Seen, TuningConfig
from forebay.core.tuning.fixed import FixedConfig


class Tuners:
    """Both are shown the same; only one is followed. `resting`: nothing happens that they could see."""

    def __init__(
        self,
        config: TuningConfig,
        depth: int,
        chance: Chance,
        *,
        shadow_depth: int | None = None,
        acting: DepthTuning | None = None,
    ) -> None:
        """`depth` is where tuning begins, and stays when nobody tunes; `acting`: who does already."""
        kept = config.kept
        self.acting = acting or DepthTuning(config.tuner, depth, chance, kept=kept, frozen=config.frozen)
        self.shadow: DepthTuning | None = None
        if config.shadow is not None:
            begins = config.shadow_depth if shadow_depth is None else shadow_depth
            self.shadow = DepthTuning(config.shadow, self.acting.depth if begins is None else begins, Even(), kept=kept)
        both = (self.acting,) if self.shadow is None else (self.acting, self.shadow)
        self.looking = tuple(tuning for tuning in both if tuning.tuner.interval_ns)
        self.timed = tuple(tuning.times for tuning in self.looking if tuning.times is not None)
        self.resting = bool(self.looking)
        self._chance = chance

    @property
    def due(self) -> Instant:
        """When one of them looks next; far away when none does."""
        return FOREVER if self.resting or not self.looking else min(tuning.due for tuning in self.looking)

    def begin(self, seen: Seen, now: Instant) -> None:
        """There is work again: look from here on."""
        self.resting = False
        for tuning in self.looking:
            tuning.begin(seen, now)

    def look(self, seen: Seen, budget_ns: Callable[[float], int], now: Instant, *, idle: bool) -> None:
        """Let those look whose time it is. `idle`: nothing waits or runs, so this is the last look for now."""
        for tuning in self.looking:
            if not tuning.due:
                tuning.begin(seen, now)  # it came while there was work
            elif tuning.due <= now:
                tuning.look(seen, budget_ns, now)
        self.resting = idle

    def succeeded(self, old: TuningConfig, new: TuningConfig, depth: int, now: Instant) -> Tuners:
        """Their successors under other settings; what was found stays, also by one that comes out of the shadow.

        `depth` is in force where nobody tunes.
        """
        acting, shadow = self.acting, self.shadow
        stays = (new.shadow, new.shadow_depth) == (old.shadow, old.shadow_depth)
        kept = shadow.depth if shadow is not None and stays else None
        moves = isinstance(new.tuner, FixedConfig) and depth != acting.depth
        if not moves and replace(new, shadow=old.shadow, shadow_depth=old.shadow_depth) == old:
            heirs = Tuners(new, depth, self._chance, shadow_depth=kept, acting=acting)
            heirs.resting = self.resting
            return heirs
        begins, why = acting.depth, "reload"
        if isinstance(new.tuner, FixedConfig):
            begins = depth
        elif shadow is not None and new.tuner == old.shadow != old.tuner:
            begins, why = shadow.depth, "promoted"
        heirs = Tuners(new, begins, self._chance, shadow_depth=kept)
        heirs.acting.inherit(acting, why, now)
        return heirs

    def snapshot(self, now: Instant) -> TunerSnapshot:
        """A frozen picture."""
        acting = self.acting
        looked, changed = acting.looked_at, acting.changed_at
        return TunerSnapshot(
            kind=acting.tuner.kind,
            depth=acting.depth,
            frozen=acting.frozen,
            changes=acting.changes,
            looked_ns=None if looked is None else now - looked,
            changed_ns=None if changed is None else now - changed,
            shadow_depth=None if self.shadow is None else self.shadow.depth,
        )
