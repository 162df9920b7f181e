"""A fit must find the engine again that made the data, and say what the data cannot tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from forebay.engines.simulated import replay as plain
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.fitted import FrontEnd
from forebay.engines.simulated.model import EngineLimits, EngineModel
from forebay.engines.simulated.profile import StepProfile
from forebay.errors import UsageError
from forebay.report.records import RequestRecord
from forebay.sim.calibrate import Calibration, fit, fitted
from forebay.sim.features import offers_of
from forebay.sim.replay import Offer, Timing, replay

LIMITS = EngineLimits(16, 128, 8192)
FRONT = FrontEnd(3.0, 0.004)
SECOND = 1_000_000_000


def engine(**coefficients: float) -> StepProfile:
    base = profile_named("h100-80g/llama-3.1-8b/bf16/tp1/trtllm")
    assert isinstance(base, StepProfile)
    slow = replace(base, c0=5.0, w=30.0, r=2.5, p=2.0, e=0.2, seq=0.4, kv=1.5, att=400.0)
    return replace(slow, max_num_seqs=16, max_num_batched_tokens=128, **coefficients)  # type: ignore[arg-type]


TRUE = engine()


def served(
    offers: Sequence[Offer], profile: StepProfile = TRUE, noise: float = 0.0, seed: int = 1
) -> list[RequestRecord]:
    """What callers of such an engine see; each span off by a random part."""
    rng = Random(f"{seed}/noise")
    records = []
    timings, _ = replay(profile, LIMITS, FRONT, offers)
    for index, (offer, timing) in enumerate(zip(offers, timings, strict=True)):
        first = offer.at_ns + int((timing.first_ns - offer.at_ns) * rng.gauss(1.0, noise))
        done = first + int((timing.done_ns - timing.first_ns) * rng.gauss(1.0, noise))
        records.append(record(index, offer, first, done))
    return records


def record(index: int, offer: Offer, first_ns: int, done_ns: int) -> RequestRecord:
    return RequestRecord(
        index=index,
        phase="probe",
        key="",
        outcome="completed",
        intended_ns=offer.at_ns,
        sent_ns=offer.at_ns,
        first_token_ns=first_ns,
        done_ns=done_ns,
        status=200,
        attempts=1,
        prompt_tokens=offer.prompt_tokens,
        output_tokens=offer.output_tokens,
    )


def probes() -> list[list[Offer]]:
    """As the probing run makes them: alone, together, long, all sizes, and at random."""
    made = [[Offer(0, size, 6)] for size in (4, 8, 16, 32, 64, 128, 200, 300)]
    made += [[Offer(0, 6, 20)] * batch for batch in (1, 2, 4, 8, 12, 16)]
    made += [[Offer(0, 300, 20)] * 6, [Offer(0, 150, 20)] * 12]
    rng = Random("sizes")
    at, mixed = 0, []
    for _ in range(60):
        at += int(rng.expovariate(2.0) * SECOND)
        mixed.append(Offer(at, rng.randint(4, 150), rng.randint(2, 40)))
    return [*made, mixed]


def step_errors(found: Calibration) -> list[float]:
    """Of the time of steps that an engine has in service."""
    steps = [(1, 1, 50, 0.0), (4, 4, 400, 0.0), (16, 16, 3000, 0.0), (64, 3, 100, 500.0), (128, 1, 0, 8192.0)]
    return [found.profile.step_ms(*step) / TRUE.step_ms(*step) - 1.0 for step in steps]


# ---- the forward model -------------------------------------------------------------------------------------------


def test_a_replay_is_the_engine_model_s_own() -> None:
    offers = probes()[-1]
    timings, steps = replay(TRUE, LIMITS, FrontEnd(), offers)
    model = EngineModel(TRUE, LIMITS)
    timeline = plain.replay(model, [plain.Work(*offer) for offer in offers])
    assert [timing.first_ns for timing in timings] == list(timeline.first_ns)
    assert [timing.done_ns for timing in timings] == list(timeline.finished_ns)
    assert len(steps) == timeline.steps


def test_the_features_of_a_step_give_its_time() -> None:
    _, steps = replay(TRUE, LIMITS, FrontEnd(), probes()[-1])
    for step in steps:
        took_ms = (step.to_ns - step.from_ns) / 1e6
        assert TRUE.step_ms(step.tokens, step.sequences, step.context, step.pairs) == pytest.approx(took_ms, abs=1e-5)


def test_a_front_end_delays_what_reaches_the_scheduler() -> None:
    (without,), _ = replay(TRUE, LIMITS, FrontEnd(), [Offer(0, 100, 3)])
    (behind,), _ = replay(TRUE, LIMITS, FRONT, [Offer(0, 100, 3)])
    assert behind.queued_ns == 3_400_000
    assert behind.first_ns == pytest.approx(without.first_ns + 3_400_000, abs=2)


def test_a_replay_that_follows_what_was_seen_is_near_it_with_a_poor_profile() -> None:
    offers = probes()[-1]
    timings, steps = replay(TRUE, LIMITS, FrontEnd(), offers)
    seen = [(timing.first_ns, timing.done_ns) for timing in timings]
    poor = replace(TRUE, c0=60.0, w=0.0, r=0.0, e=1.0, seq=0.0, kv=0.0, att=0.0)
    followed, again = replay(poor, LIMITS, FrontEnd(), offers, seen)
    free, _ = replay(poor, LIMITS, FrontEnd(), offers)
    assert _off_ms(followed, timings) < 0.1 * _off_ms(free, timings)
    assert sum(step.tokens for step in again) == sum(step.tokens for step in steps)


def _off_ms(found: Sequence[Timing], true: Sequence[Timing]) -> float:
    """Mean error of first tokens."""
    return sum(abs(a.first_ns - b.first_ns) for a, b in zip(found, true, strict=True)) / len(true) / 1e6


# ---- the fit -----------------------------------------------------------------------------------------------------


def test_an_engine_is_found_again() -> None:
    found = fit([served(offers) for offers in probes()], LIMITS, TRUE)
    assert max(map(abs, step_errors(found))) < 0.01
    assert found.front.fixed_ms == pytest.approx(3.0, abs=1.0)
    assert found.residuals.tpot_p50 < 0.005
    assert found.residuals.ttft_p50 < 0.01
    assert found.profile.confidence.startswith("high")
    assert found.profile.max_num_seqs == 16


def test_noise_is_averaged_out() -> None:
    found = fit([served(offers, noise=0.03, seed=n) for n, offers in enumerate(probes() * 2)], LIMITS, TRUE)
    assert max(map(abs, step_errors(found))) < 0.05


def test_a_stall_of_the_machine_does_not_move_the_fit() -> None:
    runs = [served(offers) for offers in probes()]
    stalled = runs[3][0]
    runs[3] = [record(0, Offer(0, stalled.prompt_tokens, 6), stalled.first_token_ns + SECOND, stalled.done_ns + SECOND)]
    found = fit(runs, LIMITS, TRUE)
    assert max(map(abs, step_errors(found))) < 0.02


def test_traffic_alone_is_enough_where_it_visits_all_of_the_engine() -> None:
    found = fit([served(probes()[-1])], LIMITS, TRUE)
    assert found.residuals.tpot_p50 < 0.01
    assert found.residuals.ttft_p50 < 0.03


def test_what_the_data_cannot_tell_is_said() -> None:
    # One sequence at a time, no prompt longer than a few tokens: nothing shows batches, contexts or long prompts.
    found = fit([served([Offer(0, 4, 12)]) for _ in range(10)], LIMITS, TRUE)
    unknown = {one.name: one.wants for one in found.coefficients if not one.known}
    assert {"r", "p", "w", "kv", "att"} <= set(unknown)
    assert unknown["att"] == "longer prompts"
    assert "not identified" in found.profile.confidence
    assert found.profile.step_ms(1, 1, 10, 0.0) == pytest.approx(TRUE.step_ms(1, 1, 10, 0.0), rel=0.02)


def test_an_engine_that_guards_its_answers_is_fitted_as_one() -> None:
    guarded = replace(LIMITS, max_mixed_tokens=32)
    offers = probes()
    runs = []
    for asked in offers:
        timings, _ = replay(TRUE, guarded, FRONT, asked)
        runs.append([record(i, o, t.first_ns, t.done_ns) for i, (o, t) in enumerate(zip(asked, timings, strict=True))])
    right, wrong = fit(runs, guarded, TRUE), fit(runs, LIMITS, TRUE)
    assert max(map(abs, step_errors(right))) < 0.02
    assert right.residuals.ttft_p90 < wrong.residuals.ttft_p90


def test_an_engine_that_no_roofline_describes_gets_a_curve() -> None:
    # As matrix products by blocks are: steep for few rows, flat up to a block, then in proportion.
    points = ((1, 40.0), (8, 62.0), (16, 63.0), (64, 180.0), (128, 350.0))
    blocky = replace(TRUE, curve=points, seq=0.2, kv=3.0, att=300.0)
    found = fit([served(offers, blocky, noise=0.01) for offers in probes() * 2], LIMITS, TRUE)
    assert found.profile.curve
    for tokens in (1, 2, 4, 8, 12, 16, 24, 48, 96, 128):
        expected = blocky.step_ms(tokens, 1, 0, 0.0)
        assert found.profile.step_ms(tokens, 1, 0, 0.0) == pytest.approx(expected, rel=0.05), tokens


def test_a_roofline_is_kept_where_it_serves() -> None:
    assert fit([served(offers, noise=0.02) for offers in probes()], LIMITS, TRUE).profile.curve == ()


def test_the_same_data_give_the_same_fit() -> None:
    runs = [served(offers, noise=0.02) for offers in probes()[:-1]]
    assert fit(runs, LIMITS, TRUE) == fit(runs, LIMITS, TRUE)


# ---- what cannot be fitted ---------------------------------------------------------------------------------------


def test_too_little_is_refused() -> None:
    with pytest.raises(UsageError, match="3 completed streams, at least 8"):
        fit([served([Offer(0, 4, 4)] * 3)], LIMITS, TRUE)


def test_answers_that_did_not_stream_tell_nothing() -> None:
    blind = [
        RequestRecord(
            index=i, phase="", key="", outcome="completed", intended_ns=0, sent_ns=0, first_token_ns=-1, done_ns=9,
            status=200, attempts=1, prompt_tokens=4, output_tokens=4,
        )
        for i in range(20)
    ]  # fmt: skip
    with pytest.raises(UsageError, match="answers must stream"):
        fit([blind], LIMITS, TRUE)


def test_requests_that_the_limits_rule_out_are_refused() -> None:
    with pytest.raises(UsageError, match="limits as given: 200 \\+ 6 tokens do not fit"):
        fit([served(offers) for offers in probes()], EngineLimits(16, 128, 200), TRUE)


def test_requests_are_replayed_in_the_order_in_which_they_were_sent() -> None:
    records = served(probes()[-1])
    assert offers_of(records)[0].at_ns == records[0].sent_ns


def test_a_file_holds_no_infinity() -> None:
    found = fit([served([Offer(0, 4, 12)]) for _ in range(10)], LIMITS, TRUE)
    assert all(abs(one.error) < 1e9 for one in fitted(found, LIMITS, "test").coefficients)
