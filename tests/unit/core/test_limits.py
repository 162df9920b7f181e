"""Concurrency limits: each baseline against its published rule, the guarded window against its guards."""

from __future__ import annotations

from math import sqrt
from random import Random
from typing import Any

import pytest

from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits import build
from forebay.core.limits.aimd import Aimd, AimdConfig
from forebay.core.limits.envoy import Envoy, EnvoyConfig
from forebay.core.limits.gradient2 import Gradient2, Gradient2Config
from forebay.core.limits.guarded import Guarded, GuardedConfig
from forebay.core.limits.limit import UNBOUNDED, Answer, View
from forebay.core.limits.vegas import Vegas, VegasConfig
from forebay.core.model import EngineSignal


class Steady:
    """Chance that always says the same."""

    def random(self) -> float:
        return 0.5


def answer(ms: float, in_flight: int = 1000, *, first_ms: float = 0, tokens: int = 0) -> Answer:
    return Answer(int(ms * MILLISECOND), int(first_ms * MILLISECOND), tokens, in_flight)


def view(**given: Any) -> View:
    figures: dict[str, Any] = {
        "elapsed_ns": 250 * MILLISECOND, "in_flight": 0, "in_flight_most": 0, "waiting": False, "decoding_ns": 0,
        "generated": 0, "prefilled": 0, "prefilling_ns": 0, "prefilling": 0, "expected_tokens": 0, "peak_tokens": 0,
    }  # fmt: skip
    return View(**(figures | given))


def streaming(limit: Guarded, in_flight: int, gap_ms: float, *, waiting: bool = True, now: int = 0) -> None:
    """A view of so many streams with this gap between tokens."""
    tokens = round(in_flight * 250 / gap_ms)
    limit.viewed(
        view(
            in_flight=in_flight, in_flight_most=in_flight, waiting=waiting, generated=tokens,
            decoding_ns=int(tokens * gap_ms * MILLISECOND),
        ),
        now,
    )  # fmt: skip


def test_what_counts_as_the_response_time() -> None:
    streamed = answer(1000, first_ms=200, tokens=100)
    assert streamed.response_ns("latency") == SECOND
    assert streamed.response_ns("ttft") == 200 * MILLISECOND
    assert streamed.response_ns("per_token") == 10 * MILLISECOND
    whole = answer(1000)
    assert whole.response_ns("ttft") == SECOND, "nothing was streamed: the first token came with the last"
    assert whole.response_ns("per_token") == SECOND, "an engine that tells no usage"


# ---- AIMD ----------------------------------------------------------------------------------------------------


def test_aimd_grows_by_one_while_felt_and_backs_off_by_a_tenth() -> None:
    limit = Aimd(AimdConfig())
    limit.answered(answer(10, in_flight=9), 0)
    assert limit.requests == 20, "less than half of it was in use"
    limit.answered(answer(10, in_flight=10), 0)
    assert limit.requests == 21
    for _ in range(20):
        limit.answered(answer(10), 0)
    assert limit.requests == 41
    limit.answered(answer(5001), 0)
    assert limit.requests == 36
    limit.failed(0)
    assert limit.requests == 32


def test_aimd_stays_within_its_bounds() -> None:
    limit = Aimd(AimdConfig(least=4, most=6, initial=100))
    assert limit.requests == 6
    for _ in range(50):
        limit.failed(0)
    assert limit.requests == 4


# ---- Vegas ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slower", "moved"),
    [
        (1.02, 26),  # queue ceil(20 * 0.0196) = 1 <= log10: the large step, 6
        (1.08, 21),  # queue 2 < 3: the small step
        (1.25, 20),  # queue 4, between 3 and 6: stay
        (2.0, 19),  # queue 10 > 6: back
    ],
)
def test_vegas_moves_by_the_estimated_queue(slower: float, moved: int) -> None:
    limit = Vegas(VegasConfig(), Steady())
    limit.answered(answer(100), 0)
    assert limit.requests == 20, "the first answer is the idea of the fastest"
    limit.answered(answer(100 * slower), 0)
    assert limit.requests == moved


