"""Seeded traces, and the two ways to run one: the bare core on an event heap, and the live gateway on the jumping loop.

A trace fixes everything from outside beforehand: who arrives when with what, what the engines will do with each
request, who leaves, which engines go away, when the gateway drains. All instants are whole milliseconds, so that
completions, arrivals and timers often fall on the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from forebay.core.batching.dynamic import DynamicConfig
from forebay.core.batching.passthrough import PassThroughConfig
from forebay.core.dispatch.health import HealthConfig
from forebay.core.effects import Abort, Dispatch, Effect, Queued, Refuse
from forebay.core.events import EngineDown, EngineUp, EngineWarming, Event, Failed, Finished, FirstToken, Undelivered
from forebay.core.instant import MILLISECOND, SECOND, Instant
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Lease, Mode, Refusal, Request, Ticket, Usage
from forebay.core.outcome import FailReason
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.live.gateway import Gateway
from forebay.sim.world import ARRIVAL, COMPLETION
from forebay.testing import EventWorld, ModelHands, check_invariants
from forebay.testing.loop import JumpLoop

ENGINES = ("e/0", "e/1")
PLACES = 3
LENGTH = 1500 * MILLISECOND
DRAIN_AT = LENGTH + 100 * MILLISECOND
ABANDON_AT = DRAIN_AT + 150 * MILLISECOND
OVER = ABANDON_AT + 2 * SECOND  # every answer has come


@dataclass(frozen=True)
class Caller:
    """One request of the trace, and what an engine does with it."""

    index: int
    arrives: Instant
    fields: dict[str, Any]
    service_ns: int
    end: Callable[[Lease], Event]
    first_token_ns: int | None
    screened: bool  # its head comes before its body
    leaves: Instant | None


@dataclass(frozen=True)
class Trace:
    config: PipelineConfig
    seed: str
    callers: Sequence[Caller]
    changes: Sequence[tuple[Instant, Event]]


def make_trace(seed: int, mode: Mode) -> Trace:
    """About 300 requests at twice the capacity of two engines, with everything that can go wrong."""
    chance = Random(f"{seed}/trace")
    per_minute = chance.choice((12, 1200))
    limited = KeyLimits(requests_per_minute=per_minute, tokens_per_second=9_000, burst_s=0.5, concurrency=6)
    pool = PoolConfig(
        name="e",
        engines=ENGINES,
        mode=mode,
        hold_ns=300 * MILLISECOND,
        limit=FixedConfig(limit=PLACES, tokens=chance.choice([3_000, 1 << 62])),
        batching=DynamicConfig(max_size=3, linger_ns=4 * MILLISECOND) if seed % 3 == 0 else PassThroughConfig(),
        health=HealthConfig(ejection_ns=80 * MILLISECOND),
    )
    sick = chance.random() < 0.5
    at = 0
    callers: list[Caller] = []
    while at < LENGTH:
        callers.append(_caller(chance, len(callers), at, sick))
        at += chance.choice((0, 1, 2, 4, 5, 8, 15)) * MILLISECOND
    changes: list[tuple[Instant, Event]] = [(0, EngineUp(name)) for name in ENGINES]
    for _ in range(chance.randrange(5)):
        kind = chance.choice((EngineDown, EngineWarming))
        name, gone = chance.choice(ENGINES), chance.randrange(1_200) * MILLISECOND
        changes += [(gone, kind(name)), (gone + chance.randrange(1, 200) * MILLISECOND, EngineUp(name))]
    return Trace(PipelineConfig((pool,), {"limited": KeyTerms(limited)}), str(seed), callers, changes)


def _caller(chance: Random, index: int, at: Instant, sick: bool) -> Caller:
    service_ns = chance.randint(5, 115) * MILLISECOND
    output = chance.randint(1, 400)
    leaves = at + chance.randrange(200) * MILLISECOND if chance.random() < 0.1 else None
    deadline = at + chance.randint(20, 250) * MILLISECOND if chance.random() < 0.15 else None
    return Caller(
        index=index,
        arrives=at,
        fields={
            "key": chance.choice(("a", "b", "limited")),
            "priority": chance.choice((0, 0, 0, 1)),
            "text_bytes": chance.choice((40, 900, 6_000)),
            "max_output_tokens": chance.choice((None, 400)),
            "stream": chance.random() < 0.5,
            "mode": chance.choice((None, None, None, None, *Mode)),
            "deadline": deadline,
        },
        service_ns=service_ns,
        end=_end(chance, Usage(chance.randint(10, 2_000), output), sick),
        first_token_ns=service_ns // 5 if chance.random() < 0.5 else None,
        screened=chance.random() < 0.3,
        leaves=leaves,
    )


def _end(chance: Random, usage: Usage, sick: bool) -> Callable[[Lease], Event]:
    """How the engine will end this request; a sick one fails often enough to be ejected."""
    ends: list[Callable[[Lease], Event]] = [
        partial(Failed, reason=FailReason.ENGINE_ERROR),
        partial(Failed, reason=FailReason.ENGINE_TIMEOUT, usage=usage, blame=False),
        partial(Finished, usage=usage, healthy=False),
        partial(Finished, usage=None),
        Undelivered,
    ]
    weights = [60 if sick else 2, 2, 2, 2, 1]
    well: Callable[[Lease], Event] = partial(Finished, usage=usage)
    return chance.choices([well, *ends], [100, *weights])[0]


@dataclass
class Log:
    """What was decided, in order: (instant, decision, request, figures)."""

    now: Callable[[], Instant]
    index_of: Callable[[Request], int] = lambda request: request.owner.index
    lines: list[tuple[Instant, str, int, object]] = field(default_factory=list)

    def note(self, what: str, request: Request, *figures: object) -> None:
        self.lines.append((self.now(), what, self.index_of(request), figures))

    def carried(self, effects: Sequence[Effect]) -> None:
        """Effects as they are carried out."""
        for effect in effects:
            if isinstance(effect, Dispatch):
                for lease in effect.leases:
                    self.note("dispatched", lease.ticket.request, lease.engine.name)
            elif isinstance(effect, Refuse):
                self.refused(effect.request, effect.refusal)
            elif isinstance(effect, Abort):
                self.note("aborted", effect.lease.ticket.request)
            elif isinstance(effect, Queued):
                self.note("queued", effect.ticket.request, effect.ticket.expires)

    def refused(self, request: Request, refusal: Refusal) -> None:
        self.note("refused", request, refusal.reason, refusal.retry_after_ns, refusal.limit, refusal.actual)

    # The pipeline's observer.

    def closed(self, ticket: Ticket) -> None:
        self.note("closed", ticket.request, ticket.outcome, ticket.reason, ticket.queue_wait_ns, ticket.first_token)

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        self.note("shed", request, refusal.reason, predicted_wait_ns)

    def of(self, *decisions: str) -> Iterator[tuple[Instant, str, int, object]]:
        return (line for line in self.lines if line[1] in decisions)


# ---- the bare core -----------------------------------------------------------------------------------------------


class Simulated(EventWorld):
    """The trace through the pipeline alone."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.config, dict.fromkeys(ENGINES, _ScriptedModel()), seed=0, hands=_Noting)
        self.decisions = Log(lambda: self.now)
        self.tickets: dict[int, Ticket] = {}
        self.pipeline = Pipeline(trace.config, Random(trace.seed), self.decisions)
        self.after_event = self._check
        for instant, event in trace.changes:
            self.at(instant, partial(self.report, event))
        for caller in trace.callers:
            self.at(caller.arrives, partial(self._arrive, caller), ARRIVAL)
            if caller.leaves is not None:
                self.at(caller.leaves, partial(self._leave, caller.index), COMPLETION)
        self.at(DRAIN_AT, self.gateway.drain)
        self.at(ABANDON_AT, self.gateway.abandon)

    def _check(self) -> None:
        if self.gateway.armed != self.now:  # else the timer of this very instant is still to come
            check_invariants(self.pipeline, self.now)

    def _arrive(self, caller: Caller) -> None:
        request = Request(owner=caller, **caller.fields)
        if caller.screened and (refuse := self.pipeline.screen(request, self.now)) is not None:
            self.gateway.apply([refuse])
        else:
            self.offer(request)

    def _leave(self, index: int) -> None:
        if index in self.tickets:
            self.cancel(self.tickets[index], Usage(1, 1, exact=False))


