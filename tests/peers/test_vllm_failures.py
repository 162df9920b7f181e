"""A real vLLM on its bad days: refusals inside a 200, a drain that fails new requests, a request that kills it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import openai
import pytest

from tests.faults.rig.client import Answer, RawClient, ask
from tests.faults.rig.gateway import GatewayProcess, StartGateway, config_for
from tests.faults.rig.waiting import eventually, in_parallel

from .conftest import MakeVllm
from .rig.vllm import MODEL_NAME, PROBED, VllmServer, prompt_of

pytestmark = pytest.mark.peers

PREFILL_CHUNK = 256
LONG = 3000  # tokens: seconds of work
# vLLM's own admission control, narrow; prompts in chunks, which the poison needs; and time for a drain.
FLAGS = (
    "--max-num-queued-reqs", "4", "--max-num-queued-tokens", "2000",
    "--max-num-batched-tokens", str(PREFILL_CHUNK), "--shutdown-timeout", "20",
)  # fmt: skip
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(make_vllm: MakeVllm) -> VllmServer:
    return make_vllm(*FLAGS)


@pytest.fixture
def vllm(server: VllmServer) -> VllmServer:
    """Running, whatever the test before did to it."""
    server.start()
    eventually(lambda: server.load() == (0, 0), within=10, what="vLLM idle")
    return server


@pytest.fixture
def gateway(vllm: VllmServer, start_gateway: StartGateway) -> Iterator[GatewayProcess]:
    """It allows more than vLLM takes: what vLLM refuses shows."""
    gateway = start_gateway(config_for(vllm.url, slots=16, engine=PROBED))
    yield gateway
    gateway.settles(within=3)


def generation(tokens: int, *, prompt: int = 20, stream: bool = False, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": prompt_of(prompt), "max_tokens": tokens, "ignore_eos": True}
    return body | ({"stream": True} if stream else {}) | more


def a_chat(*, stream: bool = False) -> dict[str, Any]:
    messages = [{"role": "user", "content": "How does a forebay work?"}]
    return {"model": MODEL_NAME, "messages": messages, "max_tokens": 3, "stream": stream}


@contextmanager
def long_stream(gateway: GatewayProcess) -> Iterator[RawClient]:
    """A client whose stream has begun, and goes on for long."""
    with RawClient(gateway.port) as client:
        client.request(generation(LONG, stream=True), path=COMPLETIONS)
        assert client.read_head().status == 200
        assert client.read_event()
        yield client


def is_a_busy_refusal(answer: Answer) -> None:
    """What vLLM says when it is full, as the refusal that it is."""
    assert answer.status == 503
    assert answer.reason == "engine_error"
    assert 1 <= answer.retry_after <= 121
    assert (answer.header("content-type") or "").startswith("application/json")
    assert "try again later" in answer.error["message"]


# ---- trap 1: refusals inside a 200 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
@pytest.mark.parametrize(
    ("clients", "prompt", "tokens"),
    [(16, 20, 60), (8, 900, 5)],
    ids=["max-num-queued-reqs", "max-num-queued-tokens"],
)
def test_what_vllm_refuses_is_a_refusal(
    gateway: GatewayProcess, vllm: VllmServer, clients: int, prompt: int, tokens: int, stream: bool
) -> None:
    """vLLM answers some of the streams that it refuses with 200 and an error event; no client sees that."""
    before = vllm.rejections()

    def one(_: int) -> Answer:
        return ask(gateway.port, generation(tokens, prompt=prompt, stream=stream), path=COMPLETIONS, within=30)

    answers: list[Answer] = []
    for number in range(12):  # whether its queue fills up is a matter of how fast it is at the moment
        answers += in_parallel(one, range(clients))
        if number >= 2 and any(answer.status != 200 for answer in answers):
            break
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status != 200]
    assert served
    assert refused
    for answer in refused:
        is_a_busy_refusal(answer)
    for answer in served:
        assert b'{"error"' not in answer.body
        assert answer.ended == "whole"
    assert vllm.rejections() - before == len(refused), "each is vLLM's own: the gateway had room"
    gateway.settles()
    assert gateway.ready(), "a busy engine is no broken engine"


def test_the_official_client_retries_what_vllm_refuses(gateway: GatewayProcess, vllm: VllmServer) -> None:
    """vLLM names no time to come back, the gateway does: the client waits, and is served when there is room."""
    before = vllm.rejections()
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=10, timeout=30) as client,
        ThreadPoolExecutor(1) as thread,
    ):

        def ask_it() -> Any:
            return client.completions.create(model=MODEL_NAME, prompt=prompt_of(20), max_tokens=3)

        ask_it()  # the first call of a process loads code for longer than an answer takes
        for _ in range(5):  # the crowd's answers last seconds here, less on a faster machine
            with ExitStack() as crowd:
                for _ in range(4):
                    stream = crowd.enter_context(RawClient(gateway.port))
                    stream.request(generation(LONG, stream=True), path=COMPLETIONS)
                    assert stream.read_head(within=20).status == 200
                call = thread.submit(ask_it)
                refused = _comes_true(lambda: vllm.rejections() > before, within_s=2)
            assert call.result(60).choices
            if refused:
                break
    assert refused, "vLLM refused the call while the crowd was there"


def _comes_true(condition: Callable[[], bool], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


# ---- trap 2: a drain ------------------------------------------------------------------------------------------------


def test_a_draining_vllm_leaves_the_rotation(gateway: GatewayProcess, vllm: VllmServer) -> None:
    """While it drains vLLM fails new chats with 500, though /health goes on saying 200."""
    with ExitStack() as crowd:
        streams = [crowd.enter_context(long_stream(gateway)) for _ in range(2)]
        vllm.terminate()
        eventually(lambda: vllm.request("POST", CHAT, a_chat())[0] == 500, within=5, what="vLLM draining")
        assert vllm.health() == 200

        answers = [ask(gateway.port, a_chat(stream=index == 1), path=CHAT) for index in range(2)]
        # Where it needs no tokenizer, a draining vLLM says 200, [DONE] and nothing else.
        answers.append(ask(gateway.port, generation(3, stream=True), path=COMPLETIONS))
        answers += [ask(gateway.port, a_chat(), path=CHAT) for _ in range(3)]
        assert [answer.status for answer in answers[:3]] == [500, 500, 502], "vLLM's own word, but for the stream"
        for answer in answers[3:]:
            assert (answer.status, answer.reason) == (503, "no_engine"), "out of rotation"
            assert 1 <= answer.retry_after <= 121

        for each in streams:
            *_, last = each.events(within=30)
            assert last == b"data: [DONE]\n\n", "what was in flight ends well"
    gateway.settles()
    vllm.wait_gone()
    assert (gateway.outcome("failed"), gateway.outcome("completed")) == (3, 2)
    comes_back(gateway, vllm)


# ---- trap 3: the request that kills it ------------------------------------------------------------------------------


def test_a_poison_request_kills_vllm_and_nothing_else(gateway: GatewayProcess, vllm: VllmServer) -> None:
    """`seed` with a prompt longer than a prefill chunk ends vLLM 0.32 on CPU: a real crash with requests in flight."""
    with ExitStack() as crowd:
        streams = [crowd.enter_context(long_stream(gateway)) for _ in range(2)]
        document = crowd.enter_context(RawClient(gateway.port))
        document.request(generation(LONG), path=COMPLETIONS)
        eventually(lambda: gateway.gauges() == (3, 0), what="three in flight")

        poison = ask(gateway.port, generation(5, prompt=2 * PREFILL_CHUNK, seed=1), path=COMPLETIONS, within=30)
        assert poison.status in {500, 502}
        assert poison.error["message"]
        for each in streams:
            *_, last, done = each.events(within=30)
            assert json.loads(last.removeprefix(b"data: "))["error"]["message"]
            assert done == b"data: [DONE]\n\n", "vLLM says that, even now"
        broken = document.read_answer(within=30)
        assert broken.status in {500, 502}
        assert broken.error["message"]

    gateway.settles()
    assert gateway.outcome("failed") == 4
    vllm.wait_gone()
    comes_back(gateway, vllm)


# ---- after that -----------------------------------------------------------------------------------------------------


def comes_back(gateway: GatewayProcess, vllm: VllmServer) -> None:
    """Until vLLM is started again on its port the gateway refuses at once; after that it serves, by itself."""
    eventually(lambda: gateway.engines()[0]["readiness"] == "down", within=3, what="the engine seen as down")
    began = time.monotonic()
    refused = ask(gateway.port, generation(3), path=COMPLETIONS)
    assert (refused.status, refused.reason) == (503, "no_engine")
    assert 1 <= refused.retry_after <= 121
    assert refused.head.at - began < 0.5
    vllm.start()
    ready = time.monotonic()
    eventually(
        lambda: ask(gateway.port, generation(3), path=COMPLETIONS, within=10).status == 200, within=10, what="service"
    )
    print(f"served {time.monotonic() - ready:.1f} s after vLLM was ready")
    answers = in_parallel(lambda _: ask(gateway.port, generation(3), path=COMPLETIONS, within=10), range(4))
    assert [answer.status for answer in answers] == [200] * 4