def test_vegas_holds_while_it_is_not_felt_and_steps_back_at_a_loss() -> None:
    limit = Vegas(VegasConfig(), Steady())
    limit.answered(answer(100), 0)
    limit.answered(answer(101, in_flight=9), 0)
    assert limit.requests == 20
    limit.failed(0)
    assert limit.requests == 19


def test_vegas_forgets_its_fastest_now_and_then() -> None:
    """One lucky answer must not pin the limit for ever (F-06)."""
    limit = Vegas(VegasConfig(), Steady())
    limit.answered(answer(1), 0)
    seen = []
    for _ in range(300):
        limit.answered(answer(100), 0)
        seen.append(limit.requests)
    assert min(seen) < 10
    assert limit.requests > 20


# ---- Gradient2 -----------------------------------------------------------------------------------------------


def window(limit: Gradient2, ms: float, in_flight: int = 1000, answers: int = 10) -> None:
    for _ in range(answers):
        limit.answered(answer(ms, in_flight=in_flight), 0)
    limit.viewed(view(), 0)


def test_gradient2_follows_its_rule() -> None:
    limit = Gradient2(Gradient2Config())
    window(limit, 100)
    # long = short = 100: gradient min(1, 1.5) = 1; 0.8 * 20 + 0.2 * (20 + 4)
    assert limit._limit == pytest.approx(20.8)
    window(limit, 300)
    # long = mean(100, 300) = 200; gradient max(0.5, 1.5 * 200 / 300) = 1
    assert limit._limit == pytest.approx(0.8 * 20.8 + 0.2 * 24.8)
    before = limit._limit
    window(limit, 1600)
    # long = mean(100, 300, 1600) = 666.7; gradient 1.5 * 666.7 / 1600 = 0.625; the floor of 20 bites
    assert limit._limit == pytest.approx(max(20.0, 0.8 * before + 0.2 * (before * 0.625 + 4)))


def test_gradient2_needs_ten_answers_and_to_be_felt() -> None:
    limit = Gradient2(Gradient2Config())
    window(limit, 100, answers=9)
    assert limit.requests == 20
    limit = Gradient2(Gradient2Config())
    window(limit, 100, in_flight=9)
    assert limit._limit == 20.0


def test_gradient2_lets_go_of_a_load_that_is_over() -> None:
    limit = Gradient2(Gradient2Config())
    for _ in range(10):
        window(limit, 1000)
    assert limit._long_ns == pytest.approx(1000 * MILLISECOND)
    window(limit, 100)
    drifted = 1000 * MILLISECOND * (1 - 2 / 601) + 100 * MILLISECOND * 2 / 601
    assert limit._long_ns == pytest.approx(drifted * 0.95)


# ---- Envoy ---------------------------------------------------------------------------------------------------


def probed(ms: float = 100) -> Envoy:
    limit = Envoy(EnvoyConfig(), Steady())
    for _ in range(50):
        limit.answered(answer(ms), 0)
    return limit


def test_envoy_probes_first_at_its_least_limit() -> None:
    limit = Envoy(EnvoyConfig(), Steady())
    for _ in range(49):
        limit.answered(answer(100), 0)
    limit.viewed(view(), 0)
    assert (limit.requests, limit._probing) == (3, True)
    limit.answered(answer(100), 0)
    assert not limit._probing
    assert limit._fastest_ns == 100 * MILLISECOND


@pytest.mark.parametrize(("ms", "gradient"), [(100, 1.25), (250, 0.5), (125, 1.0), (10_000, 0.5), (1, 2.0)])
def test_envoy_multiplies_by_the_gradient_and_adds_the_root(ms: float, gradient: float) -> None:
    limit = probed()
    limit.requests = 100
    limit.answered(answer(ms), 0)
    limit.viewed(view(), 0)
    assert limit.requests == int(100 * gradient + sqrt(100 * gradient))


