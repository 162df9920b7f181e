"""H. Backend failures, second part: what engines answer, and how much of it reaches the client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import pytest

from .rig import scripts
from .rig.backend import Call, FakeBackend, early
from .rig.checks import charged
from .rig.client import EndedShortError, RawClient, ask, chat, marker
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, serving, wait_until
from .rig.scripts import DONE, LAST_CHUNK, Do, chunk
from .rig.waiting import eventually


@pytest.fixture(scope="module")
def gateway(shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One gateway for the cases that leave nothing behind."""
    with serving(config_for(shared_backend), tmp_path_factory.mktemp("gateway")) as process:
        yield process


@pytest.fixture(autouse=True)
def ordinary(shared_backend: FakeBackend) -> None:
    """Each case begins with a backend that does as it should."""
    shared_backend.script = scripts.ordinary


MANY = 600_000  # tokens a minute: 10,000 a second


@pytest.mark.parametrize("escaped", [False, True], ids=["utf-8", "escaped"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_h10_the_length_of_a_changed_body(
    shared_backend: FakeBackend, gateway: GatewayProcess, chunked: bool, escaped: bool
) -> None:
    mark = marker()
    body = chat(mark, messages=[{"role": "user", "content": "漢字かな交じり文 😀🎉 é" * 50}], stream=True)
    sent = json.dumps(body, ensure_ascii=escaped).encode()
    answer = ask(gateway.port, sent, chunked=chunked)
    assert answer.body.endswith(DONE)
    call = shared_backend.call(mark)
    assert call is not None
    # `header` fails on a second one; the backend read the body by this very length and found its end.
    assert call.header("content-length") == str(len(call.raw_body))
    assert call.header("transfer-encoding") is None
    assert json.loads(call.body) == body | {"stream_options": {"include_usage": True}}
    eventually(lambda: not call.open)
    assert ask(gateway.port).status == 200


ODD_HEADERS = [
    ("connection", "X-Foo, keep-alive"), ("x-foo", "hop"), ("keep-alive", "timeout=5"), ("te", "trailers"),
    ("trailer", "x-sum"), ("upgrade", "h2c"), ("proxy-authenticate", "Basic"), ("server", "rig/1.0"),
    ("set-cookie", "a=1; Path=/"), ("set-cookie", "b=2"), ("x-two", "1"), ("x-two", "2"), ("x-empty", ""),
    ("x-latin", "caf\xe9"), ("vary", "origin"), ("openai-processing-ms", "12"), ("x-request-id", "engine-7"),
]  # fmt: skip
HOP_BY_HOP = {"keep-alive", "te", "trailer", "upgrade", "proxy-authenticate", "x-foo"}


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_h11_headers_of_the_answer(shared_backend: FakeBackend, gateway: GatewayProcess, framing: str) -> None:
    body = json.dumps(scripts.completion()).encode()
    headers = [("content-type", "application/json"), *ODD_HEADERS]
    shared_backend.script = {
        "length": scripts.steps(scripts.answer(200, body, headers)),
        "chunked": scripts.steps(
            scripts.head(200, [*headers, ("transfer-encoding", "chunked")]), chunk(body[:9]), chunk(body[9:]),
            b"0\r\nx-sum: 1\r\n\r\n",
        ),
        "close": scripts.steps(scripts.head(200, headers), body, 0.05, Do.CLOSE),
    }[framing]  # fmt: skip
    with RawClient(gateway.port) as client:
        for _ in range(2):  # the second may be read another way: its head is known
            client.request(chat())
            answer = client.read_answer()
            assert (answer.status, answer.body, answer.ended) == (200, body, "whole")
            names = [name for name, _ in answer.head.headers]
            assert not HOP_BY_HOP & set(names)
            # Exactly one framing, whatever the engine's was.
            assert names.count("content-length") + names.count("transfer-encoding") == 1
            assert "connection" not in names
            assert answer.head.all("set-cookie") == ["a=1; Path=/", "b=2"]
            assert answer.head.all("x-two") == ["1", "2"]
            assert [answer.header(n) for n in ("server", "x-latin", "vary", "x-empty", "openai-processing-ms")] == [
                "rig/1.0", "caf\xe9", "origin", "", "12",
            ]  # fmt: skip
            assert len(answer.head.all("x-request-id")) == 1
            assert answer.header("x-sum") is None


def test_h11_content_coding_stays_with_its_bytes(shared_backend: FakeBackend, gateway: GatewayProcess) -> None:
    body = b"\x0b\x02\x80not really brotli\x03"
    shared_backend.script = scripts.steps(scripts.answer(200, body, [("content-encoding", "br")]))
    answer = ask(gateway.port)
    assert (answer.header("content-encoding"), answer.body) == ("br", body)


NOT_HTTP: dict[str, list[scripts.Step]] = {
    "garbage": [b"\x00\x01\x02garbage\r\n\r\n"],
    "two framings": [
        scripts.head(200, [("content-length", "5"), ("transfer-encoding", "chunked")]) + chunk(b"hello") + LAST_CHUNK
    ],
    "two lengths": [scripts.head(200, [("content-length", "5"), ("content-length", "6")]) + b"hello!"],
    "a folded header": [b"HTTP/1.1 200 OK\r\nx-a: 1\r\n folded\r\ncontent-length: 0\r\n\r\n"],
    "a bare line feed": [b"HTTP/1.1 200 OK\ncontent-length: 0\n\n"],
    "an endless head": [b"HTTP/1.1 200 OK\r\n" + b"x-a: " + b"a" * 200_000],
    "switching protocols": [scripts.head(101, [("upgrade", "x"), ("connection", "upgrade")]) + b"zzz"],
    "nothing": [0.05, Do.CLOSE],
    "half a status line": [b"HTTP/1.1 2", 0.05, Do.CLOSE],
}


@pytest.mark.parametrize("name", NOT_HTTP)
def test_h11_an_answer_that_is_not_http(shared_backend: FakeBackend, gateway: GatewayProcess, name: str) -> None:
    shared_backend.script = scripts.steps(*NOT_HTTP[name])
    answer = ask(gateway.port)
    shared_backend.script = scripts.ordinary
    assert (answer.status, answer.reason) == (502, "engine_error")
    assert answer.error["type"] == "server_error"
    gateway.settles()
    assert ask(gateway.port).status == 200


def test_h11_interim_answers_are_not_the_answer(shared_backend: FakeBackend, gateway: GatewayProcess) -> None:
    early = scripts.head(103, [("link", "</x>")]) + scripts.head(100)
    shared_backend.script = scripts.steps(early, 0.05, scripts.answer(200, scripts.completion()))
    for _ in range(2):
        assert ask(gateway.port).json() == scripts.completion()


WITHIN_200: dict[str, tuple[list[scripts.Step], bytes]] = {
    "html": ([scripts.answer(200, b"<html>busy</html>", [("content-type", "text/html")])], b"<html>busy</html>"),
    "an error": ([scripts.answer(200, b'{"error":{"message":"no"}}')], b'{"error":{"message":"no"}}'),
    "an error, typed": (
        [scripts.answer(200, {"error": {"message": "no", "code": 500}})],
        b'{"error": {"message": "no", "code": 500}}',
    ),
    "nothing": ([scripts.answer(200, b"")], b""),
    "broken json": ([scripts.answer(200, b'{"choices":[{"ind')], b'{"choices":[{"ind'),
}


@pytest.mark.parametrize("name", WITHIN_200)
def test_h12_a_200_with_an_error_inside(backend: FakeBackend, start_gateway: StartGateway, name: str) -> None:
    gateway = start_gateway(config_for(backend, keys=[key(k, tokens_per_minute=60_000) for k in "ab"]))
    script, body = WITHIN_200[name]
    backend.script = scripts.steps(*script)
    answer = ask(gateway.port, chat(max_tokens=20_000), key="sk-a")
    assert answer.body == body
    eventually(lambda: gateway.outcome("failed") == 1)
    assert gateway.outcome("completed") == 0
    assert charged(gateway, backend) < 100, "no output is charged"


@pytest.mark.parametrize("how", [Do.CLOSE, Do.RESET])
def test_h12_a_truncated_body_is_not_padded(backend: FakeBackend, start_gateway: StartGateway, how: Do) -> None:
    gateway = start_gateway(config_for(backend))
    whole = scripts.answer(200, scripts.completion())
    backend.script = scripts.steps(whole[:-40], 0.1, how)
    try:
        answer = ask(gateway.port)
        assert answer.status == 502 or (answer.ended != "whole" and whole.endswith(answer.body + whole[-40:]))
    except EndedShortError:
        pass
    eventually(lambda: gateway.outcome("failed") == 1)


def test_h13_a_backend_400_is_no_backend_failure(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, keys=[key(k, tokens_per_minute=MANY) for k in "ab"]))
    complaint = {"object": "error", "message": "maximum context length is 4096 tokens", "code": 400}
    body = json.dumps(complaint).encode()
    headers = [("content-type", "application/json"), ("x-engine", "e1")]
    backend.script = scripts.steps(scripts.answer(400, body, headers))
    for _ in range(50):
        answer = ask(gateway.port, chat(max_tokens=5000), key="sk-a")
        assert (answer.status, answer.body, answer.header("x-engine")) == (400, body, "e1")
    assert len(backend.calls) == 50
    assert [engine["ejected"] for engine in gateway.engines()] == [False]
    assert gateway.ready()
    assert charged(gateway, backend) < 5000, "what was reserved is given back"


@pytest.mark.parametrize("how", ["500", "hangs"])
def test_h14_engine_dead_behind_a_live_http_server(backend: FakeBackend, start_gateway: StartGateway, how: str) -> None:
    gateway = start_gateway(config_for(backend, engine={"timeouts": {"first_byte_s": 0.3}}))
    backend.script = scripts.refuses(500) if how == "500" else scripts.silent
    failures = [ask(gateway.port) for _ in range(3)]
    assert {answer.status for answer in failures} == {500 if how == "500" else 504}
    # It is out of rotation, though its probe is answered: refusals are quick, and nobody bothers it.
    calls = len(backend.calls)
    for _ in range(20):
        began = time.monotonic()
        answer = ask(gateway.port)
        assert time.monotonic() - began < 0.2
        assert (answer.status, answer.reason) == (503, "no_engine")
        assert answer.retry_after >= 1
    assert len(backend.calls) == calls
    assert [engine["readiness"] for engine in gateway.engines()] == ["up"]
    # Healthy again, it returns by itself when the refusal said.
    backend.script = scripts.ordinary
    wait_until(answer.head.at + answer.retry_after)
    assert ask(gateway.port).status == 200
    assert [engine["ejected"] for engine in gateway.engines()] == [False]
    assert ask(gateway.port).status == 200


@pytest.mark.parametrize("reads", [True, False], ids=["reads 64 KB", "reads nothing more"])
@pytest.mark.parametrize("closes", [True, False], ids=["closes", "stays"])
def test_h15_backend_answers_before_the_upload_is_finished(
    backend: FakeBackend, start_gateway: StartGateway, closes: bool, reads: bool
) -> None:
    gateway = start_gateway(config_for(backend, engine={"probe": {"interval_s": 60}}))
    too_long = {"error": {"message": "too long", "type": "invalid_request_error", "param": None, "code": 413}}

    async def script(call: Call) -> None:
        if reads:
            while len(call.body) + len(call.connection.buffer) < 65536:
                await _next_turn()
        call.stop_reading()
        await call.send(scripts.answer(413, too_long, [("connection", "close")] if closes else []))
        if closes:
            await _next_turn()
            call.close()

    backend.plan.append(early(script))
    answer = ask(gateway.port, chat(pad="x" * 10 * 1024 * 1024))
    assert (answer.status, answer.json()) == (413, too_long)
    gateway.settles()
    # The connection with the unread rest is not the next one's.
    backend.script = scripts.ordinary
    assert ask(gateway.port, within=2).status == 200
    assert gateway.outcome("completed") == 2


async def _next_turn() -> None:
    await asyncio.sleep(0.01)
