"""A fit from an engine's counters: from those that our engines publish, and from those that vLLM does."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from forebay.engines.serving.metrics import EngineMetrics
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.model import EngineLimits
from forebay.engines.simulated.profile import StepProfile
from forebay.errors import UsageError
from forebay.sim.replay import FrontEnd, Offer, replay
from forebay.sim.windows import Scrape, Window, fit_windows, scrape_of, windows_of

NOTHING = Scrape(0, 0, 0, None, None, None, None)
VLLM = """
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 3.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 40.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 900.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 700.0
vllm:generation_tokens_total{engine="0",model_name="m"} 200.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 1.5e+00
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 190.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""


def profile(**coefficients: float) -> StepProfile:
    base = profile_named("h100-80g/llama-3.1-8b/bf16/tp1/trtllm")
    assert isinstance(base, StepProfile)
    return replace(base, w=0.0, r=0.0, p=2.0, att=0.0, **coefficients)  # type: ignore[arg-type]


def test_the_counters_of_vllm_are_read() -> None:
    assert scrape_of(VLLM, 8000) == Scrape(40, 900, 200, None, 1.5, 190, 2000)
    assert scrape_of(VLLM, None) == Scrape(40, 900, 200, None, 1.5, 190, None)


def test_the_counters_of_our_engines_are_read() -> None:
    metrics = EngineMetrics("m")
    metrics.steps, metrics.busy_s, metrics.prompt_tokens, metrics.generation_tokens = 7, 1.25, 30, 12
    text = metrics.text(running=1, waiting=0, kv_usage=0.5, max_batch=4, cache_config={})
    assert scrape_of(text, 100) == Scrape(7, 42, 12, 1.25, 0, 0, 50)


def test_an_engine_that_counts_no_steps_tells_nothing() -> None:
    assert scrape_of("vllm:generation_tokens_total 5\n", 100) is None
    assert scrape_of("", 100) is None


def test_a_window_is_means_over_its_steps() -> None:
    before, after = Scrape(10, 100, 50, 1.0, None, None, 1000), Scrape(20, 500, 130, 1.5, None, None, 3000)
    assert windows_of([before, after]) == [Window(50.0, 40.0, 8.0, 2000.0, 10)]


def test_gaps_between_tokens_stand_in_for_busy_time() -> None:
    after = NOTHING._replace(steps=10, tokens=20, generated=20, gaps_s=2.0, gaps=100.0)
    before = NOTHING._replace(gaps_s=1.0, gaps=50.0)
    assert windows_of([before, after]) == [Window(20.0, 2.0, 2.0, 0.0, 10)]


@pytest.mark.parametrize(
    "after",
    [
        NOTHING,
        NOTHING._replace(steps=4, tokens=4, generated=4, busy_s=1.0),
        NOTHING._replace(steps=10, tokens=10, generated=10),
        NOTHING._replace(steps=10, tokens=-1, generated=0, busy_s=1.0),
    ],
)
def test_idle_short_and_restarted_windows_are_left_out(after: Scrape) -> None:
    assert windows_of([NOTHING._replace(busy_s=0.0) if after.busy_s else NOTHING, after]) == []


def test_the_coefficients_behind_counters_are_found() -> None:
    true = profile(c0=20.0, e=0.4, seq=0.9, kv=2.0)
    rng = Random(3)
    made = []
    for _ in range(40):
        tokens, sequences, context = rng.uniform(4, 200), rng.uniform(1, 16), rng.uniform(0, 9000)
        step = true.c0 + true.e * tokens + true.seq * sequences + true.kv * context / 1e3
        made.append(Window(step * rng.gauss(1.0, 0.01), tokens, sequences, context, 50))
    found = fit_windows(made, true)
    for name in ("c0", "e", "seq", "kv"):
        assert getattr(found.profile, name) == pytest.approx(getattr(true, name), rel=0.1), name
    known = {one.name for one in found.coefficients if one.known}
    assert known == {"c0", "e", "seq", "kv"}
    assert found.profile.confidence == "medium, from counters; not identified: w, r, p, att, front, front_token"


def test_an_engine_under_load_is_fitted_from_its_counters() -> None:
    true = profile(c0=20.0, e=0.4, seq=0.9, kv=2.0)
    rng = Random(5)
    at, offers = 0.0, []
    for number in range(400):
        at += rng.expovariate(1.0 + number % 100 / 25)
        offers.append(Offer(int(at * 1e9), rng.randint(8, 300), rng.randint(4, 60)))
    _, steps = replay(true, EngineLimits(16, 128, 16384), FrontEnd(), offers)
    total, scrapes, since = Scrape(0, 0, 0, 0.0, None, None, 0), [], 0
    for step in steps:
        took_s = (step.to_ns - step.from_ns) / 1e9
        total = Scrape(
            total.steps + 1, total.tokens + step.tokens, total.generated + step.sequences,
            (total.busy_s or 0.0) + took_s, None, None, step.context,
        )  # fmt: skip
        if step.to_ns - since >= 1e9:
            since = step.to_ns
            scrapes.append(total)
    found = fit_windows(windows_of(scrapes), true)
    for tokens, sequences, context in ((1, 1, 50), (16, 16, 2000), (128, 4, 500)):
        expected = true.step_ms(tokens, sequences, context, 0.0)
        assert found.profile.step_ms(tokens, sequences, context, 0.0) == pytest.approx(expected, rel=0.1)


def test_too_few_windows_are_refused() -> None:
    with pytest.raises(UsageError, match="3 stretches in which the engine made steps, at least 8"):
        fit_windows([Window(1.0, 1.0, 1.0, 0.0, 10)] * 3, profile())


def test_windows_that_are_all_alike_tell_one_number() -> None:
    found = fit_windows([Window(30.0, 8.0, 8.0, 1000.0, 50)] * 10, profile())
    assert [one.name for one in found.coefficients if one.known] == []
    assert found.profile.step_ms(8, 8, 1000, 0.0) == pytest.approx(30.0, rel=1e-6)
