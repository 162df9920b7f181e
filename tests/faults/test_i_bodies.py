"""I. Hostile and odd request bodies, first part: what is refused, and what passes through as it is.

The rule for all: a 4xx with a useful message, no contact with an engine, no reservation left, never a 500.
"""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from .rig import scripts
from .rig.backend import Call, FakeBackend
from .rig.checks import exchange, head_of, still_serves, untouched
from .rig.client import Answer, RawClient, ask, chat, marker
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, serving
from .rig.scripts import LAST_CHUNK
from .rig.waiting import eventually

JSON_TYPE = ("content-type", "application/json")
FORM = ("content-type", "application/x-www-form-urlencoded")


@pytest.fixture(scope="module")
def gateway(shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One gateway for all. Key `a` is limited so widely that only a missing refund would show."""
    keys = [key("a", requests_per_minute=100_000, tokens_per_minute=100_000_000), key("narrow") | {"models": ["m"]}]
    config = config_for(shared_backend, keys=keys, engine={"models": ["m", "other"]})
    with serving(config, tmp_path_factory.mktemp("gateway")) as process:
        yield process


def hostile(gateway: GatewayProcess, backend: FakeBackend, body: bytes, **how: Any) -> Answer:
    """The answer to a body that must be refused; it must cost nothing and leave the connection in step."""
    with untouched(gateway, backend), RawClient(gateway.port) as client:
        client.request(body, key=how.pop("key", "sk-a"), **how)
        answer = client.read_answer()
        assert 400 <= answer.status < 500
        assert answer.error["message"]
        assert answer.header("x-should-retry") == "false"
        if answer.header("connection") != "close":
            client.request(chat(), path="/v1/unknown")
            assert client.read_answer().status == 404
    return answer


MALFORMED = {
    "empty": b"",
    "spaces": b"  \n ",
    "truncated": b'{"model":"m","messages":[{"role":"us',
    "trailing comma": b'{"model":"m","messages":[],}',
    "single quotes": b"{'model':'m'}",
    "comments": b'{"model":"m" /* the model */}',
    "null": b"null",
    "array": b"[]",
    "string": b'"x"',
    "number": b"5",
    "true": b"true",
    "two documents": b'{"model":"m"}{"model":"m"}',
    "byte order mark": b'\xef\xbb\xbf{"model":"m","messages":[]}',
    "nuls behind": b'{"model":"m","messages":[]}\x00\x00',
    "form": b"model=m&messages=hi",
    "unquoted": b"{model:m}",
}


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("name", [name for name in MALFORMED if name != "empty"])
def test_i01_malformed_json(gateway: GatewayProcess, shared_backend: FakeBackend, name: str, chunked: bool) -> None:
    answer = hostile(gateway, shared_backend, MALFORMED[name], chunked=chunked)
    assert (answer.status, answer.reason) == (400, "malformed")
    assert answer.error["type"] == "invalid_request_error"


def test_i01_an_empty_body(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    assert hostile(gateway, shared_backend, b"").status == 400
    with untouched(gateway, shared_backend):
        assert exchange(gateway, head_of(None, ("transfer-encoding", "chunked"), key="sk-a") + LAST_CHUNK).status == 400


def test_i01_content_type(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    body = json.dumps(chat()).encode()
    for wrong in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"):
        answer = hostile(gateway, shared_backend, body, headers=[("content-type", wrong)])
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    for right in (
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON",
        "application/vnd.api+json",
    ):
        assert ask(gateway.port, body, key="sk-a", headers=[("content-type", right)]).status == 200
    # Without a type it is taken for what it must be.
    untyped = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-a\r\ncontent-length: {len(body)}"
    )
    with RawClient(gateway.port) as client:
        client.send(untyped.encode() + b"\r\n\r\n" + body)
        assert client.read_answer().status == 200


def test_i01_a_malformed_request_costs_nothing(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """It is refused before the limits are asked, so it takes none of the key's requests."""
    gateway = start_gateway(config_for(backend, keys=[key("a", requests_per_minute=5)]))
    for _ in range(20):
        assert ask(gateway.port, b"{", key="sk-a").status == 400
    assert ask(gateway.port, key="sk-a").header("x-ratelimit-remaining-requests") == "4"


def nested(depth: int, opening: bytes = b'{"a":', closing: bytes = b"}") -> bytes:
    return opening * depth + b"1" + closing * depth


def schema(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


DEEP = {
    "brackets": b"[" * 20_000,
    "closed brackets": b"[" * 20_000 + b"]" * 20_000,
    "brackets in a field": b'{"model":"m","messages":' + nested(20_000, b"[", b"]") + b"}",
    "objects": b'{"model":"m","x":' + nested(1000) + b"}",
    "a tool schema": b'{"model":"m","tools":[' + nested(1000, b'{"properties":{"a":', b"}}") + b"]}",
    "a prompt": b'{"model":"m","prompt":' + nested(5000, b"[", b"]") + b"}",
}


def test_i02_deep_nesting(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    mark = marker()
    shared_backend.by_marker[mark] = scripts.streams(scripts.deltas(20), every=0.02)
    with RawClient(gateway.port) as stream:
        stream.request(chat(mark, stream=True), key="sk-a")
        assert stream.read_head().status == 200
        calls = len(shared_backend.calls)
        for name, body in DEEP.items():
            assert ask(gateway.port, body, key="sk-a").status == 400, name
        assert len(shared_backend.calls) == calls
        assert sum(1 for _ in stream.events(0.5)) == 21
    tool = {"type": "function", "function": {"name": "f", "parameters": schema(100)}}
    shared_backend.by_marker[mark := marker()] = scripts.says()
    assert ask(gateway.port, chat(mark, tools=[tool]), key="sk-a").status == 200


NOT_UTF8 = {
    "ff fe": b'{"model":"m","a":"\xff\xfe"}',
    "utf-16": '{"model":"m","messages":[]}'.encode("utf-16"),
    "utf-16 without a mark": '{"model":"m","messages":[]}'.encode("utf-16-le"),
    "overlong": b'{"model":"m","a":"\xc0\xaf"}',
    "surrogate bytes": b'{"model":"m","a":"\xed\xa0\x80"}',
    "a cut emoji": b'{"model":"m","messages":[],"a":"\xf0\x9f\x98"}',
    "a cut emoji at the end": b'{"model":"m","messages":[]}\xf0\x9f\x98',
    "nul in a string": b'{"model":"m","a":"\x00"}',
}


@pytest.mark.parametrize("name", NOT_UTF8)
def test_i04_not_utf8(gateway: GatewayProcess, shared_backend: FakeBackend, name: str) -> None:
    typed = [("content-type", "application/json; charset=utf-16")] if "utf-16" in name else []
    assert hostile(gateway, shared_backend, NOT_UTF8[name], headers=typed).status == 400


@pytest.mark.parametrize("escape", ["\\ud800", "\\udc00\\ud800", "\\ud83dx"])
def test_i04_a_lone_surrogate_escape(gateway: GatewayProcess, shared_backend: FakeBackend, escape: str) -> None:
    """Refused, or unchanged at the engine; never re-encoded."""
    mark = marker()
    shared_backend.by_marker[mark] = scripts.says()
    body = b'{"model":"m","messages":[],"user":"%b","a":"%b"}' % (mark.encode(), escape.encode())
    answer = ask(gateway.port, body, key="sk-a")
    assert answer.status in {200, 400}
    call = shared_backend.call(mark)
    assert call is None if answer.status == 400 else call is not None and bytes(call.body) == body


def test_i05_odd_numbers(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "01", "+1", "1.", ".5", "0x10", "1e", "--1", "1_000"):
        body = b'{"model":"m","messages":[],"seed":%b}' % number.encode()
        assert hostile(gateway, shared_backend, body).status == 400, number
    for number in ("-0", "1e400", "1" + "0" * 30, "9" * 5000, "0.1", "9007199254740993", "1E+2", "1.000"):
        for more in (b"", b',"stream":true,"stream_options":{}'):
            mark = marker()
            shared_backend.by_marker[mark] = scripts.says()
            body = b'{"model":"m","messages":[],"user":"%b","seed":%b%b}' % (mark.encode(), number.encode(), more)
            assert ask(gateway.port, body, key="sk-a").status == 200
            call = shared_backend.call(mark)
            assert call is not None
            assert bytes(call.body) == body.replace(b'"stream_options":{}', b'"stream_options":{"include_usage":true}')
    for number in ("1e400", "9" * 5000, "1.5", "-1", "1e2"):
        body = b'{"model":"m","messages":[],"max_tokens":%b}' % number.encode()
        answer = hostile(gateway, shared_backend, body)
        assert answer.error["param"] == "max_tokens"


def test_i07_compressed_bodies(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    """Documented: no content coding of requests is supported, so 415, whatever it holds."""
    plain = json.dumps(chat()).encode()
    packed = gzip.compress(plain)
    for coding, body in [
        ("gzip", packed), ("gzip", packed[:-5]), ("gzip", b"PK" + packed), ("br", plain), ("deflate, gzip", packed),
        ("unheard-of", plain), ("GZIP", packed),
    ]:  # fmt: skip
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = hostile(gateway, shared_backend, body, headers=[("content-encoding", coding)], path=path)
            assert answer.status == 415
            assert "identity" in answer.error["message"]
    assert ask(gateway.port, plain, key="sk-a", headers=[("content-encoding", "identity")]).status == 200
    assert hostile(gateway, shared_backend, packed).status == 400  # gzip that does not say so


DUPLICATES = {
    "allowed first": b'{"model":"m","model":"other","messages":[]}',
    "forbidden first": b'{"model":"other","model":"m","messages":[]}',
    "with spaces": b'{ "model" : "m" , "model" : "other" }',
    "by an escape": b'{"model":"m","mod\\u0065l":"other","messages":[]}',
    "by two escapes": b'{"\\u006dodel":"m","mod\\u0065l":"other","messages":[]}',
    "two caps": b'{"model":"m","max_tokens":1,"max_tokens":100000,"messages":[]}',
    "two streams": b'{"model":"m","stream":false,"stream":true,"messages":[]}',
    "two bodies of text": b'{"model":"m","messages":[],"messages":[{"role":"user","content":"hi"}]}',
}


@pytest.mark.parametrize("name", DUPLICATES)
def test_i11_duplicate_keys(gateway: GatewayProcess, shared_backend: FakeBackend, name: str) -> None:
    answer = hostile(gateway, shared_backend, DUPLICATES[name], key="sk-narrow")
    assert answer.status == 400
    assert "more than once" in answer.error["message"]


def test_i11_an_escaped_key_is_the_key(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    assert hostile(gateway, shared_backend, b'{"mod\\u0065l":"other","messages":[]}', key="sk-narrow").status == 403


KNOBS: list[tuple[str, Any]] = [
    ("logprobs", 1_000_000), ("logprobs", -1), ("top_logprobs", -1), ("top_logprobs", 1_000_000),
    ("prompt_logprobs", -1), ("prompt_logprobs", 100_000), ("stop", ["x"] * 10_000), ("n", 0), ("n", 100_000),
    ("best_of", 100_000), ("max_tokens", 10**12),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), KNOBS, ids=[f"{field}-{i}" for i, (field, _) in enumerate(KNOBS)])
def test_i12_output_size_knobs(gateway: GatewayProcess, shared_backend: FakeBackend, field: str, value: Any) -> None:
    answer = hostile(gateway, shared_backend, json.dumps(chat(**{field: value})).encode())
    assert (answer.status, answer.error["param"]) == (400, field)


def test_i12_a_million_biases(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    body = b'{"model":"m","messages":[],"logit_bias":{"1":1' + b',"2":1' * 1_000_000 + b"}}"
    answer = hostile(gateway, shared_backend, body)
    assert (answer.status, answer.error["param"]) == (400, "logit_bias")


def test_i12_what_is_let_through_is_counted(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, keys=[key("a", tokens_per_minute=100_000)]))
    with untouched(gateway, backend):
        body = chat(min_tokens=101, max_tokens=100)
        assert ask(gateway.port, body, key="sk-a").error["param"] == "min_tokens"
        # 8 completions of 20,000 tokens are more than the key has.
        refused = ask(gateway.port, chat(n=8, max_tokens=20_000), key="sk-a")
        assert (refused.status, refused.reason) == (413, "never_fits")
    seen: list[int] = []

    async def look(call: Call) -> None:
        seen.append(len(call.body))
        await call.hold()

    # An echoed prompt is read by the engine like any other: it is held from the key while it runs.
    backend.script = look
    with RawClient(gateway.port) as client:
        client.request(chat(prompt="word " * 40_000, echo=True, max_tokens=1), path="/v1/completions", key="sk-a")
        eventually(lambda: seen)
        refused = ask(gateway.port, chat(prompt="word " * 60_000, max_tokens=1), path="/v1/completions", key="sk-a")
        assert (refused.status, refused.reason) == (429, "key_tokens")


CONFUSED: list[tuple[str, Any, set[int]]] = [
    ("stream", "true", {400}), ("stream", 1, {400}), ("messages", {}, {200}), ("messages", [], {200}),
    ("model", ["a"], {400}), ("model", "", {400}), ("model", "m" * 1_000_000, {400}), ("model", "a\nb", {400, 404}),
    ("model", 5, {400}), ("temperature", "hot", {200}), ("user", {}, {200}), ("max_tokens", "100", {400}),
    ("stream_options", "yes", {400}), ("prompt", [1, "a"], {400}), ("prompt", [[]], {400}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "statuses"), CONFUSED, ids=[f"{f}-{i}" for i, (f, _, _) in enumerate(CONFUSED)]
)
def test_i13_type_confusion(
    gateway: GatewayProcess, shared_backend: FakeBackend, field: str, value: Any, statuses: set[int]
) -> None:
    mark = marker()
    shared_backend.by_marker[mark] = scripts.says()
    body = json.dumps(chat(mark) | {"trace": mark} | {field: value}).encode()
    answer = ask(gateway.port, body, key="sk-a")
    assert answer.status in statuses
    call = shared_backend.call(mark)
    if answer.status == 200:
        assert call is not None
        assert bytes(call.body) == body
    else:
        assert call is None
        assert answer.error["param"] == field
        assert len(answer.body) < 2000
    still_serves(gateway, key="sk-a")


def test_i13_only_true_streams(gateway: GatewayProcess) -> None:
    for value, kind in [(True, "text/event-stream"), (False, "application/json"), (None, "application/json")]:
        answer = ask(gateway.port, chat() | {"stream": value}, key="sk-a")
        assert (answer.header("content-type") or "").startswith(kind)


def test_i14_schemas_the_backend_chokes_on(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    complaint = {"error": {"message": "grammar is not valid", "type": "BadRequestError", "param": None, "code": 400}}
    for response_format in (
        {"type": "no-such-type"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(a+)+$"}}},
    ):
        mark = marker()
        shared_backend.by_marker[mark] = scripts.refuses(400, complaint)
        body = json.dumps(chat(mark, response_format=response_format)).encode()
        answer = ask(gateway.port, body, key="sk-a")
        assert (answer.status, answer.json()) == (400, complaint)
        call = shared_backend.call(mark)
        assert call is not None
        assert bytes(call.body) == body
        # The same in the middle of a stream: what was said is relayed, and no end is invented.
        mark = marker()
        failing = scripts.steps(scripts.sse_head(), scripts.chunk(scripts.delta()), 0.1, scripts.Do.RESET)
        shared_backend.by_marker[mark] = failing
        broken = ask(gateway.port, chat(mark, stream=True, response_format=response_format), key="sk-a")
        assert broken.status == 200
        assert broken.body.startswith(scripts.delta())
        assert b'"error"' in broken.body
        assert scripts.DONE not in broken.body


def elaborate(mark: str) -> bytes:
    """100 KB of what clients really send: tools, escapes, unicode, long numbers, unknown fields, odd layout."""
    parameters = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "description": "é" * 20} for i in range(40)},
    }
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(20)]
    text = json.dumps(tools, ensure_ascii=False)
    return (
        '{ "z":null,"model" :"m",\n\t"messages":[{"role":"user","content":"\\u00e9\\/\\ud83d\\ude00 漢字 😀 \u2028"}],'
        f'"seed":9007199254740993,"x":1.0e-7,"y":-0.0,"user":"{mark}","unknown":{{"b":1,"a":[{{}},[],""]}},'
        f'"tools":{text} , "logit_bias":{{"50256":-100}}'
    ).encode() + b"%b }"


@pytest.mark.parametrize(
    ("more", "forwarded"),
    [
        (b"", b""),
        (b',"stream":false', b',"stream":false'),
        (
            b',"stream":true,"stream_options":{"include_usage":true}',
            b',"stream":true,"stream_options":{"include_usage":true}',
        ),
    ],
    ids=["plain", "no stream", "asks for usage itself"],
)
def test_i15_an_unaltered_body(
    gateway: GatewayProcess, shared_backend: FakeBackend, more: bytes, forwarded: bytes
) -> None:
    mark = marker()
    shared_backend.by_marker[mark] = scripts.says()
    body = elaborate(mark)[:-4] + more + b" }"
    for chunked in (False, True):
        shared_backend.calls.clear()
        assert ask(gateway.port, body, key="sk-a", chunked=chunked).status == 200
        call = shared_backend.call(mark)
        assert call is not None
        assert bytes(call.raw_body) == elaborate(mark)[:-4] + forwarded + b" }"
        assert call.header("content-length") == str(len(body))


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False, "x": 1}], ids=["absent", "empty", "others"])
def test_i15_only_the_intended_field_differs(
    gateway: GatewayProcess, shared_backend: FakeBackend, options: dict[str, Any] | None
) -> None:
    mark = marker()
    shared_backend.by_marker[mark] = scripts.streams(scripts.deltas(1))
    given = b',"stream":true' + (b"" if options is None else b',"stream_options":' + json.dumps(options).encode())
    body = elaborate(mark)[:-4] + given + b" }"
    assert ask(gateway.port, body, key="sk-a").status == 200
    call = shared_backend.call(mark)
    assert call is not None
    sent, seen = json.loads(body, parse_float=str, parse_int=str), json.loads(call.body, parse_float=str, parse_int=str)
    assert seen.pop("stream_options") == {k: str(v) for k, v in (options or {}).items()} | {"include_usage": True}
    sent.pop("stream_options", None)
    assert list(seen.items()) == list(sent.items())  # the order of the keys too
    assert call.header("content-length") == str(len(call.body))


