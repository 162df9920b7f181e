"""What an answer cost, under every name and in every place engines put it; and nothing an engine says raises."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from forebay.core.model import Usage
from forebay.ingress.http.usage import StreamReader, document_usage, first_event_error, last_usage

ESTIMATE = 11


def answer(usage: Any = None, **more: Any) -> bytes:
    return json.dumps({"choices": [], "usage": usage} | more).encode()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}, Usage(5, 7, True)),
        ({"input_tokens": 5, "output_tokens": 7}, Usage(5, 7, True)),
        ({"prompt_tokens": 5, "total_tokens": 5}, Usage(5, 0, True)),
        ({"total_tokens": 9}, Usage(9, 0, True)),
        ({"completion_tokens": 7}, Usage(ESTIMATE, 7, False)),
        ({"prompt_tokens": 0, "completion_tokens": 0}, Usage(0, 0, True)),  # zero is a figure, not its absence
        ({"prompt_tokens": 0, "completion_tokens": 0, "input_tokens": 5, "output_tokens": 6}, Usage(0, 0, True)),
        ({"prompt_tokens": 5, "completion_tokens": None}, Usage(5, 0, True)),
        ({"prompt_tokens": -5, "completion_tokens": 7}, None),
        ({"prompt_tokens": 5, "completion_tokens": -7}, None),
        ({"prompt_tokens": "5"}, None),
        ({"prompt_tokens": 1.5}, None),
        ({}, None),
        (None, None),
        ("none", None),
        ([], None),
    ],
)
def test_usage_of_a_document(fields: Any, expected: Usage | None) -> None:
    assert document_usage(answer(fields), ESTIMATE) == (expected, False)


@pytest.mark.parametrize(("error", "is_error"), [({"message": "no"}, True), ("no", True), (None, False)])
def test_an_error_object_in_a_document(error: Any, is_error: bool) -> None:
    assert document_usage(answer(error=error), ESTIMATE) == (None, is_error)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"null", b'{"usage":', b"\xff\xfe", b'{"x":' + b"[" * 50_000, b'{"x":' + b'{"a":' * 50_000,
     b'{"usage":{"prompt_tokens":' + b"9" * 5000 + b"}}", b'{"usage":{"prompt_tokens":1e400}}'],
)  # fmt: skip
def test_what_is_no_answer_costs_nothing_and_raises_nothing(body: bytes) -> None:
    assert document_usage(body, ESTIMATE) == (None, False)


def test_a_document_of_which_only_the_end_is_here() -> None:
    body = b"x" * 100 + b'"}],"usage":{"prompt_tokens":5,"completion_tokens":7}}'
    assert document_usage(body, ESTIMATE, cut=True) == (Usage(5, 7, True), False)
    assert document_usage(b"x" * 100, ESTIMATE, cut=True) == (Usage(ESTIMATE, 0, False), False)


def test_the_last_usage_that_can_be_read_counts() -> None:
    first, second = (
        b'"usage":{"prompt_tokens":1,"completion_tokens":1}',
        b'"usage": {"prompt_tokens":2,"completion_tokens":2}',
    )
    assert last_usage(first + second, ESTIMATE) == Usage(2, 2, True)
    for unreadable in (
        b'"usage":null',
        b'"usage":{"prompt',
        b'"usage"',
        b'"usage":{"prompt_tokens":"x"}',
        b'"usage":' + b"{" * 9,
    ):
        assert last_usage(first + unreadable, ESTIMATE) == Usage(1, 1, True)
    assert last_usage(b"", ESTIMATE) is None


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("payload", "status"),
    [
        ({"error": {"message": "busy", "code": 503}}, 503),
        ({"error": {"message": "busy", "code": "429"}}, 429),
        ({"error": {"message": "busy", "code": "rate_limited"}}, 502),
        ({"error": {"message": "busy", "code": None}}, 502),
        ({"error": {"message": "busy"}}, 502),
        ({"error": {"message": "odd", "code": 200}}, 502),
        ({"error": {"message": "odd", "code": 1e9}}, 502),
        ({"error": {"message": "odd", "code": "\u00b2\u00b2\u00b2"}}, 502),
        ({"error": {"message": "odd", "code": "9" * 5000}}, 502),
        ({"error": {"message": "odd", "code": True}}, 502),
    ],
)
def test_a_refusal_as_the_first_event(payload: Any, status: int) -> None:
    assert first_event_error(event(payload)) == (status, json.dumps(payload).encode())


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_a_stream_of_nothing_but_its_end_is_a_failure(end: str) -> None:
    status, body = first_event_error(b"data: [DONE]" + end.encode()) or (0, b"")
    assert status == 502
    assert json.loads(body)["error"]["code"] == "engine_error"


@pytest.mark.parametrize(
    "data",
    [
        event({"choices": [{"delta": {"content": "x"}}]}) + b"data: [DONE]\n\n",
        event({"choices": [], "x": "error"}),
        event({"choices": [{"delta": {"content": '"error"'}}]}),
        event({"choices": [], "error": {"message": "partial"}}),
        event({"error": None}),
        event({"error": "busy"}),
        b': "error"\n\n',
        b'data: {"error": {\n\n',
        b'data: "error"\n\n',
        b'data: {"error":{"x":' + b"[" * 50_000 + b"\n\n",
    ],
)
def test_what_is_no_refusal(data: bytes) -> None:
    assert first_event_error(data) is None


PIECES = [
    b"data: ", b"data:", b"\n", b"\n\n", b"\r\n\r\n", b"\r\n", b": ping\n\n", b"[DONE]", b"data: [DONE]\n\n",
    b'{"error":',
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7}}\n\n',
    b'"usage"', b'"usage":{', b"}", b"\xff",
    b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n', b"event: error\n", b"9" * 5000, b"[" * 3000,
    b"1e400", b"\x00",
]  # fmt: skip


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_fuzz_a_stream_never_raises_and_loses_only_usage_events(seed: int, strip: bool) -> None:
    chance = Random(seed)
    for _ in range(150):
        stream = b"".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 14)))
        reader, shown = StreamReader(strip=strip), b""
        at = 0
        while at < len(stream) and not reader.finished:
            step = chance.randrange(1, 200)
            shown += reader.pass_through(stream[at : at + step], at + step >= len(stream))
            at += step
        usage = reader.usage(ESTIMATE)
        assert usage is None or (usage.input_tokens >= 0 and usage.output_tokens >= 0)
        first_event_error(stream)
        last_usage(stream, ESTIMATE)
        document_usage(stream, ESTIMATE)
        if not strip:
            assert shown == stream[:at]
        elif b'"usage"' not in stream:
            assert shown == stream[: len(shown)]


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 7}}, 7),
        ({"input_tokens_details": {"cached_tokens": 7}}, 7),
        ({"prompt_tokens_details": {"cached_tokens": 700}}, 10),  # no more than the prompt
        ({"prompt_tokens_details": {"cached_tokens": -7}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": "7"}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": True}}, 0),
        ({"prompt_tokens_details": {}}, 0),
        ({"prompt_tokens_details": None}, 0),
        ({"prompt_tokens_details": [7]}, 0),
    ],
)
def test_cached_tokens_are_read_and_never_cost_us_the_rest(details: dict[str, Any], cached: int) -> None:
    body = json.dumps({"usage": {"prompt_tokens": 10, "completion_tokens": 3} | details}).encode()
    for usage in (document_usage(body, 1)[0], last_usage(body, 1)):
        assert usage is not None
        assert (usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.exact) == (10, 3, cached, True)
