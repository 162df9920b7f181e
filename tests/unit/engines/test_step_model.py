"""The engine model on a manual clock: scheduling, KV, preemption, step time, and the rates it must come to."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.model import EngineLimits, EngineModel, StepResult
from forebay.engines.simulated.profile import StepProfile

H100 = profile_named("h100-80g/llama-3.1-8b/bf16/tp1/trtllm")
A100 = profile_named("a100-80g/llama-3.1-8b/bf16/tp1/vllm")
assert isinstance(H100, StepProfile)
assert isinstance(A100, StepProfile)


def engine(
    seqs: int = 8, batched: int = 64, kv: int = 10_000, profile: StepProfile = H100, **more: object
) -> EngineModel:
    reserve = bool(more.pop("reserve_output", False))
    return EngineModel(profile, EngineLimits(seqs, batched, kv, reserve), **more)  # type: ignore[arg-type]


def run(model: EngineModel, now: int = 0, most: int = 100_000) -> tuple[list[StepResult], int]:
    """Step until idle; the steps and the time at the end."""
    steps = []
    for _ in range(most):
        result = model.step(now)
        if result is None:
            return steps, now
        steps.append(result)
        now += result.duration_ns
    raise AssertionError(f"the engine is not idle after {most} steps")


def made(steps: list[StepResult]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for step in steps:
        for id_, count in step.tokens:
            counts[id_] = counts.get(id_, 0) + count
    return counts


def test_one_sequence_takes_a_prefill_and_then_one_step_per_token() -> None:
    model = engine(batched=64)
    model.submit("a", 100, 3, 0)
    steps, _ = run(model)
    assert [(step.batch_tokens, step.tokens) for step in steps] == [
        (64, []),  # first chunk of the prompt
        (36, [("a", 1)]),  # its rest, which yields the first token
        (1, [("a", 1)]),
        (1, [("a", 1)]),
    ]
    assert steps[-1].finished == ["a"]
    assert (model.kv_used, model.num_running, model.num_waiting) == (0, 0, 0)


def test_step_time_of_a_prefill_by_hand() -> None:
    # A100 8B: c0 0.947157, w 9.891433, r 0.058718, p 1.97178, e 0.00411, seq 0.006094, kv 0.083199,
    # att 3.535648;
    # T 100, B 1, K 0, A 100*50 = 5,000:
    # 0.947157 + (91.713 + 32.798)^(1/1.97178) + 0.411 + 0.006094 + 0.017678, the powers from log tables
    model = engine(profile=A100, batched=128)
    model.submit("a", 100, 1, 0)
    step = model.step(0)
    assert step is not None
    assert step.duration_ns == pytest.approx(12.9323e6, rel=1e-4)


def test_step_time_of_decodes_by_hand() -> None:
    # The same entry, two sequences with 10 tokens in the cache each: T 2, B 2, K 20:
    # 0.947157 + (9.891433^1.97178 + 0.117436^1.97178)^(1/1.97178) + 0.00822 + 0.012188 + 0.00166398
    model = engine(profile=A100)
    model.submit("a", 10, 2, 0)
    model.submit("b", 10, 2, 0)
    first = model.step(0)
    assert first is not None
    step = model.step(first.duration_ns)
    assert step is not None
    assert step.duration_ns == pytest.approx(10.8615e6, rel=1e-4)


def test_decodes_come_before_prefills_within_the_token_budget() -> None:
    model = engine(seqs=4, batched=16)
    model.submit("a", 4, 10, 0)
    model.step(0)
    model.submit("b", 40, 1, 0)
    step = model.step(1)
    assert step is not None
    assert step.tokens == [("a", 1)]
    assert step.batch_tokens == 16  # one decode and 15 tokens of b's prompt
    assert step.batch_seqs == 2


def test_admission_is_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    model = engine(seqs=4, batched=64, kv=100)
    model.submit("a", 50, 30, 0)
    model.step(0)
    model.submit("big", 60, 5, 0)
    model.submit("small", 2, 2, 0)
    step = model.step(1)
    assert step is not None
    assert step.admitted == []
    steps, _ = run(model, 2)
    order = [id_ for step in steps for id_ in step.admitted]
    assert order == ["big", "small"]


def test_max_num_seqs_bounds_the_batch() -> None:
    model = engine(seqs=3, batched=64)
    for number in range(10):
        model.submit(str(number), 4, 5, 0)
    steps, _ = run(model)
    assert max(step.batch_seqs for step in steps) == 3
    assert made(steps) == {str(number): 5 for number in range(10)}
    assert [id_ for step in steps for id_ in step.admitted] == [str(number) for number in range(10)]


def test_a_full_kv_cache_preempts_the_last_admitted_and_recomputes_it() -> None:
    model = engine(seqs=2, batched=64, kv=40)
    model.submit("old", 15, 20, 0)
    model.submit("new", 15, 20, 0)
    steps, _ = run(model)
    assert model.preemptions == 1
    assert made(steps) == {"old": 20, "new": 20}
    assert [id_ for step in steps for id_ in step.finished] == ["old", "new"]
    # 15+15 prompt tokens, then each grows by one per step; at 40 there is room for neither. `new` has made 6 tokens
    # and its 15+6 are computed in one chunk when it comes back.
    again = [step for step in steps if "new" in step.admitted][1]
    assert ("new", 1) in again.tokens
    assert again.batch_tokens - (again.batch_seqs - 1) == 21


def test_reserving_the_output_never_preempts() -> None:
    model = engine(seqs=8, batched=64, kv=100, reserve_output=True)
    for number in range(6):
        model.submit(str(number), 10, 30, 0)
    steps, _ = run(model)
    assert model.preemptions == 0
    assert max(step.batch_seqs for step in steps) == 2  # 40 tokens each


def test_prefix_hits_skip_compute_but_hold_cache() -> None:
    cold, warm = engine(batched=64), engine(batched=64, prefix_hit=0.5)
    for model in (cold, warm):
        model.submit("a", 40, 2, 0)
    first_cold, first_warm = cold.step(0), warm.step(0)
    assert first_cold is not None
    assert first_warm is not None
    assert (first_cold.batch_tokens, first_warm.batch_tokens) == (40, 20)
    assert cold.kv_used == warm.kv_used == 40
    assert first_warm.duration_ns < first_cold.duration_ns


def test_a_whole_prompt_in_the_prefix_cache_still_computes_one_token() -> None:
    model = engine(prefix_hit=0.999)
    model.submit("a", 1, 1, 0)
    steps, _ = run(model)
    assert [step.batch_tokens for step in steps] == [1]


def test_abort_frees_at_once_wherever_the_sequence_is() -> None:
    model = engine(seqs=2, batched=16)
    for id_, prompt in (("decoding", 4), ("prefilling", 40), ("first", 4), ("second", 4), ("third", 4)):
        model.submit(id_, prompt, 5, 0)
    model.step(0)
    assert (model.num_running, model.num_waiting, model.kv_used) == (2, 3, 16)
    assert model.abort("decoding", 1)
    assert model.kv_used == 12
    assert model.abort("prefilling", 1)
    assert model.abort("second", 1)  # from the middle of the queue
    assert (model.num_running, model.num_waiting, model.kv_used) == (0, 2, 0)
    assert not model.abort("second", 1)
    model.submit("second", 4, 2, 1)  # its id is free again
    steps, _ = run(model, 1)
    assert made(steps) == {"first": 5, "third": 5, "second": 2}


def test_a_finishing_sequence_holds_its_slot_until_its_step_is_over() -> None:
    model = engine()
    model.submit("a", 4, 1, 0)
    step = model.step(0)
    assert step is not None
    assert step.finished == ["a"]
    assert (model.num_running, model.kv_used) == (1, 4)
    assert model.step(step.duration_ns) is None
    assert (model.num_running, model.kv_used) == (0, 0)


def test_slowdown_stretches_the_steps() -> None:
    plain, slow = engine(), engine()
    slow.slowdown = 3.0
    for model in (plain, slow):
        model.submit("a", 10, 5, 0)
    assert run(slow)[1] == pytest.approx(3 * run(plain)[1], rel=1e-6)


def test_noise_is_seeded_and_has_no_bias() -> None:
    def end(seed: int) -> int:
        model = engine(noise=0.05, rng=Random(seed))
        model.submit("a", 10, 2000, 0)
        return run(model)[1]

    quiet = engine()
    quiet.submit("a", 10, 2000, 0)
    assert end(1) == end(1) != end(2)
    assert end(1) == pytest.approx(run(quiet)[1], rel=0.01)


@pytest.mark.parametrize(
    ("prompt", "output", "reason"), [(0, 1, "at least one"), (1, 0, "at least one"), (60, 41, "do not fit")]
)
def test_what_can_never_run_is_refused(prompt: int, output: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        engine(kv=100).submit("a", prompt, output, 0)


def test_an_id_is_used_once_at_a_time() -> None:
    model = engine()
    model.submit("a", 1, 1, 0)
    with pytest.raises(ValueError, match="already"):
        model.submit("a", 1, 1, 0)


@pytest.mark.parametrize("limits", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (8, 4, 100)])
def test_limits_that_cannot_hold_are_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        EngineLimits(*limits)


@pytest.mark.parametrize("seed", range(12))
def test_random_work_is_conserved_and_stays_within_its_limits(seed: int) -> None:
    rng = Random(seed)
    limits = EngineLimits(
        rng.choice([1, 3, 16]),
        rng.choice([16, 40, 200]),
        rng.choice([80, 200, 1000]),
        reserve_output=seed % 3 == 0,
    )
    model = EngineModel(H100, limits, prefix_hit=rng.choice([0.0, 0.4]))
    wanted: dict[str, int] = {}
    got: dict[str, int] = {}
    open_ids: set[str] = set()
    aborted: set[str] = set()
    done: list[str] = []
    now = 0
    for turn in range(600):
        if turn < 400 and rng.random() < 0.5:
            prompt = rng.randint(1, 50)
            wanted[str(turn)] = output = rng.randint(1, 30)
            model.submit(str(turn), prompt, output, now)
            open_ids.add(str(turn))
        if open_ids and rng.random() < 0.1:
            victim = rng.choice(sorted(open_ids))
            assert model.abort(victim, now)
            open_ids.discard(victim)
            aborted.add(victim)
        result = model.step(now)
        assert model.kv_used <= limits.kv_tokens
        assert model.num_running <= limits.max_num_seqs
        assert model.num_running + model.num_waiting == len(open_ids)
        if result is None:
            assert not open_ids
            continue
        assert result.batch_tokens <= limits.max_num_batched_tokens
        now += result.duration_ns
        for id_, count in result.tokens:
            assert id_ in open_ids
            got[id_] = got.get(id_, 0) + count
        for id_ in result.finished:
            open_ids.discard(id_)
            done.append(id_)
    steps, _ = run(model, now)
    for id_, count in made(steps).items():
        got[id_] = got.get(id_, 0) + count
    done += [id_ for step in steps for id_ in step.finished]
    assert len(done) == len(set(done))
    assert set(done) == set(wanted) - aborted
    assert all(got[id_] == wanted[id_] for id_ in done)
    assert (model.kv_used, model.num_running, model.num_waiting) == (0, 0, 0)


def test_same_seed_same_run() -> None:
    def trail(seed: int) -> list[StepResult]:
        rng = Random(seed)
        model = engine(seqs=16, batched=64, kv=300, noise=0.1, rng=Random(seed))
        for number in range(40):
            model.submit(str(number), rng.randint(1, 60), rng.randint(1, 40), 0)
        return run(model)[0]

    assert trail(5) == trail(5)
    assert trail(5) != trail(6)


def closed_loop_rate(profile: StepProfile, batch: int, context: int, output: int = 32) -> float:
    """Decode tokens/s with `batch` sequences kept running, measured between the prefills and the ends."""
    limits = EngineLimits(batch, max(batch * context, batch), profile.kv_tokens)
    model = EngineModel(profile, limits)
    for number in range(batch):
        model.submit(str(number), context - output // 2, output, 0)
    first = model.step(0)
    assert first is not None
    decodes = list(iter(lambda: model.step(0), None))
    assert all(step.batch_seqs == batch for step in decodes)
    seconds = sum(step.duration_ns for step in decodes) / 1e9
    return sum(len(step.tokens) for step in decodes) / seconds


@pytest.mark.parametrize("name", ["h100-80g/llama-3.1-8b/bf16/tp1/trtllm", "h100-80g/llama-3.1-70b/fp8/tp4/vllm"])
@pytest.mark.parametrize("batch", [1, 32, 128])
def test_saturated_decoding_comes_to_the_published_rate(name: str, batch: int) -> None:
    profile = profile_named(name)
    assert isinstance(profile, StepProfile)
    rate = closed_loop_rate(profile, batch, 1024)
    assert rate == pytest.approx(profile.decode_tokens_per_s[batch], rel=0.01)


def test_a_saturated_closed_loop_agrees_with_the_linear_model() -> None:
    # H100 8B BF16 TensorRT-LLM, concurrency 64, 1,024 in, 256 out: the published linear fit a + b*B + c*K gives
    # 7.03 + 0.0117*64 + 0.0430*64*1.152 ms per decode step; each sequence also needs its prompt, 1,024 tokens at
    # 34,190 tok/s, of which the weight streaming share (w = 5.97 ms per step) is already in the decode step.
    assert isinstance(H100, StepProfile)
    limits = EngineLimits(64, 8192, H100.kv_tokens)
    model = EngineModel(H100, limits)
    rng = Random(1)
    now, made_tokens, count = 0, 0, 0
    for _ in range(64):
        model.submit(f"s{count}", 1024, rng.randint(1, 256), 0)  # staggered, as in a steady state
        count += 1
    warm_at = 0
    for step_number in range(1600):
        result = model.step(now)
        assert result is not None
        now += result.duration_ns
        if step_number == 400:
            warm_at, made_tokens = now, 0
        made_tokens += len(result.tokens)
        for _id in result.finished:
            model.submit(f"s{count}", 1024, 256, now)
            count += 1
    rate = made_tokens / ((now - warm_at) / 1e9)
    decode_ms = 7.03 + 0.0117 * 64 + 0.0430 * 64 * 1.152
    prefill_ms_per_sequence = 1024 / 34_190 * 1e3 - 1024 / 2048 * 5.97
    expected = 64 * 256 / ((256 * decode_ms + 64 * prefill_ms_per_sequence) / 1e3)
    assert rate == pytest.approx(expected, rel=0.05)


def test_a_slower_gpu_is_slower() -> None:
    assert isinstance(A100, StepProfile)
    assert isinstance(H100, StepProfile)
    assert closed_loop_rate(A100, 32, 512) < closed_loop_rate(H100, 32, 512)
    assert closed_loop_rate(replace(H100, kv=H100.kv * 4), 32, 512) < closed_loop_rate(H100, 32, 512)
