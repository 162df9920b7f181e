"""What the streams of one engine can spare: whether a new prompt would make answers late that are not late yet.

Every stream has an objective for the mean time between its tokens, so at any moment it is ahead of it by some time, or
behind: its *slack*. A prompt holds up all streams while the engine reads it. So it is let in when the streams can
spare what it takes, and waits until they have made it up otherwise. That needs no model of the engine but the rate at
which it reads prompts, no search for the right number in flight, and it is right at once when the traffic changes.

A few streams may be poorer than that, one at least: those that have just begun, and have had no time to get ahead. And
streams of a lower priority keep nobody out: what is above them may hold them up.
"""

from __future__ import annotations

from collections.abc import Iterable

from forebay.core.instant import MILLISECOND, Instant
from forebay.core.limits.limit import SlackConfig
from forebay.core.model import Lease

LOOK_NS = 5 * MILLISECOND
LOOK_EACH_NS = MILLISECOND // 20
"""Streams are looked at once in this time for each of them, so that looking never takes more than a part of it."""
LOOK_MOST_NS = 20 * MILLISECOND
GAIN = 4
"""A stream gets ahead by about so much more than the time that passes, at most."""
PROMPTS_KEPT = 64
"""Prompts over which their mean length is taken."""
LONGEST = 2.0
"""Times the mean is the most that a prompt is asked as."""
HOPELESS = 40
"""Objectives behind: such a stream is late whatever is let in, or its caller does not read it. It keeps nobody out."""


class Slack:
    """The streams of one engine, as they were when they were last looked at."""

    __slots__ = ("_late_at", "_soonest", "_streams", "_usual", "config", "kept_out", "look_at", "short")

    def __init__(self, config: SlackConfig) -> None:
        self.config = config
        self.short = False  # was a prompt kept out since they were last looked at?
        self.kept_out = False  # and since that was last asked, one that is due a place?
        # When each would be late if no token came, in order, and its priority.
        self._streams: list[tuple[Instant, int]] = []
        self._late_at: dict[int, list[Instant]] = {}  # the same of all streams of a priority and higher ones
        self.look_at: Instant = 0  # when to look at them again
        self._soonest: Instant = 0  # and not before
        self._usual = 0.0  # tokens of a prompt, on average

    def asked(self, gap_ns: float, places: int) -> bool:
        """Is it worth asking the streams of an engine with this mean gap and so many requests? While they go much
        faster than they must, they will make up what a burst of prompts takes from them."""
        config = self.config
        return places >= config.least and gap_ns >= config.pressed * config.objective_ns

    def opened(self, prompt: int) -> None:
        """A request with so many prompt tokens was let in."""
        self._usual += (prompt - self._usual) / PROMPTS_KEPT if self._usual else prompt

    def fair_size(self, prompt: int) -> float:
        """What a prompt is asked as. Were the longest asked as they are, short ones would always get in before them."""
        most = LONGEST * self._usual
        return prompt if prompt < most or not most else most

    def changed(self) -> None:
        """A stream began: it is the poorest of all, and the prompt that it came from is read."""
        self.look_at = 0

    def spares(self, prompts_ns: float, more_ns: int, priority: int, leases: Iterable[Lease], now: Instant) -> bool:
        """Can all but a few streams spare the time that prompts take to read, and be ahead by so much more after it?

        One that is kept out is looked at again when the streams may have made up what is missing.
        """
        if self.look_at <= now:
            self.look(leases, now)
        spare_ns = self.spare_ns(priority, now)
        if spare_ns is None:
            return True
        missing_ns = int(self.config.prompt_share * prompts_ns) + more_ns - spare_ns
        if missing_ns <= 0:
            return True
        self.kept_out = self.kept_out or not more_ns  # who may only have what is left over says nothing of places
        again = max(self._soonest, now + min(LOOK_MOST_NS, missing_ns // GAIN))
        if not self.short:
            self.short, self.look_at = True, again
        elif again < self.look_at:
            self.look_at = again
        return False

    def look(self, leases: Iterable[Lease], now: Instant) -> None:
        """Take in how far each stream has come."""
        objective_ns = self.config.objective_ns
        hopeless = now - HOPELESS * objective_ns
        streams = []
        for lease in leases:
            first = lease.ticket.first_token
            if first:
                at = first + objective_ns * (lease.generated - 1)
                if at > hopeless:
                    streams.append((at, lease.ticket.request.priority))
        streams.sort()
        self._streams, self.short = streams, False
        self._late_at.clear()
        self._soonest = self.look_at = now + max(LOOK_NS, LOOK_EACH_NS * len(streams))

    def take_kept_out(self) -> bool:
        """Was a prompt kept out since this was last asked?"""
        kept_out, self.kept_out = self.kept_out, False
        return kept_out

    def spare_ns(self, priority: int, now: Instant) -> int | None:
        """By how much all streams of this priority and above, but a few, are ahead of their objective, as last seen.
        None when a request of that priority need ask nobody."""
        late_at = self._late_at.get(priority)
        if late_at is None:
            late_at = self._late_at[priority] = [at for at, rank in self._streams if rank >= priority]
        asked = len(late_at)
        if not asked or 2 * asked < len(self._streams):
            return None  # where most are of lower classes, those are held up, and let nobody in until it is made up
        # However few there are, one of them has just begun.
        poor = min(1 + int(self.config.poor_share * asked), asked - 1)
        return late_at[poor] - now
