"""The official Anthropic client on /v1/messages: each failure arrives as the error class it knows, in its own shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.faults.rig import scripts
from tests.faults.rig.backend import FakeBackend, Script
from tests.faults.rig.gateway import GatewayProcess, config_for, key, serving

HELLO: list[Any] = [{"role": "user", "content": "How does a forebay work?"}]
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": "It fills."}],
    "model": "m",
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 11, "output_tokens": 4},
}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields)}\n\n".encode()


def text(piece: str) -> bytes:
    return event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})


BEGINNING = [
    event("message_start", message=MESSAGE | {"content": [], "usage": {"input_tokens": 11, "output_tokens": 0}}),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    text("It "),
]
END = [
    text("fills."),
    event("content_block_stop", index=0),
    event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage={"output_tokens": 4}),
    event("message_stop"),
]


@pytest.fixture(scope="module")
def shared_backend() -> Iterator[FakeBackend]:
    with closing(FakeBackend()) as fake:
        yield fake


@pytest.fixture
def backend(shared_backend: FakeBackend) -> FakeBackend:
    """Healthy, and speaking Anthropic's dialect."""
    shared_backend.restart()
    shared_backend.script = scripts.steps(scripts.answer(200, MESSAGE))
    return shared_backend


@pytest.fixture(scope="module")
def shared_gateway(shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    config = config_for(
        shared_backend,
        slots=1,
        engine={"models": ["m"], "timeouts": {"first_byte_s": 0.5}},
        keys=[
            key("a"),
            key("strict") | {"mode": "admission"},
            key("narrow") | {"models": ["other"]},
            key("shut", requests_per_minute=0),
        ],
        server={"max_body_bytes": 200_000},
    )
    with serving(config, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared_gateway: GatewayProcess, backend: FakeBackend) -> Iterator[GatewayProcess]:
    yield shared_gateway
    shared_gateway.settles()


@contextmanager
def client_of(gateway: GatewayProcess, secret: str = "sk-a", **options: Any) -> Iterator[Anthropic]:
    with Anthropic(base_url=gateway.url, api_key=secret, **({"max_retries": 0, "timeout": 20} | options)) as client:
        yield client


def has_the_shape(error: anthropic.APIStatusError, kind: str) -> None:
    assert isinstance(error.body, dict)
    assert set(error.body) == {"type", "error"}
    assert error.body["type"] == "error"
    assert error.body["error"]["type"] == kind
    assert error.body["error"]["message"]
    assert error.response.headers["x-request-id"]


def test_messages(gateway: GatewayProcess, backend: FakeBackend) -> None:
    """The key comes as x-api-key and stays here; the answer is the engine's, and its usage is charged."""
    used = gateway.metric("forebay_tokens_total", kind="used")
    with client_of(gateway) as client:
        message = client.messages.create(model="m", max_tokens=10, messages=HELLO)
    assert message.content[0].type == "text"
    assert message.usage.output_tokens == 4
    assert backend.calls[-1].target == "/v1/messages"
    assert b"sk-a" not in backend.calls[-1].raw_head
    gateway.settles()
    assert gateway.metric("forebay_tokens_total", kind="used") - used == 15


def test_a_stream_of_messages(gateway: GatewayProcess, backend: FakeBackend) -> None:
    """Input and output tokens stand in different events; there is no [DONE]."""
    backend.script = scripts.streams([*BEGINNING, *END], done=False)
    used = gateway.metric("forebay_tokens_total", kind="used")
    with (
        client_of(gateway) as client,
        client.messages.stream(model="m", max_tokens=10, messages=HELLO) as stream,
    ):
        assert "".join(stream.text_stream) == "It fills."
        assert stream.get_final_message().usage.output_tokens == 4
    gateway.settles()
    assert gateway.metric("forebay_tokens_total", kind="used") - used >= 4


ERRORS: dict[str, tuple[str, dict[str, Any], type[anthropic.APIStatusError], int, str]] = {
    "no such key": ("sk-wrong", {}, anthropic.AuthenticationError, 401, "authentication_error"),
    "model not allowed": ("sk-narrow", {}, anthropic.PermissionDeniedError, 403, "permission_error"),
    "no such model": ("sk-a", {"model": "unknown"}, anthropic.NotFoundError, 404, "invalid_request_error"),
    "malformed": ("sk-a", {"max_tokens": -5}, anthropic.BadRequestError, 400, "invalid_request_error"),
    "too large": (
        "sk-a",
        {"messages": [{"role": "user", "content": "x" * 300_000}]},
        anthropic.ContentTooLargeError,
        413,
        "invalid_request_error",
    ),
    "limit of the key": ("sk-shut", {}, anthropic.RateLimitError, 429, "rate_limit_error"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
@pytest.mark.parametrize("name", ERRORS)
def test_error_classes(gateway: GatewayProcess, name: str, stream: bool) -> None:
    secret, more, expected, status, kind = ERRORS[name]
    request: dict[str, Any] = {"model": "m", "max_tokens": 10, "messages": HELLO, "stream": stream} | more
    # Retries are allowed and must not happen: x-should-retry says so.
    before = gateway.outcome("shed")
    with client_of(gateway, secret, max_retries=2) as client, pytest.raises(expected) as raised:
        client.messages.create(**request)
    assert raised.value.status_code == status
    has_the_shape(raised.value, kind)
    assert gateway.outcome("shed") - before <= 1


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
def test_no_capacity(gateway: GatewayProcess, backend: FakeBackend, stream: bool) -> None:
    backend.script = scripts.streams(BEGINNING, done=False, end=[scripts.Do.HOLD])
    with (
        client_of(gateway) as holder,
        holder.messages.create(model="m", max_tokens=10, messages=HELLO, stream=True) as held,
        client_of(gateway, "sk-strict") as client,
    ):
        next(iter(held))
        with pytest.raises(anthropic.ServiceUnavailableError) as raised:
            client.messages.create(model="m", max_tokens=10, messages=HELLO, stream=stream)
    has_the_shape(raised.value, "overloaded_error")
    assert 1 <= int(raised.value.response.headers["retry-after"]) <= 55


ENGINE_FAILURES: dict[str, tuple[Script, type[anthropic.APIStatusError], int]] = {
    "breaks off": (scripts.steps(scripts.Do.RESET), anthropic.InternalServerError, 502),
    "silent": (scripts.silent, anthropic.GatewayTimeoutError, 504),
}


@pytest.mark.parametrize("name", ENGINE_FAILURES)
def test_an_engine_that_fails(gateway: GatewayProcess, backend: FakeBackend, name: str) -> None:
    backend.script, expected, status = ENGINE_FAILURES[name]
    with client_of(gateway) as client:
        with pytest.raises(expected) as raised:
            client.messages.create(model="m", max_tokens=10, messages=HELLO)
        assert raised.value.status_code == status
        has_the_shape(raised.value, "server_error")
        backend.script = scripts.steps(scripts.answer(200, MESSAGE))
        assert client.messages.create(model="m", max_tokens=10, messages=HELLO).content


def test_an_engine_that_fails_inside_a_stream(gateway: GatewayProcess, backend: FakeBackend) -> None:
    """What came is read; then the client raises instead of ending as if all was said."""
    # The pause: a reset takes with it what the gateway has not read yet.
    backend.script = scripts.streams(BEGINNING, done=False, end=[1.0, scripts.Do.RESET])
    got = []
    with (
        client_of(gateway) as client,
        client.messages.create(model="m", max_tokens=10, messages=HELLO, stream=True) as stream,
        pytest.raises(anthropic.APIStatusError) as raised,
    ):
        got.extend(stream)
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["message"]


def test_an_overload_may_be_told_as_529(backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With [responses] overload_status = 529 the client raises the class it has for just that."""
    backend.script = scripts.streams(BEGINNING, done=False, end=[scripts.Do.HOLD])
    config = config_for(backend, slots=1, mode="admission", responses={"overload_status": 529})
    with (
        serving(config, tmp_path_factory.mktemp("overloaded")) as gateway,
        client_of(gateway) as client,
        client.messages.create(model="m", max_tokens=10, messages=HELLO, stream=True) as held,
    ):
        next(iter(held))
        with pytest.raises(anthropic.OverloadedError) as raised:
            client.messages.create(model="m", max_tokens=10, messages=HELLO)
        assert raised.value.status_code == 529
        has_the_shape(raised.value, "overloaded_error")
