"""An asyncio event loop whose clock jumps: time passes only when nothing is ready, and then all at once.

Real asyncio code (timers, tasks, protocols, time-outs) runs on it unchanged, in no time and the same way every time.
What comes from outside (an arrival, an engine's answer) is scheduled with `happen_at` and delivered as I/O would be:
at equal time before every timer, in an order of its own. Instants are exact nanoseconds, so decisions of a live driver
can be compared with those of a simulation to the last digit.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Any

from forebay.core.instant import SECOND, Instant

_RESOLUTION_S = 0.25e-9  # timers that are a nanosecond apart stay apart

FileObject = Any  # what selectors take: a descriptor, or an object with one


class NothingLeftError(RuntimeError):
    """The loop was asked to run on, and nothing will ever happen again."""


class JumpLoop(asyncio.SelectorEventLoop):
    """A selector loop on virtual time that starts at 0. Sockets that are ready go before every jump."""

    def __init__(self) -> None:
        self.now_ns: Instant = 0
        self._outside: list[tuple[Instant, int, int, Callable[[], object]]] = []
        self._count = 0
        self._end: Instant | None = None
        super().__init__(_JumpSelector(self))
        self._clock_resolution = _RESOLUTION_S

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self.now_ns / SECOND

    def clock(self) -> Instant:
        """The same in nanoseconds: a `Clock` for the gateway."""
        return self.now_ns

    def happen_at(self, instant: Instant, action: Callable[[], object], order: int = 0) -> None:
        """Run `action` at `instant`, as I/O; `order`, then the order of these calls, settles equal instants.

        Raises ValueError for an instant in the past.
        """
        if instant < self.now_ns:
            raise ValueError(f"cannot happen at {instant}, it is {self.now_ns}")
        self._count += 1
        heappush(self._outside, (instant, order, self._count, action))

    def run_to(self, instant: Instant) -> None:
        """Let everything up to and including `instant` happen; it is `instant` afterwards.

        An exception that escapes a callback ends the run and is raised here, unless an exception handler is set.
        """
        escaped: list[BaseException] = []
        handler = self.get_exception_handler()
        if handler is None:

            def keep(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
                escaped.append(context.get("exception") or RuntimeError(str(context.get("message"))))
                loop.stop()

            self.set_exception_handler(keep)
        self._end = instant
        try:
            self.run_forever()
        finally:
            self._end = None
            self.set_exception_handler(handler)
        if escaped:
            raise escaped[0]

    @property
    def armed(self) -> list[float]:
        """Loop times of the timers that are armed now, soonest first; cancelled ones do not count."""
        handles: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]  # asyncio's own, unnamed
        return sorted(handle.when() for handle in handles if not handle.cancelled())

    def _deliver(self) -> bool:
        """Make ready what comes from outside by now, before the timers of this turn."""
        outside, now = self._outside, self.now_ns
        some = bool(outside) and outside[0][0] <= now
        while outside and outside[0][0] <= now:
            self.call_soon(heappop(outside)[3])
        return some

    def _jump(self) -> None:
        """Nothing is ready: move on to what comes first."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        timer = self._timer_instant(timers[0].when()) if timers else None
        first = self._outside[0][0] if self._outside else None
        soonest = min((at for at in (timer, first) if at is not None), default=None)
        if self._end is not None and (soonest is None or soonest > self._end):
            self.now_ns = max(self.now_ns, self._end)
            self.stop()
            return
        if soonest is None:
            raise NothingLeftError("no timer is armed and nothing is to happen: what is awaited will never come")
        self.now_ns = max(self.now_ns, soonest)
        self._deliver()

    def _timer_instant(self, when: float) -> Instant:
        """The first nanosecond at which asyncio takes this timer to be due."""
        instant = round(when * SECOND)
        return instant if instant / SECOND + _RESOLUTION_S > when else instant + 1


class _JumpSelector(selectors.BaseSelector):
    """Waits for nothing: what is ready is ready, else time jumps."""

    def __init__(self, loop: JumpLoop) -> None:
        self._loop = loop
        self._real = selectors.DefaultSelector()

    def register(self, fileobj: FileObject, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: FileObject) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: FileObject, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not self._loop._deliver() and not ready and (timeout is None or timeout > 0):
            self._loop._jump()
        return ready

    def get_map(self) -> Mapping[FileObject, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()