def test_i16_the_gateway_fetches_nothing(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.settimeout(0.3)
        address = f"http://127.0.0.1:{bait.getsockname()[1]}/image.png"
        for url in (
            address,
            f"{gateway.url}/healthz",
            f"http://127.0.0.1:{gateway.admin_port}/metrics",
            "file:///etc/passwd",
        ):
            mark = marker()
            content = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}]
            body = json.dumps(chat(mark, messages=[{"role": "user", "content": content}])).encode()
            assert ask(gateway.port, body, key="sk-a").status == 200
            call = shared_backend.call(mark)
            assert call is not None
            assert bytes(call.body) == body
        with pytest.raises(TimeoutError):
            bait.accept()


@pytest.mark.parametrize(
    ("model", "status"), [("unknown", 404), ("M", 404), ("m ", 404), ("other/m", 404), ("", 400), (None, 404)]
)
def test_i17_unknown_model(
    gateway: GatewayProcess, shared_backend: FakeBackend, model: str | None, status: int
) -> None:
    answer = hostile(gateway, shared_backend, json.dumps(chat() | {"model": model}).encode())
    assert (answer.status, answer.error["param"]) == (status, "model")
    if status == 404:
        assert answer.error["code"] == "model_not_found"
    assert ask(gateway.port, chat() | {"model": "other"}, key="sk-a").status == 200


def test_i17_an_unknown_model_reserves_nothing(backend: FakeBackend, start_gateway: StartGateway) -> None:
    limited = [key("a", requests_per_minute=5, tokens_per_minute=6000)]
    gateway = start_gateway(config_for(backend, keys=limited, engine={"models": ["m"]}))
    for _ in range(20):
        assert ask(gateway.port, chat(max_tokens=1000) | {"model": "x"}, key="sk-a").status == 404
    answer = ask(gateway.port, chat(max_tokens=10), key="sk-a")
    assert answer.header("x-ratelimit-remaining-requests") == "4"
    assert int(answer.header("x-ratelimit-remaining-tokens") or 0) > 5900