def test_envoy_probes_again_after_a_minute_and_takes_its_limit_up_again() -> None:
    limit = probed()
    limit.requests = 100
    limit.answered(answer(125), 0)
    limit.viewed(view(), 62 * SECOND)
    assert not limit._probing, "the jitter of this engine adds up to a tenth"
    limit.answered(answer(125), 0)
    limit.viewed(view(), 63 * SECOND)
    assert (limit.requests, limit._probing) == (3, True)
    for _ in range(50):
        limit.answered(answer(200), 64 * SECOND)
    assert limit.requests == limit._before_probe > 100
    assert limit._fastest_ns == 200 * MILLISECOND


def test_envoy_probes_again_after_five_windows_at_the_least() -> None:
    limit = Envoy(EnvoyConfig(least=3, most=3), Steady())
    for _ in range(50):
        limit.answered(answer(100), 0)
    for count in range(5):
        assert not limit._probing, count
        limit.answered(answer(1000), 0)
        limit.viewed(view(), 0)
    assert limit._probing


# ---- the guarded window --------------------------------------------------------------------------------------


def test_guarded_grows_as_far_as_the_pace_allows() -> None:
    """Half the aim of 52.5 ms at 100 requests: at least 200 keep it. A quarter of the way per view is the most."""
    limit = Guarded(GuardedConfig(initial=100))
    streaming(limit, 100, 26.25)
    assert limit.requests == 126
    limit = Guarded(GuardedConfig(initial=100))
    streaming(limit, 100, 50)
    assert limit.requests == 105  # 52.5 / 50
    streaming(limit, 100, 50)
    assert limit.requests == 105, "the same evidence says the same"


def test_guarded_comes_down_to_what_its_streams_can_bear() -> None:
    """Where prompts are kept out for the streams' sake, the places that nobody could take are none."""
    limit = Guarded(GuardedConfig(initial=100))
    kept_out = {"waiting": True, "generated": 500, "decoding_ns": 20 * SECOND, "kept_out": True}
    limit.viewed(view(in_flight=40, in_flight_most=40, **kept_out), 0)
    assert limit.requests == 85, "not at once: it may be one long prompt"
    for _ in range(10):
        limit.viewed(view(in_flight=40, in_flight_most=40, **kept_out), 0)
    assert limit.requests == 46, "with room for those who may hold others up"


def test_guarded_does_not_grow_unfelt() -> None:
    """F-04: growth needs evidence that the limit binds."""
    limit = Guarded(GuardedConfig(initial=100))
    for _ in range(100):
        streaming(limit, 20, 10, waiting=False)
    assert limit.requests == 100


def test_guarded_goes_down_in_small_steps_and_at_once_after_an_alarm() -> None:
    limit = Guarded(GuardedConfig(initial=100))
    streaming(limit, 100, 54)
    assert limit.requests == 97  # 52.5 / 54
    limit = Guarded(GuardedConfig(initial=100))
    streaming(limit, 100, 60)
    assert limit.requests == 96, "four per cent at a time"
    limit = Guarded(GuardedConfig(initial=100))
    streaming(limit, 100, 90)
    assert limit.requests == 85, "twice the aim is an alarm"
    limit = Guarded(GuardedConfig(initial=100))
    streaming(limit, 40, 90)
    assert limit.requests == 34, "the gap was made by 40 streams, not by the 100 that were allowed"


def test_guarded_looks_at_the_last_few_views_together() -> None:
    """One step that carried long prompts makes one bad view; the objective is a mean."""
    limit = Guarded(GuardedConfig(initial=100))
    for _ in range(8):
        streaming(limit, 80, 20, waiting=False)
    streaming(limit, 80, 90, waiting=False)
    assert limit.requests == 100
    for _ in range(14):
        streaming(limit, 80, 90, waiting=False)
    assert limit.requests < 50


