"""The forward pass on a tiny random Llama: against a plain reference, and against itself in every way of batching."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.engines.embedded.gguf import GgufFile
from forebay.engines.embedded.model import Model, Shape, load_weights
from forebay.engines.embedded.scheduler import Want
from forebay.errors import EngineError

CLOSE = 1e-4
PROMPT = [5, 77, 130, 9, 200, 31, 31, 8, 250, 4, 19, 66]


def _reference(tiny: Any, tokens: list[int]) -> np.ndarray:
    """Llama by the book: one position at a time, float64, neighbouring pairs rotated. [positions, vocabulary]"""
    shape, arrays = tiny.shape, {name: array.astype(np.float64) for name, array in tiny.arrays.items()}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + shape.norm_epsilon) * weight

    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        out = x.copy()
        for pair in range(shape.head_width // 2):
            angle = position * shape.rope_base ** (-2 * pair / shape.head_width)
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            out[:, 2 * pair : 2 * pair + 2] = x[:, 2 * pair : 2 * pair + 2] @ turn.T
        return out

    keys: list[list[np.ndarray]] = [[] for _ in range(shape.layers)]
    values: list[list[np.ndarray]] = [[] for _ in range(shape.layers)]
    logits = []
    for position, token in enumerate(tokens):
        x = arrays["token_embd.weight"][token]
        for layer in range(shape.layers):
            part = {k.split(".")[2]: v for k, v in arrays.items() if k.startswith(f"blk.{layer}.")}
            h = norm(x, part["attn_norm"])
            query = rotate((part["attn_q"] @ h).reshape(shape.heads, -1), position)
            keys[layer].append(rotate((part["attn_k"] @ h).reshape(shape.kv_heads, -1), position))
            values[layer].append((part["attn_v"] @ h).reshape(shape.kv_heads, -1))
            heads = []
            for head in range(shape.heads):
                kv_head = head // (shape.heads // shape.kv_heads)
                scores = np.array([query[head] @ key[kv_head] for key in keys[layer]]) / np.sqrt(shape.head_width)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                heads.append(sum(w * value[kv_head] for w, value in zip(weights, values[layer], strict=True)))
            x = x + part["attn_output"] @ np.concatenate(heads)
            h = norm(x, part["ffn_norm"])
            gate = part["ffn_gate"] @ h
            x = x + part["ffn_down"] @ (gate / (1 + np.exp(-gate)) * (part["ffn_up"] @ h))
        logits.append(arrays["token_embd.weight"] @ norm(x, arrays["output_norm.weight"]))
    return np.array(logits)


def _stepwise(model: Model, span: Any, tokens: list[int], slot: int = 0) -> np.ndarray:
    """Logits of every position, fed one token at a time. [positions, vocabulary]"""
    steps = [model.forward([span(slot, at, [token])]).logits[:, 0] for at, token in enumerate(tokens)]
    return np.array(steps)


def test_one_token_at_a_time_gives_the_references_logits(tiny: Any, span: Any) -> None:
    np.testing.assert_allclose(_stepwise(tiny.model(), span, PROMPT), _reference(tiny, PROMPT), atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_whole_prompt_agrees_with_its_tokens_one_by_one(tiny: Any, span: Any, threads: int) -> None:
    model = tiny.model(threads=threads)
    whole = model.forward([span(1, 0, PROMPT)]).logits[:, 0]
    np.testing.assert_allclose(whole, _stepwise(model, span, PROMPT)[-1], atol=CLOSE, rtol=CLOSE)
    model.close()


@pytest.mark.parametrize("chunk", [1, 2, 5, 11])
def test_a_prompt_in_chunks_agrees_with_the_whole(tiny: Any, span: Any, chunk: int) -> None:
    model = tiny.model()
    whole = model.forward([span(0, 0, PROMPT)]).logits[:, 0]
    for start in range(0, len(PROMPT), chunk):
        logits = model.forward([span(2, start, PROMPT[start : start + chunk])]).logits[:, 0]
    np.testing.assert_allclose(logits, whole, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [0, 2], [1, 9, 15], [3, 4, 11], [15]])
def test_a_batch_agrees_with_each_sequence_alone(tiny: Any, span: Any, slots: list[int]) -> None:
    """Neighbours, small gaps that are bridged and wide ones that are not; lengths differ."""
    model = tiny.model(slots=16)
    prompts = {slot: PROMPT[: 3 + index * 2] for index, slot in enumerate(slots)}
    model.forward([span(slot, 0, prompt, Want.NOTHING) for slot, prompt in prompts.items()])
    logits = model.forward([span(slot, len(prompts[slot]), [40 + slot]) for slot in slots]).logits
    for column, slot in enumerate(slots):
        alone = _stepwise(tiny.model(), span, [*prompts[slot], 40 + slot])[-1]
        np.testing.assert_allclose(logits[:, column], alone, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_batch_whose_attention_is_shared_agrees(tiny: Any, span: Any, threads: int) -> None:
    model = tiny.model(slots=24, threads=threads)
    prompt = (PROMPT * 5)[:50]
    for slot in range(24):
        model.forward([span(slot, 0, [*prompt[:-1], slot], Want.NOTHING)])
    logits = model.forward([span(slot, 50, [7]) for slot in range(24)]).logits
    for slot in (0, 11, 12, 23):
        alone = tiny.model().forward([span(0, 0, [*prompt[:-1], slot, 7])]).logits[:, 0]
        np.testing.assert_allclose(logits[:, slot], alone, atol=CLOSE, rtol=CLOSE)
    model.close()


def test_a_mixed_step_serves_prompts_and_answers_alike(tiny: Any, span: Any) -> None:
    model = tiny.model()
    model.forward([span(0, 0, PROMPT, Want.NOTHING), span(1, 0, PROMPT[:4], Want.NOTHING)])
    logits = model.forward([span(0, 12, [50]), span(1, 4, PROMPT[4:]), span(2, 0, PROMPT[:1])]).logits
    expected = _reference(tiny, [*PROMPT, 50])
    np.testing.assert_allclose(logits[:, 0], expected[12], atol=CLOSE, rtol=CLOSE)
    np.testing.assert_allclose(logits[:, 1], expected[11], atol=CLOSE, rtol=CLOSE)
    np.testing.assert_allclose(logits[:, 2], expected[0], atol=CLOSE, rtol=CLOSE)


def test_a_slot_that_is_used_again_remembers_nothing(tiny: Any, span: Any) -> None:
    model = tiny.model()
    fresh = model.forward([span(0, 0, PROMPT[:3])]).logits[:, 0]
    model.forward([span(0, 0, list(range(40)))])
    np.testing.assert_array_equal(model.forward([span(0, 0, PROMPT[:3])]).logits[:, 0], fresh)


def test_a_vectors_sum_does_not_depend_on_chunks(tiny: Any, span: Any) -> None:
    model = tiny.model()
    whole = model.forward([span(0, 0, PROMPT, Want.VECTOR)])
    assert whole.logits.shape == (tiny.shape.vocabulary, 0)
    parts = [
        model.forward([span(1, start, PROMPT[start : start + 5], Want.VECTOR)]).sums[0]
        for start in range(0, len(PROMPT), 5)
    ]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole.sums[0], atol=CLOSE, rtol=CLOSE)
    assert whole.sums[0].shape == (tiny.shape.width,)


def test_nothing_is_ever_float64(tiny: Any, span: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One float64 scalar in the wrong place makes every later product ten times slower."""
    from forebay.engines.embedded import model as module

    seen = []
    multiply = module.Linear.__call__

    def watched(self: Any, weights: Any, activations: Any) -> Any:
        out = multiply(self, weights, activations)
        seen.extend([weights.dtype, activations.dtype, out.dtype])
        return out

    monkeypatch.setattr(module.Linear, "__call__", watched)
    model = tiny.model()
    model.forward([span(0, 0, PROMPT, Want.VECTOR)])
    result = model.forward([span(1, 0, PROMPT), span(0, 12, [1])])
    assert len(seen) == 3 * (4 * 2 * 2 + 1)
    assert set(seen) == {np.dtype(np.float32)}
    assert result.logits.dtype == np.float32


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("general.architecture", "gpt2", "architecture 'gpt2'"),
        ("llama.block_count", 0, r"llama\.block_count = 0"),
        ("llama.attention.head_count", 5, "do not fit together"),
        ("llama.attention.head_count_kv", 3, "do not fit together"),
        ("llama.embedding_length", "x", r"llama\.embedding_length = 'x'"),
        ("tokenizer.ggml.tokens", 7, "no vocabulary"),
    ],
)
def test_another_architecture_is_refused_by_name(tiny: Any, key: str, value: Any, why: str) -> None:
    with pytest.raises(EngineError, match=why):
        Shape.from_gguf({**tiny.metadata, key: value})


def test_missing_and_misshapen_tensors_are_refused(tiny: Any) -> None:
    deeper = Shape.from_gguf({**tiny.metadata, "llama.block_count": 3})
    wider = Shape.from_gguf({**tiny.metadata, "llama.feed_forward_length": 64})
    with GgufFile(tiny.path) as file:
        with pytest.raises(EngineError, match=r"no tensor 'blk\.2\.attn_q\.weight'"):
            load_weights(file, deeper)
        with pytest.raises(EngineError, match=r"ffn_gate.weight' of shape"):
            load_weights(file, wider)
