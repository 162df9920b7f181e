"""What a body says about its cost: read exactly, or refused; and the forced usage event changes nothing else."""

from __future__ import annotations

import json
import tracemalloc
from random import Random
from typing import Any

import pytest

from forebay.core.model import ESCAPED, ByteClass
from forebay.ingress.http import peek as module
from forebay.ingress.http.media import IMAGE_TOKENS, PARTS_MAX
from forebay.ingress.http.peek import (
    FRAME_BYTES,
    ITEMS_MAX,
    LARGE_BYTES,
    LOGIT_BIAS_MAX,
    LOGPROBS_MAX,
    STOPS_MAX,
    TOKEN_IDS_MAX,
    BadRequest,
    peek,
    with_usage,
)

BASE = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def body(**fields: Any) -> bytes:
    return json.dumps(BASE | fields, separators=(",", ":")).encode()


def refused(data: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        peek(data)
    assert caught.value.message
    return caught.value


def test_a_plain_request() -> None:
    seen = peek(body(max_tokens=7))
    assert (seen.model, seen.stream, seen.max_output_tokens, seen.completions, seen.prompts) == ("m", False, 7, 1, 1)
    assert seen.text_bytes == len(body(max_tokens=7)) - FRAME_BYTES
    assert seen.byte_class is ByteClass.ASCII
    assert seen.counted_tokens == 0


def test_text_is_never_negative() -> None:
    assert peek(b"{}").text_bytes == 0


@pytest.mark.parametrize(
    "data",
    [
        b"", b" ", b"null", b"[]", b'"x"', b"5", b"true", b"{", b'{"model":"m"', b'{"model":"m",}', b"{'model':'m'}",
        b'{"a":1}{"b":2}', b'{"a":1}x', b'{"a":1}\x00', b'\xef\xbb\xbf{"a":1}', b"a=b", b'{"a":1 /* c */}', b'{"a" 1}',
        b"{1:2}", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b'{"a":01}', b'{"a":1.}', b'{"a":.5}',
        b'{"a":+1}', b'{"a":-}', b'{"a":1e}', b'{"a":0x1}', b'{"a":tru}', b'{"a":"\n"}', b'{"a":"\x00"}',
        b'{"a":"\\x"}', b'{"a":"\\u12"}', b'{"a":"\xff\xfe"}', b'{"a":"\xc0\xaf"}', b'{"a":"\xf0\x9f\x98"}',
        b'{"a":"\xed\xa0\x80"}', '{"a":"\u00e9"}'.encode("utf-16"), b"[" * 20_000, b'{"a":' * 20_000,
        b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    ],
)  # fmt: skip
def test_what_is_not_a_json_object_in_utf8_is_refused(data: bytes) -> None:
    refused(data)


@pytest.mark.parametrize(
    "data",
    [
        b'{"x":-0,"y":1e400,"z":1E+2,"w":0.1}', b'{"seed":9007199254740993}', b'{"x":' + b"9" * 5000 + b"}",
        b' \n\t{ "model" : "m" } \r\n', b'{"a":' * 100 + b"1" + b"}" * 100, b'{"a":"\\u0000\\/\\n"}', b'{"":1}',
    ],
)  # fmt: skip
def test_what_is_valid_is_accepted(data: bytes) -> None:
    peek(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", "true"), ("stream", 1), ("stream", [True]), ("model", ["a"]), ("model", ""), ("model", 5),
        ("model", "x" * 513), ("model", "x" * 1_000_000),
        ("max_tokens", -5), ("max_tokens", 1.5), ("max_tokens", "100"), ("max_tokens", True),
        ("max_tokens", 10**12), ("max_tokens", 10**30), ("max_completion_tokens", -1), ("max_output_tokens", "1"),
        ("n", 0), ("n", 129), ("n", 1.0), ("n", "2"), ("best_of", 100_000), ("stream_options", 5),
        ("stream_options", []), ("stream_options", {"include_usage": "yes"}), ("prompt", []), ("prompt", [[]]),
        ("prompt", [1, "a"]), ("prompt", ["a", 1]), ("prompt", [1, True]), ("prompt", [1.5]), ("prompt", [-1]),
        ("prompt", [[[1]]]), ("prompt", [[1], ["a"]]), ("prompt", [None]), ("input", []), ("input", [[1], []]),
        ("logprobs", LOGPROBS_MAX + 1), ("logprobs", -1), ("top_logprobs", -1), ("top_logprobs", 10**6),
        ("prompt_logprobs", -1), ("prompt_logprobs", LOGPROBS_MAX + 1), ("min_tokens", -1),
        ("stop", ["x"] * (STOPS_MAX + 1)),
        ("stop", 5), ("stop", [1]), ("logit_bias", {str(i): 1 for i in range(LOGIT_BIAS_MAX + 1)}),
    ],
)  # fmt: skip
def test_a_judged_field_of_the_wrong_kind_is_refused_by_name(field: str, value: Any) -> None:
    error = refused(body(**{field: value}))
    assert error.field == field
    assert field in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", None), ("model", None), ("max_tokens", None), ("max_tokens", 0), ("n", None), ("n", 128),
        ("stream_options", None), ("stream_options", {}), ("logprobs", True), ("logprobs", None), ("logprobs", 5),
        ("top_logprobs", LOGPROBS_MAX), ("prompt_logprobs", 0), ("stop", "x"), ("stop", None), ("stop", ["x"] * 4),
        ("logit_bias", {"50256": -100}), ("logit_bias", None), ("prompt", "text"), ("prompt", None), ("prompt", 5),
        ("temperature", "hot"), ("user", {}), ("messages", {}), ("messages", []),
    ],
)  # fmt: skip
def test_what_the_gate_need_not_understand_is_left_to_the_engine(field: str, value: Any) -> None:
    peek(body(**{field: value}))


