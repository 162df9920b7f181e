"""A whole plan, small: real simulations of a few engines for a minute of traffic."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from forebay.config.load import loads
from forebay.errors import UsageError
from forebay.plan.assemble import make_plan, verdict
from forebay.plan.candidates import candidates
from forebay.plan.feasible import prospects
from forebay.plan.objective import Objective
from forebay.plan.page import render_plan
from forebay.plan.planner import Question
from forebay.plan.prices import price_book
from forebay.plan.result import Comparison, Plan
from forebay.plan.show import print_plan
from forebay.plan.traffic import Traffic, token_cost
from forebay.plan.trials import Simulator, Trials
from forebay.sim.scenario import WorkloadSpec

OBJECTIVE = Objective(ttft_ms=1500.0, tpot_ms=150.0, attainment=0.95, max_shed=0.02)


def a_question(
    *, objective: Objective = OBJECTIVE, gpus: tuple[str, ...] = ("l40s", "l4"), rate: float = 3.0, **options: object
) -> Question:
    book = price_book(given=["l40s=0.7", "l4=0.4"])
    found, _ = candidates(book, model="llama-3.1-8b", gpus=gpus)
    workload = WorkloadSpec(rate=rate, duration_s=20.0, prompt_tokens="300-900", output_tokens="~60/1")
    traffic = Traffic(workload, name="three a second", seed=3, window_s=15.0, cost=token_cost(found[0].profile))
    return Question(found, traffic, objective, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    book = price_book(given=["l40s=0.7", "l4=0.4"])
    return make_plan(a_question(), Trials(Simulator(1, None)), book, notes=["a note"])


def test_the_answer_is_the_cheapest_candidate_that_keeps_the_objective(plan: Plan) -> None:
    kept = [one.fleet for one in plan.candidates if one.fleet is not None]
    assert len(kept) == 2
    assert plan.answer.cost.per_hour == min(fleet.cost.per_hour for fleet in kept)
    assert plan.answer.window.meets
    assert plan.check is not None
    assert plan.check.figures.meets
    for one in plan.candidates:
        assert one.fleet is not None
        assert one.bound_engines is not None
        assert one.bound_engines <= one.fleet.engines


def test_money_follows_from_gpus_prices_and_tokens(plan: Plan) -> None:
    cost, answer, traffic = plan.answer.cost, plan.answer, plan.traffic
    assert cost.per_hour == pytest.approx(answer.gpus * (0.7 if answer.gpu == "l40s-48g" else 0.4))
    assert cost.per_month == pytest.approx(730 * cost.per_hour)
    served_per_h = 3600 * traffic.requests_per_s * (1 - answer.window.shed)
    assert cost.per_million_output_tokens == pytest.approx(
        1e6 * cost.per_hour / (served_per_h * traffic.output_tokens_mean)
    )
    both = traffic.prompt_tokens_mean + traffic.output_tokens_mean
    assert cost.per_million_tokens == pytest.approx(1e6 * cost.per_hour / (served_per_h * both))


def test_modes_and_more_traffic_are_compared(plan: Plan) -> None:
    assert [one.mode for one in plan.comparisons] == ["hybrid", "admission", "backpressure"]
    assert all(one.sustains is not None and one.sustains >= 1 for one in plan.comparisons if one.fleet is not None)
    less, more = plan.sensitivity
    assert (less.factor, more.factor) == (0.7, 1.3)
    assert less.fleet is not None
    assert more.fleet is not None
    assert less.fleet.engines <= plan.answer.engines <= more.fleet.engines
    assert plan.verdict is not None
    assert "22 %" in plan.verdict.text
    assert {point.factor for curve in plan.traffic_curves for point in curve.points} >= {0.7, 1.0, 1.3}


def test_the_json_holds_what_the_schema_says(plan: Plan) -> None:
    again = msgspec.json.decode(plan.to_json(), type=Plan)
    assert again == plan
    schema = msgspec.json.schema(Plan)["$defs"]["Plan"]
    assert set(schema["properties"]) == set(msgspec.json.decode(plan.to_json()))
    assert {"answer", "candidates", "prices_as_of", "config", "assumptions"} <= set(schema["required"])


def test_the_configuration_is_valid_and_is_what_was_simulated(plan: Plan) -> None:
    loaded = loads(plan.config, environment={})
    assert not loaded.warnings
    engine = loaded.config.engines[0]
    assert len(engine.urls) == plan.answer.engines
    assert engine.concurrency.limit == plan.answer.setup.limit
    assert loaded.config.admission.mode.value == plan.answer.setup.mode
    assert loaded.config.slo.ttft_ms == 1500.0


@pytest.mark.parametrize("width", [80, 200])
def test_the_tables_say_the_price_and_its_date(plan: Plan, width: int) -> None:
    out = io.StringIO()
    print_plan(Console(file=out, width=width), plan)
    text = " ".join(out.getvalue().split())
    assert "0.70 (given)" in text
    assert f"Prices as of {plan.prices_as_of}" in text
    assert "a note" in text
    assert "…" not in out.getvalue()


def test_the_page_stands_alone_and_holds_the_curves(plan: Plan) -> None:
    page = render_plan(plan)
    assert "{{" not in page.replace("${{", "")
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", page)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    curves = msgspec.json.decode(data.group(1))
    assert {curve["name"] for curve in curves["counts"]} == {"l4-24g", "l40s-48g"}
    assert any(point["answer"] for curve in curves["counts"] for point in curve["points"])
    assert {curve["mode"] for curve in curves["traffic"]} == {"hybrid", "admission", "backpressure"}


def test_finished_simulations_are_used_again(tmp_path: Path) -> None:
    book = price_book(given=["l40s=0.7", "l4=0.4"])
    question = a_question(rate=1.0, compare=False, vary=False)
    first = make_plan(question, Trials(Simulator(1, tmp_path)), book)
    again = make_plan(question, Trials(Simulator(1, tmp_path)), book)
    assert first.simulations_reused == 0
    assert again.simulations_reused == again.simulations == first.simulations
    assert (again.answer, again.candidates) == (first.answer, first.candidates)


def test_an_impossible_objective_is_answered_with_the_nearest() -> None:
    asked = Objective(ttft_ms=20.0)
    with pytest.raises(UsageError, match=r"ttft 20 ms cannot be met by any candidate: the fastest, l40s") as error:
        make_plan(a_question(objective=asked), Trials(Simulator(1, None)), price_book())
    nearest = re.search(r"--ttft-ms (\d+)", str(error.value))
    assert nearest is not None
    met = Objective(ttft_ms=float(nearest.group(1)), attainment=0.9, max_shed=0.05)
    question = a_question(objective=met, rate=0.5, compare=False, vary=False)
    assert make_plan(question, Trials(Simulator(1, None)), price_book(given=["l40s=1", "l4=1"])).answer.window.meets


def test_bounds_that_hold_apart_and_not_together() -> None:
    both = Objective(ttft_ms=150.0, latency_ms=3000.0, attainment=0.5, max_shed=0.0)
    question = a_question(objective=both, gpus=("l4",))
    with pytest.raises(UsageError, match="together"):
        make_plan(question, Trials(Simulator(1, None)), price_book())


def test_too_few_gpus_are_said() -> None:
    with pytest.raises(UsageError, match=r"needs more than --max-gpus 1: at least \d+ x"):
        make_plan(a_question(rate=100.0, most_gpus=1), Trials(Simulator(1, None)), price_book())
    tight = a_question(rate=9.0, most_gpus=1, compare=False, objective=Objective(ttft_ms=120.0, tpot_ms=60.0))
    with pytest.raises(UsageError, match=r"no fleet of up to 1 GPUs keeps it: .* The nearest, 1 x l40s"):
        make_plan(tight, Trials(Simulator(1, None)), price_book())


def test_an_encoder_is_planned_by_its_batches() -> None:
    book = price_book(given=["t4=0.5", "a30=0.9"])
    found, _ = candidates(book, model="bert-large/seq128", gpus=["t4", "a30"])
    workload = WorkloadSpec(rate=400.0, duration_s=2.0, prompt_tokens="128", output_tokens="1")
    traffic = Traffic(workload, name="texts", seed=1, window_s=1.0, cost=token_cost(found[0].profile))
    asked = Objective(latency_ms=60.0)
    plan = make_plan(Question(found, traffic, asked, compare=False, vary=False), Trials(Simulator(1, None)), book)
    assert plan.answer.setup.batch > 1
    assert loads(plan.config, environment={}).config.engines[0].batching is not None


def test_the_verdict_counts_both_ways(plan: Plan) -> None:
    fleet = plan.answer
    dear = msgspec.structs.replace(fleet, cost=msgspec.structs.replace(fleet.cost, per_hour=fleet.cost.per_hour / 0.7))
    found = verdict(
        [
            Comparison(mode="hybrid", fleet=fleet, sustains=1.5),
            Comparison(mode="admission", fleet=fleet, sustains=1.2),
            Comparison(mode="backpressure", fleet=dear, sustains=1.0),
        ]
    )
    assert found.saved_by_hybrid == pytest.approx(0.3)
    assert found.per_gpu_by_hybrid == pytest.approx(1 / 3)
    assert "within reach" in found.text
    assert "paid for" not in found.text
    alike = verdict(
        [Comparison(mode=mode, fleet=fleet, sustains=1.2) for mode in ("hybrid", "admission", "backpressure")]
    )
    assert "is not found" in alike.text
    none = verdict(
        [
            Comparison(mode="hybrid", fleet=fleet, sustains=1.2),
            Comparison(mode="admission", fleet=None, sustains=0.5),
            Comparison(mode="backpressure", fleet=None, sustains=0.5),
        ]
    )
    assert "no saving can be stated" in none.text


def test_what_may_come_late_lowers_the_bound() -> None:

    found = []
    for asked in (Objective(ttft_ms=1500.0), Objective(latency_ms=60_000.0), Objective(tpot_ms=100.0)):
        question = a_question(rate=60.0, objective=asked, gpus=("l4",))
        found.append(prospects(question.candidates, question.traffic, asked)[0])
    prompt, patient, unbounded = found
    assert prompt.low > patient.low > unbounded.low == 1
    assert patient.guess >= prompt.low
