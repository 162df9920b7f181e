"""What stands between callers and engines: a Forebay gateway, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from forebay.config.schema import Timeouts
from forebay.core.events import Event, Failed, Finished, FirstToken, Undelivered
from forebay.core.instant import SECOND, Instant
from forebay.core.model import Lease, Refusal, Request, Ticket, Usage
from forebay.core.outcome import FailReason
from forebay.sim.call import Call
from forebay.sim.engines import SimulatedEngine
from forebay.sim.journal import Journal
from forebay.sim.world import Time

ENGINE_REFUSED, UNREACHABLE = "engine_refused", "unreachable"
"""Why a call failed that no gateway has a word for: the engine's own 400, and a connection that nobody took."""


class Answers(Protocol):
    """How callers hear of the end of an attempt. None of it may offer again before it returns."""

    def completed(self, call: Call) -> None:
        """The answer is whole."""
        ...

    def refused(self, call: Call, refusal: Refusal) -> None:
        """It was shed or evicted."""
        ...

    def broken(self, call: Call, reason: str, made: int) -> None:
        """The engine failed after so many tokens, or refused it."""
        ...


class Driver(Protocol):
    """A gateway, simulated or live."""

    def offer(self, request: Request) -> object:
        """Decide a request."""
        ...

    def cancel(self, ticket: Ticket, usage: Usage | None) -> object:
        """Its client left."""
        ...

    def report(self, event: Event) -> object:
        """Pass on what happened at an engine."""
        ...


class Gated:
    """Calls pass a gateway. `engines` are those that it dispatches to, by name; `driver` must be set before use."""

    driver: Driver

    def __init__(self, world: Time, engines: dict[str, SimulatedEngine], answers: Answers, timeouts: Timeouts) -> None:
        """`timeouts`: how long the gateway waits for a silent engine."""
        self._first_byte_ns, self._idle_ns = int(timeouts.first_byte_s * SECOND), int(timeouts.idle_s * SECOND)
        self.journal: Journal | None = None
        self._world = world
        self._engines = engines
        self._counted: dict[str, int] = {}  # how far each was when its leases were last counted
        self.answers = answers

    def engine(self, lease: Lease) -> SimulatedEngine:
        """Whom a lease is for."""
        return self._engines[lease.engine.name]

    # ---- from callers ----------------------------------------------------------------------------------------

    def offer(self, call: Call, request: Request) -> None:  # noqa: ARG002
        """A caller sends it."""
        if self.journal is not None:
            self.journal.offered(request)
        self.driver.offer(request)

    def leave(self, call: Call) -> int:
        """Its caller has gone; what was streamed to it is charged."""
        ticket = call.ticket
        assert ticket is not None
        if call.lease is None:
            self.driver.cancel(ticket, None)
            return 0
        made = self.engine(call.lease).made(call)
        call.lease.generated = made if call.first_token else 0
        self.driver.cancel(ticket, Usage(ticket.demand.input_tokens, made if ticket.request.stream else 0, exact=False))
        return made

    # ---- from engines ----------------------------------------------------------------------------------------

    def first_token(self, call: Call) -> None:
        """The first token exists: the client of a stream sees it."""
        request, lease = call.request, call.lease
        assert request is not None
        assert lease is not None
        if request.stream:
            call.first_token = self._world.now
            self._counted.pop(lease.engine.name, None)
            self.driver.report(FirstToken(lease))

    def finished(self, call: Call, input_tokens: int, output_tokens: int) -> None:
        """The last token exists."""
        assert call.lease is not None
        if not call.first_token:
            self.driver.report(FirstToken(call.lease))  # an answer that is no stream comes in one piece
        else:
            call.lease.generated = call.output_tokens
        self.driver.report(Finished(call.lease, Usage(input_tokens, output_tokens)))
        self.answers.completed(call)

    def failed(self, call: Call, reason: FailReason, made: int, *, blame: bool) -> None:
        """The engine broke off, or refused it for a reason of its own."""
        ticket, lease = call.ticket, call.lease
        assert ticket is not None
        assert lease is not None
        streamed = made if ticket.request.stream else 0
        if call.first_token:
            lease.generated = made
        usage = Usage(ticket.demand.input_tokens, streamed, exact=False) if streamed else None
        self.driver.report(Failed(lease, reason, usage, blame=blame))
        self.answers.broken(call, reason.value, made)

    def unfit(self, call: Call) -> None:
        """The engine answers 400."""
        assert call.lease is not None
        self.driver.report(Finished(call.lease, None))
        self.answers.broken(call, ENGINE_REFUSED, 0)

    def undelivered(self, call: Call) -> None:
        """The gateway sends it to another engine, or evicts it."""
        lease = call.lease
        assert lease is not None
        call.restart()
        self.driver.report(Undelivered(lease))

    def stalled(self, call: Call, until: Instant) -> None:
        """The gateway's patience with a silent engine may end before that. Only here: a busy engine is not silent."""
        lease, ticket = call.lease, call.ticket
        assert lease is not None
        assert ticket is not None
        now = self._world.now
        ends = now + self._idle_ns if call.first_token else max(now, ticket.dispatched + self._first_byte_ns)
        if ends < until:
            self._world.at(ends, partial(self._time_out, call, lease))

    def _time_out(self, call: Call, lease: Lease) -> None:
        if lease.open:
            engine = self.engine(lease)
            made = engine.made(call)
            engine.abort(call)
            self.failed(call, FailReason.ENGINE_TIMEOUT, made, blame=True)

    # ---- from the gateway ------------------------------------------------------------------------------------

    def start(self, leases: Sequence[Lease]) -> None:
        """Send these to their engine."""
        if self.journal is not None:
            self.journal.dispatched(leases)
        calls = []
        for lease in leases:
            ticket = lease.ticket
            call: Call = ticket.request.owner
            call.ticket, call.lease = ticket, lease
            calls.append(call)
        self.engine(leases[0]).start(calls)

    def queued(self, ticket: Ticket) -> None:
        """It waits."""
        ticket.request.owner.ticket = ticket
        if self.journal is not None:
            self.journal.queued(ticket)

    def refused(self, request: Request, refusal: Refusal, ticket: Ticket | None) -> None:  # noqa: ARG002
        """Its caller is told."""
        if self.journal is not None:
            self.journal.refused(request, refusal)
        self.answers.refused(request.owner, refusal)

    def aborted(self, lease: Lease) -> None:
        """The engine frees it at once."""
        if self.journal is not None:
            self.journal.aborted(lease)
        self.engine(lease).abort(lease.ticket.request.owner)

    def count(self, engine: str, leases: Iterable[Lease]) -> None:
        """What the clients of streams have seen so far. It is asked for more often than engines make steps."""
        working = self._engines[engine]
        progress = working.progress
        if self._counted.get(engine) != progress:
            self._counted[engine] = progress
            working.count(leases)


