"""The official OpenAI client, the gateway and the simulated engine: three processes, nothing changed but the URL."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.faults.rig.gateway import GatewayProcess, config_for, key, serving
from tests.faults.rig.waiting import eventually

HELLO: list[Any] = [{"role": "user", "content": "How does a forebay work?"}]
SLOTS = 2
LONG = 2000  # tokens: an answer that outlasts a test, if nobody cancels it …
ENDLESS = {"ignore_eos": True}  # … and the engine does not end it early


class EngineProcess:
    """`forebay engine simulated` on a port of its own."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "forebay", "engine", "simulated", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.match(r"listening on (http://127\.0\.0\.1:(\d+))", self.process.stdout.readline())
        assert found, "the engine did not start"
        self.url, self.port = found[1], int(found[2])

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 200, answer
            return answer
        finally:
            connection.close()

    def running(self) -> float:
        found = re.search(
            r"^vllm:num_requests_running\{.*\} (\S+)$", self.request("GET", "/metrics").decode(), re.MULTILINE
        )
        assert found
        return float(found[1])

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=10)


@contextmanager
def engine_process(*flags: str) -> Iterator[EngineProcess]:
    engine = EngineProcess(*flags)
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[EngineProcess]:
    # Some 200 tokens a second: slow enough to cancel, fast enough to wait for.
    sizes = ("--max-num-seqs", "8", "--max-model-len", "4096", "--output-mean", "20")
    with engine_process("--model-name", "m", "--seed", "7", *sizes) as engine:
        yield engine


@pytest.fixture(scope="module")
def encoder() -> Iterator[EngineProcess]:
    with engine_process("--profile", "t4/bert-base/fp16/seq128", "--model-name", "e") as engine:
        yield engine


@pytest.fixture(scope="module")
def shared_gateway(
    shared_engine: EngineProcess, encoder: EngineProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    config = config_for(
        shared_engine.url,
        slots=SLOTS,
        engine={"models": ["m"]},
        keys=[
            key("a"),
            key("strict") | {"mode": "admission"},
            key("narrow") | {"models": ["e"]},
            key("shut", requests_per_minute=0),
            key("single", concurrency=1),
        ],
        server={"max_body_bytes": 200_000},
    )
    config["engines"].append({"name": "encoder", "urls": [encoder.url], "models": ["e"]})
    with serving(config, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.fixture
def engine(shared_engine: EngineProcess) -> Iterator[EngineProcess]:
    """The shared engine without faults, before and after."""
    shared_engine.request("DELETE", "/faults")
    yield shared_engine
    shared_engine.request("DELETE", "/faults")


@pytest.fixture
def gateway(shared_gateway: GatewayProcess, engine: EngineProcess) -> Iterator[GatewayProcess]:
    """The shared gateway, idle before and after."""
    shared_gateway.settles()
    yield shared_gateway
    shared_gateway.settles()


@contextmanager
def client_of(gateway: GatewayProcess, secret: str = "sk-a", **options: Any) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{gateway.url}/v1", api_key=secret, **({"max_retries": 0, "timeout": 20} | options)
    ) as client:
        yield client


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[OpenAI]:
    with client_of(gateway) as client:
        yield client


# ---- answers --------------------------------------------------------------------------------------------------------


def test_chat(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="m", messages=HELLO, max_tokens=5)
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.usage
    assert answer.usage.completion_tokens == 5
    assert raw.headers["x-request-id"]
    assert re.fullmatch(r"queue;dur=\d+\.\d{3}", raw.headers["server-timing"])


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model="m", prompt="one two three", max_tokens=4)
    assert answer.choices[0].text
    assert answer.usage
    assert answer.usage.completion_tokens == 4


def stream_of(client: OpenAI, **more: Any) -> list[ChatCompletionChunk]:
    with client.chat.completions.create(model="m", messages=HELLO, max_tokens=6, stream=True, **more) as stream:
        return list(stream)


def test_stream_without_usage_has_no_chunk_without_choices(gateway: GatewayProcess, client: OpenAI) -> None:
    before = gateway.metric("forebay_tokens_total", kind="used")
    chunks = stream_of(client)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) == 6
    gateway.settles()
    assert gateway.metric("forebay_tokens_total", kind="used") - before > 6, "it was charged for prompt and answer"


