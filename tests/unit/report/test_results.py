"""Results against cases worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import UsageError
from forebay.report.engine_metrics import engine_sample
from forebay.report.records import (
    EngineSample,
    Objective,
    PhaseBounds,
    RecordWriter,
    RequestRecord,
    RunHeader,
    RunRecords,
    classify,
    read_run,
    stitch,
)
from forebay.report.results import Results, count, environment, summarise, utilization, wasted_work, within
from forebay.report.statistics import interpolate, jain_index, percentile

S = 1_000_000_000
MS = 1_000_000


def request(at_s: float, outcome: str, latency_ms: float = 100.0, **fields: Any) -> RequestRecord:
    start_ns = int(at_s * S)
    given: dict[str, Any] = {
        "index": int(at_s * 1000),
        "phase": "a" if at_s < 10 else "b",
        "key": "k",
        "outcome": outcome,
        "intended_ns": start_ns,
        "sent_ns": start_ns,
        "first_token_ns": -1,
        "done_ns": start_ns + int(latency_ms * MS),
        "status": 200,
        "attempts": 1,
    }
    return RequestRecord(**{**given, **fields})


def run_of(*requests: RequestRecord, samples: tuple[EngineSample, ...] = (), **header: Any) -> RunRecords:
    phases = [PhaseBounds("a", 0, 10), PhaseBounds("b", 10, 20)]
    given: dict[str, Any] = {"mode": "hybrid", "policy": "p", "workload": "w", "seed": 1, "phases": phases}
    return RunRecords(RunHeader(**{**given, **header}), list(requests), list(samples))


@pytest.mark.parametrize(
    ("data", "share", "expected"),
    [
        ([], 0.5, None),
        ([7.0], 0.5, 7.0),
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0),
        (list(range(1, 101)), 0.5, 50),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 102)), 0.99, 100),
        (list(range(1, 1001)), 0.99, 990),
        (list(range(1, 100)), 0.99, 99),
        ([1.0, 2.0], 0.0, 1.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_percentile(data: list[float], share: float, expected: float | None) -> None:
    assert percentile(data, share) == expected


def test_jain_index() -> None:
    assert jain_index([5, 5, 5]) == pytest.approx(1.0)
    assert jain_index([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain_index([1, 2, 3]) == pytest.approx(36 / 42)
    assert jain_index([4]) is None
    assert jain_index([0, 0]) is None


def test_interpolation_of_a_counter() -> None:
    points = [(1.0, 10.0), (3.0, 30.0), (3.0, 30.0), (5.0, 30.0)]
    assert [interpolate(points, at) for at in (0.0, 1.0, 2.0, 3.0, 4.0, 9.0)] == [10, 10, 20, 30, 30, 30]
    assert interpolate([], 1.0) is None


@pytest.mark.parametrize(
    ("status", "reason", "complete", "left", "outcome"),
    [
        (200, "", True, False, "completed"),
        (200, "", False, False, "failed"),
        (200, "", True, True, "cancelled"),
        (0, "", False, True, "cancelled"),
        (0, "", False, False, "failed"),
        (503, "queue_full", True, False, "shed"),
        (429, "key_tokens", True, False, "shed"),
        (413, "never_fits", True, False, "shed"),
        (529, "queue_wait", True, False, "shed"),
        (503, "expired", True, False, "evicted"),
        (503, "displaced", True, False, "evicted"),
        (503, "", True, False, "failed"),
        (429, "", True, False, "failed"),
        (502, "engine_error", True, False, "failed"),
        (504, "engine_timeout", True, False, "failed"),
        (401, "invalid_key", True, False, "failed"),
    ],
)
def test_classification(status: int, reason: str, complete: bool, left: bool, outcome: str) -> None:
    assert classify(status, reason, complete=complete, left=left) == outcome


def test_counts_conserve_requests() -> None:
    counts = count([request(index, outcome) for index, outcome in enumerate(["completed", "shed", "shed", "failed"])])
    assert (counts.offered, counts.completed, counts.shed, counts.failed) == (4, 1, 2, 1)


def test_an_unknown_outcome_breaks_conservation_loudly() -> None:
    with pytest.raises(AssertionError, match="1 requests were offered but 0 ended"):
        count([request(0, "lost")])


def test_the_objective_bounds_first_token_and_latency() -> None:
    fast = request(0, "completed", 100, first_token_ns=30 * MS)
    assert within(fast, Objective())
    assert within(fast, Objective(ttft_ms=30, latency_ms=100))
    assert not within(fast, Objective(ttft_ms=29))
    assert not within(fast, Objective(latency_ms=99))
    assert not within(request(0, "shed"), Objective())
    # Without a stream the first token is seen with the last.
    assert not within(request(0, "completed", 100), Objective(ttft_ms=50))


def test_a_run_worked_out_by_hand() -> None:
    result = summarise(
        run_of(
            request(1, "completed", 500, output_tokens=10, queue_wait_ms=1.0, attempts=2),
            request(2, "completed", 1500, output_tokens=30, queue_wait_ms=900.0),
            request(3, "shed", reason="queue_wait", status=503),
            request(9.5, "completed", 1000, output_tokens=20),  # ends in the next phase
            request(11, "cancelled", output_tokens=5, status=200),
            request(12, "evicted", reason="expired", status=503),
            request(19.9, "completed", 600, output_tokens=15),  # ends after the load
            request(13, "failed", status=500),
            objective=Objective(latency_ms=1000),
        )
    )
    assert (result.counts.offered, result.counts.completed, result.counts.evicted) == (8, 4, 1)
    assert result.duration_s == 20
    # Completions inside the window: at 1.5, 3.5 and 10.5 s; within the objective: the first and the last.
    assert result.served_per_s == pytest.approx(3 / 20)
    assert result.goodput_per_s == pytest.approx(2 / 20)
    assert result.goodput_tokens_per_s == pytest.approx(30 / 20)
    assert (result.latency_ms.p50, result.latency_ms.p99) == (600, 1500)
    assert (result.queue_wait_ms.p50, result.queue_wait_ms.p99) == (1.0, 900.0)
    assert result.ttft_ms.p50 is None
    # Tokens 10 + 30 + 20 + 5 + 15; late 30, abandoned 5.
    assert result.wasted_work_ratio == pytest.approx(35 / 80)
    assert result.shed_by_reason == {"expired": 1, "queue_wait": 1}
    assert result.late_evicted_ratio == pytest.approx(1 / 7)
    assert result.attempts_per_request == pytest.approx(9 / 8)
    first, second = result.phases
    assert (first.counts.offered, second.counts.offered) == (4, 4)
    # The rate belongs to the time, the count to the request.
    assert (first.served_per_s, second.served_per_s) == (pytest.approx(0.2), pytest.approx(0.1))
    assert (first.counts.completed, second.counts.completed) == (3, 1)


def test_the_warm_up_counts_for_nothing() -> None:
    phases = [PhaseBounds("warm-up", 0, 10), PhaseBounds("b", 10, 20)]
    result = summarise(run_of(request(1, "failed", phase="warm-up"), request(11, "completed"), phases=phases))
    assert (result.counts.offered, result.counts.completed, result.duration_s) == (1, 1, 10)
    assert [phase.name for phase in result.phases] == ["b"]


def test_a_request_without_a_phase_is_caught() -> None:
    with pytest.raises(AssertionError, match="belongs to no phase"):
        summarise(run_of(request(1, "completed", phase="c")))


def test_embeddings_are_measured_in_prompt_tokens() -> None:
    records = [request(0, "completed", 50, prompt_tokens=30), request(1, "completed", 150, prompt_tokens=10)]
    assert wasted_work(records, Objective(latency_ms=100)) == pytest.approx(0.25)
    assert wasted_work([request(0, "shed")], Objective()) == 0.0


def test_fairness_between_keys() -> None:
    result = summarise(
        run_of(
            request(1, "completed", key="a", output_tokens=30),
            request(2, "completed", key="b", output_tokens=10),
            request(3, "shed", key="b"),
        )
    )
    assert result.jain_index == pytest.approx(1600 / 2000)


def counters(at_s: float, busy_s: float, steps: float, seqs: float) -> EngineSample:
    return EngineSample(at_ns=int(at_s * S), busy_s=busy_s, steps=steps, batch_seqs=seqs, max_batch=16)


def test_utilization_from_the_engines_counters() -> None:
    samples = [counters(0, 100, 1000, 8000), counters(10, 105, 1100, 9600), counters(20, 115, 1300, 12800)]
    first = utilization(samples, [(0, 10 * S)])
    assert (first.busy, first.batch) == (pytest.approx(0.5), pytest.approx(16 / 16))
    whole = utilization(samples, [(0, 20 * S)])
    assert (whole.busy, whole.batch) == (pytest.approx(0.75), pytest.approx(4800 / 300 / 16))
    assert whole.step_ms == pytest.approx(15_000 / 300)
    # Half of the first stretch lies in the window.
    assert utilization(samples, [(5 * S, 10 * S)]).busy == pytest.approx(0.5)


def test_what_happens_between_windows_counts_for_nothing() -> None:
    samples = [counters(0, 0, 0, 0), counters(10, 5, 50, 400), counters(15, 10, 100, 1200), counters(25, 13, 130, 1440)]
    found = utilization(samples, [(0, 10 * S), (15 * S, 25 * S)])
    assert (found.busy, found.batch) == (pytest.approx(8 / 20), pytest.approx(640 / 80 / 16))
    phases = [PhaseBounds("a", 0, 5), PhaseBounds("b", 10, 20)]
    result = summarise(run_of(request(1, "completed"), request(4.9, "completed", 200), phases=phases))
    assert (result.duration_s, result.served_per_s) == (15, pytest.approx(1 / 15))


def test_utilization_without_counters_falls_back_to_running_requests() -> None:
    samples = [EngineSample(at_ns=index * S, running=float(index % 4)) for index in range(8)]
    found = utilization(samples, [(0, 8 * S)])
    assert (found.busy, found.batch) == (pytest.approx(0.75), None)
    nothing = utilization([], [(0, S)])
    assert (nothing.busy, nothing.batch) == (None, None)


def test_an_idle_engine_has_no_batch() -> None:
    idle = utilization([counters(0, 5, 10, 80), counters(10, 5, 10, 80)], [(0, 10 * S)])
    assert (idle.busy, idle.batch) == (0.0, None)


METRICS = """\
# HELP vllm:num_requests_running Running.
vllm:num_requests_running{engine="0",model_name="a b} c"} 3.0
vllm:num_requests_running{engine="1",model_name="x"} 2
vllm:num_requests_waiting{engine="0"} NaN
vllm:generation_tokens_total{engine="0"} 1.5e3
forebay_engine_busy_seconds_total 12.25
forebay_engine_max_batch 16 1700000000000
broken line
"""


def test_engine_metrics_are_read() -> None:
    sample = engine_sample(METRICS, 7)
    assert (sample.at_ns, sample.running, sample.waiting, sample.generated_tokens) == (7, 5.0, None, 1500.0)
    assert (sample.busy_s, sample.max_batch, sample.steps) == (12.25, 16.0, None)


def test_records_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run = run_of(request(2, "shed"), request(1, "completed"), samples=(counters(1, 1, 1, 1),))
    writer = RecordWriter(path)
    for line in (run.header, *run.requests, *run.samples):
        writer.write(line)
    writer.close()
    again = read_run(path)
    assert again.header == run.header
    assert again.requests == sorted(run.requests, key=lambda record: record.intended_ns)
    assert again.samples == run.samples


@pytest.mark.parametrize(("text", "message"), [("{}\n", "line 1"), ("", "no `run` line"), ("x", "line 1")])
def test_a_file_that_holds_no_records_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_run(path)


def test_the_public_json_has_its_contracted_fields() -> None:
    results = Results(environment(), [summarise(run_of(request(1, "completed"), offered_load=2.0))])
    document = json.loads(results.to_json())
    assert document["environment"].keys() >= {"commit", "machine", "cpus", "at"}
    (run,) = document["runs"]
    assert run.keys() >= {
        *("mode", "policy", "workload", "offered_load", "seed", "duration_s", "counts", "latency_ms", "ttft_ms"),
        *("queue_wait_ms", "served_per_s", "goodput_per_s", "goodput_tokens_per_s", "utilization", "shed_by_reason"),
        *("wasted_work_ratio", "late_evicted_ratio", "jain_index", "phases"),
    }
    assert run["counts"].keys() == {"offered", "completed", "shed", "evicted", "cancelled", "failed"}
    assert run["utilization"].keys() >= {"busy", "batch"}
    assert run["latency_ms"].keys() == {"p50", "p99"}


def test_stretches_run_apart_become_one_run() -> None:
    first = RunRecords(
        RunHeader(mode="m", policy="", workload="", seed=1, phases=[PhaseBounds("a", 0, 5)]),
        [request(1, "completed", 100, first_token_ns=-1)],
        [counters(0, 100, 1000, 4000), counters(6, 103, 1030, 4240)],
    )
    # In between the engine worked for somebody else: 50 s, 500 steps.
    second = RunRecords(
        RunHeader(mode="m", policy="", workload="", seed=2, phases=[PhaseBounds("b", 0, 5)]),
        [request(2, "shed", phase="b", sent_ns=-1), request(3, "completed", phase="b", first_token_ns=5)],
        [counters(0, 153, 1530, 8240), counters(6, 157, 1570, 8880)],
    )
    run = stitch([first, second], [0.0, 8.0])
    assert run.header.phases == [PhaseBounds("a", 0, 5), PhaseBounds("b", 8, 13)]
    assert [record.index for record in run.requests] == [1000, 2001, 3001]
    shed, late = run.requests[1:]
    assert (shed.intended_ns, shed.sent_ns) == (10 * S, -1)
    assert (late.intended_ns, late.first_token_ns) == (11 * S, 8 * S + 5)
    assert [(s.at_ns // S, s.busy_s, s.steps) for s in run.samples] == [
        (0, 100, 1000),
        (6, 103, 1030),
        (8, 103, 1030),
        (14, 107, 1070),
    ]
    result = summarise(run)
    assert result.duration_s == 10
    assert result.counts.offered == 3
