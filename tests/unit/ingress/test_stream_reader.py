"""The stream reader takes out the usage event that nobody asked for, and nothing else, wherever the bytes are cut."""

from __future__ import annotations

import random

import pytest

from forebay.ingress.http.usage import StreamReader

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7,"total_tokens":12}}'
SHOWN = [
    b"\xef\xbb\xbf: a comment after a BOM\n\n",
    b'event: message\nid: 1\ndata: {"choices":[{"delta":{"content":"a"}}]}\r\n\r\n',
    b"\n\n\n",
    b'data: {"choices":[{"delta":{"content":"\\"usage\\":{}"}}],"usage":null}\n\n',
    b": ping\r\n\r\n",
    b'data: {"choices":[{"delta":{"content":"\xe2\x80\xa8\xc2\x85"}}]}\n\n',
]
DONE = b"data: [DONE]\n\n"


def pieces(data: bytes, chance: random.Random, longest: int) -> list[bytes]:
    cuts = []
    while data:
        size = chance.randint(1, longest)
        cuts.append(data[:size])
        data = data[size:]
    return cuts


@pytest.mark.parametrize("ending", [b"\n\n", b"\r\n\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("longest", [1, 2, 5, 40, 4000])
@pytest.mark.parametrize("seed", range(5))
def test_only_the_usage_event_is_taken_out(longest: int, ending: bytes, seed: int) -> None:
    chance = random.Random(seed)
    events = [*SHOWN, USAGE + ending, DONE]
    reader = StreamReader(strip=True)
    cuts = pieces(b"".join(events), chance, longest)
    seen = b"".join(reader.pass_through(piece, i == len(cuts) - 1) for i, piece in enumerate(cuts))
    assert seen == b"".join([*SHOWN, DONE])
    assert reader.finished
    usage = reader.usage(99)
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (5, 7)


@pytest.mark.parametrize("longest", [1, 7, 4000])
def test_asked_usage_passes_byte_for_byte(longest: int) -> None:
    stream = b"".join([*SHOWN, USAGE + b"\n\n", DONE])
    reader = StreamReader(strip=False)
    cuts = pieces(stream, random.Random(longest), longest)
    assert b"".join(reader.pass_through(piece, False) for piece in cuts) == stream
    assert reader.finished


@pytest.mark.parametrize("strip", [False, True])
def test_the_size_of_an_open_event_is_known(strip: bool) -> None:
    reader = StreamReader(strip=strip)
    reader.pass_through(b"data: 1\n\ndata: ", False)
    reader.pass_through(b"x" * 10_000, False)
    assert reader.pending == 10_006
    reader.pass_through(b"\n", False)
    reader.pass_through(b"\n", False)
    assert reader.pending == 0


ERROR = b'data: {"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","code":500}}\n\n'


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([*SHOWN, ERROR, DONE], 500),
        ([*SHOWN, ERROR], 500),
        ([*SHOWN, b'event: error\ndata: {"type":"error","error":{"message":"no"}}\n\n'], 502),
        ([*SHOWN, ERROR, SHOWN[1], DONE], None),
        ([*SHOWN, b'data: {"choices":[{"text":"\\"error\\""}]}\n\n', DONE], None),
        ([*SHOWN, b'data: {"choices":[{"text":"error"}],"error":null}\n\n', DONE], None),
        ([*SHOWN, USAGE + b"\n\n", DONE], None),
    ],
    ids=["with terminator", "without", "Anthropic", "went on", "in the text", "null", "none"],
)
@pytest.mark.parametrize("longest", [1, 30, 4000])
@pytest.mark.parametrize("strip", [False, True])
def test_a_stream_that_ends_in_an_error(events: list[bytes], status: int | None, longest: int, strip: bool) -> None:
    reader = StreamReader(strip=strip)
    cuts = pieces(b"".join(events), random.Random(longest), longest)
    for i, piece in enumerate(cuts):
        reader.pass_through(piece, i == len(cuts) - 1)
    assert reader.error_status() == status
