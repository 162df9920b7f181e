"""Traffic: the busiest window, what is heavier, what an idle engine needs, and flags that contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.engines.simulated.catalog import profile_named
from forebay.errors import UsageError
from forebay.plan.objective import Objective, objective
from forebay.plan.traffic import TokenCost, Traffic, alone, busiest, token_cost, workload_of
from forebay.sim.bounds import Size
from forebay.sim.scenario import WorkloadSpec
from forebay.workload.arrival import NS_PER_S, Arrival

A100 = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"
COST = TokenCost(1.0, 10.0, "an engine")


def arrival(at_s: float, prompt: int = 100, output: int = 10) -> Arrival:
    return Arrival(int(at_s * NS_PER_S), "trace", prompt, output)


def test_the_window_is_where_the_work_is_not_where_the_requests_are() -> None:
    many_small = [arrival(at, 10, 1) for at in range(60)]
    few_large = [arrival(120 + 10 * at, 5000, 100) for at in range(6)]
    window = busiest([*many_small, *few_large, arrival(299)], 300.0, 60.0, COST)
    assert (window.start_s, window.duration_s) == (120.0, 60.0)
    assert window.warm_up_s == 60.0
    assert "the busiest 1 minutes" in window.why


@pytest.mark.parametrize("window_s", [None, 0.0, 300.0, 500.0])
def test_no_window_or_a_long_one_is_the_whole(window_s: float | None) -> None:
    window = busiest([arrival(0), arrival(299)], 300.0, window_s, COST)
    assert (window.start_s, window.duration_s, window.warm_up_s) == (0.0, 300.0, 0.0)


def a_trace(path: Path) -> Path:
    rows = [f"{at},{200 if 100 <= at < 130 else 20},5" for at in range(200)]
    path.write_text("timestamp,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_a_trace_is_made_heavier_by_playing_its_window_faster(tmp_path: Path) -> None:
    workload = WorkloadSpec(trace=str(a_trace(tmp_path / "t.csv")), speed=2.0)
    traffic = Traffic(workload, name="t", seed=1, window_s=10.0, cost=COST)
    # At twice the speed the heavy seconds 100 to 130 are 50 to 65.
    assert traffic.window.start_s == 50.0
    heavier, warm_up_s = traffic.simulated(1.25)
    assert (heavier.speed, heavier.start_s) == (2.5, 0.0)
    assert heavier.duration_s == pytest.approx(60 / 1.25)
    assert warm_up_s == pytest.approx(50 / 1.25)
    measured = [a for a in heavier.draw(1) if a.at_ns >= warm_up_s * NS_PER_S]
    assert len(measured) == len(traffic.sizes) == 20
    longer = traffic.longer()
    assert longer is not None
    assert len(longer[0].draw(1)) == 200


def test_a_rate_is_raised(tmp_path: Path) -> None:
    workload = WorkloadSpec(rate=2.0, duration_s=90.0)
    traffic = Traffic(workload, name="rate", seed=1, window_s=30.0, cost=COST)
    heavier, warm_up_s = traffic.simulated(1.5)
    assert (heavier.rate, heavier.duration_s, warm_up_s) == (3.0, 90.0, 60.0)
    assert traffic.figures.window_requests_per_s == pytest.approx(2.0, rel=0.4)


def test_the_content_of_a_trace_is_part_of_what_it_is(tmp_path: Path) -> None:
    def content() -> str:
        traffic = Traffic(WorkloadSpec(trace=str(path)), name="t", seed=1, window_s=None, cost=COST)
        return traffic.figures.content

    path = a_trace(tmp_path / "t.csv")
    before = content()
    assert content() == before
    path.write_text(path.read_text().replace("\n7,20,5\n", "\n7,21,5\n"))
    assert content() != before


def test_what_an_idle_engine_needs_bounds_every_fleet() -> None:
    profile = profile_named(A100)
    sizes = [Size(1000, 100)] * 985 + [Size(30_000, 100)] * 15
    needs = alone(profile, sizes, Objective(ttft_ms=200.0))
    assert needs.within == pytest.approx(0.985)
    assert 60 < needs.ttft_p50 < 100
    # 99 % of the 99 % that are not refused are 981 of 1,000: none of the long ones.
    assert needs.ttft_attained == pytest.approx(needs.ttft_p50)
    strict = alone(profile, sizes, Objective(ttft_ms=200.0, max_shed=0.0))
    assert strict.ttft_attained > 1000


def test_a_prompt_beyond_the_kv_cache_fits_nowhere() -> None:
    needs = alone(profile_named("l4-24g/llama-3.1-8b/bf16/tp1"), [Size(40_000, 10), Size(100, 10)], Objective())
    assert needs.fits == 0.5


def test_an_output_token_costs_more_than_a_prompt_token() -> None:
    cost = token_cost(profile_named(A100))
    assert 0 < cost.prompt_ms < cost.output_ms


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"trace": None}, "either as --trace or as --rate"),
        ({"rate": 3.0}, "either as --trace or as --rate"),
        ({"prompt_tokens": "5"}, "--prompt-tokens goes with --rate"),
        ({"cv": 2.0}, "--cv goes with --rate"),
        ({"speed": 0.0}, "--speed 0"),
        ({"speed": float("nan")}, "--speed nan"),
        ({"trace": None, "rate": 3.0}, "--rate needs --prompt-tokens"),
        ({"trace": None, "rate": 3.0, "speed": 2.0}, "--speed goes with --trace"),
        ({"trace": None, "rate": 1e9}, "--rate 1e+09"),
        ({"trace": None, "rate": 3.0, "prompt_tokens": "5", "output_tokens": "5", "cv": 2.0}, "--arrivals gamma"),
    ],
)
def test_flags_that_contradict_each_other(changed: dict[str, object], says: str) -> None:
    flags: dict[str, object] = {"trace": "t", "rate": None, "speed": 1.0, "prompt_tokens": None, "output_tokens": None}
    flags |= {"arrivals": None, "cv": None, "window_s": 60.0}
    with pytest.raises(UsageError) as error:
        workload_of(**(flags | changed))  # type: ignore[arg-type]
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "there is no objective"),
        ({"ttft_ms": -1.0}, "--ttft-ms -1"),
        ({"tpot_ms": float("inf")}, "--tpot-ms inf"),
        ({"ttft_ms": 900.0, "latency_ms": 800.0}, "cannot end before it begins"),
        ({"ttft_ms": 900.0, "attainment_percent": 100.0}, "--attainment 100"),
        ({"ttft_ms": 900.0, "max_shed_percent": -1.0}, "--max-shed -1"),
    ],
)
def test_objectives_that_make_no_sense(changed: dict[str, float], says: str) -> None:
    flags: dict[str, float | None] = {"ttft_ms": None, "tpot_ms": None, "latency_ms": None}
    flags |= {"attainment_percent": 99.0, "max_shed_percent": 1.0}
    with pytest.raises(UsageError) as error:
        objective(**(flags | changed))  # type: ignore[arg-type]
    assert says in str(error.value)
