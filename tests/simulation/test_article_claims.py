"""Claims of the article that prompted this project, tried in a second or two. All of them: docs/article-claims.md.

The longer runs behind that page are `python -m benchmarks.article`.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from benchmarks import article, article_code, article_figures, article_runs
from forebay.report.table import refused_share
from forebay.sim.scenario import EngineSpec

PAGE = Path(__file__).parents[2] / "docs" / "article-claims.md"


def test_the_page_refers_to_tests_and_figures_that_exist() -> None:
    text = PAGE.read_text("utf-8")
    here = Path(__file__).read_text("utf-8")
    tests = set(re.findall(r"`(test_[a-z_]+)`", text))
    assert tests, "the page names no test"
    assert not {name for name in tests if f"def {name}(" not in here}
    figures = set(re.findall(r"\]\(#([a-z-]+)\)", text))
    assert figures >= set(article.CLAIMS), f"not referred to: {set(article.CLAIMS) - figures}"


# ---- the curve ---------------------------------------------------------------------------------------------------


def test_the_s_curve_is_a_hyperbola() -> None:
    fit = article_figures.hyperbola()
    for batch, (low, high) in article_figures.BANDS.items():
        assert low <= fit.percent[batch] <= high
    assert fit.half == pytest.approx(5.5, abs=0.1)
    assert fit.worst < 2.2


def test_no_gain_per_request_ever_rises() -> None:
    middles = {batch: sum(band) / 2 for batch, band in article_figures.BANDS.items()}
    gains = article_figures.slopes(middles)
    assert gains == sorted(gains, reverse=True), "an S rises before it falls"


def test_one_measured_engine_is_in_all_five_bands_and_no_language_model_in_any() -> None:
    series = article_figures.measured_series()
    assert [one.name for one in series if one.inside == one.of == 5] == ["A100-40GB bert-large int8 encoder seq 128"]
    models = [one for one in series if "llama" in one.name]
    assert len(models) >= 5
    assert all(one.inside == 0 for one in models)


def test_batches_of_8_to_16_leave_most_of_a_language_models_throughput() -> None:
    for name, full in ((article_figures.H100_8B, 128), (article_figures.A100_8B, 256)):
        assert article_figures.decode_share(name, 8, full) < 15
        assert article_figures.decode_share(name, 16, full) < 25


def test_memory_bandwidth_is_spent_before_compute() -> None:
    shares = [article_figures.bandwidth_share(batch) for batch in (1, 8, 64, 128)]
    assert shares[0] > 70
    assert shares == sorted(shares, reverse=True), "a larger batch spends less of it on weights"


def test_200_callers_wait_seconds_only_for_whole_batches() -> None:
    assert article_figures.wait_of_static_batches(200, 108, 211) == pytest.approx(4.0, abs=0.2)
    assert article_figures.wait_of_static_batches(200, 8, 211) > 30
    assert article_figures.wait_of_static_batches(200, 200, 211) == 0


# ---- the code ----------------------------------------------------------------------------------------------------


def test_the_bounded_queue_has_no_bound_and_stops() -> None:
    queue = article_code.PushQueue(max_depth=50)
    slept = [queue.push(number) for number in range(500)]
    assert len(queue.queue) == 500
    assert max(slept) == 50
    assert len(queue.start_batch()) == 8
    queue.end_batch()
    assert len(queue.queue) == 492
    assert not queue.busy, "nothing starts the next batch but a push"


def test_the_gate_that_counts_shuts_when_completions_are_missed() -> None:
    gate = article_code.InflightGate(max_inflight=32)
    for _ in range(32):
        assert gate.admit() == 200  # whose clients leave: nobody says that they are complete
    assert [gate.admit() for _ in range(3)] == [429, 429, 429]


def test_the_token_gate_never_refills() -> None:
    gate = article_code.TokenGate()
    statuses = [gate.admit(4000) for _ in range(1000)]
    assert statuses.count(200) == 10
    assert set(statuses[10:]) == {429}
    assert article_code.TokenGate().admit(4 * 12_000) == 429, "a long prompt never fits, idle or not"


def test_the_hybrid_gate_charges_whom_it_refuses() -> None:
    gate = article_code.HybridGate(depth=20)
    gate.queue.extend(range(20))
    assert gate.process(99, 4000) == 503
    assert gate.tokens.available == article_code.SNIPPET_TOKENS_PER_S - 1128


def test_the_hybrid_gate_answers_with_the_results_of_others() -> None:
    gate = article_code.HybridGate()
    gate.queue.extend(range(8))
    assert 99 not in gate.process(99, 400)  # type: ignore[operator]


def test_the_channel_holds_senders_only_after_it_is_full_for_good() -> None:
    alone = asyncio.run(article_code.channel_calls(12, 8, 0, 0.001))
    assert alone == {"by handler": 8, "by worker": 0, "deadline": 4}
    with_worker = asyncio.run(article_code.channel_calls(12, 8, 1, 0.5))
    assert with_worker == {"by handler": 12, "by worker": 12, "deadline": 0}, "every call is served twice"


def test_the_tuner_does_nothing_between_200_and_500_ms() -> None:
    for p99 in (200.0, 350.0, 500.0):
        assert article_code.settle(article_code.DepthTuner(40), lambda _, p99=p99: p99, 100)[-1] == 40  # type: ignore[misc]


def test_the_tuner_grows_to_its_end_while_p99_is_low() -> None:
    """A GPU that runs any kernel reads as busy, so the other condition always holds."""
    assert article_code.settle(article_code.DepthTuner(16), lambda _: 150.0, 12)[-1] == 64


def test_the_tuner_takes_a_quarter_of_an_hour_to_come_down() -> None:
    depths = article_code.settle(article_code.DepthTuner(64), lambda _: 900.0, 60)
    assert depths.index(4) + 1 == 30  # turns of 30 s


def test_a_flat_output_is_wrong_by_most_of_it() -> None:
    flat = article_figures.flat_output("azure_llm_2023_conv")
    assert flat.longer_share == pytest.approx(0.50, abs=0.01)
    assert flat.output_error > 0.6


# ---- the rules, simulated ----------------------------------------------------------------------------------------


def encoder_run(text: str, share: float, s: float = 0.6) -> article_runs.Outcome:
    engine = EngineSpec(profile=article_figures.BERT_INT8, max_num_seqs=32)
    load = article_runs.encoder_load(share, s=s)
    return article_runs.simulate("claim", text, engine, load, latency_ms=100.0, ttft_ms=None, warm_up_s=0.1)


def test_a_wait_rule_of_50_ms_bounds_p99() -> None:
    text = article_runs.config("hybrid", limit=1, wait_budget_ms=50, depth=100_000, batching=article_runs.BATCHES)
    result = encoder_run(text, 2.0).result
    assert result.queue_wait_ms.p99 is not None
    assert 40 < result.queue_wait_ms.p99 <= 50
    assert result.late_evicted_ratio < 0.03
    assert refused_share(result) > 0.3


def test_the_wait_rule_fills_no_batch_below_capacity() -> None:
    text = article_runs.config("hybrid", limit=1, wait_budget_ms=50, batching=article_runs.BATCHES)
    result = encoder_run(text, 0.6).result
    assert result.utilization.batch is not None
    assert result.utilization.batch < 0.3
    assert refused_share(result) == 0


def test_waiting_for_a_batch_costs_latency_and_serves_no_more() -> None:
    outcomes = [
        encoder_run(
            article_runs.config(
                "backpressure",
                limit=1,
                batching=f'{{ kind = "dynamic", max_size = 32, linger_ms = {linger} }}',
            ),
            0.3,
        ).result
        for linger in (0, 50)
    ]
    at_once, waited = outcomes
    assert at_once.latency_ms.p99 is not None
    assert waited.latency_ms.p99 is not None
    assert waited.latency_ms.p99 > 5 * at_once.latency_ms.p99
    assert waited.goodput_per_s <= at_once.goodput_per_s * 1.01
    assert (waited.utilization.busy or 1) < 0.5 * (at_once.utilization.busy or 0), "what it saves is the GPU's time"


def test_batches_form_without_a_queue() -> None:
    load, _ = article_runs.MIXES[0].load(0.5, 30.0)
    outcome = article_runs.simulate("direct", None, EngineSpec(profile=article_figures.H100_8B), load, warm_up_s=10.0)
    assert 1024 * (outcome.result.utilization.batch or 0) > 16
    assert (outcome.result.ttft_ms.p50 or 1e9) < 50


def test_a_busy_gpu_is_no_saturated_gpu() -> None:
    load, _ = article_runs.MIXES[0].load(0.25, 30.0)
    outcome = article_runs.simulate("direct", None, EngineSpec(profile=article_figures.H100_8B), load, warm_up_s=10.0)
    assert (outcome.result.utilization.busy or 0) > 0.97
    assert (outcome.extras.tokens_share or 1) < 0.2
