"""What simulated engines say of themselves on their metrics pages, which gateways read once a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.core.events import Signalled
from forebay.core.instant import SECOND
from forebay.core.model import EngineSignal
from forebay.sim.engines import LanguageEngine, SimulatedEngine
from forebay.sim.faults import Tell
from forebay.sim.world import TIMER, Time

READ_EVERY_NS = SECOND


class Pages:
    """Reads the pages of all engines for their watchers for as long as `going` says that there is anything to do."""

    def __init__(
        self,
        world: Time,
        engines: Sequence[SimulatedEngine],
        watchers: Sequence[Sequence[tuple[Tell, str]]],
        going: Callable[[], bool],
        every_ns: int = READ_EVERY_NS,
    ) -> None:
        self._world = world
        self._engines = engines
        self._watchers = watchers
        self._going = going
        self._every_ns = every_ns

    def begin(self) -> None:
        """Read them now, and every so often from now on."""
        self._read()

    def _read(self) -> None:
        for engine, watchers in zip(self._engines, self._watchers, strict=True):
            if isinstance(engine, LanguageEngine) and engine.answers:
                signal = _signal(engine, self._world.now)
                for tell, name in watchers:
                    tell(Signalled(name, signal))
        if self._going():
            self._world.at(self._world.now + self._every_ns, self._read, TIMER)


def _signal(engine: LanguageEngine, now: int) -> EngineSignal:
    model = engine.model
    return EngineSignal(
        running=model.num_running,
        waiting=model.num_waiting,
        kv_share=model.kv_used_at(now) / model.limits.kv_tokens,
        kv_tokens=model.limits.kv_tokens,
        preemptions=model.preemptions,
    )