def test_stream_with_usage_ends_with_it(gateway: GatewayProcess, client: OpenAI) -> None:
    before = gateway.metric("forebay_tokens_total", kind="used")
    chunks = stream_of(client, stream_options={"include_usage": True})
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    usage = chunks[-1].usage
    assert usage
    assert usage.completion_tokens == 6
    gateway.settles()
    assert gateway.metric("forebay_tokens_total", kind="used") - before == usage.total_tokens


def test_completion_stream(client: OpenAI) -> None:
    with client.completions.create(model="m", prompt="one two", max_tokens=4, stream=True) as stream:
        chunks = list(stream)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert sum(bool(chunk.choices[0].text) for chunk in chunks) == 4


def test_the_streaming_helper_of_the_client(client: OpenAI) -> None:
    with client.chat.completions.stream(model="m", messages=HELLO, extra_body={"max_tokens": 64}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content


def test_embeddings(gateway: GatewayProcess, client: OpenAI) -> None:
    answer = client.embeddings.create(model="e", input=["one", "two", "three"])
    assert [item.index for item in answer.data] == [0, 1, 2]
    widths = {len(item.embedding) for item in answer.data}
    assert len(widths) == 1
    assert widths.pop() > 1
    assert answer.usage.prompt_tokens > 0


def test_models(client: OpenAI) -> None:
    assert "m" in {model.id for model in client.models.list()}


def test_async_client(gateway: GatewayProcess) -> None:
    """Chat, streams, embeddings and an error at the same time on one async client."""

    async def streamed(client: openai.AsyncOpenAI) -> int:
        stream = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=6, stream=True)
        async with stream:
            return sum([bool(chunk.choices[0].delta.content) async for chunk in stream])

    async def everything() -> None:
        options: dict[str, Any] = {"api_key": "sk-a", "max_retries": 8, "timeout": 20}
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", **options) as client:
            chat, tokens, vectors, unknown = await asyncio.gather(
                client.chat.completions.create(model="m", messages=HELLO, max_tokens=5),
                streamed(client),
                client.embeddings.create(model="e", input="one"),
                client.chat.completions.create(model="unknown", messages=HELLO),
                return_exceptions=True,
            )
        assert not isinstance(chat, BaseException), chat
        assert chat.choices[0].message.content
        assert tokens == 6
        assert not isinstance(vectors, BaseException), vectors
        assert len(vectors.data) == 1
        assert isinstance(unknown, openai.NotFoundError)

    asyncio.run(everything())


# ---- errors ---------------------------------------------------------------------------------------------------------


