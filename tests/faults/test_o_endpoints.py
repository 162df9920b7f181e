"""O. Other endpoints: what is not supported says so and costs nothing; arrays, uploads and cheap paths are priced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .rig import scripts
from .rig.backend import FakeBackend
from .rig.checks import exchange, head_of, still_serves, untouched
from .rig.client import Answer, RawClient, ask, chat, marker, wire
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, serving
from .rig.waiting import eventually

MEGABYTE = 1024 * 1024
WEBSOCKET = [
    ("upgrade", "websocket"),
    ("connection", "Upgrade"),
    ("sec-websocket-version", "13"),
    ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ("sec-websocket-protocol", "realtime, openai-insecure-api-key.sk-a"),
]


@pytest.fixture(scope="module")
def gateway(shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One gateway: key `a` is free, `spent` may do nothing more, `m0` to `m3` have tokens that refill slowly."""
    keys = [key("a"), key("spent", requests_per_minute=1), *(key(f"m{i}", tokens_per_minute=100_000) for i in range(4))]
    with serving(config_for(shared_backend, keys=keys), tmp_path_factory.mktemp("gateway")) as process:
        assert ask(process.port, key="sk-spent").status == 200
        yield process


@pytest.mark.parametrize("secret", [None, "sk-spent", "sk-a"], ids=["no key", "spent key", "good key"])
@pytest.mark.parametrize("path", ["/v1/realtime?model=m", "/v1/responses", "/v1/chat/completions"])
def test_o01_websockets_are_not_spoken(
    gateway: GatewayProcess, shared_backend: FakeBackend, secret: str | None, path: str
) -> None:
    with untouched(gateway, shared_backend):
        answer = exchange(gateway, wire(method="GET", path=path, key=secret, headers=WEBSOCKET), method="GET")
        assert answer.status in {401, 404, 405}
        assert answer.error["message"]
        assert answer.header("upgrade") is None
        assert answer.header("sec-websocket-accept") is None
    still_serves(gateway, key="sk-a")


def test_o01_a_client_that_vanishes_or_sends_frames_anyway(
    gateway: GatewayProcess, shared_backend: FakeBackend
) -> None:
    handshake = wire(method="GET", path="/v1/realtime?model=m", key="sk-a", headers=WEBSOCKET)
    with untouched(gateway, shared_backend):
        with RawClient(gateway.port) as client:
            client.send(handshake)
            client.reset()
        with RawClient(gateway.port) as client:
            # O-02: a frame that names a model. It is not HTTP, so nothing of it is served.
            client.send(handshake + b"\x81\xfe\x00\x7e" + b"\x00" * 4 + b'{"type":"session.update","model":"other"}')
            assert client.read_answer().status == 404
            assert client.read_answer().status == 400
            assert client.closed_by_peer()


def test_o02_no_frame_reaches_an_engine(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    frame = b"\x81\x19" + b'{"model":"forbidden-one"}'
    with untouched(gateway, shared_backend):
        for path in ("/v1/realtime", "/v1/chat/completions"):
            data = wire(b"", method="GET", path=path, key="sk-a", headers=WEBSOCKET) + frame
            assert exchange(gateway, data, method="GET").status in {404, 405}


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/batches", "/v1/batches/b1/cancel", "/v1/uploads", "/v1/fine_tuning/jobs"]
)
def test_o03_batch_files_are_not_supported(gateway: GatewayProcess, shared_backend: FakeBackend, path: str) -> None:
    """A file of a hundred thousand requests is no way around the limits."""
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": chat()}).encode()
    form = multipart(line * 1000, "batch.jsonl")
    with untouched(gateway, shared_backend):
        for secret in ("sk-a", "sk-spent"):
            answer = ask(gateway.port, form, path=path, key=secret, headers=[MULTIPART])
            assert (answer.status, answer.error["code"]) == (404, "not_found")


MULTIPART = ("content-type", "multipart/form-data; boundary=frontier")


def multipart(content: bytes, filename: str = "a.wav") -> bytes:
    return (
        b'--frontier\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n'
        b'--frontier\r\ncontent-disposition: form-data; name="file"; filename="%b"\r\n\r\n%b\r\n--frontier--\r\n'
        % (filename.encode(), content)
    )


REFILL = 1500  # tokens that a key of 1,000 a second may get back while it is looked at


def reserved(gateway: GatewayProcess, backend: FakeBackend, secret: str, body: dict[str, Any]) -> int:
    """Tokens that are held from an unused key while this embeddings request runs."""
    before = remaining(ask(gateway.port, chat(max_tokens=1), key=secret))
    mark = marker()
    backend.by_marker[mark] = scripts.silent
    with RawClient(gateway.port) as client:
        client.request(body | {"user": mark}, path="/v1/embeddings", key=secret)
        eventually(lambda: backend.call(mark))
        while_it_runs = remaining(ask(gateway.port, chat(max_tokens=1), key=secret))
    gateway.settles()
    return before - while_it_runs