def test_only_true_streams() -> None:
    assert peek(body(stream=True)).stream
    assert not peek(body(stream=False)).stream
    assert not peek(body(stream=None)).stream


def test_the_smallest_cap_counts() -> None:
    assert peek(body(max_tokens=9, max_completion_tokens=5, max_output_tokens=7)).max_output_tokens == 5
    assert peek(body(max_tokens=None, max_completion_tokens=5)).max_output_tokens == 5
    assert peek(body()).max_output_tokens is None
    assert peek(body(max_tokens=9), generates=False).max_output_tokens is None


def test_more_least_tokens_than_the_cap_is_refused() -> None:
    assert refused(body(min_tokens=11, max_tokens=10)).field == "min_tokens"
    assert peek(body(min_tokens=10, max_tokens=10)).max_output_tokens == 10
    assert peek(body(min_tokens=10)).max_output_tokens is None


def test_completions_and_prompts() -> None:
    assert peek(body(n=3, best_of=8)).completions == 8
    assert peek(body(prompt=["a", "b", "c"], n=2)).prompts == 3
    assert peek(body(prompt=[[1, 2], [3]])).prompts == 2
    assert peek(body(input=[{"role": "user"}, {"role": "system"}])).prompts == 1


@pytest.mark.parametrize("field", ["prompt", "input"])
@pytest.mark.parametrize(("value", "tokens"), [([1, 2, 3], 3), ([[1, 2], [3]], 3), ([0] * 5000, 5000)])
def test_token_ids_are_counted_and_are_no_text(field: str, value: Any, tokens: int) -> None:
    data = body(**{field: value})
    seen = peek(data)
    assert seen.counted_tokens == tokens
    assert seen.text_bytes == max(0, len(data) - FRAME_BYTES - len(json.dumps(value, separators=(",", ":"))))


def test_items_are_bounded() -> None:
    assert peek(body(input=["a"] * 2048)).prompts == 2048
    assert peek(body(input=['\\"'] * ITEMS_MAX)).prompts == ITEMS_MAX
    for value in (["a"] * (ITEMS_MAX + 1), [[1]] * (ITEMS_MAX + 1), [1] * (TOKEN_IDS_MAX + 1)):
        assert refused(body(input=value)).field == "input"


def test_inlined_images_are_priced_apart_and_bounded() -> None:
    picture = "data:image/png;base64," + "A" * 1000
    data = body(content=[picture, picture])
    seen = peek(data)
    assert (seen.media_tokens, seen.counted_tokens) == (2 * IMAGE_TOKENS, 0)
    assert seen.text_bytes == len(data) - FRAME_BYTES - 2 * (len(";base64,") + 1000)
    assert peek(body(content=["data:;base64,"] * (PARTS_MAX + 100))).media_tokens == PARTS_MAX * IMAGE_TOKENS
    peek(b'{"a":";base64,' + b"A" * 100 + b'"}')


