"""The fluid bound: what is known in closed form, and the engine model itself under an endless backlog."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.model import EngineLimits
from forebay.engines.simulated.profile import EncoderProfile, StepProfile
from forebay.sim.bounds import Size, encoder_bound, fluid_bound, limits_of, saturation, step_bound
from forebay.sim.scenario import EngineSpec, Scenario, WorkloadSpec
from forebay.workload.sizes import Sizes

H100 = "h100-80g/llama-3.1-8b/bf16/tp1/trtllm"
ENCODER = "a100-40gb/bert-large/fp16/seq128"


def step_profile(name: str = H100) -> StepProfile:
    profile = profile_named(name)
    assert isinstance(profile, StepProfile)
    return profile


def encoder(name: str = ENCODER) -> EncoderProfile:
    profile = profile_named(name)
    assert isinstance(profile, EncoderProfile)
    return profile


def lengths(prompt: str, output: str, count: int = 800) -> list[Size]:
    rng = Random("lengths")
    prompts, outputs = Sizes.parse(prompt), Sizes.parse(output)
    return [Size(prompts.draw(rng), outputs.draw(rng)) for _ in range(count)]


def scenario(**changes: object) -> Scenario:
    load = WorkloadSpec(rate=5.0, duration_s=20.0, prompt_tokens="~500/1", output_tokens="~200/1")
    made = Scenario(name="test", policy="none", engines=EngineSpec(profile=H100), workload=load)
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize(
    ("prompt", "output", "max_num_seqs"),
    [("~553/1", "~189/1", 64), ("~553/1", "~189/1", 128), ("~292/1", "~300/1", 64), ("~4113/0.5", "~118/1", 64)],
)
def test_the_engine_under_an_endless_backlog_comes_close_and_never_passes(
    prompt: str, output: str, max_num_seqs: int
) -> None:
    sizes = lengths(prompt, output)
    limits = limits_of(step_profile(), EngineSpec(profile=H100, max_num_seqs=max_num_seqs, reserve_output=True))
    bound = step_bound(step_profile(), limits, sizes)
    reached = saturation(step_profile(), limits, sizes, rounds=1)
    # A round of finite length may be a little lighter or heavier than the stream that it stands for.
    assert 0.95 * bound.requests_per_s < reached.requests_per_s < 1.02 * bound.requests_per_s


def test_prompts_of_one_token_and_answers_of_one_are_a_step_of_full_batches() -> None:
    """Nothing decodes: every step takes `max_num_seqs` new sequences, and they all end with it."""
    profile, limits = step_profile(), EngineLimits(64, 64, 100_000)
    bound = step_bound(profile, limits, [Size(1, 1)])
    assert bound.requests_per_s == pytest.approx(64_000 / profile.step_ms(64, 64, 0, 64 * 0.5), rel=1e-6)
    assert bound.limited_by in {"sequences", "batch tokens"}


def test_a_tight_tpot_lowers_the_operating_point() -> None:
    sizes = lengths("~553/1", "~189/1")
    limits = limits_of(step_profile(), EngineSpec(profile=H100))
    free, tight = step_bound(step_profile(), limits, sizes), step_bound(step_profile(), limits, sizes, tpot_ms=15.0)
    assert tight.limited_by == "objective"
    assert tight.step_ms <= 15.0 < free.step_ms
    assert tight.requests_per_s < free.requests_per_s


def test_an_objective_shorter_than_any_step_allows_nothing() -> None:
    limits = limits_of(step_profile(), EngineSpec(profile=H100))
    assert step_bound(step_profile(), limits, lengths("500", "100", 10), tpot_ms=0.5).requests_per_s == 0.0


def test_a_small_cache_limits_by_kv() -> None:
    limits = limits_of(step_profile(), EngineSpec(profile=H100, kv_tokens=20_000))
    assert step_bound(step_profile(), limits, lengths("~2000/1", "~300/1")).limited_by == "kv"


def test_cached_prefixes_need_no_computing() -> None:
    limits = limits_of(step_profile(), EngineSpec(profile=H100))
    cold = step_bound(step_profile(), limits, [Size(2000, 100)])
    warm = step_bound(step_profile(), limits, [Size(2000, 100, cached=1900)])
    assert warm.requests_per_s > 1.5 * cold.requests_per_s


def test_encoders_are_bounded_by_the_largest_batch_within_the_objective() -> None:
    profile, size = encoder(), [Size(128, 1)]
    whole = encoder_bound(profile, size, 64)
    assert whole.requests_per_s == pytest.approx(64_000 / profile.batch_ms(64))
    assert whole.tokens_per_s == pytest.approx(128 * whole.requests_per_s)
    short = encoder_bound(profile, size, 64, latency_ms=profile.batch_ms(8))
    assert (short.batch, short.limited_by) == (8, "objective")
    assert encoder_bound(profile, size, 64, latency_ms=0.1).requests_per_s == 0.0


def test_engines_add_up() -> None:
    one = fluid_bound(scenario())
    four = fluid_bound(scenario(engines=EngineSpec(profile=H100, count=4)))
    assert one is not None
    assert four is not None
    assert four.requests_per_s == pytest.approx(4 * one.requests_per_s)
    assert four.batch == one.batch
