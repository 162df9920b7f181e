"""When a refused caller should come back: a control input, not a courtesy.

The seconds to come are a calendar. Each has room for so many returns as the pool can serve beside its usual load, and
a refused caller gets the first room that is left, somewhere within that second, so that callers refused together do
not return together. The room follows what is known of the pool: when it turns out to serve more than was thought, the
nearer seconds have room again. Callers whose kept promise met a full pool may fill what the margin left to them.

Nobody is promised a place later than the caller's library would wait for. Who gets none is told a later time and that
retrying by itself cannot work: coming back in a crowd would only be refused again, and keep others out meanwhile. With
a fair share every flow has a calendar of its own, by its part of the pool, so that one that floods delays nobody else.
"""

from __future__ import annotations

from array import array
from copy import deepcopy
from dataclasses import dataclass
from math import ceil

from forebay.core.instant import FOREVER, SECOND, Chance, Instant
from forebay.core.model import OBEYED_NS

FLOWS_MAX = 10_000
SPAN = 128
"""Seconds that a calendar holds; no library waits for longer."""
PAST_MOST = 32
"""Seconds gone by that it may still hold: a flow's is in no cache, and moving it on reads and writes all of it."""
EMPTY = array("d", bytes(8 * (SPAN + PAST_MOST)))
WHOLE = 1.0 - 1e-6
"""Of a place is enough: sums of fractions are not exact."""


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """Bounds of what is promised."""

    share_least: float = 0.02  # of the capacity is promised to returns, however busy the pool usually is
    share_most: float = 0.95
    headroom: float = 0.06  # of the capacity is promised to nobody
    least_ns: int = SECOND
    spread: float = 0.25  # of waits that no calendar gave
    margin_ns: int = 5 * SECOND  # that a promise stays below what the caller's library keeps to
    beyond_ns: int = 60 * SECOND  # those who get no place are told a time up to so much beyond what is kept to
    probe_interval_ns: int = SECOND  # after which an engine that is away may be back
    hold_ns: int = 6 * SECOND  # that who came back may wait for what new requests leave
    spare_places: float = 0.05  # of the places stay free when such a one is let in
    spare_slack: float = 0.04  # of an average answer, that streams stay ahead of their objective when one is let in


class _Calendar:
    """Places promised by the second. The room of a second may be a fraction: then a place takes several of them."""

    __slots__ = (
        "_first", "_from", "_left", "_left_at", "_none_from", "_none_to", "_places", "_room", "_sought", "last"
    )  # fmt: skip

    def __init__(self, present: int) -> None:
        self.last = present  # the latest second of which a place was given
        self._places = array("d", EMPTY)  # from `_first` on
        self._first = present  # or a little earlier: older seconds are forgotten as it moves on
        self._from = present  # no second before it has room
        self._sought = present  # from which second on a place was last looked for
        self._room = 0.0
        self._none_from, self._none_to = FOREVER, 0  # between which seconds no place was found, when last none was
        self._left, self._left_at = 0.0, 0.0  # less than a place, in all of these, at so much room in each

    def take(self, room: float, present: int, first: int, last: int, drawn: float) -> int | None:
        """The second of the first free place from `first` on, at `room` places per second; None: none up to `last`,
        which is less than SPAN after the present.

        A place that several seconds make up together is in the one where so much of it, `drawn` of 1, has come
        together: when the room grows by a little again and again, all these places would else be in the last second.
        """
        if present - self._first > PAST_MOST:
            self._forget(present)
        if self._none_from <= first and self._none_to <= last and self._left_most(room, first, last) < WHOLE:
            return None
        if room > self._room or first < self._sought:
            self._from = first  # more is possible than was: nearer seconds may have room again
        self._room, self._sought = room, first
        places, base, end = self._places, self._first, last + 1 - self._first
        begin = (first if first > self._from else self._from) - base
        while begin < end and places[begin] >= room:
            begin += 1
        self._from = begin + base
        at, found = self._gather(room, begin, end)
        if at >= end:
            self._none_from, self._none_to, self._left, self._left_at = first, last, found, room
            return None
        second = at
        if at > begin:
            if drawn < found - max(0.0, room - places[at]):
                second = self._where(drawn, room, begin)
            full = array("d", [room])
            places[begin:at] = full * (at - begin) if max(places[begin:at]) <= room else _filled(places[begin:at], room)
        taken = places[at] if places[at] > room else room
        places[at] = taken - (found - 1.0) if found > 1.0 else taken
        if at + base > self.last:
            self.last = at + base
        return base + second

    def _where(self, drawn: float, room: float, begin: int) -> int:
        """By which index so much of a place has come together."""
        at, found, places = begin, max(0.0, room - self._places[begin]), self._places
        while found <= drawn and at + 1 < len(places):
            at += 1
            found += max(0.0, room - places[at])
        return at

    def _gather(self, room: float, begin: int, end: int) -> tuple[int, float]:
        """By which index a place has come together, of what each has left from `begin` on, and how much has; `end`:
        not before it."""
        found, places = 0.0, self._places
        if begin < end and room - places[begin] >= WHOLE:
            return begin, room - places[begin]
        given = min(end, self.last + 1 - self._first)
        if begin < given:
            held = places[begin:given]
            # Of dozens of seconds each may have a trace left, when a little more became possible: seen in one step.
            traces = room * len(held) - sum(held) if max(held) <= room else WHOLE
            if traces < WHOLE:
                found, begin = traces, given
        for at in range(begin, given):
            left = room - places[at]
            if left > 0.0:
                found += left
                if found >= WHOLE:
                    return at, found
        given = max(begin, given)
        if room <= 0.0 or given >= end:
            return end, found
        # Nobody was given anything of what comes then.
        at = given + ceil((WHOLE - found) / room) - 1
        return (at, found + room * (at + 1 - given)) if at < end else (end, found + room * (end - given))

    def _left_most(self, room: float, first: int, last: int) -> float:
        """The most that may be left since none was found, without a look: while all is promised this is asked for
        every refusal. What was left then can only have become less; seconds that came since are whole."""
        more = room - self._left_at
        grown = more * (self._none_to - first + 1) if more > 0.0 and self._none_to >= first else 0.0
        return self._left + grown + room * (last - max(self._none_to, first - 1))

    def _forget(self, present: int) -> None:
        passed = min(present - self._first, len(EMPTY))
        del self._places[:passed]
        self._places.extend(EMPTY[:passed])
        self._first = present


