"""Many deadlines of one length on one timer.

Time-outs of one kind all last equally long, so one armed timer serves any number of connections, and moving a deadline
is one assignment to `alive_at`. This keeps timers off the hot path: watching and releasing are dict operations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Watched(Protocol):
    """Something that must show a sign of life."""

    alive_at: float  # loop time of the last sign; the owner assigns it


W = TypeVar("W", bound=Watched)

GRAIN_SHARE = 1 / 50  # of the time-out: checks look at everything watched, so they are at least this far apart
GRAIN_LEAST_S = 0.02


class Deadlines(Generic[W]):
    """Calls `expired(watched)`, once, when an object showed no sign of life for `seconds`."""

    __slots__ = ("_expired", "_loop", "_timer", "_watched", "seconds")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, expired: Callable[[W], None]) -> None:
        self.seconds = seconds
        self._loop = loop
        self._expired = expired
        self._watched: dict[W, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, watched: W) -> None:
        """Begin to watch; `watched.alive_at` must be set."""
        self._watched[watched] = None
        if self._timer is None:
            self._timer = self._loop.call_at(watched.alive_at + self.seconds, self._check)

    def release(self, watched: W) -> None:
        """Watch no longer; harmless when it was not watched."""
        self._watched.pop(watched, None)

    def __contains__(self, watched: object) -> bool:
        return watched in self._watched

    def _check(self) -> None:
        self._timer = None
        now = self._loop.time()
        soonest: float | None = None
        for watched in list(self._watched):
            due = watched.alive_at + self.seconds
            if due > now:
                soonest = due if soonest is None or due < soonest else soonest
            elif watched in self._watched:  # not released by an expiry just before
                del self._watched[watched]
                self._expired(watched)
        if soonest is not None and self._timer is None:
            grain = max(GRAIN_LEAST_S, self.seconds * GRAIN_SHARE)
            # Who is watched from now on may be due before all that are watched now: those may be far ahead.
            self._timer = self._loop.call_at(min(max(soonest, now + grain), now + self.seconds), self._check)

    def stop(self) -> None:
        """Forget all."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