class Direct:
    """No gateway: calls are dealt out to the engines in turn, and wait there."""

    def __init__(self, world: Time, engines: Sequence[SimulatedEngine], answers: Answers) -> None:
        self._world = world
        self._engines = engines
        self.answers = answers
        self._turn = 0
        self._engine_of: dict[int, SimulatedEngine] = {}

    def offer(self, call: Call, request: Request) -> None:  # noqa: ARG002
        """A caller sends it to the next engine."""
        engine = self._engines[self._turn % len(self._engines)]
        self._turn += 1
        self._engine_of[call.index] = engine
        engine.start((call,))

    def leave(self, call: Call) -> int:
        """Its connection closes, which the engine sees."""
        engine = self._engine_of.pop(call.index)
        made = engine.made(call)
        engine.abort(call)
        return made

    def first_token(self, call: Call) -> None:
        """The client of a stream sees it."""
        if call.request is not None and call.request.stream:
            call.first_token = self._world.now

    def finished(self, call: Call, input_tokens: int, output_tokens: int) -> None:  # noqa: ARG002
        """The answer is whole."""
        del self._engine_of[call.index]
        self.answers.completed(call)

    def failed(self, call: Call, reason: FailReason, made: int, *, blame: bool) -> None:  # noqa: ARG002
        """The connection breaks."""
        del self._engine_of[call.index]
        self.answers.broken(call, reason.value, made)

    def unfit(self, call: Call) -> None:
        """The engine answers 400."""
        del self._engine_of[call.index]
        self.answers.broken(call, ENGINE_REFUSED, 0)

    def undelivered(self, call: Call) -> None:
        """Nobody takes the connection."""
        del self._engine_of[call.index]
        self.answers.broken(call, UNREACHABLE, 0)

    def stalled(self, call: Call, until: Instant) -> None:
        """There is nobody to wait less long than the caller."""