def _filled(places: array[float], room: float) -> array[float]:
    """These, with none below `room`."""
    return array("d", [max(room, taken) for taken in places])


class RetryLadder:
    """Spreads returns to one pool over the time that it needs to serve them."""

    def __init__(self, config: RetryConfig, chance: Chance) -> None:
        self.config = config
        self.chance = chance
        self._calendars: dict[str, _Calendar] = {}  # by flow; "" is everybody
        self._tidied = -1  # the second in which those without a promise were last let go

    def inherit(self, before: RetryLadder) -> None:
        """Go on from what a predecessor promised, who promises nothing more."""
        self._calendars = before._calendars

    def apart(self) -> None:
        """Let what it promises from now on be its own, though the predecessor goes on too."""
        self._calendars = deepcopy(self._calendars)

    def next_ns(
        self,
        capacity: float,
        now: Instant,
        *,
        usual_rate: float = 0.0,
        obeys_ns: int = OBEYED_NS,
        flow: str = "",
        part: float = 1.0,
        least_ns: int = 0,
        shows: float = 1.0,
    ) -> int:
        """Nanoseconds after which the caller refused now should return; more than `obeys_ns` if it should not.

        `capacity`: requests per second that the pool can serve; 0.0 when nothing is known. `usual_rate`: those that it
        serves over a longer time, returns left out. `part`: the flow's part of the pool. `least_ns`: nobody should
        come sooner. `shows`: the share of those told to come back who do.
        """
        config = self.config
        least_ns = config.least_ns if config.least_ns > least_ns else least_ns
        if capacity > 0:
            free = 1 - config.headroom - usual_rate / capacity
            if free < config.share_least:
                free = config.share_least
            elif free > config.share_most:
                free = config.share_most
            room = free * capacity * part / shows
        else:  # nothing is known: they return as they came
            room = max(float(SECOND) / config.least_ns, usual_rate) * part
        present = now // SECOND
        first = -(-(now + least_ns) // SECOND)
        last = (now + obeys_ns - config.margin_ns) // SECOND - 1
        if last >= present + SPAN:
            last = present + SPAN - 1
        second = self._calendar(flow, present).take(room, present, first, last, self.chance.random())
        if second is None:
            return obeys_ns + SECOND + int(config.beyond_ns * self.chance.random())
        return second * SECOND + int(SECOND * self.chance.random()) - now

    def _calendar(self, flow: str, present: int) -> _Calendar:
        """That of the flow; beyond the most that are kept, the new ones share that of everybody."""
        calendars = self._calendars
        calendar = calendars.get(flow)
        if calendar is None and len(calendars) >= FLOWS_MAX:
            if self._tidied < present:
                self._tidied = present
                self._calendars = calendars = {name: one for name, one in calendars.items() if one.last >= present}
            if len(calendars) >= FLOWS_MAX:
                calendar = calendars.get(flow := "")
        if calendar is None:
            calendar = calendars[flow] = _Calendar(present)
        return calendar

    def spread_ns(self, wait_ns: int) -> int:
        """The same wait, a little later for some."""
        return wait_ns + int(wait_ns * self.config.spread * self.chance.random())

    def exact_ns(self, wait_ns: int) -> int:
        """A wait known exactly (a bucket's refill), later by at most 5 % or half a second."""
        return wait_ns + int(min(wait_ns // 20, SECOND // 2) * self.chance.random())
