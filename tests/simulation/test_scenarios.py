"""Scenarios run twice, and what overload looks like in them."""

from __future__ import annotations

import msgspec
import pytest

from forebay.sim.run import Outcome, run
from forebay.sim.scenario import ClientSpec, EngineSpec, FaultSpec, Scenario, WorkloadSpec

GPU = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"


def scenario(mode: str = "hybrid", **fields: object) -> Scenario:
    """The Azure coding trace for 5 minutes: on the average a third of the engine's capacity, and bursts far beyond."""
    given: dict[str, object] = {
        "name": "code",
        "policy": mode,
        "config": f'[admission]\nmode = "{mode}"\n',
        "engines": EngineSpec(profile=GPU),
        "workload": WorkloadSpec(trace="azure_llm_2023_code", start_s=600, duration_s=300, keys=20),
        "ttft_ms": 1000.0,
    }
    return Scenario(**(given | fields))  # type: ignore[arg-type]


def test_the_same_scenario_gives_the_same_bytes() -> None:
    faults = (FaultSpec(kind="crashed", from_s=100, to_s=130, engines=(1,)),)
    engines = EngineSpec(profile=GPU, count=2, noise=0.05, faults=faults)
    of = scenario(engines=engines, clients=ClientSpec(retry="sdk", patience_s=40.0), gateways=2)
    logs: list[list[str]] = [[], [], []]
    outcomes: list[Outcome] = [run(of, decisions=logs[0]), run(of, decisions=logs[1])]
    run(msgspec.structs.replace(of, seed=2), decisions=logs[2])
    assert len(logs[0]) > 2000
    assert "\n".join(logs[0]) == "\n".join(logs[1]) != "\n".join(logs[2])
    assert msgspec.json.encode(outcomes[0]) == msgspec.json.encode(outcomes[1])
    assert run(of) == outcomes[0], "writing decisions down changes none"


def test_a_bare_engine_under_the_coding_trace_is_as_slow_as_an_independent_simulation_says() -> None:
    """When the traces were collected, a simulation that shares no code gave 6.1 s and 57 s at 35 % of the capacity."""
    workload = WorkloadSpec(trace="azure_llm_2023_code")
    result = run(scenario(workload=workload, gateway=False)).result
    assert result.ttft_ms.p50 == pytest.approx(6_100, rel=0.01)
    assert result.ttft_ms.p99 == pytest.approx(57_000, rel=0.01)
    assert result.counts.completed == result.counts.offered == 8_819


def test_bursts_of_a_real_trace_break_a_bare_engine_and_not_a_guarded_one() -> None:
    bare, guarded = run(scenario(gateway=False)).result, run(scenario()).result
    assert bare.counts.offered == guarded.counts.offered > 500
    assert bare.ttft_ms.p99 > 5 * guarded.ttft_ms.p99  # type: ignore[operator]
    assert guarded.goodput_per_s > bare.goodput_per_s
    assert guarded.counts.shed > 0
    expired = guarded.shed_by_reason.get("expired", 0)
    assert expired / (guarded.counts.completed + guarded.counts.evicted) < 0.03, "bursts of a few seconds, 500 requests"


def test_a_fleet_shares_its_load() -> None:
    spec = EngineSpec(profile=GPU, count=12)
    workload = WorkloadSpec(rate=60.0, duration_s=20.0, keys=50, prompt_tokens="~1000/1", output_tokens="~150/1")
    outcomes = [
        run(scenario(engines=spec, workload=workload, gateways=gateways, engines_shared=shared)).result
        for gateways, shared in ((1, False), (4, False), (4, True))
    ]
    for result in outcomes:
        assert result.counts.completed > 0.9 * result.counts.offered
    # One gateway that sees all engines balances at least as well as four that see three each.
    assert outcomes[0].ttft_ms.p99 <= 1.1 * outcomes[1].ttft_ms.p99  # type: ignore[operator]
