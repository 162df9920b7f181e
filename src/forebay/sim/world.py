"""An event heap on a virtual clock: what happens, in one order that is the same in every run.

At equal time completions come first, then arrivals, then the first steps of engines that were idle (so that what came
together is computed together), and timers last, as in the live driver, where sockets are served before timers.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from forebay.core.instant import FOREVER, Instant

COMPLETION, ARRIVAL, STEP, TIMER = range(4)
"""Order of actions at the same instant."""

_RANK_BITS = 48  # room for the count of actions below their order

Action = Callable[[], object]


class Time(Protocol):
    """What everything simulated asks of the world it runs in."""

    @property
    def now(self) -> Instant:
        """The instant at which things happen now."""
        ...

    def at(self, instant: Instant, action: Action, order: int = COMPLETION) -> None:
        """Run `action` at `instant`, which is not in the past; `order`, then the order of calls, settle equal ones."""
        ...


class World:
    """The heap and the clock."""

    def __init__(self) -> None:
        self.now: Instant = 0
        self.events = 0
        """Actions that have been run."""
        self.after_event: Callable[[], None] | None = None
        """Called after every action; for checking invariants."""
        self._heap: list[tuple[Instant, int, Action]] = []
        self._count = 0

    def at(self, instant: Instant, action: Action, order: int = COMPLETION) -> None:
        """Run `action` at `instant`. Raises ValueError for an instant in the past."""
        if instant < self.now:
            raise ValueError(f"cannot schedule at {instant}, it is {self.now}")
        self._count = count = self._count + 1
        heappush(self._heap, (instant, order << _RANK_BITS | count, action))

    def run(self, until: Instant) -> None:
        """Let everything up to and including `until` happen; it is `until` afterwards."""
        self._run(until)
        self.now = until

    def run_out(self) -> None:
        """Let everything happen, until nothing is left; the clock stays at the last of it."""
        self._run(FOREVER)

    def _run(self, until: Instant) -> None:
        heap, pop = self._heap, heappop
        events, after = 0, self.after_event
        try:
            while heap and heap[0][0] <= until:
                self.now, _, action = pop(heap)
                action()
                events += 1
                if after is not None:
                    after()
        finally:
            self.events += events
