"""Whatever is simulated: no request is lost, nothing happens before its cause, and no engine is over its limits."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.core.outcome import Outcome
from forebay.report.records import NEVER
from forebay.sim.engines import LanguageEngine
from forebay.sim.records import COMPLETED
from forebay.sim.run import Simulation
from forebay.sim.scenario import ClientSpec, EngineSpec, FaultSpec, Scenario, WorkloadSpec
from forebay.testing import check_empty

GPU = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"
PLACES, TOKENS = 6, 9_000

CONFIG = """
[admission]
mode = "{mode}"
[queue]
deadline_s = 2
depth_limit = 12
[batching]
kind = "{batching}"
max_size = 4
linger_ms = 3
[[engines]]
name = "e"
urls = ["http://127.0.0.1:1"]
concurrency = {{ kind = "fixed", limit = {places}, tokens = {tokens} }}
[[keys.static]]
id = "k0"
secret = "s"
limits = {{ requests_per_minute = 90, tokens_per_second = 3000, concurrency = 3 }}
"""

whole = st.integers(0, 2**16)
faults = st.builds(
    lambda kind, start, length, factor, engines: FaultSpec(
        kind=kind, from_s=start / 2, to_s=(start + length) / 2, factor=factor, engines=engines
    ),
    st.sampled_from(("slow", "stalled", "crashed", "cold", "lying")),
    st.integers(0, 10),
    st.integers(1, 6),
    st.sampled_from((0.5, 3.0)),
    st.sampled_from(((), (0,), (1,))),
)
engines = st.builds(
    EngineSpec,
    profile=st.just(GPU),
    count=st.integers(2, 3),
    max_num_seqs=st.sampled_from((4, 64)),
    max_num_batched_tokens=st.just(512),
    kv_tokens=st.sampled_from((6_000, 50_000)),
    reserve_output=st.booleans(),
    prefix_cache=st.booleans(),
    noise=st.sampled_from((0.0, 0.1)),
    faults=st.lists(faults, max_size=3).map(tuple),
)
clients = st.builds(
    ClientSpec,
    retry=st.sampled_from(("none", "sdk", "sdk-tickets", "sdk-2025", "naive")),
    patience_s=st.sampled_from((None, 1.0, 6.0)),
    deadline_ms=st.sampled_from((None, 1500)),
    max_tokens=st.sampled_from(("unset", "power-of-two", "exact")),
    stream=st.booleans(),
)
workloads = st.builds(
    WorkloadSpec,
    rate=st.sampled_from((3.0, 12.0, 40.0)),
    duration_s=st.just(6.0),
    arrivals=st.sampled_from(("poisson", "gamma", "constant")),
    prompt_tokens=st.sampled_from(("~600/1", "40", "3000-7000")),
    output_tokens=st.sampled_from(("~80/1", "1", "200")),
    keys=st.integers(1, 3),
)
configs = st.builds(
    CONFIG.format,
    mode=st.sampled_from(("backpressure", "admission", "hybrid")),
    batching=st.sampled_from(("passthrough", "dynamic")),
    places=st.just(PLACES),
    tokens=st.just(TOKENS),
)
scenarios = st.builds(
    Scenario,
    name=st.just("any"),
    policy=st.just("any"),
    config=configs,
    engines=engines,
    workload=workloads,
    clients=clients,
    gateways=st.integers(1, 2),
    engines_shared=st.booleans(),
    spread=st.sampled_from(("in-turn", "by-key")),
    gateway=st.sampled_from((True, True, True, False)),
    seed=whole,
).filter(lambda scenario: next(scenario.workload.stream(scenario.seed), None) is not None)  # bursty ones may be empty


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios)
def test_nothing_is_lost_early_or_too_much(scenario: Scenario) -> None:
    lines: list[str] = []
    simulation = Simulation(scenario, decisions=lines)
    simulation.world.after_event = lambda: _within_limits(simulation)
    simulation.run()
    _conserved(simulation)
    _causal(simulation, lines)


def _within_limits(simulation: Simulation) -> None:
    for engine in simulation.engines:
        assert isinstance(engine, LanguageEngine)
        model = engine.model
        assert model.num_running <= model.limits.max_num_seqs
        assert model.kv_used <= model.limits.kv_tokens
    for pipeline in simulation.pipelines:
        for pool in pipeline.pools:
            for one in pool.engines:
                assert one.places <= PLACES
                assert one.tokens <= TOKENS or one.places == 1


def _conserved(simulation: Simulation) -> None:
    records, outcome = simulation.records, simulation.outcome()
    counts = outcome.result.counts
    assert counts.offered == len(records) == outcome.speed.requests
    assert counts.offered == counts.completed + counts.shed + counts.evicted + counts.cancelled + counts.failed
    assert all(engine.held == 0 for engine in simulation.engines)
    for pipeline in simulation.pipelines:
        check_empty(pipeline, simulation.world.now)
    if simulation.scenario.gateway:
        # One that its engine refuses for good has got its answer, as far as a gateway can tell.
        refused = sum(records.status[row] == 400 for row in range(len(records)))
        completed = sum(pipeline.outcomes[Outcome.COMPLETED] for pipeline in simulation.pipelines)
        assert completed == counts.completed + refused
        assert sum(pipeline.offered for pipeline in simulation.pipelines) == sum(records.attempts)


def _causal(simulation: Simulation, lines: list[str]) -> None:
    records = simulation.records
    for row in range(len(records)):
        intended, first, done = records.intended_ns[row], records.first_token_ns[row], records.done_ns[row]
        assert intended <= done
        assert first == NEVER or intended < first <= done
        assert records.queue_wait_ns[row] <= done - intended
        assert records.output_tokens[row] >= 0
        if records.outcome[row] == COMPLETED:
            assert records.output_tokens[row] >= records.asked_tokens[row]
            assert done > intended
    instants = [int(line.split(" ", 1)[0]) for line in lines]
    assert instants == sorted(instants)
    per_request = Counter(line.split()[3] for line in lines if line.split()[2] in {"close", "shed"})
    assert set(per_request.values()) <= {1}, "an attempt ended twice"


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios, scenarios)
def test_worlds_do_not_disturb_each_other(one: Scenario, other: Scenario) -> None:
    """Two in turns, a tenth of a second each, decide as each does alone."""
    alone: list[list[str]] = [[], []]
    mixed: list[list[str]] = [[], []]
    for lines, scenario in zip(alone, (one, other), strict=True):
        Simulation(scenario, decisions=lines).run()
    pair = [Simulation(scenario, decisions=lines) for lines, scenario in zip(mixed, (one, other), strict=True)]
    for simulation in pair:
        simulation.parts.begin()
    for turn in range(1, 100):
        for simulation in pair:
            simulation.world.run(turn * 100_000_000)
    for simulation in pair:
        simulation.world.run_out()
    for ours, theirs in zip(mixed, alone, strict=True):
        assert "\n".join(ours) == "\n".join(theirs)