def saying(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


ERRORS: dict[str, tuple[str, dict[str, Any], type[openai.APIStatusError], int, str | None]] = {
    "no such key": ("sk-wrong", {}, openai.AuthenticationError, 401, "invalid_api_key"),
    "model not allowed": ("sk-narrow", {}, openai.PermissionDeniedError, 403, "model_not_allowed"),
    "no such model": ("sk-a", {"model": "unknown"}, openai.NotFoundError, 404, None),
    "refused by the gateway": ("sk-a", {"max_tokens": -5}, openai.BadRequestError, 400, None),
    "refused by the engine": ("sk-a", saying("word " * 6000), openai.BadRequestError, 400, None),
    "too large": ("sk-a", saying("x" * 300_000), openai.APIStatusError, 413, "request_too_large"),
    "limit of the key": ("sk-shut", {}, openai.RateLimitError, 429, "rate_limit_exceeded"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
@pytest.mark.parametrize("name", ERRORS)
def test_error_classes(gateway: GatewayProcess, name: str, stream: bool) -> None:
    secret, more, expected, status, code = ERRORS[name]
    request: dict[str, Any] = {"model": "m", "messages": HELLO, "stream": stream} | more
    with client_of(gateway, secret) as client, pytest.raises(expected) as raised:
        client.chat.completions.create(**request)
    error = raised.value
    assert error.status_code == status
    assert error.request_id
    assert isinstance(error.body, dict)
    assert error.body["message"]
    assert error.body["type"]
    if code is not None:
        assert error.code == code


def test_an_unknown_path_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.post("/nowhere", body={}, cast_to=object)


@contextmanager
def all_slots_taken(gateway: GatewayProcess) -> Iterator[Callable[[], None]]:
    """Long streams hold every slot; the yielded call lets them go at once."""
    with client_of(gateway) as client:
        streams = [
            client.chat.completions.create(model="m", messages=HELLO, max_tokens=LONG, stream=True, extra_body=ENDLESS)
            for _ in range(SLOTS)
        ]
        for stream in streams:
            next(stream)

        def let_go() -> None:
            for stream in streams:
                stream.close()

        try:
            yield let_go
        finally:
            let_go()


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
def test_no_capacity(gateway: GatewayProcess, stream: bool) -> None:
    with (
        all_slots_taken(gateway),
        client_of(gateway, "sk-strict") as client,
        pytest.raises(openai.InternalServerError) as raised,
    ):
        client.chat.completions.create(model="m", messages=HELLO, stream=stream)
    assert raised.value.status_code == 503
    assert raised.value.type == "overloaded_error"
    assert raised.value.response.headers["x-forebay-reason"] in {"queue_full", "queue_wait"}
    assert 1 <= int(raised.value.response.headers["retry-after"]) <= 55


def test_an_engine_that_fails(gateway: GatewayProcess, engine: EngineProcess, client: OpenAI) -> None:
    """Its own 500 is told as such; the next request is served."""
    engine.request("POST", "/faults", {"error_rate": 1.0})
    with pytest.raises(openai.InternalServerError) as raised:
        client.chat.completions.create(model="m", messages=HELLO)
    assert raised.value.status_code in {500, 502}
    engine.request("DELETE", "/faults")
    assert client.chat.completions.create(model="m", messages=HELLO, max_tokens=3).choices


def test_an_engine_that_fails_inside_a_stream(gateway: GatewayProcess, engine: EngineProcess, client: OpenAI) -> None:
    """The client gets what came, then an error of its own kind instead of an end that looks right."""
    engine.request("POST", "/faults", {"error_after_tokens": 30})
    got: list[ChatCompletionChunk] = []
    with (
        client.chat.completions.create(model="m", messages=HELLO, max_tokens=60, stream=True) as stream,
        pytest.raises(openai.APIError) as raised,
    ):
        got.extend(stream)
    assert len(got) >= 29
    assert raised.value.message


# ---- the client's own retries ---------------------------------------------------------------------------------------


class Attempts:
    """What the client sent and was told, by hooks in its transport."""

    def __init__(self) -> None:
        self.sent: list[float] = []
        self.answered: list[tuple[float, int, int | None]] = []  # (when, status, retry-after-ms)
        self.refused = threading.Event()

    def transport(self) -> Any:
        return openai.DefaultHttpxClient(event_hooks={"request": [self._request], "response": [self._response]})

    def _request(self, request: Any) -> None:
        self.sent.append(time.monotonic())

    def _response(self, response: Any) -> None:
        millis = response.headers.get("retry-after-ms")
        self.answered.append((time.monotonic(), response.status_code, int(millis) if millis else None))
        if response.status_code == 503:
            self.refused.set()

    def check_pauses(self) -> None:
        """Between an answer and the next attempt lies the time that the answer named."""
        for (answered, _, millis), sent in zip(self.answered, self.sent[1:], strict=False):
            assert millis is not None
            assert millis / 1000 - 0.01 <= sent - answered < millis / 1000 + 0.5


def test_retries_pause_as_long_as_they_are_told(gateway: GatewayProcess) -> None:
    attempts = Attempts()
    with (
        all_slots_taken(gateway),
        client_of(gateway, "sk-strict", max_retries=2, http_client=attempts.transport()) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.chat.completions.create(model="m", messages=HELLO)
    assert [status for _, status, _ in attempts.answered] == [503] * 3
    attempts.check_pauses()


def test_a_retry_succeeds_when_there_is_room_again(gateway: GatewayProcess) -> None:
    attempts = Attempts()
    with (
        all_slots_taken(gateway) as let_go,
        client_of(gateway, "sk-strict", max_retries=2, http_client=attempts.transport()) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        call = thread.submit(client.chat.completions.create, model="m", messages=HELLO, max_tokens=3)
        assert attempts.refused.wait(5)
        let_go()
        assert call.result(20).choices
    assert [status for _, status, _ in attempts.answered] == [503, 200]
    attempts.check_pauses()


def test_a_retry_succeeds_when_the_key_has_room_again(gateway: GatewayProcess) -> None:
    """429 for the key's own limit is retried as well, at the time that it names."""
    attempts = Attempts()
    with (
        client_of(gateway, "sk-single") as other,
        client_of(gateway, "sk-single", max_retries=5, http_client=attempts.transport()) as client,
        other.chat.completions.create(
            model="m", messages=HELLO, max_tokens=LONG, stream=True, extra_body=ENDLESS
        ) as stream,
        ThreadPoolExecutor(1) as thread,
    ):
        next(stream)
        call = thread.submit(client.chat.completions.create, model="m", messages=HELLO, max_tokens=3)
        eventually(lambda: attempts.answered, what="the first answer")
        stream.close()
        assert call.result(20).choices
    assert [status for _, status, _ in attempts.answered] == [429, 200]
    attempts.check_pauses()


@pytest.mark.parametrize("name", [name for name in ERRORS if name != "refused by the engine"])
def test_hopeless_requests_are_not_retried(gateway: GatewayProcess, name: str) -> None:
    """x-should-retry: false, or a status that says so: one attempt, though three were allowed."""
    secret, more, expected, status, _ = ERRORS[name]
    attempts = Attempts()
    with client_of(gateway, secret, max_retries=2, http_client=attempts.transport()) as client, pytest.raises(expected):
        client.chat.completions.create(**({"model": "m", "messages": HELLO} | more))
    assert [answered for _, answered, _ in attempts.answered] == [status]


# ---- leaving, and other clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_leaving_a_stream_frees_the_slot(gateway: GatewayProcess, engine: EngineProcess, kind: str) -> None:
    def leave() -> None:
        with (
            client_of(gateway) as client,
            client.chat.completions.create(
                model="m", messages=HELLO, max_tokens=LONG, stream=True, extra_body=ENDLESS
            ) as stream,
        ):
            for _ in range(3):
                next(stream)
            assert (gateway.gauges(), engine.running()) == ((1, 0), 1)

    async def leave_async() -> None:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="sk-a", max_retries=0) as client:
            stream = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=LONG, stream=True)
            await anext(aiter(stream))
            # The task that reads is cancelled, as when the caller's own caller leaves.
            reading = asyncio.create_task(_read_all(stream))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await stream.close()

    if kind == "sync":
        leave()
    else:
        asyncio.run(leave_async())
    gateway.settles(within=1.0)
    eventually(lambda: engine.running() == 0, within=1.0, what="the engine's slot free")


async def _read_all(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_streams(gateway: GatewayProcess, tmp_path: Path) -> None:
    """`curl -N` as in any tutorial: events come one by one, the last is [DONE]."""
    body = {"model": "m", "messages": HELLO, "stream": True, "max_tokens": 8}
    command = ["curl", "-sS", "-N", "-i", f"{gateway.url}/v1/chat/completions"]
    command += ["-H", "content-type: application/json", "-H", "authorization: Bearer sk-a", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    head, _, events = done.stdout.replace("\r\n", "\n").partition("\n\n")
    assert head.startswith("HTTP/1.1 200 ")
    payloads = [line.removeprefix("data: ") for line in events.splitlines() if line]
    assert payloads[-1] == "[DONE]"
    assert all(json.loads(payload)["choices"] for payload in payloads[:-1])


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_is_told_why(gateway: GatewayProcess) -> None:
    """A large upload with `Expect: 100-continue` and a wrong key: one clean 401, nothing broken off."""
    command = ["curl", "-sS", "-w", "%{http_code}", f"{gateway.url}/v1/chat/completions", "-H", "expect: 100-continue"]
    command += ["-H", "content-type: application/json", "-H", "authorization: Bearer sk-wrong", "-d", "@-"]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 150_000}]})
    done = subprocess.run(command, input=body, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("401")
    assert json.loads(done.stdout[:-3])["error"]["code"] == "invalid_api_key"