class _Noting(ModelHands):
    """Keeps the tickets and the decisions of a simulated trace."""

    world: Simulated

    def start(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.world.tickets[lease.ticket.request.owner.index] = lease.ticket
        self.world.decisions.carried([Dispatch(tuple(leases))])
        super().start(leases)

    def queued(self, ticket: Ticket) -> None:
        self.world.tickets[ticket.request.owner.index] = ticket
        self.world.decisions.carried([Queued(ticket)])

    def refused(self, request: Request, refusal: Refusal, ticket: Ticket | None) -> None:
        self.world.decisions.refused(request, refusal)

    def aborted(self, lease: Lease) -> None:
        self.world.decisions.carried([Abort(lease)])
        super().aborted(lease)


class _ScriptedModel:
    """An engine that does what each caller's script says."""

    def start(self, leases: Sequence[Lease], world: EventWorld) -> None:
        for lease in leases:
            caller: Caller = lease.ticket.request.owner
            if caller.first_token_ns is not None:
                world.at(world.now + caller.first_token_ns, partial(world.report, FirstToken(lease)))
            world.at(world.now + caller.service_ns, partial(world.report, caller.end(lease)))

    def abort(self, lease: Lease, world: EventWorld) -> None:
        """What the script does next is late, and changes nothing."""


# ---- the live gateway --------------------------------------------------------------------------------------------


class Live:
    """The trace through `live.Gateway` on a real asyncio loop."""

    def __init__(self, trace: Trace) -> None:
        self.loop = JumpLoop()
        self.decisions = Log(self.loop.clock)
        self.pipeline = Pipeline(trace.config, Random(trace.seed), self.decisions)
        self.gateway = Gateway(self.pipeline, self.loop, self.loop.clock)
        self.timers_most = 0
        for instant, event in trace.changes:
            self.happen(instant, partial(self.gateway.report, event))
        for caller in trace.callers:
            owner = _LiveCaller(caller, self)
            self.happen(caller.arrives, owner.arrive, ARRIVAL)
            if caller.leaves is not None:
                self.happen(caller.leaves, owner.leave, COMPLETION)
        self.happen(DRAIN_AT, self.gateway.drain)
        self.happen(ABANDON_AT, self.gateway.abandon)

    def happen(self, instant: Instant, action: Callable[[], object], order: int = COMPLETION) -> None:
        def act() -> None:
            action()
            self.timers_most = max(self.timers_most, len(self.loop.armed))

        self.loop.happen_at(instant, act, order)

    def run(self, until: Instant) -> None:
        try:
            self.loop.run_to(until)
        finally:
            self.loop.close()


class _LiveCaller:
    """A caller as the owner of its request."""

    def __init__(self, caller: Caller, live: Live) -> None:
        self.index = caller.index
        self._caller = caller
        self._live = live
        self._ticket: Ticket | None = None

    def arrive(self) -> None:
        request = Request(owner=self, **self._caller.fields)
        gateway = self._live.gateway
        if self._caller.screened and (refusal := gateway.screen(request)) is not None:
            self._live.decisions.refused(request, refusal)
        else:
            self._request = request
            gateway.offer(request)

    def leave(self) -> None:
        if self._ticket is not None:
            self._live.gateway.cancel(self._ticket, Usage(1, 1, exact=False))

    def queued(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._live.decisions.carried([Queued(ticket)])

    def dispatched(self, lease: Lease) -> None:
        self._ticket = lease.ticket
        live, caller = self._live, self._caller
        live.decisions.carried([Dispatch((lease,))])
        now, report = live.loop.clock(), live.gateway.report
        if caller.first_token_ns is not None:
            live.happen(now + caller.first_token_ns, partial(report, FirstToken(lease)))
        live.happen(now + caller.service_ns, partial(report, caller.end(lease)))

    def refused(self, refusal: Refusal) -> None:
        self._live.decisions.refused(self._request, refusal)

    def aborted(self, lease: Lease) -> None:
        self._live.decisions.carried([Abort(lease)])
