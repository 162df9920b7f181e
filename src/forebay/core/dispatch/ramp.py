"""Slow start: an engine that has come back is given little at first, and more as it shows what it can do.

Its caches are empty, its kernels may still be compiled, and everything that waited for it would come at once. Every
answer that begins makes room for one more, which doubles what it may hold in the time to its first token; passing time
does so too, so that a quiet engine is back in the end. One that comes back from an ejection is on trial first: then
only answers count.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.core.instant import SECOND, Instant


@dataclass(frozen=True, slots=True)
class RampConfig:
    """How an engine comes back."""

    span_ns: int = 10 * SECOND  # until it has its whole limit again, at the latest; 0: at once
    least: int = 4  # places at the start
    share: float = 0.125  # of its limit at the start, when that is more
    trial: int = 2  # places at the start after an ejection


class Ramp:
    """The way back of one engine. It begins at rest: an engine that was never away has its whole limit."""

    __slots__ = ("_answers", "_since", "_start", "active", "config")

    def __init__(self, config: RampConfig) -> None:
        self.config = config
        self.active = False
        self._start = self._answers = 0
        self._since: Instant = 0

    def returned(self, limit: int, now: Instant) -> None:
        """It is there again after it was away; `limit` is how much it may hold in the end."""
        self.active = self.config.span_ns > 0
        self._start, self._answers, self._since = max(self.config.least, int(self.config.share * limit)), 0, now

    def ejected(self, until: Instant) -> None:
        """It failed, and is on trial from `until` on."""
        self.active = True
        self._start, self._answers, self._since = self.config.trial, 0, until

    def answered(self) -> None:
        """An answer began, or is whole."""
        self._answers += 1

    def places(self, limit: int, now: Instant, *, on_trial: bool) -> int:
        """How many of its limit's places it may use; the ramp ends when that is all of them."""
        span_ns, places = self.config.span_ns, self._start + self._answers
        if on_trial:
            self._since = now  # time says nothing about an engine that is let do nothing
        elif span_ns:
            places += max(0, limit - self._start) * max(0, now - self._since) // span_ns
        else:
            places = limit
        self.active = on_trial or places < limit
        return min(limit, places)

    def grows_at(self, limit: int, now: Instant) -> Instant | None:
        """When time alone makes room for one more; None while it does not."""
        rest, span_ns = limit - self._start, self.config.span_ns
        if not self.active or rest <= 0 or not span_ns or now < self._since:
            return None
        steps = rest * (now - self._since) // span_ns + 1
        return self._since + -(-steps * span_ns // rest)
