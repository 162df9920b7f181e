"""The demand estimate: priors, learning, hierarchy, caps, bounds, and engines that lie."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.admission import estimate as module
from forebay.core.admission.estimate import DemandEstimator, EstimateConfig
from forebay.core.model import ByteClass, Request, Usage


def request(text: int = 4_200, **fields: Any) -> Request:
    fields.setdefault("key", "k")
    return Request(model="m", text_bytes=text, body_bytes=text + 100, **fields)


@pytest.fixture
def estimator() -> DemandEstimator:
    return DemandEstimator(EstimateConfig())


@pytest.mark.parametrize(
    ("byte_class", "expected"), [(ByteClass.ASCII, 1_009), (ByteClass.WIDE, 1_409), (ByteClass.ESCAPED_ALPHABET, 429)]
)
def test_priors_before_anything_is_learned(estimator: DemandEstimator, byte_class: ByteClass, expected: int) -> None:
    assert estimator.estimate(request(byte_class=byte_class)).input_tokens == expected


def test_cjk_is_estimated_at_one_token_a_character(estimator: DemandEstimator) -> None:
    """B-19: at least 0.6 token per CJK character (three bytes each), never below bytes / 8."""
    tokens = estimator.estimate(request(12_000, byte_class=ByteClass.WIDE)).input_tokens
    assert tokens >= 0.6 * 4_000


@pytest.mark.parametrize(
    ("fields", "expected", "reserved"),
    [
        ({}, 256, 256),
        ({"max_output_tokens": 100}, 100, 100),
        ({"max_output_tokens": 100, "choices": 8}, 800, 800),  # B-13
        ({"choices": 2}, 512, 512),
        ({"generates": False}, 0, 0),
        ({"max_output_tokens": 0}, 0, 0),
    ],
)
def test_output_before_anything_is_learned(
    estimator: DemandEstimator, fields: dict[str, Any], expected: int, reserved: int
) -> None:
    demand = estimator.estimate(request(**fields))
    assert (demand.output_tokens, demand.output_reserved) == (expected, reserved)


def test_counted_tokens_are_taken_as_they_are(estimator: DemandEstimator) -> None:
    """B-16: prompts given as token ids."""
    assert estimator.estimate(request(0, counted_tokens=3_000, generates=False)).input_tokens == 3_000
    for _ in range(50):
        estimator.learn(request(4_000, counted_tokens=500), Usage(1_500, 10))
    assert estimator.estimate(request(4_000, counted_tokens=500)).input_tokens == pytest.approx(1_500, rel=0.03)


@pytest.mark.parametrize("tokens_per_byte", [0.15, 0.24, 0.45])
def test_input_error_after_fifty_requests(estimator: DemandEstimator, tokens_per_byte: float) -> None:
    chance = Random(3)
    errors = []
    for number in range(150):
        size = chance.randrange(300, 9_000)
        true = int(size * tokens_per_byte * chance.gauss(1.0, 0.1)) + 20
        estimate = estimator.estimate(request(size)).input_tokens
        if number >= 50:
            errors.append(abs(estimate - true) / true)
        estimator.learn(request(size), Usage(true, 50))
    assert sum(errors) / len(errors) < 0.13, "the noise itself is 8 %"
    assert sorted(errors)[len(errors) * 95 // 100] < 0.37


def test_a_new_key_starts_from_what_its_model_taught(estimator: DemandEstimator) -> None:
    for _ in range(100):
        estimator.learn(request(5_000, key="old"), Usage(2_000, 10))
    assert estimator.estimate(request(5_000, key="new")).input_tokens == pytest.approx(2_000, rel=0.2)
    assert estimator.estimate(request(5_000, key="new", byte_class=ByteClass.WIDE)).input_tokens == 1_675


def test_a_key_of_its_own_habits_is_learned_apart(estimator: DemandEstimator) -> None:
    for _ in range(200):
        estimator.learn(request(5_000, key="code"), Usage(2_000, 10))
        estimator.learn(request(5_000, key="prose"), Usage(1_000, 10))
    assert estimator.estimate(request(5_000, key="code")).input_tokens == pytest.approx(2_000, rel=0.1)
    assert estimator.estimate(request(5_000, key="prose")).input_tokens == pytest.approx(1_000, rel=0.1)


def test_short_texts_teach_the_template_not_the_ratio(estimator: DemandEstimator) -> None:
    """A greeting of 2 bytes becomes 40 tokens by the chat template; a document must not be priced at 20 a byte."""
    for _ in range(200):
        estimator.learn(request(2), Usage(40, 10))
    assert 30 <= estimator.estimate(request(2)).input_tokens <= 50
    assert estimator.estimate(request(10_000)).input_tokens < 3_500
    assert estimator.estimate(request(10_000, key="other")).input_tokens < 3_500


def test_output_is_learned_and_never_above_the_callers_cap(estimator: DemandEstimator) -> None:
    chance = Random(5)
    for _ in range(600):
        estimator.learn(request(), Usage(1_000, int(chance.lognormvariate(4.6, 0.5))))  # median 99, mean 113
    free = estimator.estimate(request())
    assert free.output_tokens == pytest.approx(113, rel=0.25)
    assert free.output_reserved >= free.output_tokens
    capped = estimator.estimate(request(max_output_tokens=50))
    assert (capped.output_tokens, capped.output_reserved) == (50, 50)
    roomy = estimator.estimate(request(max_output_tokens=4_000))
    assert roomy.output_tokens == free.output_tokens
    assert roomy.output_reserved == 4_000


def test_output_error_of_a_sum_after_learning(estimator: DemandEstimator) -> None:
    """One answer cannot be foreseen, a hundred can: the errors average out."""
    chance = Random(8)
    draws = [int(chance.lognormvariate(5.0, 0.8)) + 1 for _ in range(1_100)]
    for output in draws[:1_000]:
        estimator.learn(request(), Usage(1_000, output))
    expected = estimator.estimate(request()).output_tokens * 100
    assert expected == pytest.approx(sum(draws[1_000:]), rel=0.35)


def test_streamed_and_whole_answers_are_learned_apart(estimator: DemandEstimator) -> None:
    for _ in range(60):
        estimator.learn(request(stream=True), Usage(1_000, 900))
        estimator.learn(request(), Usage(1_000, 30))
    assert estimator.estimate(request(stream=True)).output_tokens > 800
    assert estimator.estimate(request()).output_tokens < 60


@pytest.mark.parametrize("lie", [Usage(10**15, 10**15), Usage(0, 0), Usage(-5, -5), Usage(10**15, 1), Usage(1, 10**15)])
def test_an_engine_that_lies_cannot_price_everybody_out(estimator: DemandEstimator, lie: Usage) -> None:
    """An estimate beyond every bound would refuse for ever, and nothing would be learned again."""
    for _ in range(100):
        estimator.learn(request(key="victim"), lie)
    for key in ("victim", "bystander"):
        demand = estimator.estimate(request(4_200, key=key))
        assert 4_200 / 64 <= demand.input_tokens <= 4_200 + 600
        assert 1 <= demand.output_tokens <= 1_000_001
    for _ in range(200):
        estimator.learn(request(key="victim"), Usage(1_000, 100))
    assert estimator.estimate(request(key="victim")).input_tokens == pytest.approx(1_000, rel=0.15)


def test_tables_are_bounded(estimator: DemandEstimator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEARNERS_MAX", 20)
    for number in range(100):
        estimator.learn(request(key=f"k{number}"), Usage(1_000, 10))
    assert len(estimator._learners) <= 20
    assert estimator.estimate(request(key="k99")).input_tokens > 0


def test_what_an_engine_has_cached_is_learned_and_is_no_work(estimator: DemandEstimator) -> None:
    for _ in range(100):
        estimator.learn(request(key="agent"), Usage(1_000, 50, cached_tokens=800))
    demand = estimator.estimate(request(key="agent"))
    assert demand.cached_tokens == pytest.approx(0.8 * demand.input_tokens, rel=0.05)
    assert demand.work == demand.input_tokens - demand.cached_tokens + 2 * demand.output_tokens
    assert estimator.estimate(request(key="other")).cached_tokens == 0, "one key's habit is not another's"
    assert demand.reserved >= demand.input_tokens, "its limits hold all of it until the engine has spoken"
    for _ in range(200):
        estimator.learn(request(key="agent"), Usage(1_000, 50))
    assert estimator.estimate(request(key="agent")).cached_tokens < 30


@pytest.mark.parametrize(("weight", "charged"), [(1.0, 1_000), (0.0, 200), (0.25, 400)])
def test_cached_tokens_are_charged_by_their_weight(weight: float, charged: int) -> None:
    estimator = DemandEstimator(EstimateConfig(cached_weight=weight))
    usage = estimator.weighed(Usage(1_000, 50, cached_tokens=800))
    assert usage.charged_input == charged
    assert (usage.input_tokens, usage.tokens, usage.work) == (1_000, 1_050, 300)


def test_a_negative_word_of_an_engine_charges_nothing() -> None:
    assert Usage(-5, 1).charged_input == 0


def test_the_price_of_images_is_learned_and_leaves_that_of_text_alone(estimator: DemandEstimator) -> None:
    for _ in range(50):
        estimator.learn(request(4_200), Usage(1_008, 10))
    for _ in range(150):
        estimator.learn(request(4_200, media_tokens=1_024), Usage(1_108, 10))
    assert estimator.estimate(request(4_200, media_tokens=2_048)).input_tokens == pytest.approx(1_208, rel=0.06)
    assert estimator.estimate(request(4_200)).input_tokens == pytest.approx(1_008, rel=0.02)
    assert estimator.estimate(request(0, media_tokens=1_024, key="new")).input_tokens < 250, (
        "a new key starts there too"
    )


def test_kinds_of_text_are_learned_apart(estimator: DemandEstimator) -> None:
    """A tokenizer that makes a token of every digit is dear on figures, and not on prose."""
    prose, figures = {"tokens_per_byte": 0.2}, {"tokens_per_byte": 0.4}
    for _ in range(60):
        estimator.learn(request(5_000, **prose), Usage(1_000, 10))
        estimator.learn(request(5_000, **figures), Usage(4_000, 10))
    assert estimator.estimate(request(5_000, **prose)).input_tokens == pytest.approx(1_008, rel=0.03)
    assert estimator.estimate(request(5_000, **figures)).input_tokens == pytest.approx(4_008, rel=0.03)


TEXTS = st.builds(
    request,
    st.integers(0, 1_000_000),
    byte_class=st.sampled_from(ByteClass),
    tokens_per_byte=st.floats(0, 1.7),
    counted_tokens=st.integers(0, 10_000),
    media_tokens=st.sampled_from([0, 1_024]),
    max_output_tokens=st.none() | st.integers(0, 100_000),
    choices=st.integers(1, 8),
)
WORDS = st.builds(Usage, st.integers(-10, 10**9), st.integers(-10, 10**9), cached_tokens=st.integers(0, 10**9))


@given(st.lists(st.tuples(TEXTS, WORDS), max_size=30), TEXTS)
def test_whatever_was_learned_an_estimate_stays_within_bounds(
    history: list[tuple[Request, Usage]], asked: Request
) -> None:
    estimator = DemandEstimator(EstimateConfig())
    for each, usage in history:
        estimator.learn(each, usage)
    demand = estimator.estimate(asked)
    least = asked.text_bytes * module.LEAST[asked.byte_class]
    most = asked.text_bytes * max(asked.tokens_per_byte, 1) * module.RATIO_MOST + module.OVERHEAD_MOST + 1
    media = asked.media_tokens * module.MEDIA_MOST
    assert int(least) + asked.counted_tokens <= demand.input_tokens <= most + media + asked.counted_tokens
    assert 0 <= demand.output_tokens <= demand.output_reserved
    assert 0 <= demand.cached_tokens <= demand.input_tokens
    cap = asked.max_output_tokens
    if cap is not None:
        assert demand.output_reserved == cap * asked.choices
        asked.max_output_tokens = cap + 1
        more = estimator.estimate(asked)
        assert more.output_tokens >= demand.output_tokens
        assert more.output_reserved > demand.output_reserved


def test_other_assumptions_are_taken_and_what_was_learned_stays() -> None:
    estimator = DemandEstimator(EstimateConfig(output_tokens_default=256, message_overhead_tokens=8))
    for _ in range(30):
        estimator.learn(request(2_000), Usage(900, 40))
    learned = estimator.estimate(request(2_000))
    estimator.reconfigure(EstimateConfig(output_tokens_default=700, message_overhead_tokens=50, cached_weight=0.25))
    assert estimator.estimate(request(2_000)).output_tokens == learned.output_tokens, "it was learned"
    assert estimator.estimate(request(2_000)).input_tokens == learned.input_tokens + 42, "the overhead was assumed"
    stranger = Request("k", "another model", text_bytes=400)
    assert estimator.estimate(stranger).output_reserved == 700
    assert estimator.weighed(Usage(100, 1, cached_tokens=80)).charged_input == 40


def test_an_overhead_that_was_learned_is_kept() -> None:
    estimator = DemandEstimator(EstimateConfig(message_overhead_tokens=8))
    for _ in range(200):
        estimator.learn(request(40), Usage(40, 1))
    before = estimator.estimate(request(40)).input_tokens
    estimator.reconfigure(EstimateConfig(message_overhead_tokens=500))
    assert estimator.estimate(request(40)).input_tokens == before
    assert before >= 35


def test_another_tokenizer_forgets_the_ratios_of_its_models_alone() -> None:
    estimator = DemandEstimator(EstimateConfig())
    requests = {model: Request("k", model, text_bytes=2_000, tokens_per_byte=0.3) for model in ("m", "n", "o")}
    for one in requests.values():
        for _ in range(30):
            estimator.learn(one, Usage(1_200, 40))
    learned = {model: estimator.estimate(one) for model, one in requests.items()}
    assert {demand.input_tokens > 1_000 for demand in learned.values()} == {True}
    estimator.recount({"n": "o200k", "*": "llama3"}, {"n": "o200k", "m": "qwen3", "*": "llama3"})
    after = {model: estimator.estimate(one) for model, one in requests.items()}
    assert (after["n"], after["o"]) == (learned["n"], learned["o"])
    assert after["m"].input_tokens == 609, "counted anew: nothing is known of how far that is off"
    assert after["m"].output_tokens == learned["m"].output_tokens, "an answer's length does not depend on it"