def remaining(answer: Answer) -> int:
    assert answer.status == 200
    return int(answer.header("x-ratelimit-remaining-tokens") or -1)


def test_o04_embeddings_with_arrays(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    """Tokens are summed over the items, no output is expected, and one request may have so many items."""
    path = "/v1/embeddings"
    inputs: list[tuple[Any, int, int]] = [
        ([[7] * 10 for _ in range(2048)], 20_480, 21_500),
        (list(range(1, 30_001)), 30_000, 31_000),
        (["word " * 20 for _ in range(2048)], 40_000, 70_000),
        ("word " * 8000, 8_000, 13_000),
    ]
    for i, (value, least, most) in enumerate(inputs):
        held = reserved(gateway, shared_backend, f"sk-m{i}", {"model": "m", "input": value})
        assert least - REFILL < held < most

    answer = ask(gateway.port, {"model": "m", "input": ["a", "b", "c"]}, path=path, key="sk-a")
    assert len(answer.json()["data"]) == 3
    with untouched(gateway, shared_backend):
        for hostile in ([], [[]], [[[1]]], [1, "a"], ["a", 1], [None], [-1], ["a"] * 20_000, [[1], []]):
            answer = ask(gateway.port, {"model": "m", "input": hostile}, path=path, key="sk-a")
            assert (answer.status, answer.error["param"]) == (400, "input"), str(hostile)[:40]


def test_o05_an_audio_upload(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    """Priced by its size (one token for 320 bytes), passed on as it is, in memory once or twice."""
    size = 25 * MEGABYTE
    body = multipart(b"\x00\xffRIFF" * (size // 6))
    script = scripts.steps(scripts.answer(200, {"text": "hello"}))
    before, calls = gateway.rss_bytes(), len(shared_backend.calls)
    shared_backend.plan.append(script)
    with RawClient(gateway.port) as client:
        client.send(
            head_of(len(body), MULTIPART, key="sk-a", path="/v1/audio/transcriptions").replace(
                b"content-type: application/json\r\n", b""
            )
        )
        most = before
        for start in range(0, len(body), MEGABYTE):
            client.send(body[start : start + MEGABYTE])
            most = max(most, gateway.rss_bytes())
        answer = client.read_answer(10)
        most = max(most, gateway.rss_bytes())
    assert (answer.status, answer.json()) == (200, {"text": "hello"})
    assert most - before < 3 * size
    (call,) = shared_backend.calls[calls:]
    assert bytes(call.body) == body
    assert call.header("content-type") == MULTIPART[1]


def test_o05_audio_is_priced_by_its_size(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, keys=[key("a", tokens_per_minute=10_000)]))
    backend.script = scripts.steps(scripts.answer(200, {"text": "hello"}))
    path = "/v1/audio/transcriptions"
    small, large = multipart(b"x" * 320 * 5000), multipart(b"x" * 320 * 11_000)
    assert ask(gateway.port, small, path=path, key="sk-a", headers=[MULTIPART]).status == 200
    refused = ask(gateway.port, large, path=path, key="sk-a", headers=[MULTIPART])
    assert (refused.status, refused.reason) == (413, "never_fits")
    assert len(backend.calls) == 1


def test_o05_an_upload_to_the_wrong_path(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    with untouched(gateway, shared_backend):
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/v2/models/m/infer"):
            answer = ask(gateway.port, multipart(b"x" * 1000), path=path, key="sk-a", headers=[MULTIPART])
            assert answer.status == 415


def test_o06_cheap_endpoints_answer_when_nothing_else_does(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(
        config_for(
            backend, slots=1, places=1, mode="backpressure", keys=[key("a"), key("spent", requests_per_minute=1)]
        )
    )
    assert ask(gateway.port, key="sk-spent").status == 200
    backend.script = scripts.silent
    with RawClient(gateway.port) as running, RawClient(gateway.port) as waiting:
        running.request(chat(), key="sk-a")
        eventually(lambda: gateway.gauges() == (1, 0))
        waiting.request(chat(), key="sk-a")
        eventually(lambda: gateway.gauges() == (1, 1))
        assert ask(gateway.port, key="sk-spent").status == 429
        for _ in range(20):
            for secret in ("sk-a", "sk-spent"):
                models = ask(gateway.port, method="GET", path="/v1/models", key=secret)
                assert models.json()["data"][0]["id"] == "m"
            assert ask(gateway.port, method="GET", path="/v1/models").status == 401
            assert ask(gateway.port, method="GET", path="/healthz").status == 200
            assert ask(gateway.port, method="GET", path="/readyz").status == 200
            assert b"forebay_" in gateway.admin("/metrics")
        assert gateway.gauges() == (1, 1)
    gateway.settles()
