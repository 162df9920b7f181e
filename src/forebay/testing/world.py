"""A simulated world around a pipeline: arrivals, engines and the one timer, on an event heap and a virtual clock.

It drives the very pipeline that runs live. At equal time completions come first, then arrivals, then the timer, as
in the live driver. The same seed gives the same decision log, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Protocol

from forebay.core.effects import Abort, Dispatch, Effect, Queued, Refuse
from forebay.core.events import Event, Finished
from forebay.core.instant import MILLISECOND, SECOND, Instant
from forebay.core.model import Lease, Refusal, Request, Ticket, Usage
from forebay.core.pipeline import Pipeline, PipelineConfig

COMPLETION, ARRIVAL, TIMER = 0, 1, 2


class World(Protocol):
    """What an engine model may ask of the world it runs in."""

    now: Instant
    chance: Random

    def at(self, instant: Instant, action: Callable[[], object], order: int = COMPLETION) -> None:
        """Run `action` at `instant`; `order` settles equal instants."""
        ...

    def report(self, event: Event) -> None:
        """Tell the pipeline, and carry out what it answers."""
        ...


class ServingModel(Protocol):
    """An engine of the world: it is given leases, and reports how they end."""

    def start(self, leases: Sequence[Lease], world: World) -> None:
        """Work on these leases, which were dispatched together."""
        ...

    def abort(self, lease: Lease, world: World) -> None:
        """The lease is closed already: free what it used."""
        ...


class ExponentialServers:
    """M/M/k: every lease is served on its own for an exponential time; usage is what `usage` says of the ticket."""

    def __init__(self, mean_ns: int, usage: Callable[[Ticket], Usage | None] | None = None) -> None:
        self.mean_ns = mean_ns
        self.started = 0
        self.busy_ns = 0
        self._usage = usage

    def start(self, leases: Sequence[Lease], world: World) -> None:
        for lease in leases:
            self.started += 1
            took = max(1, int(world.chance.expovariate(1.0) * self.mean_ns))
            world.at(world.now + took, partial(self._end, lease, world))

    def _end(self, lease: Lease, world: World) -> None:
        if lease.open:
            self.busy_ns += world.now - lease.opened
            world.report(Finished(lease, self._usage(lease.ticket) if self._usage else None))

    def abort(self, lease: Lease, world: World) -> None:
        self.busy_ns += world.now - lease.opened


class BatchServer:
    """One batch at a time: `fixed_ns + each_ns * size`, and all its members end together."""

    def __init__(self, fixed_ns: int, each_ns: int) -> None:
        self.fixed_ns = fixed_ns
        self.each_ns = each_ns
        self.batches: list[tuple[Instant, tuple[int, ...]]] = []
        """(started, sequence numbers of its tickets) of every batch."""

    def start(self, leases: Sequence[Lease], world: World) -> None:
        self.batches.append((world.now, tuple(lease.ticket.sequence for lease in leases)))
        took = self.fixed_ns + self.each_ns * len(leases)
        for lease in leases:
            world.at(world.now + took, partial(self._end, lease, world))

    @staticmethod
    def _end(lease: Lease, world: World) -> None:
        if lease.open:
            world.report(Finished(lease, None))

    def abort(self, lease: Lease, world: World) -> None:
        """A batch runs to its end whoever has left."""


class EventWorld:
    """A pipeline, the engines it dispatches to, and everything that happens to them.

    `models` maps each engine's name to its model. Read `log` for the decisions, `ended` for the tickets that have
    their outcome, `refused` for what was shed with its instant.
    """

    def __init__(self, config: PipelineConfig, models: dict[str, ServingModel], *, seed: int) -> None:
        self.now: Instant = 0
        self.chance = Random(f"{seed}/world")
        self.pipeline = Pipeline(config, Random(f"{seed}/core"), self)
        self.models = models
        self.log: list[str] = []
        self.ended: list[Ticket] = []
        self.refused: list[tuple[Instant, Request, Refusal]] = []
        self.after_event: Callable[[], None] | None = None
        """Called after every event; for checking invariants."""
        self._heap: list[tuple[Instant, int, int, Callable[[], object]]] = []
        self._count = 0
        self._armed: Instant | None = None

    # ---- what happens ----------------------------------------------------------------------------------------

    def at(self, instant: Instant, action: Callable[[], object], order: int = COMPLETION) -> None:
        """Run `action` at `instant`. Raises ValueError for an instant in the past."""
        if instant < self.now:
            raise ValueError(f"cannot schedule at {instant}, it is {self.now}")
        self._count += 1
        heappush(self._heap, (instant, order, self._count, action))

    def arrivals(self, requests: Iterable[tuple[Instant, Request]]) -> None:
        """Offer each request at its instant."""
        for instant, request in requests:
            self.at(instant, partial(self.offer, request), ARRIVAL)

    def offer(self, request: Request) -> list[Effect]:
        """Offer a request now."""
        self._note(f"offer {request.key}")
        return self._carry_out(self.pipeline.offer(request, self.now))

    def cancel(self, ticket: Ticket, usage: Usage | None = None) -> list[Effect]:
        """The client of this ticket leaves now."""
        self._note(f"cancel {ticket.sequence}")
        return self._carry_out(self.pipeline.cancel(ticket, self.now, usage))

    def report(self, event: Event) -> None:
        """Report an event now."""
        self._note(type(event).__name__.lower())
        self._carry_out(self.pipeline.report(event, self.now))

    def run(self, until: Instant) -> None:
        """Let everything up to and including `until` happen; it is `until` afterwards."""
        while self._heap and self._heap[0][0] <= until:
            instant, _, _, action = heappop(self._heap)
            self.now = instant
            action()
            if self.after_event is not None:
                self.after_event()
        self.now = until

    # ---- what the pipeline asks for --------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Dispatch):
                engine = effect.leases[0].engine.name
                tickets = ",".join(str(lease.ticket.sequence) for lease in effect.leases)
                self._note(f"dispatch {tickets} to {engine}")
                self.models[engine].start(effect.leases, self)
            elif isinstance(effect, Abort):
                self._note(f"abort {effect.lease.ticket.sequence}")
                self.models[effect.lease.engine.name].abort(effect.lease, self)
            elif isinstance(effect, Queued):
                self._note(f"queue {effect.ticket.sequence}")
            elif isinstance(effect, Refuse):
                refusal = effect.refusal
                who = effect.ticket.sequence if effect.ticket else effect.request.key
                self._note(f"refuse {who} {refusal.reason.value} {refusal.retry_after_ns}")
        self._arm()
        return effects

    def _arm(self) -> None:
        """Keep one timer for the pipeline's next wake-up; an outdated one finds that it is not the armed one."""
        wakeup = self.pipeline.next_wakeup(self.now)
        if wakeup is not None and wakeup <= self.now:
            wakeup = self.now
        if self._armed is not None and self._armed == self.now:
            return  # it fires at this very instant, and may be the one that an ejection ends with
        if wakeup != self._armed:
            self._armed = wakeup
            if wakeup is not None:
                self.at(wakeup, partial(self._timer, wakeup), TIMER)

    def _timer(self, armed_for: Instant) -> None:
        if self._armed == armed_for:
            self._armed = None
            self._carry_out(self.pipeline.poll(self.now))

    def _note(self, what: str) -> None:
        self.log.append(f"{self.now} {what}")

    # ---- the pipeline's observer -----------------------------------------------------------------------------

    def closed(self, ticket: Ticket) -> None:
        """A ticket has its outcome."""
        self.ended.append(ticket)

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:  # noqa: ARG002
        """A request was refused before it was queued."""
        self.refused.append((self.now, request, refusal))


def poisson(chance: Random, rate_per_s: float, start: Instant, end: Instant) -> Iterable[Instant]:
    """Instants of a Poisson process in [start, end)."""
    at = start + int(chance.expovariate(rate_per_s) * SECOND)
    while at < end:
        yield at
        at += int(chance.expovariate(rate_per_s) * SECOND)


def bursts(chance: Random, size: int, every_ns: int, start: Instant, end: Instant) -> Iterable[Instant]:
    """`size` arrivals within a millisecond, every `every_ns`."""
    for at in range(start, end, every_ns):
        yield from sorted(at + chance.randrange(MILLISECOND) for _ in range(size))
