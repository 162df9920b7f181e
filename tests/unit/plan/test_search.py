"""The search for the least fleet, on an engine whose behaviour is a formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from forebay.config.load import loads
from forebay.engines.simulated.catalog import profile_named
from forebay.plan.candidates import Candidate
from forebay.plan.objective import Objective
from forebay.plan.prices import Price
from forebay.plan.search import CLOSE, Bench, least_engines, sustained
from forebay.plan.setup import Setup
from forebay.plan.traffic import TokenCost, Traffic
from forebay.plan.trials import Trial, Trials
from forebay.sim.scenario import Scenario, WorkloadSpec

OBJECTIVE = Objective(ttft_ms=500.0)
CANDIDATE = Candidate(
    profile_named("a100-80g/llama-3.1-8b/bf16/tp1/vllm"), "a100-80g", 1, Price("a100-80g", 1, 1, 1, 1, "2026-05", "one")
)
SETUPS = [Setup("hybrid", 64), Setup("hybrid", 32)]


class Formula:
    """Enough is `rate_per_engine` requests/s for each engine, times what the setup's limit reaches. Counts its runs."""

    def __init__(self, rate_per_engine: float, efficiency: Callable[[int], float] = lambda _: 1.0) -> None:
        self.rate_per_engine, self.efficiency = rate_per_engine, efficiency
        self.ran: list[tuple[int, int]] = []

    def __call__(self, scenarios: Sequence[Scenario], done: Callable[[Scenario], None]) -> list[Trial]:
        trials = []
        for scenario in scenarios:
            limit = loads(scenario.config, environment={}).config.engines[0].concurrency.limit
            count = scenario.engines.count
            self.ran.append((count, limit))
            load = scenario.workload.rate / (count * self.rate_per_engine * self.efficiency(limit))
            good = 1000 if load <= 1 else min(980, int(1000 / load))
            trials.append(trial(good=good))
            done(scenario)
        return trials


def trial(*, good: int, refused: int = 0, offered: int = 1000) -> Trial:
    figures = dict.fromkeys(("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "latency_p50", "latency_p99", "busy"))
    return Trial(offered=offered, refused=refused, failed=0, good=good, **figures)


def bench(formula: Formula, rate: float = 10.0) -> Bench:
    workload = WorkloadSpec(rate=rate, duration_s=61.0)
    traffic = Traffic(workload, name="r", seed=1, window_s=1.0, cost=TokenCost(1, 1, "x"))
    return Bench(Trials(formula), traffic, CANDIDATE, OBJECTIVE, 1, "none")


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 16, 33, 100])
@pytest.mark.parametrize("guess", [1, 5, 64])
def test_the_least_number_is_found_from_any_guess(needed: int, guess: int) -> None:
    formula = Formula(10.0 / (needed - 0.5))
    found = least_engines(bench(formula), SETUPS, low=1, guess=guess, most=1000)
    assert found.best is not None
    assert found.best.engines == needed
    assert found.monotone
    counts = [probe.engines for probe in found.probes]
    assert needed + 1 in counts
    assert needed == 1 or needed - 1 in counts
    assert len(counts) <= 20


def test_nothing_below_the_bound_is_simulated_and_nothing_above_the_most() -> None:
    formula = Formula(1.0)
    assert least_engines(bench(formula), SETUPS, low=8, guess=8, most=9).best is None
    assert {count for count, _ in formula.ran} == {8, 9}


def test_another_setup_can_save_an_engine() -> None:
    formula = Formula(2.0, lambda limit: 1.0 if limit == 64 else 1.4)
    found = least_engines(bench(formula), SETUPS, low=1, guess=1, most=100)
    assert found.best is not None
    assert (found.best.engines, found.best.setup.limit) == (4, 32)


def test_a_near_miss_is_varied() -> None:
    formula = Formula(2.0, lambda limit: 1.0 if limit >= 80 else 0.99)
    found = least_engines(bench(formula), SETUPS[:1], low=5, guess=5, most=6)
    assert found.best is not None
    assert (found.best.engines, found.best.setup.limit) == (5, 86)


def test_a_fleet_that_is_enough_below_one_that_is_not_is_said() -> None:
    class Lucky(Formula):
        def __call__(self, scenarios: Sequence[Scenario], done: Callable[[Scenario], None]) -> list[Trial]:
            plain = super().__call__(scenarios, done)
            return [trial(good=1000) if s.engines.count == 8 else t for s, t in zip(scenarios, plain, strict=True)]

    found = least_engines(bench(Lucky(1.0)), SETUPS, low=1, guess=10, most=100)
    assert found.best is not None
    assert found.best.engines == 10
    assert not found.monotone


@pytest.mark.parametrize("carried", [0.3, 0.9, 1.0, 1.31, 2.6])
def test_how_much_more_traffic_is_carried_is_found_closely(carried: float) -> None:
    found = sustained(bench(Formula(10.0 * carried / 4)), 4, SETUPS)
    assert carried / CLOSE <= found <= carried


def test_almost_nothing_is_carried() -> None:
    assert sustained(bench(Formula(0.01)), 1, SETUPS) == 0.0


def test_a_trial_is_judged_by_both_shares() -> None:
    objective = msgspec.structs.replace(OBJECTIVE, attainment=0.99, max_shed=0.01)
    assert trial(good=990).meets(objective)
    assert not trial(good=989).meets(objective)
    refusing = trial(good=985, refused=10)
    assert refusing.meets(objective)
    assert refusing.attainment == 985 / 990
    assert not trial(good=989, refused=11).meets(objective)
    assert trial(good=990).margin(objective) == pytest.approx(0.0)
    assert trial(good=900).margin(objective) < trial(good=950).margin(objective) < 0
    assert trial(good=0, refused=1000).attainment == 0.0


def test_a_scenario_is_run_once() -> None:
    formula = Formula(10.0)
    one = bench(formula)
    first = one.run(1, SETUPS)
    assert one.run(1, SETUPS) == first
    assert len(formula.ran) == 2
    assert (one.trials.ran, one.trials.reused) == (2, 0)
