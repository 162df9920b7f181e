"""One slice of a recorded trace through the simulator and through the live driver: the same decision log.

Callers, engines and pipelines are those of `forebay.sim` on both sides. What differs is what is compared: who drives
the pipeline and keeps its timer, `sim.Gateway` on the event heap or `live.Gateway` on a real asyncio loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from forebay.core.events import Event
from forebay.core.instant import SECOND, Instant
from forebay.core.model import Lease, Refusal, Request, Ticket, Usage
from forebay.core.pipeline import Pipeline
from forebay.live.gateway import Gateway
from forebay.report.records import RequestRecord
from forebay.sim.call import Call
from forebay.sim.fronts import Gated
from forebay.sim.journal import Journal
from forebay.sim.run import Parts, Simulation, call_name
from forebay.sim.scenario import ClientSpec, EngineSpec, FaultSpec, Scenario, WorkloadSpec
from forebay.sim.world import Action
from forebay.testing.loop import JumpLoop

CONFIG = """
[slo]
ttft_ms = 800
[admission]
mode = "{mode}"
wait_budget_ms = 120
[queue]
deadline_s = 1.5
[tuner]
{tuner}
[admission.shadow]
{tried}
[[engines]]
name = "llama"
urls = ["http://127.0.0.1:1"]
concurrency = {{ kind = "{window}", limit = 12, tokens = 20000, kv_tokens = 60000{shadow} }}
[classes.first]
priority = 1
[[keys.static]]
id = "k0"
secret = "s0"
limits = {{ concurrency = 4 }}
[[keys.static]]
id = "k1"
secret = "s1"
limits = {{ tokens_per_second = 6000, burst_s = 1.0 }}
[[keys.static]]
id = "k2"
secret = "s2"
class = "first"
limits = {{ requests_per_minute = 30 }}
"""

FAULTS = (
    FaultSpec(kind="crashed", from_s=8.0, to_s=11.0, engines=(1,)),
    FaultSpec(kind="slow", from_s=12.0, to_s=16.0, factor=3.0, engines=(0,)),
    FaultSpec(kind="cold", to_s=2.0, engines=(2,)),
)

OVER = 3600 * SECOND


def scenario(
    mode: str, seed: int, window: str = "fixed", *, tuner: str = "", tried: str = "", shadow: str = "", **fields: object
) -> Scenario:
    """Twenty seconds of the Azure conversation trace, eight times as fast, on three engines."""
    return Scenario(
        name="azure",
        policy=mode,
        config=CONFIG.format(mode=mode, window=window, tuner=tuner, tried=tried, shadow=shadow),
        engines=EngineSpec(profile="a100-80g/llama-3.1-8b/bf16/tp1/vllm", count=3, faults=FAULTS),
        workload=WorkloadSpec(trace="azure_llm_2023_conv", start_s=900, speed=8.0, duration_s=20.0, keys=5),
        clients=ClientSpec(retry="sdk", patience_s=4.0, deadline_ms=9000, max_tokens="power-of-two"),
        seed=seed,
        **fields,  # type: ignore[arg-type]
    )


class _LoopTime:
    """The jumping loop as a world: what the simulator puts on its heap happens here as I/O."""

    def __init__(self, loop: JumpLoop) -> None:
        self._loop = loop

    @property
    def now(self) -> Instant:
        return self._loop.now_ns

    def at(self, instant: Instant, action: Action, order: int = 0) -> None:
        self._loop.happen_at(instant, action, order)


class _Owner:
    """A simulated call as the live gateway sees the owner of a request."""

    def __init__(self, call: Call, request: Request, front: _LiveFront) -> None:
        self.index, self.attempts = call.index, call.attempts
        self.call, self._request, self._front = call, request, front

    def queued(self, ticket: Ticket) -> None:
        self.call.ticket = ticket
        self._front.journal.queued(ticket)

    def dispatched(self, lease: Lease) -> None:
        self.call.ticket, self.call.lease = lease.ticket, lease
        self._front.journal.dispatched((lease,))
        self._front.engine(lease).start((self.call,))

    def refused(self, refusal: Refusal) -> None:
        self._front.journal.refused(self._request, refusal)
        self._front.answers.refused(self.call, refusal)

    def aborted(self, lease: Lease) -> None:
        self._front.journal.aborted(lease)
        self._front.engine(lease).abort(self.call)


class _SeeingGateway(Gateway):
    """On the wire every piece of a stream moves the count of its lease; here it is taken when it is looked at."""

    def __init__(self, pipeline: Pipeline, loop: JumpLoop, front: _LiveFront) -> None:
        super().__init__(pipeline, loop, loop.clock)
        self._front = front

    def offer(self, request: Request) -> None:
        self._see()
        super().offer(request)

    def cancel(self, ticket: Ticket, usage: Usage | None) -> None:
        self._see()
        super().cancel(ticket, usage)

    def report(self, event: Event) -> None:
        self._see()
        super().report(event)

    def _wake(self) -> None:
        self._see()
        super()._wake()

    def _see(self) -> None:
        for _, engine in self.pipeline.learning:
            self._front.count(engine.name, engine.leases)


class _LiveFront(Gated):
    journal: Journal

    def offer(self, call: Call, request: Request) -> None:
        request.owner = _Owner(call, request, self)
        super().offer(call, request)

    def count(self, engine: str, leases: Iterable[Lease]) -> None:
        for lease in leases:
            call = lease.ticket.request.owner.call
            lease.generated = self.engine(lease).made(call) if call.first_token else 0


def live(of: Scenario, decisions: list[str]) -> Parts:
    """The scenario with every pipeline in a live gateway."""
    loop = JumpLoop()
    parts = Parts(of, of.loaded(), _LoopTime(loop), front=_LiveFront)
    for number in range(of.gateways):
        front = parts.gated(number)
        front.journal = Journal(decisions, number, loop.clock, call_name)
        front.driver = _SeeingGateway(parts.pipeline(number, front.journal), loop, front)
        parts.connect(number, front)
    try:
        parts.begin()
        loop.run_to(OVER)
    finally:
        loop.close()
    assert parts.callers.open == 0
    return parts


@pytest.mark.parametrize("gateways", [1, 2])
@pytest.mark.parametrize("mode", ["backpressure", "admission", "hybrid"])
def test_a_recorded_trace_is_decided_alike_live_and_simulated(mode: str, gateways: int) -> None:
    _compare(scenario(mode, gateways, gateways=gateways, engines_shared=gateways == 2))


@pytest.mark.parametrize("window", ["guarded", "aimd"])
def test_with_a_window_that_is_learned_too(window: str) -> None:
    _compare(scenario("hybrid", 3, window))


@pytest.mark.parametrize(
    "tuner", ['interval_s = 1\nshadow = "stepwise"', 'kind = "stepwise"\ninterval_s = 2\nleast = 1\nshadow = "derived"']
)
def test_with_a_depth_that_is_tuned_too(tuner: str) -> None:
    ours, theirs = (pipeline.pools[0].tuning for pipeline in _compare(scenario("hybrid", 4, tuner=tuner)))
    assert ours.shadow is not None
    assert theirs.shadow is not None
    assert ours.acting.looks > 5
    assert ours.acting.changes + ours.shadow.changes > 0
    assert (ours.acting.log, ours.shadow.log) == (theirs.acting.log, theirs.shadow.log)


SHADOWS = {
    "tuner": 'shadow = "stepwise"\ninterval_s = 2',
    "tried": "wait_budget_ms = 400\nlate_share = 0.1\nfair_share = true\nretry_budget = true\nwaiting_room = 3\n"
    "retry = { headroom = 0.5 }\n[queue.shadow]\norder = 'adaptive'\n[classes.first.shadow]\nhold_back = 0.3",
    "shadow": ', shadow = { kind = "guarded", kv_tokens = 60000 }',
}


@pytest.mark.parametrize("window", ["fixed", "aimd", "guarded"])
def test_settings_in_shadow_change_no_decision(window: str) -> None:
    """With shadows of everything, live and simulated are alike, and both are as without any."""
    ours, theirs = _compare(scenario("hybrid", 5, window, **SHADOWS))
    shadows = ours.pools[0].shadows, theirs.pools[0].shadows
    assert shadows[0] is not None
    assert shadows[1] is not None
    assert shadows[0].counts == shadows[1].counts
    always = {"window", "depth", "wait_budget", "fair_share", "hold_back", "retry_after", "order"}
    assert always <= {policy for policy, _ in shadows[0].counts} <= {*always, "retry_budget", "waiting_room"}
    plain: list[str] = []
    Simulation(scenario("hybrid", 5, window, tuner="interval_s = 2"), decisions=plain).run()
    beside: list[str] = []
    Simulation(scenario("hybrid", 5, window, **SHADOWS), decisions=beside).run()
    assert plain == beside


def _compare(of: Scenario) -> tuple[Pipeline, Pipeline]:
    """Run it live and simulated; the first pipeline of each."""
    ours: list[str] = []
    parts = live(of, ours)
    theirs: list[str] = []
    simulation = Simulation(of, decisions=theirs)
    simulation.run()
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        assert one == other, f"decision {number} differs: live {one!r}, simulated {other!r}"
    assert len(ours) == len(theirs)
    assert _rows(parts) == _rows(simulation.parts)
    return parts.callers.fronts[0].driver.pipeline, simulation.pipelines[0]


def _rows(parts: Parts) -> list[RequestRecord]:
    return list(parts.callers.records.records())


def test_the_trace_holds_what_it_is_meant_to_hold() -> None:
    """Overload, limits, expiries, cancels, failures and retries, at hundreds of requests."""
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for mode in ("backpressure", "admission", "hybrid"):
        lines: list[str] = []
        simulation = Simulation(scenario(mode, 1), decisions=lines)
        simulation.run()
        kinds.update(line.split()[2] for line in lines)
        reasons.update(line.split()[4] for line in lines if line.split()[2] == "refuse")
        assert len(simulation.records) > 500
    assert min(kinds[kind] for kind in ("offer", "dispatch", "queue", "refuse", "abort", "close", "shed")) >= 10, kinds
    for reason in ("key_requests", "key_tokens", "key_concurrency", "queue_wait", "queue_full", "expired"):
        assert reasons[reason] >= 5, reasons
