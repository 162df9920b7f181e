"""B. Token accounting, the part that is estimated: what a request may cost, read from its body before it is admitted.

The reservation is what a fresh key's tokens of the day fall by, told on the head of the answer before it is settled.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

import pytest

from .rig import scripts
from .rig.backend import FakeBackend, Script
from .rig.checks import untouched
from .rig.client import Answer, ask, chat, marker
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, serving

A_DAY = 10_000_000  # tokens; nothing of them comes back before midnight
FRESH = (f"fresh{number}" for number in count())  # keys that nobody used before
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
DEFAULT_OUTPUT = 256


@pytest.fixture(scope="module")
def gateway(shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One gateway for all: no test learns anything that another is misled by, since each brings a model of its own."""
    keys = [
        key("narrow", tokens_per_minute=2_000),
        *(key(f"fresh{number}", tokens_per_day=A_DAY) for number in range(200)),
    ]
    config = config_for(shared_backend, keys=keys, engine={"models": ["*"]}, server={"max_body_bytes": 16_000_000})
    with serving(config, tmp_path_factory.mktemp("gateway")) as process:
        yield process


def asking(**fields: Any) -> dict[str, Any]:
    """A chat of a model that nobody used before."""
    return chat(**fields) | {"model": marker()}


def reserved(gateway: GatewayProcess, body: dict[str, Any] | bytes, path: str = CHAT) -> int:
    """Tokens held for this request when it was admitted."""
    answer = ask(gateway.port, body, key=f"sk-{next(FRESH)}", path=path)
    assert answer.status == 200, answer.head.raw
    return A_DAY - left_of(answer)


def left_of(answer: Answer) -> int:
    left = answer.header("x-ratelimit-remaining-tokens")
    assert left is not None, answer.head.raw
    return int(left)


