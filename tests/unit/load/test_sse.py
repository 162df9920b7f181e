"""The stream counter: any cut of the bytes gives the same counts."""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random

import pytest

from forebay.load.sse import SseCounter, usage_of


def event(content: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": content}}]}).encode() + b"\n\n"


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"total_tokens":11,"completion_tokens":4}}\n\n'
DONE = b"data: [DONE]\n\n"
TRICKY = ["Hi", ' "usage":{"completion_tokens":99}', "\n\ndata: [DONE]\n\n", " end"]
STREAM = ROLE + b"".join(event(text) for text in TRICKY) + FINISH + USAGE + DONE


def fed(chunks: list[bytes]) -> SseCounter:
    counter = SseCounter()
    for number, chunk in enumerate(chunks):
        counter.feed(chunk, now_ns=number)
    return counter


@pytest.mark.parametrize("stream", [STREAM, STREAM.replace(b"\n\n", b"\r\n\r\n")], ids=["lf", "crlf"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_cuts_change_nothing(stream: bytes, size: int) -> None:
    counter = fed([stream[start : start + size] for start in range(0, len(stream), size)])
    assert counter.output_tokens == 4
    assert counter.usage is not None
    assert counter.usage.prompt_tokens == 7
    assert counter.finished
    assert counter.error == ""


def test_random_cuts_change_nothing() -> None:
    rng = Random(1)
    for _ in range(50):
        cuts = sorted(rng.randrange(len(STREAM)) for _ in range(6))
        edges = [0, *cuts, len(STREAM)]
        counter = fed([STREAM[a:b] for a, b in pairwise(edges)])
        assert (counter.output_tokens, counter.finished, counter.error) == (4, True, "")


def test_the_role_event_is_not_the_first_token() -> None:
    counter = fed([ROLE, event("Hi"), event(" there")])
    assert counter.first_token_ns == 1


def test_without_usage_the_events_count() -> None:
    counter = fed([ROLE, *[event("x")] * 5])
    assert counter.output_tokens == 5
    assert not counter.finished


def test_completion_text_and_tool_calls_are_tokens() -> None:
    text = b'data: {"choices":[{"text":"word"}]}\n\n'
    call = b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n'
    assert fed([text]).first_token_ns == 0
    assert fed([call]).first_token_ns == 0


def test_an_error_event_is_kept() -> None:
    counter = fed([ROLE, event("Hi"), b'data: {"error":{"message":"overloaded","code":503}}\n\n'])
    assert "overloaded" in counter.error


def test_comments_and_named_events_are_passed_over() -> None:
    counter = fed([b": keep-alive\n\n", b"event: ping\ndata: {}\n\n", event("Hi"), DONE])
    assert (counter.output_tokens, counter.finished, counter.error) == (1, True, "")


def test_keep_alives_after_the_first_token_are_no_tokens() -> None:
    ping = b": keep-alive\n\n"
    counter = fed([event("a"), ping, ping + event("b") + ping, event("c") + event("d"), b"event: ping\n\n"])
    assert counter.output_tokens == 4


def test_what_is_no_completion_chunk_is_an_error() -> None:
    assert "not a completion chunk" in fed([b"data: <html>\n\n"]).error


def test_usage_of_a_plain_answer() -> None:
    usage = usage_of(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}')
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 2)
    assert usage_of(b"not json") is None
    assert usage_of(b"{}") is None
