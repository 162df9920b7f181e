"""When engines fail: the faults of a scenario on the event heap, and the probes by which gateways find out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from forebay.core.events import EngineDown, EngineUp, EngineWarming, Event
from forebay.core.instant import FOREVER, SECOND, Instant
from forebay.sim.engines import SimulatedEngine
from forebay.sim.scenario import FaultSpec
from forebay.sim.world import COMPLETION, Action, Time

Tell = Callable[[Event], object]


class Faults:
    """Puts faults on the heap. `watchers` holds, for each engine, who probes it and what it is called there.

    A gateway learns of a change with its first probe after it; probes are sent at multiples of `probe_interval_ns`.
    """

    def __init__(
        self,
        world: Time,
        engines: Sequence[SimulatedEngine],
        watchers: Sequence[Sequence[tuple[Tell, str]]],
        probe_interval_ns: int,
    ) -> None:
        self._world = world
        self._engines = engines
        self._watchers = watchers
        self._interval_ns = probe_interval_ns

    def schedule(self, faults: Iterable[FaultSpec]) -> None:
        """Put them on the heap, and the first probe of every engine."""
        away: dict[int, type[EngineDown | EngineWarming]] = {}
        for fault in faults:
            start, end = int(fault.from_s * SECOND), None if fault.to_s is None else int(fault.to_s * SECOND)
            for number in fault.engines or range(len(self._engines)):
                begins, ends = self._actions(fault, number, end)
                if start == 0:
                    begins()
                    if fault.kind in {"crashed", "cold"}:
                        away[number] = EngineDown if fault.kind == "crashed" else EngineWarming
                else:
                    self._world.at(start, begins, COMPLETION)
                if end is not None:
                    self._world.at(end, ends, COMPLETION)
        for number in range(len(self._engines)):
            self._tell(number, away.get(number, EngineUp))

    def _actions(self, fault: FaultSpec, number: int, end: Instant | None) -> tuple[Action, Action]:
        engine = self._engines[number]
        if fault.kind == "slow":
            return partial(engine.slow_down, fault.factor), partial(engine.slow_down, 1.0)
        if fault.kind == "stalled":
            return partial(engine.stall, FOREVER if end is None else end), engine.go_on
        if fault.kind == "lying":
            return partial(_lie, engine, fault.factor), partial(_lie, engine, 1.0)
        crashed = fault.kind == "crashed"
        found = EngineDown if crashed else EngineWarming
        return partial(self._fall, number, found, reachable=not crashed), partial(self._rise, number)

    def _fall(self, number: int, found: type[EngineDown | EngineWarming], *, reachable: bool) -> None:
        self._engines[number].fall(reachable=reachable)
        if self._world.now:
            self._world.at(self._next_probe(), partial(self._tell, number, found))

    def _rise(self, number: int) -> None:
        self._engines[number].rise()
        self._world.at(self._next_probe(), partial(self._tell, number, EngineUp))

    def _next_probe(self) -> Instant:
        return (self._world.now // self._interval_ns + 1) * self._interval_ns

    def _tell(self, number: int, event: type[EngineUp | EngineDown | EngineWarming]) -> None:
        for tell, name in self._watchers[number]:
            tell(event(name))


def _lie(engine: SimulatedEngine, factor: float) -> None:
    engine.usage_factor = factor