def test_guarded_holds_without_evidence() -> None:
    """F-05: no traffic, no tokens, a view of nothing."""
    limit = Guarded(GuardedConfig(initial=100))
    limit.viewed(view(), 0)
    limit.viewed(view(elapsed_ns=0), 0)
    limit.viewed(view(in_flight=100, in_flight_most=100, waiting=True, generated=15, decoding_ns=SECOND), 0)
    assert (limit.requests, limit.gap_ns) == (100, 0.0)


def test_guarded_climbs_back_after_a_bad_spell() -> None:
    """F-02: at least 80 % of its earlier level within 60 views of 250 ms."""
    limit = Guarded(GuardedConfig(initial=200))
    for _ in range(60):
        streaming(limit, limit.requests, 400)
    assert limit.requests == 2
    for _ in range(60):
        streaming(limit, limit.requests, 8)
    assert limit.requests >= 160


def test_guarded_stays_within_its_bounds() -> None:
    """F-01, and F-06: errors and single fast samples move nothing."""
    limit, chance = Guarded(GuardedConfig(least=4, most=64)), Random(1)
    for _ in range(200):
        streaming(limit, limit.requests, chance.uniform(1, 1000))
        assert 4 <= limit.requests <= 64
    before = limit.requests
    limit.failed(0)
    limit.answered(answer(1), 0)
    assert limit.requests == before


def test_guarded_learns_from_whole_answers_when_nothing_streams() -> None:
    limit = Guarded(GuardedConfig(initial=100))
    limit.answered(answer(1000, tokens=10), 0)
    limit.answered(answer(1000, tokens=10), 0)
    limit.viewed(view(in_flight=90, in_flight_most=100), 0)
    assert limit.gap_ns == 100 * MILLISECOND
    assert limit.requests == 85, "twice the aim is an alarm"


def test_guarded_allows_the_memory_that_does_not_peak_together() -> None:
    limit = Guarded(GuardedConfig(kv_tokens=100_000))
    assert limit.tokens == 92_000
    limit.viewed(view(expected_tokens=90_000, peak_tokens=60_000), 0)
    assert limit.tokens == 122_000
    assert Guarded(GuardedConfig()).tokens == UNBOUNDED


