"""Leaps by hand: how far they go, what cuts them, and the prefix cache between them."""

from __future__ import annotations

from random import Random

import pytest

from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.model import EngineLimits, EngineModel
from forebay.engines.simulated.prefix import PrefixCache
from forebay.engines.simulated.profile import StepProfile
from forebay.engines.simulated.replay import Work, closed_loop, replay
from forebay.engines.simulated.stretch import Stretch

A100 = profile_named("a100-80g/llama-3.1-8b/bf16/tp1/vllm")


def engine(seqs: int = 8, batched: int = 64, kv: int = 10_000, **more: object) -> EngineModel:
    assert isinstance(A100, StepProfile)
    return EngineModel(A100, EngineLimits(seqs, batched, kv), **more)  # type: ignore[arg-type]


def leap(model: EngineModel, now: int) -> Stretch:
    stretch = model.leap(now)
    assert stretch is not None
    return stretch


def decoding(model: EngineModel, output: int) -> Stretch:
    """One sequence of 10 prompt tokens, past its prefill; the stretch that decodes the rest."""
    model.submit("a", 10, output, 0)
    prefill = leap(model, 0)
    assert (prefill.steps, prefill.admitted, prefill.first, prefill.tokens) == (1, ["a"], ["a"], 1)
    return leap(model, prefill.end)


def test_a_leap_goes_to_the_end_of_the_first_sequence_that_finishes() -> None:
    model = engine()
    stretch = decoding(model, 500)
    assert (stretch.steps, stretch.batch_seqs, stretch.tokens, stretch.finished) == (499, 1, 499, ["a"])
    assert model.leap(stretch.end) is None
    assert (model.steps, model.kv_used) == (500, 0)


def test_a_submission_ends_the_leap_with_the_step_under_way() -> None:
    model = engine()
    stretch = decoding(model, 500)
    middle = (stretch.end_of(99) + stretch.end_of(100)) // 2
    hundred = stretch.end_of(100)
    model.submit("b", 20, 3, middle)
    assert (stretch.steps, stretch.end, stretch.finished) == (100, hundred, [])
    assert model.kv_used == 10 + 100
    joint = leap(model, hundred)
    assert (joint.steps, joint.admitted, joint.batch_tokens, joint.first) == (1, ["b"], 21, ["b"])


def test_a_submission_that_cannot_join_leaves_the_leap_alone() -> None:
    full = engine(seqs=1)
    stretch = decoding(full, 500)
    full.submit("b", 20, 3, stretch.end_of(10))
    assert stretch.steps == 499
    short = engine(batched=1_000, kv=600)
    stretch = decoding(short, 500)
    short.submit("b", 595, 5, stretch.end_of(10))
    assert stretch.steps == 499


def test_an_abort_ends_the_leap_for_the_others() -> None:
    model = engine()
    model.submit("a", 10, 100, 0)
    model.submit("b", 10, 300, 0)
    stretch = leap(model, leap(model, 0).end)
    assert (stretch.steps, stretch.finished) == (99, ["a"])
    assert model.abort("a", stretch.end_of(98))  # the instant at which the last step begins
    assert (stretch.steps, stretch.finished) == (99, [])
    assert leap(model, stretch.end).steps == 200


def test_the_cache_in_use_can_be_read_without_a_cut() -> None:
    model = engine()
    stretch = decoding(model, 500)
    assert model.kv_used_at(stretch.start) == 11
    assert model.kv_used_at(stretch.end_of(249)) == 10 + 250
    assert stretch.steps == 499


def test_a_leap_stops_before_the_cache_is_full() -> None:
    model = engine(kv=100)
    model.submit("a", 10, 90, 0)
    model.submit("b", 10, 60, 0)
    stretch = leap(model, leap(model, 0).end)
    assert (stretch.steps, stretch.finished, model.kv_used_at(stretch.end)) == (40, [], 100)
    leap(model, stretch.end)
    assert model.preemptions == 1


def test_noise_draws_every_step() -> None:
    model = engine(noise=0.1, rng=Random(1))
    assert decoding(model, 500).steps == 1


def test_given_prefixes_are_attended_to_but_not_computed() -> None:
    model = engine(batched=2_000)
    model.submit("a", 1_000, 2, 0, cached_tokens=900)
    first = leap(model, 0)
    assert isinstance(A100, StepProfile)
    assert first.batch_tokens == 100
    assert first.end == pytest.approx(A100.step_ms(100, 1, 0, 100 * 950) * 1e6, abs=1)
    assert (model.kv_used, model.cached_tokens) == (1_000, 900)


def test_a_session_finds_what_it_left_unless_others_needed_the_room() -> None:
    def second_turn(kv: int, between: bool) -> int:
        model = engine(batched=1_000, kv=kv, prefix_cache=True)
        model.submit("one", 100, 20, 0, session="s")
        now = 0
        while (stretch := model.leap(now)) is not None:
            now = stretch.end
        if between:
            model.submit("other", 290, 5, now)
            while (stretch := model.leap(now)) is not None:
                now = stretch.end
        model.submit("two", 200, 20, now, session="s")
        leap(model, now)
        return model.cached_tokens

    assert second_turn(400, between=False) == 119  # the last token was made, but nothing was computed from it
    assert second_turn(500, between=True) == 119
    assert second_turn(400, between=True) == 0


def test_what_may_be_reused_bounds_what_a_session_finds() -> None:
    model = engine(batched=1_000, prefix_cache=True)
    model.submit("one", 100, 1, 0, session="s")
    end = leap(model, 0).end
    assert model.leap(end) is None
    model.submit("two", 200, 1, end, cached_tokens=64, session="s")
    leap(model, end)
    assert model.cached_tokens == 64


def test_the_least_recently_used_session_goes_first() -> None:
    cache = PrefixCache()
    for session in ("a", "b", "c"):
        cache.keep(session, 10)
    cache.keep("a", 4)  # used again; what it left before is longer
    cache.shrink(25)
    assert [cache.held(session) for session in ("a", "b", "c")] == [10, 0, 10]
    cache.take("a")
    assert (cache.tokens, cache.held("a")) == (10, 0)


def test_a_replay_records_every_request() -> None:
    work = [Work(0, 10, 5), Work(0, 10, 1), Work(10_000_000_000, 10, 3)]
    timeline = replay(engine(), work)
    assert list(timeline.submitted_ns) == [0, 0, 10_000_000_000]
    assert timeline.first_ns[0] == timeline.first_ns[1] == timeline.finished_ns[1]
    assert timeline.steps == 5 + 3
    assert timeline.end_ns == timeline.finished_ns[2]
    assert timeline.busy_ns == timeline.finished_ns[0] + timeline.end_ns - 10_000_000_000
    assert len(timeline.ttft_ms()) == 3
    assert len(timeline.tpot_ms()) == 2


def test_work_that_goes_back_in_time_is_refused() -> None:
    with pytest.raises(ValueError, match="back in time"):
        replay(engine(), [Work(10, 1, 1), Work(9, 1, 1)])


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    timeline = closed_loop(engine(), [(10, 20)] * 7, 3)
    assert len(timeline.finished_ns) == 7
    for number in range(3, 7):
        assert timeline.submitted_ns[number] in timeline.finished_ns[: number - 2]


def test_nothing_to_do_is_no_trouble() -> None:
    assert replay(engine(), []).steps == 0
    assert closed_loop(engine(), [], 4).steps == 0
