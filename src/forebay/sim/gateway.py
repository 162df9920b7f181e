"""A pipeline on the event heap: it is called, what it asks for is carried out, and its one wake-up is kept armed.

The counterpart of `live.Gateway`, down to which timer stays when another instant is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from forebay.core.dispatch.leases import Engine
from forebay.core.effects import Abort, Dispatch, Effect, Queued, Refuse
from forebay.core.events import Event, FirstToken
from forebay.core.instant import FOREVER, Instant
from forebay.core.model import Lease, Refusal, Request, Ticket, Usage
from forebay.core.pipeline import Pipeline
from forebay.sim.world import TIMER, Time


class Hands(Protocol):
    """Who carries out what a pipeline asks for. None of it may call the gateway back before it returns."""

    def start(self, leases: Sequence[Lease]) -> None:
        """Begin work on these leases of one engine, dispatched together."""
        ...

    def queued(self, ticket: Ticket) -> None:
        """It waits."""
        ...

    def refused(self, request: Request, refusal: Refusal, ticket: Ticket | None) -> None:
        """Answer it with the refusal; `ticket` is None when it was shed before queueing."""
        ...

    def aborted(self, lease: Lease) -> None:
        """Stop the work on a lease that is closed already."""
        ...

    def count(self, engine: str, leases: Iterable[Lease]) -> None:
        """Set `generated` of an engine's open leases to the tokens that their clients have seen."""
        ...


class Gateway:
    """Drives one pipeline in a world."""

    def __init__(self, world: Time, pipeline: Pipeline, hands: Hands) -> None:
        self.pipeline = pipeline
        self._world = world
        self._hands = hands
        self._armed: Instant | None = None

    @property
    def armed(self) -> Instant | None:
        """When the pipeline is polled next; None while nothing waits for time to pass."""
        return self._armed

    def offer(self, request: Request) -> list[Effect]:
        """Decide a request now."""
        self._see()
        effects = self.pipeline.offer(request, self._world.now)
        self._apply(effects)
        return effects

    def cancel(self, ticket: Ticket, usage: Usage | None = None) -> list[Effect]:
        """The client of a ticket leaves now."""
        self._see()
        effects = self.pipeline.cancel(ticket, self._world.now, usage)
        self._apply(effects)
        return effects

    def report(self, event: Event) -> None:
        """Pass on what happened at an engine now."""
        self._see(event.lease.engine if isinstance(event, FirstToken) else None)
        self._apply(self.pipeline.report(event, self._world.now))

    def drain(self) -> None:
        """Admit nothing more."""
        self._apply(self.pipeline.drain(self._world.now))

    def abandon(self) -> None:
        """Evict what still waits."""
        self._apply(self.pipeline.abandon(self._world.now))

    def apply(self, effects: list[Effect]) -> None:
        """Carry out effects of a call that was made on the pipeline itself, and arm what it left."""
        self._apply(effects)

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Dispatch):
                self._hands.start(effect.leases)
            elif isinstance(effect, Queued):
                self._hands.queued(effect.ticket)
            elif isinstance(effect, Refuse):
                self._hands.refused(effect.request, effect.refusal, effect.ticket)
            elif isinstance(effect, Abort):
                self._hands.aborted(effect.lease)
        pipeline = self.pipeline
        if pipeline.queued or pipeline.learning or pipeline.tune_at < (self._armed or FOREVER):
            self._arm()

    def _arm(self) -> None:
        """An earlier timer stays: it polls for nothing, and arms anew."""
        now = self._world.now
        wake = self.pipeline.next_wakeup(now)
        if wake is None or (self._armed is not None and self._armed <= wake):
            return
        self._armed = wake = max(wake, now)
        self._world.at(wake, self._wake, TIMER)

    def _wake(self) -> None:
        if self._armed != self._world.now:
            return  # an earlier one took its place
        self._armed = None
        now = self._world.now
        for _, engine in self.pipeline.learning:
            if 0 < engine.view_at <= now:
                self._count(engine)
        self._see()
        self._apply(self.pipeline.poll(now))

    def _see(self, begins: Engine | None = None) -> None:
        """Count what the streams of those engines have made whose streams the pipeline may look at now. Live, every
        piece of a stream that comes is counted. `begins`: an engine one of whose streams begins."""
        now = self._world.now
        for _, engine in self.pipeline.learning:
            slack = engine.slack
            if slack is not None and (slack.look_at <= now or engine is begins):
                self._count(engine)

    def _count(self, engine: Engine) -> None:
        self._hands.count(engine.name, engine.leases)