def test_guarded_bounds_the_prompts_ahead() -> None:
    limit = Guarded(GuardedConfig(ttft_ns=SECOND))
    assert limit.prefill_tokens == UNBOUNDED, "nothing is known yet"
    for _ in range(20):
        limit.viewed(view(prefilled=1000, prefilling_ns=100 * MILLISECOND), 0)  # 10,000 tokens/s, when there were any
    assert limit.prefill_tokens == pytest.approx(3000, rel=0.01)
    for _ in range(20):
        limit.viewed(view(prefilled=5, prefilling_ns=SECOND // 4), 0)
    assert limit.prefill_tokens > 2400, "it is slow now; what it could do is forgotten slowly"


def test_each_kind_is_built_from_its_config() -> None:
    chance = Random(1)
    for config in (AimdConfig(), VegasConfig(), Gradient2Config(), EnvoyConfig(), GuardedConfig()):
        assert type(build(config, chance)).__name__.lower() == config.kind


# ---- what the engine says of itself --------------------------------------------------------------------------


def test_guarded_takes_the_size_of_the_cache_from_the_engine_unless_it_is_set() -> None:
    limit = Guarded(GuardedConfig())
    limit.signalled(EngineSignal(kv_tokens=100_000), 5, 0)
    limit.viewed(view(), 0)
    assert limit.tokens == 92_000
    limit = Guarded(GuardedConfig(kv_tokens=10_000))
    limit.signalled(EngineSignal(kv_tokens=100_000), 5, 0)
    limit.viewed(view(), 0)
    assert limit.tokens == 9_200


def test_guarded_backs_off_once_for_a_preemption_and_then_holds() -> None:
    limit = Guarded(GuardedConfig(initial=100))
    limit.signalled(EngineSignal(preemptions=7), 80, 0)
    assert limit.requests == 100, "they were before our time"
    limit.signalled(EngineSignal(preemptions=9), 80, SECOND)
    assert limit.requests == 64  # 0.8 of what was in flight
    limit.signalled(EngineSignal(preemptions=12), 64, 2 * SECOND)
    assert limit.requests == 64, "one incident"
    streaming(limit, 64, 10, now=3 * SECOND)
    assert limit.requests == 64, "frozen"
    streaming(limit, 64, 10, now=7 * SECOND)
    assert limit.requests > 64


def test_guarded_does_not_grow_into_a_full_cache_nor_trust_old_news() -> None:
    """F-08: what is stale is not known, neither full nor empty."""
    limit = Guarded(GuardedConfig(initial=100))
    limit.signalled(EngineSignal(kv_share=0.99), 100, 0)
    streaming(limit, 100, 10, now=SECOND)
    assert limit.requests == 100
    streaming(limit, 100, 10, now=4 * SECOND)
    assert limit.requests > 100


def test_guarded_begins_anew_with_a_restarted_engine() -> None:
    limit = Guarded(GuardedConfig(initial=16))
    for _ in range(40):
        streaming(limit, limit.requests, 5)
    assert limit.requests > 200
    limit.signalled(EngineSignal(preemptions=40), 100, 0)
    limit.restarted(SECOND)
    assert limit.requests == 16
    limit.signalled(EngineSignal(preemptions=1), 10, 2 * SECOND)
    assert limit.requests == 16, "a new process counts from nothing"
    streaming(limit, 16, 5)
    assert limit.requests == 21


@pytest.mark.parametrize(("queue_ms", "window"), [(20, 100), (30, 100), (31, 90)])
def test_guarded_lets_one_batch_wait_behind_the_one_that_runs(queue_ms: int, window: int) -> None:
    """Triton counts what waits for the next batch: it is no queue too long before it waits longer than it is served."""
    limit = Guarded(GuardedConfig(initial=100))
    for second in range(2):
        signal = EngineSignal(waiting=30, queue_wait_ns=queue_ms * MILLISECOND, service_ns=30 * MILLISECOND)
        limit.signalled(signal, 100, second * SECOND)
    assert limit.requests == window


def test_guarded_takes_a_queue_inside_the_engine_for_a_window_too_large() -> None:
    limit = Guarded(GuardedConfig(initial=100))
    limit.signalled(EngineSignal(waiting=30), 100, 0)
    assert limit.requests == 100, "a moment's queue"
    limit.signalled(EngineSignal(waiting=30), 100, SECOND)
    assert limit.requests == 90
    limit.signalled(EngineSignal(waiting=2), 90, 2 * SECOND)
    limit.signalled(EngineSignal(waiting=30), 90, 3 * SECOND)
    assert limit.requests == 90


def test_guarded_comes_down_to_what_the_engine_runs() -> None:
    """An engine that runs four at a time keeps the rest in a queue of its own, where nobody can reorder them."""
    limit = Guarded(GuardedConfig(initial=64))
    for second in range(2):
        limit.signalled(EngineSignal(running=4, waiting=60), 64, second * SECOND)
    assert limit.requests == 6


def test_guarded_keeps_the_objective_of_answers_without_tokens() -> None:
    """Embeddings and the like: the answer is one step, and its time is the pace."""
    limit = Guarded(GuardedConfig(initial=40, latency_ns=200 * MILLISECOND))
    for number in range(40):
        for _ in range(20):
            limit.answered(answer(9 * limit.requests), number)  # nine ms for each that is in flight
        limit.viewed(view(in_flight=limit.requests, in_flight_most=limit.requests, waiting=True), number)
    assert limit.requests == pytest.approx(20, abs=2), "180 ms of 200"
