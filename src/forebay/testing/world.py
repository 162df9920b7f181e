"""A simulated world around one pipeline, with everything in reach of a test: arrivals, engines, decisions.

Heap and driver are the simulator's own, and the pipeline is the one that runs live. The same seed gives the same
decision log, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Protocol

from forebay.core.effects import Effect
from forebay.core.events import Event, Finished
from forebay.core.instant import MILLISECOND, SECOND, Instant
from forebay.core.model import Lease, Refusal, Request, Ticket, Usage
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.sim.gateway import Gateway, Hands
from forebay.sim.world import ARRIVAL, World


class ServingModel(Protocol):
    """An engine of the world: it is given leases, and reports how they end."""

    def start(self, leases: Sequence[Lease], world: EventWorld) -> None:
        """Work on these leases, which were dispatched together."""
        ...

    def abort(self, lease: Lease, world: EventWorld) -> None:
        """The lease is closed already: free what it used."""
        ...


class ExponentialServers:
    """M/M/k: every lease is served on its own for an exponential time; usage is what `usage` says of the ticket."""

    def __init__(self, mean_ns: int, usage: Callable[[Ticket], Usage | None] | None = None) -> None:
        self.mean_ns = mean_ns
        self.started = 0
        self.busy_ns = 0
        self._usage = usage

    def start(self, leases: Sequence[Lease], world: EventWorld) -> None:
        for lease in leases:
            self.started += 1
            took = max(1, int(world.chance.expovariate(1.0) * self.mean_ns))
            world.at(world.now + took, partial(self._end, lease, world))

    def _end(self, lease: Lease, world: EventWorld) -> None:
        if lease.open:
            self.busy_ns += world.now - lease.opened
            world.report(Finished(lease, self._usage(lease.ticket) if self._usage else None))

    def abort(self, lease: Lease, world: EventWorld) -> None:
        self.busy_ns += world.now - lease.opened


class BatchServer:
    """One batch at a time: `fixed_ns + each_ns * size`, and all its members end together."""

    def __init__(self, fixed_ns: int, each_ns: int) -> None:
        self.fixed_ns = fixed_ns
        self.each_ns = each_ns
        self.batches: list[tuple[Instant, tuple[int, ...]]] = []
        """(started, sequence numbers of its tickets) of every batch."""

    def start(self, leases: Sequence[Lease], world: EventWorld) -> None:
        self.batches.append((world.now, tuple(lease.ticket.sequence for lease in leases)))
        took = self.fixed_ns + self.each_ns * len(leases)
        for lease in leases:
            world.at(world.now + took, partial(self._end, lease, world))

    @staticmethod
    def _end(lease: Lease, world: EventWorld) -> None:
        if lease.open:
            world.report(Finished(lease, None))

    def abort(self, lease: Lease, world: EventWorld) -> None:
        """A batch runs to its end whoever has left."""


class EventWorld(World):
    """A pipeline, the engines it dispatches to, and everything that happens to them, in a world of its own.

    `models` maps each engine's name to its model. Read `log` for the decisions, `ended` for the tickets that have
    their outcome, `refused` for what was shed with its instant.
    """

    def __init__(
        self,
        config: PipelineConfig,
        models: dict[str, ServingModel],
        *,
        seed: int,
        hands: Callable[[EventWorld], Hands] | None = None,
    ) -> None:
        """`hands` makes what carries out the effects; by default ModelHands."""
        super().__init__()
        self.chance = Random(f"{seed}/world")
        self.models = models
        self.gateway = Gateway(self, Pipeline(config, Random(f"{seed}/core"), self), (hands or ModelHands)(self))
        self.log: list[str] = []
        self.ended: list[Ticket] = []
        self.refused: list[tuple[Instant, Request, Refusal]] = []

    @property
    def pipeline(self) -> Pipeline:
        """What decides; another one may be set before anything happens."""
        return self.gateway.pipeline

    @pipeline.setter
    def pipeline(self, pipeline: Pipeline) -> None:
        self.gateway.pipeline = pipeline

    # ---- what happens ----------------------------------------------------------------------------------------

    def arrivals(self, requests: Iterable[tuple[Instant, Request]]) -> None:
        """Offer each request at its instant."""
        for instant, request in requests:
            self.at(instant, partial(self.offer, request), ARRIVAL)

    def offer(self, request: Request) -> list[Effect]:
        """Offer a request now."""
        self.note(f"offer {request.key}")
        return self.gateway.offer(request)

    def cancel(self, ticket: Ticket, usage: Usage | None = None) -> list[Effect]:
        """The client of this ticket leaves now."""
        self.note(f"cancel {ticket.sequence}")
        return self.gateway.cancel(ticket, usage)

    def report(self, event: Event) -> None:
        """Report an event now."""
        self.note(type(event).__name__.lower())
        self.gateway.report(event)

    def note(self, what: str) -> None:
        """Write to the log what happens now."""
        self.log.append(f"{self.now} {what}")

    # ---- the pipeline's observer -----------------------------------------------------------------------------

    def closed(self, ticket: Ticket) -> None:
        """A ticket has its outcome."""
        self.ended.append(ticket)

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:  # noqa: ARG002
        """A request was refused before it was queued."""
        self.refused.append((self.now, request, refusal))


class ModelHands:
    """Carries out what a world's pipeline asks for: its models work, its log says so."""

    def __init__(self, world: EventWorld) -> None:
        self.world = world

    def start(self, leases: Sequence[Lease]) -> None:
        """Leases were given."""
        world, engine = self.world, leases[0].engine.name
        tickets = ",".join(str(lease.ticket.sequence) for lease in leases)
        world.note(f"dispatch {tickets} to {engine}")
        world.models[engine].start(leases, world)

    def queued(self, ticket: Ticket) -> None:
        """It waits."""
        self.world.note(f"queue {ticket.sequence}")

    def refused(self, request: Request, refusal: Refusal, ticket: Ticket | None) -> None:
        """It was shed or evicted."""
        who = ticket.sequence if ticket else request.key
        self.world.note(f"refuse {who} {refusal.reason.value} {refusal.retry_after_ns}")

    def aborted(self, lease: Lease) -> None:
        """The engine is to stop."""
        self.world.note(f"abort {lease.ticket.sequence}")
        self.world.models[lease.engine.name].abort(lease, self.world)

    def count(self, engine: str, leases: Iterable[Lease]) -> None:
        """What clients have seen is as much as the model has said, by setting `lease.generated`."""


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
