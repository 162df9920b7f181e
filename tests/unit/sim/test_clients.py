"""Callers: what they are told, when they return, and when they leave."""

from __future__ import annotations

import pytest

from forebay.core.instant import SECOND
from forebay.core.model import Request
from forebay.core.outcome import EvictReason, FailReason, ShedReason
from forebay.ingress.status import TABLE, retry_headers
from forebay.report.records import RequestRecord
from forebay.sim.answers import STATUS, headers
from forebay.sim.run import Simulation
from forebay.sim.scenario import ClientSpec, EngineSpec, FaultSpec, Scenario, WorkloadSpec

GPU = "h100-80g/llama-3.1-8b/bf16/tp1/trtllm"
FULL = """
[admission]
mode = "admission"
[[engines]]
name = "e"
urls = ["http://127.0.0.1:1"]
concurrency = { kind = "fixed", limit = 1 }
"""


def simulate(config: str = FULL, **fields: object) -> Simulation:
    given = {
        "name": "test",
        "policy": "p",
        "config": config,
        "engines": EngineSpec(profile=GPU),
        "workload": WorkloadSpec(rate=20, duration_s=1.0, arrivals="constant", output_tokens="200"),
    }
    simulation = Simulation(Scenario(**(given | fields)))  # type: ignore[arg-type]
    simulation.run()
    return simulation


def rows(simulation: Simulation) -> list[RequestRecord]:
    return list(simulation.records.records())


@pytest.mark.parametrize("reason", [*ShedReason, *EvictReason, *FailReason])
def test_statuses_are_those_of_the_data_port(reason: str) -> None:
    assert STATUS[reason] == TABLE[reason].status


@pytest.mark.parametrize("obeyed", [True, False])
@pytest.mark.parametrize("retry_after_ns", [None, 0, 1, SECOND, SECOND + 1, 17 * SECOND + 3, 60 * SECOND, 61 * SECOND])
def test_headers_are_those_of_the_data_port(retry_after_ns: int | None, obeyed: bool) -> None:
    lines = retry_headers(retry_after_ns, obeyed).decode().splitlines()
    assert headers(retry_after_ns, obeyed) == dict(line.split(": ") for line in lines)


def test_one_who_does_not_retry_takes_the_first_answer() -> None:
    found = rows(simulate())
    assert {row.attempts for row in found} == {1}
    assert {row.outcome for row in found} == {"completed", "shed"}
    assert all(row.done_ns == row.intended_ns for row in found if row.outcome == "shed")
    assert {row.status for row in found if row.outcome == "shed"} == {503}


def test_the_status_of_shared_refusals_may_be_mapped() -> None:
    found = rows(simulate("[responses]\noverload_status = 529\n" + FULL))
    assert {row.status for row in found if row.outcome == "shed"} == {529}


def test_an_sdk_comes_back_when_it_was_told_to_and_at_most_twice() -> None:
    found = rows(simulate(clients=ClientSpec(retry="sdk")))
    late = [row for row in found if row.attempts > 1]
    assert len(late) > 10
    assert max(row.attempts for row in found) == 3
    assert all(row.done_ns - row.intended_ns >= (row.attempts - 1) * SECOND for row in late)
    assert sum(row.outcome == "completed" for row in found) > sum(
        row.outcome == "completed" for row in rows(simulate())
    )


def test_one_who_shows_retry_tickets_is_refused_once_at_most() -> None:
    full = FULL.replace('"admission"\n[[', '"admission"\nretry_tickets = true\n[[')
    without, with_ = (rows(simulate(full, clients=ClientSpec(retry=retry))) for retry in ("sdk", "sdk-tickets"))
    assert any(row.attempts > 2 for row in without), "a promise is not always kept"
    returned = [row for row in with_ if row.attempts > 1]
    assert len(returned) > 10
    assert {(row.attempts, row.outcome) for row in returned} == {(2, "completed")}
    assert rows(simulate(clients=ClientSpec(retry="sdk-tickets"))) == rows(simulate(clients=ClientSpec(retry="sdk")))


def test_an_impatient_loop_comes_back_at_once() -> None:
    found = rows(simulate(clients=ClientSpec(retry="naive")))
    shed = [row for row in found if row.outcome == "shed"]
    assert {row.attempts for row in shed} == {6}
    assert all(row.done_ns == row.intended_ns for row in shed)


def test_patience_counts_from_the_first_attempt_and_frees_the_engine() -> None:
    backlog = FULL.replace('"admission"', '"backpressure"')
    simulation = simulate(backlog, clients=ClientSpec(patience_s=1.5))
    found = rows(simulation)
    left = [row for row in found if row.outcome == "cancelled"]
    assert left
    assert all(row.done_ns - row.intended_ns == 1_500_000_000 for row in left)
    assert all(row.done_ns - row.intended_ns < 1_500_000_000 for row in found if row.outcome == "completed")
    assert any(row.output_tokens for row in left), "one had begun"
    assert [engine.held for engine in simulation.engines] == [0]
    assert max(row.done_ns for row in found) <= 2_500_000_000


