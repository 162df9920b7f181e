"""Two limits on one engine: one is followed, the other is told the same and only says what it would have allowed.

The shadow sees an engine as the acting limit fills it: one that would go lower sees more in flight than it would have
let in, one that would go higher is never filled. Views come as often as the acting limit asks for them; a shadow that
wants them more rarely is given several as one, and one that wants them more often waits.
"""

from __future__ import annotations

from forebay.core.instant import Chance, Even, Instant
from forebay.core.limits import LimitConfig, build, started_at
from forebay.core.limits.limit import Answer, Limit, View
from forebay.core.model import EngineSignal


class Shadowed:
    """The acting limit, as it would be alone, beside its shadow."""

    def __init__(self, acting: Limit, shadow: Limit) -> None:
        self.acting = acting
        self.shadow = shadow
        self.learns = acting.learns or shadow.learns
        self.interval_ns = acting.interval_ns or shadow.interval_ns
        self.slack = acting.slack
        self._views: View | None = None  # since the shadow was last shown one
        self._follow()

    def _follow(self) -> None:
        acting = self.acting
        self.requests, self.tokens = acting.requests, acting.tokens
        self.prefill_tokens, self.prefill_rate, self.gap_ns = acting.prefill_tokens, acting.prefill_rate, acting.gap_ns

    def answered(self, answer: Answer, now: Instant) -> None:
        """Tell both."""
        self.acting.answered(answer, now)
        self.shadow.answered(answer, now)
        self._follow()

    def failed(self, now: Instant) -> None:
        """Tell both."""
        self.acting.failed(now)
        self.shadow.failed(now)
        self._follow()

    def viewed(self, view: View, now: Instant) -> None:
        """Show it to both, to the shadow when it wants one."""
        if self.acting.interval_ns:
            self.acting.viewed(view, now)
            self._follow()
        if self.shadow.interval_ns:
            views = view if self._views is None else self._views.then(view)
            due = views.elapsed_ns >= self.shadow.interval_ns
            self._views = None if due else views
            if due:
                self.shadow.viewed(views, now)

    def restarted(self, now: Instant) -> None:
        """Tell both."""
        self.acting.restarted(now)
        self.shadow.restarted(now)
        self._views = None
        self._follow()

    def signalled(self, signal: EngineSignal, in_flight: int, now: Instant) -> None:
        """Tell both."""
        self.acting.signalled(signal, in_flight, now)
        self.shadow.signalled(signal, in_flight, now)
        self._follow()


def shadowed(config: LimitConfig, shadow: LimitConfig | None, chance: Chance) -> Limit:
    """The limit that a config asks for, with one in its shadow or without."""
    acting = build(config, chance)
    return acting if shadow is None else Shadowed(acting, build(shadow, Even()))


def succeeded(
    limit: Limit,
    old: tuple[LimitConfig, LimitConfig | None],
    new: tuple[LimitConfig, LimitConfig | None],
    chance: Chance,
) -> Limit:
    """The successor of a limit under other settings, each given as (acting, shadow).

    One that is asked for as before stays, with what it learned, also when it comes out of the shadow or goes into it;
    any other begins where the acting limit stood.
    """
    known: list[tuple[LimitConfig | None, Limit]] = [(old[0], limit)]
    if isinstance(limit, Shadowed):
        known = [(old[0], limit.acting), (old[1], limit.shadow)]
    acting = _heir(new[0], known, limit.requests, chance)
    if new[1] is None:
        return acting
    return Shadowed(acting, _heir(new[1], known, limit.requests, Even()))


def _heir(config: LimitConfig, known: list[tuple[LimitConfig | None, Limit]], requests: int, chance: Chance) -> Limit:
    for number, (before, limit) in enumerate(known):
        if before == config:
            del known[number]  # nobody is acting and shadow at once
            return limit
    return build(started_at(config, requests), chance)