@pytest.mark.parametrize(
    ("text", "byte_class"),
    [
        ("x", ByteClass.ASCII), ("é", ByteClass.LATIN), ("“", ByteClass.LATIN), ("я", ByteClass.ALPHABET),
        ("ω", ByteClass.ALPHABET), ("ש", ByteClass.ALPHABET), ("م", ByteClass.ALPHABET), ("ह", ByteClass.INDIC),
        ("ไ", ByteClass.INDIC), ("漢", ByteClass.WIDE), ("か", ByteClass.WIDE), ("한", ByteClass.WIDE),
        ("🙂", ByteClass.WIDE),
    ],
)  # fmt: skip
def test_the_script_of_text_and_its_spelling(text: str, byte_class: ByteClass) -> None:
    assert peek(json.dumps({"x": text}, ensure_ascii=False).encode()).byte_class is byte_class
    escaped = byte_class + ESCAPED if byte_class else byte_class
    assert peek(json.dumps({"x": text}).encode()).byte_class == escaped


@pytest.mark.parametrize("text", ["\\u", "\\users", "C:\\uxyz", "\\\\u4e2d"])
def test_a_backslash_before_a_u_need_not_be_an_escape(text: str) -> None:
    peek(json.dumps({"x": text}).encode())


DUPLICATES = [
    b'{"model":"a","model":"b"}',
    b'{"model":"a", "model":"b"}',
    b'{"model":"a","mod\\u0065l":"b"}',
    b'{"\\u006dodel":"a","x":[],"model":"b"}',
    b'{"max_tokens":1,"max_tokens":1000}',
    b'{"stream":false,"messages":[],"stream":true}',
    b'{"n":1,"\\u006E":100}',
    '{"x":"é","model":"a","model":"b"}'.encode(),
    b'{"messages":[1],"messages":[2]}',
]


@pytest.mark.parametrize("data", DUPLICATES)
@pytest.mark.parametrize("padding", [0, LARGE_BYTES], ids=["small", "large"])
def test_a_second_copy_of_a_judged_key_is_refused(data: bytes, padding: int) -> None:
    """Engines take the first, the last, or neither: gate and engine could disagree."""
    refused(data[:-1] + b',"messages":"' + b"x" * padding + b'"}')


def test_a_second_copy_is_found_behind_bulk_of_every_kind() -> None:
    bulk = b'["' + b"x" * LARGE_BYTES + b'"]'
    for data in (
        b'{"messages":%b,"messages":%b}' % (bulk, bulk),
        b'{"model":"a","messages":%b,"model":"b"}' % bulk,
        b'{"model":"a","unknown":%b,"model":"b"}' % bulk,
        b'{"model":"a","unknown":%b,"mod\\u0065l":"b"}' % bulk,
        b'{"messages":%b,"mess\\u0061ges":5}' % bulk,
    ):
        refused(data)


def test_a_name_that_occurs_elsewhere_is_no_second_copy() -> None:
    inner = {"model": "x", "n": 1, "messages": [], "text": 'say "model": twice "model":', "input": {"input": 1}}
    for data in (
        json.dumps(BASE | {"inner": inner}),
        json.dumps(BASE | {"inner": inner, "x": "é"}),
        json.dumps(BASE | {"messages": [inner] * 10_000}),
        json.dumps(BASE | {"tools": [inner] * 10_000, "x": "\x7f\\u0061"}, ensure_ascii=False),
        json.dumps(BASE | {"messages": [inner], "prompt": json.dumps(inner)}),
    ):
        assert peek(data.encode()).model == "m"


def test_large_bodies_cost_no_more_than_a_look() -> None:
    """Nothing builds what a large body holds: that takes seconds, and many times the memory of the body."""
    message = {"role": "user", "content": "h\u00e9"}
    for data in (
        json.dumps(BASE | {"messages": [message] * 100_000}).encode(),
        json.dumps(BASE | {"messages": [";base64,"] * 300_000}).encode(),
        b'{"prompt":[' + b"1," * 2_000_000 + b"1]}",
        b'{"prompt":[' + b'"a",' * 1_000_000 + b'"a"]}',
    ):
        tracemalloc.start()
        try:
            peek(data)
        except BadRequest:
            pass
        finally:
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert most < 3 * len(data)