def says(prompt_tokens: int, completion_tokens: int) -> Script:
    """An answer that cost so much, in two pieces: the head of an answer in one is written when all is settled."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    data = scripts.answer(200, scripts.completion(usage=usage))
    return scripts.steps(data[:-9], 0.03, data[-9:])


IN_TWO_PIECES = says(5, 7)


def refused_by_name(gateway: GatewayProcess, backend: FakeBackend, body: Any, field: str, path: str = CHAT) -> Answer:
    with untouched(gateway, backend):
        answer = ask(gateway.port, body, key="sk-narrow", path=path)
    assert answer.status == 400, (body, answer.status)
    assert field in answer.error["message"]
    assert answer.error["param"] == field
    return answer


# ---- B-13 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"n": 8}, {"best_of": 8, "n": 1}, {"n": 2, "best_of": 8}])
def test_b13_choices_multiply_the_output(
    gateway: GatewayProcess, fresh_backend: FakeBackend, fields: dict[str, Any]
) -> None:
    fresh_backend.script = IN_TWO_PIECES
    one = reserved(gateway, asking(max_tokens=100))
    eight = reserved(gateway, asking(max_tokens=100, **fields))
    assert 690 <= eight - one <= 720, "but for what their own bytes are priced at"


@pytest.mark.parametrize("n", [0, -1, 100_000, "2", True, 1.5])
def test_b13_no_other_number_of_choices_reaches_an_engine(
    gateway: GatewayProcess, fresh_backend: FakeBackend, n: Any
) -> None:
    for field in ("n", "best_of"):
        refused_by_name(gateway, fresh_backend, asking(max_tokens=100, **{field: n}), field)


# ---- B-14 --------------------------------------------------------------------------------------------------------


def test_b14_no_cap_is_no_error(backend: FakeBackend, start_gateway: StartGateway) -> None:
    keys = [key("a", tokens_per_minute=5_000), key("b", requests_per_minute=100), key("c", tokens_per_day=5_000)]
    gateway = start_gateway(config_for(backend, keys=keys))
    backend.script = says(9, 20)
    for _ in range(10):
        answer = ask(gateway.port, chat(), key="sk-a")
        assert answer.status == 200
        gateway.settles()
        assert left_of(answer) >= 5_000 - 9 * 29 - DEFAULT_OUTPUT - 60, "a default, not the model's context"
    last = ask(gateway.port, chat(max_tokens=1), key="sk-a")
    assert left_of(last) >= 5_000 - 10 * 29 - 60, "settled to what was used"
    assert all(ask(gateway.port, chat(), key="sk-b").status == 200 for _ in range(3))
    assert DEFAULT_OUTPUT <= 5_000 - left_of(ask(gateway.port, asking(), key="sk-c")) <= DEFAULT_OUTPUT + 60


# ---- B-15 --------------------------------------------------------------------------------------------------------

CAPS = ("max_tokens", "max_completion_tokens")


@pytest.mark.parametrize("field", CAPS)
def test_b15_null_is_absent_and_zero_is_nothing(
    gateway: GatewayProcess, fresh_backend: FakeBackend, field: str
) -> None:
    fresh_backend.script = IN_TWO_PIECES
    absent = reserved(gateway, asking())
    assert abs(reserved(gateway, asking(**{field: None})) - absent) <= 20
    assert DEFAULT_OUTPUT - 20 <= absent - reserved(gateway, asking(**{field: 0})) <= DEFAULT_OUTPUT + 20


@pytest.mark.parametrize("value", ["-5", "1.5", '"100"', "true", "1e12", "1000000000000", "[]", "{}", "7" * 5_000])
@pytest.mark.parametrize("field", CAPS)
def test_b15_other_values_are_named(
    gateway: GatewayProcess, fresh_backend: FakeBackend, field: str, value: str
) -> None:
    body = json.dumps(asking())[:-1] + f',"{field}":{value}}}'
    answer = refused_by_name(gateway, fresh_backend, body.encode(), field)
    assert len(answer.error["message"]) < 300


def test_b15_nothing_refused_gives_tokens_back(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    fresh_backend.script = IN_TWO_PIECES
    for value in (-5, -(10**9), 1.5, "100"):
        assert ask(gateway.port, asking(max_tokens=value), key="sk-narrow").status == 400
    answer = ask(gateway.port, asking(max_tokens=10), key="sk-narrow")
    assert answer.status == 200
    assert left_of(answer) < 2_000


# ---- B-16 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "tokens", "prompts"),
    [
        ([7] * 3_000, 3_000, 1),
        ([[7] * 300] * 10, 3_000, 10),
        (["seven words are in this short sentence"] * 10, 90, 10),
    ],
    ids=["ids", "lists of ids", "strings"],
)
def test_b16_token_ids_are_counted_and_prompts_multiply(
    gateway: GatewayProcess, fresh_backend: FakeBackend, prompt: Any, tokens: int, prompts: int
) -> None:
    fresh_backend.script = IN_TWO_PIECES
    body = {"model": marker(), "prompt": prompt, "max_tokens": 50}
    held = reserved(gateway, body, COMPLETIONS) - 50 * prompts
    assert tokens * 0.95 <= held <= tokens * 1.35 + 10
    embedded = reserved(gateway, {"model": marker(), "input": prompt}, EMBEDDINGS)
    assert tokens * 0.95 <= embedded <= tokens * 1.35 + 10, "nothing is generated"


@pytest.mark.parametrize(
    "prompt", [[], [[]], [[1], []], [1, "a"], ["a", 1], [-1], [[1], [-2]], [1.5], [True], [[1], ["a"]]]
)
def test_b16_mixed_and_empty_prompts_are_refused(
    gateway: GatewayProcess, fresh_backend: FakeBackend, prompt: Any
) -> None:
    body = {"model": marker(), "prompt": prompt, "max_tokens": 5}
    refused_by_name(gateway, fresh_backend, body, "prompt", COMPLETIONS)


def test_b16_a_million_ids_are_counted_and_one_more_is_too_many(
    gateway: GatewayProcess, fresh_backend: FakeBackend
) -> None:
    fresh_backend.script = IN_TWO_PIECES
    body = {"model": marker(), "prompt": [7] * 1_000_000, "max_tokens": 0}
    assert reserved(gateway, body, COMPLETIONS) == pytest.approx(1_000_000, abs=100)
    body["prompt"].append(7)
    refused_by_name(gateway, fresh_backend, body, "prompt", COMPLETIONS)


# ---- B-18 --------------------------------------------------------------------------------------------------------

SENTENCE = "The tool looks up the weather of a city on a day, and says whether it will rain there. "
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": SENTENCE,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "day": {"type": "string"}}},
    },
}
HIDDEN: dict[str, dict[str, Any]] = {
    "tools": {"tools": [TOOL] * 60},
    "response_format": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"properties": {f"p{n}": {"type": "string"} for n in range(8_000)}}},
        }
    },
    "tool results": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": SENTENCE * 60}}]},
            {"role": "tool", "tool_call_id": "1", "content": SENTENCE * 100},
            {"role": "user", "content": "so?"},
        ]
    },
    "tool calls": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": SENTENCE * 160}}]},
            {"role": "user", "content": "so?"},
        ]
    },
    "system": {"messages": [{"role": "system", "content": SENTENCE * 160}, {"role": "user", "content": "hi"}]},
    "developer": {"messages": [{"role": "developer", "content": SENTENCE * 160}, {"role": "user", "content": "hi"}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": SENTENCE}] * 160}]},
}


@pytest.mark.parametrize("where", HIDDEN)
def test_b18_what_stands_outside_the_last_message_counts(
    gateway: GatewayProcess, fresh_backend: FakeBackend, where: str
) -> None:
    with untouched(gateway, fresh_backend):
        answer = ask(gateway.port, asking(max_tokens=10) | HIDDEN[where], key="sk-narrow")
        assert (answer.status, answer.reason) in {(413, "never_fits"), (429, "key_tokens")}
    fresh_backend.script = IN_TWO_PIECES
    size = len(json.dumps(HIDDEN[where]))
    assert reserved(gateway, asking(max_tokens=0) | HIDDEN[where]) > size / 8


def test_b18_images_by_url_cost_what_images_cost(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    """No URL is fetched to know it: the one here would be this very gateway."""
    fresh_backend.script = IN_TWO_PIECES
    url = f"http://127.0.0.1:{gateway.port}/healthz"
    parts = [{"type": "image_url", "image_url": {"url": url}}] * 3
    held = reserved(gateway, asking(max_tokens=0) | {"messages": [{"role": "user", "content": parts}]})
    assert held >= 3 * 1_000
    assert len(fresh_backend.calls) == 1


def test_b18_inlined_media_are_no_text(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    fresh_backend.script = IN_TWO_PIECES
    payload = base64.b64encode(Random(1).randbytes(600_000)).decode()
    media: dict[str, dict[str, Any]] = {
        "image": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{payload}"}},
        "sound": {"type": "input_audio", "input_audio": {"data": payload, "format": "wav"}},
        "file": {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{payload}"}},
        "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": payload}},
    }
    for name, part in media.items():
        held = reserved(gateway, asking(max_tokens=0) | {"messages": [{"role": "user", "content": [part]}]})
        assert 200 <= held <= 20_000, (name, held)


# ---- B-19 --------------------------------------------------------------------------------------------------------

NOISE = base64.b64encode(Random(1).randbytes(12_000)).decode()
LISTED = {
    "ideographs": "漢" * 4_000,
    "emoji": "😀" * 4_000,
    "base64": NOISE[:16_000],
    "digits": "".join(Random(1).choices("0123456789", k=16_000)),
    "spaces": " " * 16_000,
}
LEAST_TOKENS = {  # by tokenizers: 漢 is one token to o200k, Qwen and Llama; a digit a third of one to all but Qwen
    "ideographs": 2_400,
    "emoji": 4_000,
    "base64": 5_500,
    "digits": 5_334,
    "spaces": 126,
}


@pytest.mark.parametrize("spelling", ["raw", "escaped"])
@pytest.mark.parametrize("text", LISTED)
def test_b19_what_is_not_english_is_not_undersold(
    gateway: GatewayProcess, fresh_backend: FakeBackend, text: str, spelling: str
) -> None:
    fresh_backend.script = IN_TWO_PIECES
    content = LISTED[text]
    body = asking(max_tokens=0) | {"messages": [{"role": "user", "content": content}]}
    held = reserved(gateway, json.dumps(body, ensure_ascii=spelling == "escaped").encode())
    assert held >= LEAST_TOKENS[text] * 0.95
    assert held >= 0.95 * len(content.encode()) / 8


def test_b19_settlement_corrects_it(gateway: GatewayProcess, fresh_backend: FakeBackend) -> None:
    """And what the engine said is what the next one is held for."""
    fresh_backend.script = says(4_100, 1)
    body = asking(max_tokens=0) | {"messages": [{"role": "user", "content": LISTED["ideographs"]}]}
    name = f"sk-{next(FRESH)}"
    for _ in range(12):
        assert ask(gateway.port, body, key=name).status == 200
        gateway.settles()
    assert A_DAY - left_of(ask(gateway.port, body, key=name)) - 12 * 4_101 == pytest.approx(4_100, rel=0.15)