def test_one_who_waits_to_retry_may_leave_too() -> None:
    found = rows(simulate(clients=ClientSpec(retry="sdk", patience_s=0.5)))
    left = [row for row in found if row.outcome == "cancelled" and not row.output_tokens]
    assert left
    assert all(row.done_ns - row.intended_ns == SECOND // 2 for row in left)


def test_deadlines_are_obeyed_by_the_gateway() -> None:
    backlog = FULL.replace('"admission"', '"backpressure"')
    load = WorkloadSpec(rate=4, duration_s=8.0, output_tokens="100")
    found = rows(simulate(backlog, clients=ClientSpec(deadline_ms=2500), workload=load))
    assert {row.outcome for row in found} >= {"completed", "shed"}
    assert {row.reason for row in found if row.outcome == "shed"} == {"queue_wait"}
    # A wait and the work after it fit into the deadline; what cannot is refused at once.
    waits = [row.queue_wait_ms for row in found if row.outcome == "completed" and row.queue_wait_ms is not None]
    assert max(waits) <= 2500


@pytest.mark.parametrize(("cap", "expected"), [("unset", {None}), ("power-of-two", {256}), ("exact", {200})])
def test_the_gateway_knows_bytes_and_the_callers_cap_only(cap: str, expected: set[int | None]) -> None:
    seen: list[Request] = []
    scenario = Scenario(
        name="bytes",
        policy="p",
        engines=EngineSpec(profile=GPU),
        workload=WorkloadSpec(rate=200, duration_s=1.0, prompt_tokens="1000", output_tokens="200"),
        clients=ClientSpec(max_tokens=cap),  # type: ignore[arg-type]
    )
    simulation = Simulation(scenario)
    offer = simulation.pipelines[0].offer
    simulation.pipelines[0].offer = lambda request, now: (seen.append(request), offer(request, now))[1]  # type: ignore[method-assign]
    simulation.run()
    assert {request.max_output_tokens for request in seen} == expected
    sizes = [request.text_bytes for request in seen]
    assert sum(sizes) / len(sizes) == pytest.approx(4200, rel=0.03)
    assert min(sizes) < 3900 < 4500 < max(sizes)
    assert all(request.counted_tokens == 0 and request.body_bytes > request.text_bytes for request in seen)


def test_a_broken_stream_is_not_sent_again_and_a_broken_answer_is() -> None:
    crash = EngineSpec(profile=GPU, faults=(FaultSpec(kind="crashed", from_s=0.5, to_s=1.0),))
    wide = FULL.replace("limit = 1", "limit = 64")
    for stream in (True, False):
        found = rows(simulate(wide, engines=crash, clients=ClientSpec(retry="sdk", stream=stream)))
        hit = [row for row in found if row.intended_ns < SECOND // 2 and row.done_ns >= SECOND // 2]
        assert len(hit) >= 5
        if stream:
            assert {(row.outcome, row.error, row.attempts) for row in hit} == {("failed", "engine_error", 1)}
        else:
            assert all(row.attempts >= 2 for row in hit)


def test_a_gateway_loses_patience_with_a_silent_engine() -> None:
    stall = EngineSpec(profile=GPU, faults=(FaultSpec(kind="stalled", from_s=0.5, to_s=9.0),))
    wide = FULL.replace("limit = 1", "limit = 64") + "timeouts = { first_byte_s = 3, idle_s = 2 }\n"
    found = rows(simulate(wide, engines=stall))
    begun = [row for row in found if row.intended_ns < 450_000_000 and row.done_ns > SECOND // 2]
    assert begun
    assert {(row.error, row.done_ns) for row in begun} == {("engine_timeout", 2_500_000_000)}
    late = [row for row in found if row.intended_ns > SECOND // 2]
    assert all(row.error == "engine_timeout" and row.done_ns - row.intended_ns == 3 * SECOND for row in late)


def test_without_a_gateway_everything_waits_at_the_engine() -> None:
    slow = EngineSpec(profile=GPU, max_num_seqs=1)
    found = rows(simulate(engines=slow, gateway=False))
    assert {row.outcome for row in found} == {"completed"}
    assert {row.queue_wait_ms for row in found} == {None}
    assert found[-1].first_token_ns - found[-1].intended_ns > 10 * SECOND


def test_arrivals_go_to_gateways_in_turn_or_by_key() -> None:
    def keys_of(spread: str) -> list[set[str]]:
        lines: list[str] = []
        scenario = Scenario(
            name="spread",
            policy="p",
            engines=EngineSpec(profile=GPU, count=3),
            workload=WorkloadSpec(rate=300, duration_s=1.0, keys=12),
            gateways=3,
            spread=spread,  # type: ignore[arg-type]
        )
        Simulation(scenario, decisions=lines).run()
        offers = [line.split() for line in lines if " offer " in line]
        return [{words[4] for words in offers if words[1] == str(number)} for number in range(3)]

    assert keys_of("in-turn") == [{f"k{n}" for n in range(12)}] * 3
    by_key = keys_of("by-key")
    assert sum(map(len, by_key)) == len(set.union(*by_key)) == 12
