"""The whole HTTP data plane decides as the simulation of the bare core does, for the same trace.

Requests come as bytes on connections, leave as bytes to scripted engines, and end by what these answer, or because the
client closes. Beside it the same requests go through the core on an event heap. What is compared is every end of every
request, its instant, its wait, its engine and its refusal, and the refusals that clients read on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest

from forebay.core.events import EngineUp, Event, Failed, Finished, FirstToken
from forebay.core.instant import MILLISECOND, SECOND, Instant
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Lease, Mode, Refusal, Request, Ticket, Usage
from forebay.core.outcome import FailReason, Outcome
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.core.verdicts import come_back_ns
from forebay.sim.world import ARRIVAL
from forebay.testing import EventWorld, check_empty

from .trace import Log
from .wire import LAST_CHUNK, SSE_HEAD, Client, ScriptedEngine, WiredGateway, answer, event, post

ENGINES = ("e/0", "e/1")
LENGTH = SECOND
OVER = 4 * SECOND
EVENTS = 4  # of a stream, its first token included


@dataclass(frozen=True)
class Case:
    """One request: its bytes, and what its engine answers when."""

    index: int
    arrives: Instant
    wire: bytes
    stream: bool
    service_ns: int
    status: int
    usage: Usage
    leaves: Instant | None

    @property
    def gap_ns(self) -> int:
        """Between the events of its stream."""
        return self.service_ns // EVENTS

    def end(self, lease: Lease) -> Event:
        """What the answer means to the core."""
        if self.status == 200:
            return Finished(lease, self.usage)
        if self.status == 400:
            return Finished(lease, None)
        return Failed(lease, FailReason.ENGINE_ERROR, blame=self.status != 503)


def make_cases(seed: int) -> list[Case]:
    """About 200 requests at twice the capacity; no two things happen in the same nanosecond."""
    chance, at = Random(f"{seed}/http"), 0
    cases: list[Case] = []
    while (at := at + 1 + int(chance.expovariate(200) * SECOND)) < LENGTH:
        stream = chance.random() < 0.5
        body: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": "word " * chance.choice((5, 200, 1_000))}],
        }
        if stream:
            body["stream"] = True
        if chance.random() < 0.5:
            body["max_tokens"] = 300
        headers = [f"x-case: {len(cases)}"]
        if chance.random() < 0.2:
            headers.append(f"x-forebay-deadline-ms: {chance.randint(30, 300)}")
        status = chance.choices((200, 500, 503, 400), (85, 5, 5, 5))[0]
        leaves = at + int(chance.uniform(0, 0.2) * SECOND) if chance.random() < 0.15 else None
        service_ns = chance.randint(5 * MILLISECOND, 110 * MILLISECOND)
        usage = Usage(chance.randint(20, 1_500), chance.randint(1, 300))
        wire = post(body, *headers)
        cases.append(Case(len(cases), at, wire, stream and status == 200, service_ns, status, usage, leaves))
    return cases


def make_config(mode: Mode) -> PipelineConfig:
    pool = PoolConfig("e", ENGINES, mode=mode, hold_ns=300 * MILLISECOND, limit=FixedConfig(limit=3, tokens=6_000))
    return PipelineConfig((pool,), {"anonymous": KeyTerms(KeyLimits(tokens_per_second=60_000, concurrency=60))})


class Ends(Log):
    """Only ends are kept, with the engine that had the request, and each request as the core saw it."""

    def __init__(self, now: Callable[[], Instant], index_of: Callable[[Request], int]) -> None:
        super().__init__(now, index_of)
        self.requests: dict[int, Request] = {}

    def closed(self, ticket: Ticket) -> None:
        engine = ticket.lease.engine.name if ticket.lease is not None else None
        self.requests[self.index_of(ticket.request)] = ticket.request
        figures = (ticket.outcome, ticket.reason, ticket.queue_wait_ns, ticket.first_token, ticket.usage, engine)
        self.note("closed", ticket.request, *figures)

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        self.requests[self.index_of(request)] = request
        self.note("shed", request, refusal.reason, refusal.retry_after_ns, predicted_wait_ns)


# ---- over HTTP ---------------------------------------------------------------------------------------------------


class OverHttp:
    """The trace as bytes."""

    def __init__(self, cases: Sequence[Case], mode: Mode, seed: int) -> None:
        self.cases = cases
        self.ends = Ends(lambda: self.wired.loop.clock(), _index_in_headers)
        self.wired = WiredGateway(make_config(mode), Random(seed), self.ends, self._script)
        self.clients: list[Client] = []
        for case in cases:
            client = self.wired.client()
            self.clients.append(client)
            self.wired.loop.happen_at(case.arrives, partial(client.transport.write, case.wire), ARRIVAL)
            if case.leaves is not None:
                self.wired.loop.happen_at(case.leaves, client.transport.abort)

    def _script(self, engine: ScriptedEngine, headers: dict[bytes, bytes], body: bytes) -> None:
        case = self.cases[int(headers[b"x-case"])]
        loop = self.wired.loop
        now, used = loop.clock(), case.usage
        usage = {"prompt_tokens": used.input_tokens, "completion_tokens": used.output_tokens}
        end: bytes
        if case.stream:
            assert b"include_usage" in body
            for number in range(1, EVENTS):
                delta = event({"choices": [{"delta": {"content": "x"}}]})
                head = SSE_HEAD if number == 1 else b""
                loop.happen_at(now + number * case.gap_ns, partial(engine.send, head + delta))
            end = event({"choices": [], "usage": usage}) + event(None) + LAST_CHUNK
        elif case.status == 200:
            end = answer({"choices": [{"message": {"content": "x"}}], "usage": usage})
        else:
            end = answer({"error": {"message": "scripted"}}, case.status)
        loop.happen_at(now + case.service_ns, partial(engine.send, end))

    def run(self) -> None:
        self.wired.loop.run_to(OVER)


def _index_in_headers(request: Request) -> int:
    (line,) = (line for line in request.owner.forward if line.startswith(b"x-case: "))
    return int(line[8:])


# ---- through the core alone --------------------------------------------------------------------------------------


class Alone(EventWorld):
    """The trace as requests; `requests` are those that the data plane made of the bytes."""

    def __init__(self, cases: Sequence[Case], requests: dict[int, Request], mode: Mode, seed: int) -> None:
        config = make_config(mode)
        super().__init__(config, dict.fromkeys(ENGINES, self), seed=0)
        self.ends = Ends(lambda: self.now, lambda request: request.owner.index)
        self.pipeline = Pipeline(config, Random(seed), self.ends)
        self._tickets: dict[int, Ticket] = {}
        for name in ENGINES:
            self.report(EngineUp(name))
        for case in cases:
            seen = requests[case.index]
            fields = {name: getattr(seen, name) for name in Request.__struct_fields__ if name != "owner"}
            self.at(case.arrives, partial(self._arrive, Request(owner=case, **fields)), ARRIVAL)
            if case.leaves is not None:
                self.at(case.leaves, partial(self._leave, case))

    def _arrive(self, request: Request) -> None:
        for effect in self.offer(request):
            if (ticket := getattr(effect, "ticket", None)) is not None:
                self._tickets[request.owner.index] = ticket

    def _leave(self, case: Case) -> None:
        ticket = self._tickets.get(case.index)
        if ticket is not None:
            usage = None
            if ticket.dispatched:
                events = min(EVENTS - 1, (self.now - ticket.dispatched) // case.gap_ns) if case.stream else 0
                usage = Usage(ticket.demand.input_tokens, events, exact=False)
            self.cancel(ticket, usage)

    # The engines.

    def start(self, leases: Sequence[Lease], world: EventWorld) -> None:
        for lease in leases:
            case: Case = lease.ticket.request.owner
            self._tickets[case.index] = lease.ticket
            if case.stream:
                self.at(self.now + case.gap_ns, partial(self.report, FirstToken(lease)))
            self.at(self.now + case.service_ns, partial(self._end, case, lease))

    def _end(self, case: Case, lease: Lease) -> None:
        if case.status == 503 and lease.open:
            # The engine's own refusal is relayed with a place on the pool's ladder.
            pool = lease.ticket.pool
            come_back_ns(pool, lease.ticket.request, self.now)
        self.report(case.end(lease))

    def abort(self, lease: Lease, world: EventWorld) -> None:
        """What comes later is late."""


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("seed", range(8))
def test_the_data_plane_decides_as_the_core_alone(seed: int, mode: Mode) -> None:
    cases = make_cases(seed)
    http = OverHttp(cases, mode, seed)
    http.run()
    alone = Alone(cases, http.ends.requests, mode, seed)
    alone.run(OVER)
    for number, (ours, theirs) in enumerate(zip(http.ends.lines, alone.ends.lines, strict=False)):
        assert ours == theirs, f"end {number} differs: over HTTP {ours}, alone {theirs}"
    assert len(http.ends.lines) == len(alone.ends.lines) == len(cases)
    check_empty(http.wired.pipeline, OVER)
    _check_wire(http)
    http.wired.close()


def _check_wire(http: OverHttp) -> None:
    """Clients read what was decided."""
    for instant, what, index, figures in http.ends.lines:
        client, case = http.clients[index], http.cases[index]
        assert isinstance(figures, tuple)
        if what == "shed":
            reason, retry_after_ns, _ = figures
            assert client.status in {429, 503}
            assert client.header(b"x-forebay-reason") == reason.value.encode()
            assert client.header(b"retry-after-ms") == b"%d" % -(-retry_after_ns // MILLISECOND)
            assert client.last_at == instant
        elif figures[0] is Outcome.COMPLETED and case.status == 200:
            assert client.status == 200
            micros = figures[2] // 1_000
            assert client.header(b"server-timing") == b"queue;dur=%d.%03d" % divmod(micros, 1_000)
            assert client.last_at == instant
            assert client.got.count(b'"content"') == (EVENTS - 1 if case.stream else 1)
            assert (b'"usage"' in client.got) != case.stream, "a stream's usage was not asked for by the client"


def test_the_traces_end_in_every_way() -> None:
    outcomes = dict.fromkeys(Outcome, 0)
    for seed in range(8):
        http = OverHttp(make_cases(seed), Mode.HYBRID, seed)
        http.run()
        for outcome, count in http.wired.pipeline.outcomes.items():
            outcomes[outcome] += count
        http.wired.close()
    assert min(outcomes.values()) >= 20, outcomes
