"""Figures from columns are those that the report makes of the same requests' records."""

from __future__ import annotations

import msgspec
import pytest

from forebay.report.records import Objective, PhaseBounds, RequestRecord, RunHeader, RunRecords
from forebay.report.results import RunResult, summarise
from forebay.sim.run import Outcome, Simulation
from forebay.sim.scenario import ClientSpec, EngineSpec, FaultSpec, Scenario, WorkloadSpec

GPU = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"
CONFIG = """
[queue]
depth_limit = 8
[[engines]]
name = "e"
urls = ["http://127.0.0.1:1"]
concurrency = { limit = 20 }
"""
WARM_UP_S, DURATION_S = 2.0, 12.0


def simulate(**fields: object) -> tuple[Simulation, Outcome]:
    given = {
        "name": "n",
        "policy": "p",
        "engines": EngineSpec(
            profile=GPU, count=2, faults=(FaultSpec(kind="crashed", from_s=6, to_s=8, engines=(0,)),)
        ),
        "workload": WorkloadSpec(
            rate=40, duration_s=DURATION_S, keys=4, prompt_tokens="~1000/1", output_tokens="~120/1"
        ),
        "clients": ClientSpec(retry="sdk", patience_s=9.0),
        "config": CONFIG,
        "ttft_ms": 900.0,
        "latency_ms": 7000.0,
        "warm_up_s": WARM_UP_S,
    }
    simulation = Simulation(Scenario(**(given | fields)))  # type: ignore[arg-type]
    simulation.run()
    return simulation, simulation.outcome()


def summarised(simulation: Simulation) -> RunResult:
    header = RunHeader(
        mode="hybrid",
        policy="p",
        workload="n",
        seed=1,
        phases=[PhaseBounds("warm-up", 0.0, WARM_UP_S), PhaseBounds("load", WARM_UP_S, DURATION_S)],
        objective=Objective(900.0, 7000.0),
    )

    def phased(record: RequestRecord) -> RequestRecord:
        return msgspec.structs.replace(record, phase="warm-up" if record.intended_ns < WARM_UP_S * 1e9 else "load")

    return summarise(RunRecords(header, [phased(record) for record in simulation.records.records()], []))


@pytest.mark.parametrize("fields", [{}, {"gateway": False}, {"clients": ClientSpec(stream=False)}], ids=str)
def test_figures_are_those_of_the_report(fields: dict[str, object]) -> None:
    simulation, outcome = simulate(**fields)
    ours, theirs = outcome.result, summarised(simulation)
    assert ours.counts.offered > 300
    assert ours.counts.completed > 50
    for name in (
        "duration_s", "counts", "latency_ms", "ttft_ms", "queue_wait_ms", "served_per_s", "goodput_per_s",
        "goodput_tokens_per_s", "shed_by_reason", "failed_by_error", "wasted_work_ratio", "late_evicted_ratio",
        "jain_index", "attempts_per_request",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name


def test_size_classes_share_out_all_requests() -> None:
    _, outcome = simulate()
    classes, counts = outcome.by_size_class, outcome.result.counts
    assert sum(one.offered for one in classes) == counts.offered
    assert sum(one.shed for one in classes) == counts.shed + counts.evicted
    assert sum(one.completed for one in classes) == counts.completed
    bounds = [one.from_tokens for one in classes]
    assert bounds == sorted(bounds)
    assert len(bounds) >= 3


def test_utilization_is_shown_three_ways() -> None:
    light, heavy = (
        simulate(
            workload=WorkloadSpec(rate=rate, duration_s=DURATION_S, output_tokens="200"),
            engines=EngineSpec(profile=GPU),
        )[1]
        for rate in (0.3, 12.0)
    )
    for one in (light, heavy):
        assert 0 < one.extras.tokens_share < one.result.utilization.busy <= 1  # type: ignore[operator]
        assert 0 < one.extras.kv_share < 1  # type: ignore[operator]
    assert heavy.result.utilization.busy > 0.99  # type: ignore[operator]
    assert heavy.extras.tokens_share > 3 * light.extras.tokens_share  # type: ignore[operator]
    assert heavy.result.utilization.batch > 3 * light.result.utilization.batch  # type: ignore[operator]


def test_tpot_counts_for_the_whole_objective_only() -> None:
    _, loose = simulate()
    _, strict = simulate(tpot_ms=1.0)
    assert loose.result.counts == strict.result.counts
    assert strict.result.goodput_per_s == 0
    assert strict.extras.slo_share == 0 < loose.extras.slo_share  # type: ignore[operator]


def test_an_encoder_serves_without_tokens() -> None:
    from forebay.engines.simulated.catalog import profiles
    from forebay.engines.simulated.profile import EncoderProfile

    encoder = next(name for name, one in profiles().items() if isinstance(one, EncoderProfile))
    workload = WorkloadSpec(rate=200, duration_s=DURATION_S, prompt_tokens="128")
    _, outcome = simulate(engines=EngineSpec(profile=encoder, count=1), workload=workload, clients=ClientSpec())
    assert outcome.result.counts.completed > 500
    assert outcome.result.ttft_ms.p50 is None
    assert outcome.result.goodput_tokens_per_s == pytest.approx(128 * outcome.result.goodput_per_s)
    assert outcome.extras.output_tokens == 0
