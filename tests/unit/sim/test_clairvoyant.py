"""The clairvoyant optimum: reached where it is plain what it is, and passed by no policy."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import Literal

import msgspec
import pytest

from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.profile import EncoderProfile
from forebay.errors import UsageError
from forebay.sim.clairvoyant import Job, clairvoyant, encoder_optimum, fractional_optimum
from forebay.sim.policies import Sizing, config_text
from forebay.sim.run import run
from forebay.sim.scenario import EngineSpec, Scenario, WorkloadSpec

H100 = "h100-80g/llama-3.1-8b/bf16/tp1/trtllm"
ENCODER = "a100-40gb/bert-large/fp16/seq128"
MS = 1_000_000

Mode = Literal["backpressure", "admission", "hybrid"]
MODES: tuple[Mode, ...] = ("backpressure", "admission", "hybrid")


def encoder_scenario(mode: Mode, rate: float, latency_ms: float, batch: int = 8, seed: int = 1) -> Scenario:
    return Scenario(
        name="test",
        policy=mode,
        config=config_text(mode, Sizing(1, batch), slo_ms=latency_ms),
        engines=EngineSpec(profile=ENCODER, max_num_seqs=batch),
        workload=WorkloadSpec(rate=rate, duration_s=0.02, prompt_tokens="128", output_tokens="1"),
        seed=seed,
        latency_ms=latency_ms,
    )


def language_scenario(mode: Mode, *, ttft_ms: float = 150.0, seed: int = 1) -> Scenario:
    return Scenario(
        name="test",
        policy=mode,
        config=config_text(mode, Sizing(4), slo_ms=ttft_ms),
        engines=EngineSpec(profile=H100, max_num_seqs=8),
        workload=WorkloadSpec(rate=60.0, duration_s=0.15, prompt_tokens="~3000/1", output_tokens="~20/0.5"),
        seed=seed,
        ttft_ms=ttft_ms,
        tpot_ms=60.0,
    )


def good(scenario: Scenario) -> int:
    """Requests served within the objective, whenever they ended."""
    share = run(scenario).extras.slo_share
    assert share is not None
    return round(share * len(scenario.workload.draw(scenario.seed)))


def by_trying(profile: EncoderProfile, moments: list[int], within_ns: int, max_batch: int) -> int:
    """The optimum by brute force: every subset, cut into batches in every way, each as early as it can be."""

    def fits(chosen: tuple[int, ...], free_at: int) -> bool:
        if not chosen:
            return True
        for size in range(1, min(max_batch, len(chosen)) + 1):
            batch = chosen[:size]
            ends = max(free_at, batch[-1]) + round(profile.batch_ms(size) * MS)
            if ends <= batch[0] + within_ns and fits(chosen[size:], ends):
                return True
        return False

    for count in range(len(moments), 0, -1):
        if any(fits(chosen, 0) for chosen in combinations(moments, count)):
            return count
    return 0


@pytest.mark.parametrize("seed", range(6))
def test_the_encoder_optimum_is_that_of_trying_everything(seed: int) -> None:
    profile = profile_named(ENCODER)
    assert isinstance(profile, EncoderProfile)
    rng = Random(seed)
    moments = sorted(rng.randrange(12 * MS) for _ in range(8))
    within_ns = round(rng.uniform(2.0, 6.0) * MS)
    assert encoder_optimum(profile, moments, within_ns, 4) == by_trying(profile, moments, within_ns, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rate", "latency_ms"), [(1000.0, 30.0), (3000.0, 8.0), (6000.0, 15.0)])
def test_no_policy_passes_the_optimum_of_an_encoder(mode: Mode, rate: float, latency_ms: float) -> None:
    scenario = encoder_scenario(mode, rate, latency_ms)
    best = clairvoyant(scenario)
    assert best.exact is not None
    assert good(scenario) <= best.exact <= best.at_most + 1e-6 <= best.offered + 1e-5


def test_the_optimum_is_reached_where_everything_can_be_served() -> None:
    scenario = encoder_scenario("backpressure", 400.0, 50.0)
    best = clairvoyant(scenario)
    assert good(scenario) == best.exact == best.offered
    calm = msgspec.structs.replace(language_scenario("backpressure", ttft_ms=2000.0), tpot_ms=500.0)
    best = clairvoyant(calm)
    assert good(calm) == best.by_subset == best.offered


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_policy_passes_the_bound_of_a_language_model(mode: Mode, seed: int) -> None:
    scenario = language_scenario(mode, seed=seed)
    best = clairvoyant(scenario)
    assert good(scenario) <= best.at_most + 1e-6
    assert best.by_subset is not None
    assert best.by_subset <= best.at_most + 1e-6
    assert best.by_subset < best.offered, "a load that all of it can be served of tests nothing"


def test_fractions_of_jobs_fill_the_time_there_is() -> None:
    """Two jobs of 10 and one of 4 in a window of 10: the small one, and 6 of one of the others."""
    jobs = [Job(10.0, 0, 10), Job(10.0, 0, 10), Job(4.0, 0, 10)]
    assert fractional_optimum(jobs) == pytest.approx(1.6)
    assert fractional_optimum(jobs, servers=2) == pytest.approx(2.6)


def test_a_window_inside_another_confines_only_its_own_job() -> None:
    jobs = [Job(5.0, 4, 6), Job(5.0, 0, 10)]
    assert fractional_optimum(jobs) == pytest.approx(2 / 5 + 1.0)


def test_an_optimum_needs_an_objective_and_a_small_load() -> None:
    with pytest.raises(UsageError, match="needs an objective"):
        clairvoyant(msgspec.structs.replace(encoder_scenario("hybrid", 500.0, 30.0), latency_ms=None))
    long = msgspec.structs.replace(
        encoder_scenario("hybrid", 500.0, 30.0), workload=WorkloadSpec(rate=500.0, duration_s=2.0)
    )
    with pytest.raises(UsageError, match="at most 400 requests"):
        clairvoyant(long)


def test_where_no_batch_ends_in_time_nothing_is_served() -> None:
    best = clairvoyant(encoder_scenario("hybrid", 1000.0, 0.5))
    assert (best.at_most, best.exact) == (0.0, 0)