FRAGMENTS = [
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b"\\u0061", b"\\ud800", b'"model"', b'"mod\\u0065l"', b'"stream"',
    b"true", b"false", b"null", b'"max_tokens"', b'"prompt"', b'"input"', b'"n"', b'"stream_options"', b'"stop"',
    b'{"include_usage":true}', b"1", b"-1", b"1e400", b"0.5", b" ", b"\n", b"\xff", b"\xc3\xa9", b"\x00", b";base64,",
    b'"m"', b"[1,2]", b"[[1],[2]]", b'["a"]', b'"messages"', b'"logit_bias"', b'"min_tokens"', b"9" * 5000,
]  # fmt: skip
SEEDS = [
    b'{"model":"m","messages":[{"role":"user"}],"stream":true,"stream_options":{"include_usage":false}}',
    b'{"model":"m","prompt":[1,2,3],"n":2,"max_tokens":5,"logprobs":1,"stop":["a"],"logit_bias":{"1":2}}',
    b'{"model": "m", "input": ["a", "\\u00e9"], "best_of": 3}',
    b'{"stream":true}',
]


def mutated(data: bytes, chance: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            changed[at:at] = chance.choice(FRAGMENTS)
        elif kind == 1:
            del changed[at : at + chance.randrange(1, 9)]
        elif kind == 2:
            changed[at : at + 1] = bytes([chance.randrange(256)])
        else:
            changed[at : at + chance.randrange(12)] = chance.choice(FRAGMENTS)
    return bytes(changed)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_fuzz_it_returns_or_raises_bad_request(seed: int, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes: an answer or BadRequest, nothing else; what is accepted is JSON, and so is what is sent on."""
    if large:
        monkeypatch.setattr(module, "LARGE_BYTES", 16)
    chance = Random(seed)
    accepted = 0
    for _ in range(1500):
        data = mutated(chance.choice(SEEDS), chance)
        generates = chance.random() < 0.8
        try:
            seen = peek(data, generates=generates)
        except BadRequest:
            continue
        accepted += 1
        fields = json.loads(data, parse_int=str)
        assert seen.stream is (fields.get("stream") is True)
        assert seen.model == (fields.get("model") or "")
        if seen.stream and generates:
            asked = json.loads(with_usage(data, seen), parse_int=str)
            assert asked.pop("stream_options")["include_usage"] is True
            fields.pop("stream_options", None)
            assert asked == fields
    assert accepted > 50


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (b'{"stream":true}', b'{"stream_options":{"include_usage":true},"stream":true}'),
        (b' { "stream" : true }', b' {"stream_options":{"include_usage":true}, "stream" : true }'),
        (
            b'{"stream":true,"stream_options":{"x":1.50,"include_usage":false},"seed":9007199254740993}',
            b'{"stream":true,"stream_options":{"x":1.50,"include_usage":true},"seed":9007199254740993}',
        ),
        (
            b'{"stream_options":null,"stream":true,"x":1e400}',
            b'{"stream_options":{"include_usage":true},"stream":true,"x":1e400}',
        ),
        (
            b'{"stream":true,"stream_options":{"x":1e400},"y":"\\u00e9\\/"}',
            b'{"stream":true,"stream_options":{"x":1e400,"include_usage":true},"y":"\\u00e9\\/"}',
        ),
    ],
)
def test_asking_for_usage_changes_that_field_alone(given: bytes, wanted: bytes) -> None:
    seen = peek(given)
    assert not seen.include_usage
    assert with_usage(given, seen) == wanted
    assert peek(wanted).include_usage


def test_prose_behind_a_base64_marker_is_priced_as_text() -> None:
    words = b"word " * 400
    body = b'{"model":"m","messages":[{"role":"user","content":"x;base64,' + words + b'"}]}'
    plain = b'{"model":"m","messages":[{"role":"user","content":"x,' + words + b'"}]}'
    assert peek(body).counted_tokens == 0
    assert peek(body).text_bytes >= peek(plain).text_bytes
    inlined = b'{"model":"m","messages":[{"role":"user","content":"data:x;base64,' + words + b'"}]}'
    assert peek(inlined).counted_tokens == 0
    image = b'{"model":"m","messages":[{"url":"data:image/png;base64,' + b"A" * 4000 + b'"}]}'
    assert peek(image).media_tokens == IMAGE_TOKENS
    assert peek(image).text_bytes < 200
