"""Scenarios are plain data, with a name that follows from the content."""

from __future__ import annotations

import msgspec
import pytest

from forebay.errors import ConfigError, UsageError
from forebay.sim.run import Simulation
from forebay.sim.scenario import ClientSpec, EngineSpec, FaultSpec, Scenario, WorkloadSpec, scenario_from

GPU = "h100-80g/llama-3.1-8b/bf16/tp1/trtllm"


def scenario(**fields: object) -> Scenario:
    given = {
        "name": "n",
        "policy": "p",
        "engines": EngineSpec(profile=GPU, count=2, faults=(FaultSpec(kind="slow", from_s=1, engines=(1,)),)),
        "workload": WorkloadSpec(rate=10, duration_s=2, keys=3),
    }
    return Scenario(**(given | fields))  # type: ignore[arg-type]


def test_a_scenario_survives_json_and_keeps_its_digest() -> None:
    one = scenario(clients=ClientSpec(retry="sdk", patience_s=3.0))
    other = msgspec.json.decode(msgspec.json.encode(one), type=Scenario)
    assert one == other
    assert one.digest() == other.digest()
    assert len(one.digest()) == 32


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"config": "[slo]\nttft_ms = 5\n"}, {"gateways": 2}, {"warm_up_s": 1.0}]
)
def test_every_change_changes_the_digest(change: dict[str, object]) -> None:
    assert scenario(**change).digest() != scenario().digest()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"name": "n"}, "missing required field `policy`"),
        ({"retries": 3}, "unknown field `retries`"),
        ({"workload": {"trace": "t", "rate": 3.0}}, "either a trace or a rate"),
        ({"workload": {"rate": 3.0}}, "needs a duration_s"),
        ({"engines": {"profile": GPU, "count": 0}}, "engines.count"),
        ({"gateways": 3}, "3 gateways cannot each own one of 1 engines"),
        ({"engines": {"profile": GPU, "faults": [{"kind": "slow", "engines": [4]}]}}, "a fault names engine 4"),
        ({"engines": {"profile": GPU, "faults": [{"kind": "stalled"}]}}, "a stall needs an end"),
        ({"engines": {"profile": GPU, "faults": [{"kind": "slow", "from_s": 4, "to_s": 4}]}}, "before it begins"),
    ],
)
def test_what_is_no_scenario_is_said_with_the_field(data: dict[str, object], told: str) -> None:
    base = {"name": "n", "policy": "p", "engines": {"profile": GPU}, "workload": {"rate": 3.0, "duration_s": 1.0}}
    if data == {"name": "n"}:
        base = {}
    with pytest.raises(UsageError) as error:
        scenario_from(base | data)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("fields", "error", "told"),
    [
        ({"config": "[admission]\nmood = 1\n"}, ConfigError, "mood"),
        ({"engines": EngineSpec(profile="h100/none")}, UsageError, "there is no profile"),
        (
            {"engines": EngineSpec(profile=GPU, max_num_seqs=64, max_num_batched_tokens=8)},
            UsageError,
            "must be at least",
        ),
        ({"warm_up_s": 9.0}, UsageError, "warm-up of 9 s"),
        ({"workload": WorkloadSpec(rate=1e-6, duration_s=1)}, UsageError, "holds no request"),
        ({"workload": WorkloadSpec(rate=1, duration_s=9, prompt_tokens="many")}, UsageError, "not a size"),
        ({"workload": WorkloadSpec(trace="no/such.csv")}, UsageError, "no/such"),
    ],
)
def test_what_cannot_be_run_is_a_users_error(fields: dict[str, object], error: type[Exception], told: str) -> None:
    with pytest.raises(error) as raised:
        Simulation(scenario(**fields))
    assert told in str(raised.value)


def test_streams_of_chance_are_apart() -> None:
    one = WorkloadSpec(rate=50, duration_s=2, keys=3).draw(1)
    other = WorkloadSpec(rate=50, duration_s=2, keys=3, prompt_tokens="~700/1").draw(1)
    assert [a.at_ns for a in one] == [a.at_ns for a in other]
    assert [a.key for a in one] == [a.key for a in other]
    assert one != WorkloadSpec(rate=50, duration_s=2, keys=3).draw(2)


def test_the_first_engine_entry_gives_name_and_limits() -> None:
    config = (
        '[[engines]]\nname = "a"\nurls = ["http://h:1", "http://h:2"]\nmodels = ["m"]\nconcurrency = { limit = 7 }\n'
    )
    simulation = Simulation(scenario(config=config))
    (pool,) = simulation.pipelines[0].pools
    assert [engine.name for engine in pool.engines] == ["a/0", "a/1"]
    assert {engine.limit.requests for engine in pool.engines} == {7}
    simulation.run()
    assert simulation.outcome().result.counts.offered == len(simulation.records)
