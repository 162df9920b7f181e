"""Counting by a real tokenizer: what the model reads and nothing else, in the place of the price."""

from __future__ import annotations

import base64
import json
import sys
from random import Random
from typing import Any

import pytest
import quicktok

from forebay.config.check import warnings
from forebay.config.schema import Config, Estimate
from forebay.core.admission.estimate import DemandEstimator, EstimateConfig
from forebay.core.model import Request
from forebay.ingress.http.exact import COUNTED_BYTES, MESSAGE_TOKENS, load
from forebay.ingress.http.peek import peek

PROSE = "Before a request is admitted, the gateway has to know about how many tokens it is. " * 8
count = quicktok.get_encoding("o200k_base").count


def counted(body: dict[str, Any], model: str = "m") -> float:
    """Tokens of text that the exact reader puts in the place of the price."""
    exact = load({"m": "o200k"})
    assert exact is not None
    seen = exact.read(json.dumps({"model": model} | body).encode())
    return seen.tokens_per_byte * seen.text_bytes


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "text", [PROSE, "def f(x):\n    return x[0]\n" * 20, "深度学习模型需要大量数据" * 30, "7" * 500]
)
def test_a_prompt_is_counted(text: str) -> None:
    assert counted({"messages": [message(text)]}) == pytest.approx(count(text))
    assert counted({"prompt": text}) == pytest.approx(count(text))


def test_all_that_the_model_reads_counts() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": PROSE}}]
    body = {
        "messages": [message(PROSE, "system"), message([{"type": "text", "text": PROSE}]), {"tool_calls": calls}],
        "tools": [{"type": "function", "function": {"name": "f", "description": PROSE}}],
    }
    assert counted(body) == pytest.approx(4 * count(PROSE) + 2 * MESSAGE_TOKENS, rel=0.06)


def test_payloads_are_no_text() -> None:
    payload = base64.b64encode(Random(1).randbytes(3_000)).decode()
    parts = [
        {"type": "text", "text": PROSE},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{payload}"}},
    ]
    assert counted({"messages": [message(parts)]}) == pytest.approx(count(PROSE))


def test_what_is_not_counted_is_priced() -> None:
    """Another model, a body too large for the event loop, token ids."""
    long = PROSE * (COUNTED_BYTES // len(PROSE) + 1)
    exact = load({"m": "o200k"})
    assert exact is not None
    for body in (
        json.dumps({"model": "other", "messages": [message(PROSE)]}).encode(),
        json.dumps({"model": "m", "messages": [message(long)]}).encode(),
        json.dumps({"model": "m", "prompt": [1, 2, 3]}).encode(),
    ):
        assert exact.read(body) == peek(body)


def test_a_star_is_for_all_models() -> None:
    exact = load({"*": "o200k"})
    assert exact is not None
    body = json.dumps({"model": "any", "messages": [message(PROSE)]}).encode()
    seen = exact.read(body)
    request = Request(key="k", model="any", text_bytes=seen.text_bytes, tokens_per_byte=seen.tokens_per_byte)
    estimate = DemandEstimator(EstimateConfig()).estimate(request).input_tokens
    assert estimate == pytest.approx(count(PROSE) + 8, abs=1)


def test_without_the_extra_prompts_are_priced_and_the_configuration_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quicktok", None)
    monkeypatch.setattr("forebay.config.check.find_spec", lambda name: None)
    assert load({"m": "o200k"}) is None
    config = Config(estimate=Estimate(tokenizers={"m": "o200k"}))
    (warning,) = [each for each in warnings(config) if each.path == ("estimate", "tokenizers")]
    assert "forebay[tokenizers]" in warning.todo
    assert load({}) is None
