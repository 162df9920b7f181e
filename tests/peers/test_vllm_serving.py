"""A real vLLM behind the gateway, in good health: answers, the ledger, leaving clients, overload, a cold start."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
import pytest

from tests.faults.rig.client import Answer, RawClient, ask
from tests.faults.rig.gateway import GatewayProcess, config_for, serving
from tests.faults.rig.waiting import eventually, in_parallel

from .conftest import MakeVllm
from .rig.vllm import MODEL_NAME, PROBED, VllmServer, prompt_of

pytestmark = pytest.mark.peers

SLOTS = 4  # as many as vLLM runs at once
LONG = 3900  # tokens: some ten seconds of work
HELLO: list[Any] = [{"role": "user", "content": "How does a forebay work?"}]


@dataclass
class ColdStart:
    """What clients were told while vLLM was starting."""

    refusals: list[Answer] = field(default_factory=list)
    first: Answer | None = None
    lag_s: float = 0.0  # from vLLM's readiness to the first answer


@pytest.fixture(scope="module")
def vllm(make_vllm: MakeVllm) -> VllmServer:
    return make_vllm()


@pytest.fixture(scope="module")
def shared_gateway(vllm: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """Started before its engine is."""
    with serving(
        config_for(vllm.url, slots=SLOTS, engine=PROBED), tmp_path_factory.mktemp("gateway"), ready=False
    ) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def cold_start(vllm: VllmServer, shared_gateway: GatewayProcess) -> ColdStart:
    """Start vLLM under the eyes of a client that asks five times a second."""
    seen = ColdStart()
    ready_at: list[float] = []
    vllm.launch()

    def watch() -> None:
        vllm.wait_ready()
        ready_at.append(time.monotonic())

    watcher = threading.Thread(target=watch)
    watcher.start()
    while seen.first is None and (watcher.is_alive() or time.monotonic() < ready_at[0] + 10):
        answer = ask(shared_gateway.port, generation(3), path="/v1/completions", within=20)
        if answer.status == 503:
            seen.refusals.append(answer)
            time.sleep(0.2)
        else:
            seen.first = answer
            seen.lag_s = answer.head.at - (ready_at[0] if ready_at else answer.head.at)
    watcher.join()
    return seen


@pytest.fixture
def gateway(shared_gateway: GatewayProcess, cold_start: ColdStart) -> Iterator[GatewayProcess]:
    """With vLLM ready behind it, and idle before and after."""
    shared_gateway.settles(within=5)
    yield shared_gateway
    shared_gateway.settles(within=5)


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def generation(tokens: int, *, stream: bool = False) -> dict[str, Any]:
    """A completion of exactly so many tokens."""
    body = {"model": MODEL_NAME, "prompt": prompt_of(20), "max_tokens": tokens, "ignore_eos": True}
    return body | {"stream": True} if stream else body


# ---- cold start -----------------------------------------------------------------------------------------------------


def test_a_cold_start_is_told_as_one(cold_start: ColdStart) -> None:
    """503 with a time to come back from the first moment on, and service as soon as vLLM is ready."""
    assert cold_start.first is not None
    assert cold_start.first.status == 200, cold_start.first.body
    assert cold_start.refusals, "vLLM was ready at once?"
    assert {answer.reason for answer in cold_start.refusals} <= {"no_engine", "warming"}
    assert cold_start.refusals[0].reason == "no_engine"
    assert all(1 <= answer.retry_after <= 55 for answer in cold_start.refusals)
    assert cold_start.lag_s < 3, "a probe interval, and the first request of a new engine"


# ---- answers and their cost -----------------------------------------------------------------------------------------


def chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL_NAME, messages=HELLO, max_tokens=9)
    assert answer.choices[0].finish_reason in {"length", "stop"}
    assert answer.usage
    assert answer.usage.completion_tokens


def chat_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model=MODEL_NAME, messages=HELLO, max_tokens=9, stream=True) as stream:
        chunks = list(stream)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks), "nobody asked for usage"
    assert chunks[-1].choices[0].finish_reason


def chat_stream_with_usage(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    with client.chat.completions.create(
        model=MODEL_NAME, messages=HELLO, max_tokens=9, stream=True, stream_options=options
    ) as stream:
        chunks = list(stream)
    assert chunks[-1].usage
    assert not chunks[-1].choices
    assert all(chunk.choices for chunk in chunks[:-1])


def chat_stream_with_running_usage(client: openai.OpenAI) -> None:
    """vLLM's own option: a running total in every event, of which the last counts."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    with client.chat.completions.create(
        model=MODEL_NAME, messages=HELLO, max_tokens=9, stream=True, stream_options=options
    ) as stream:
        assert all(chunk.usage for chunk in stream)


def completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL_NAME, prompt=["one two three", "four"], max_tokens=7)
    assert len(answer.choices) == 2


def completion_stream(client: openai.OpenAI) -> None:
    with client.completions.create(model=MODEL_NAME, prompt=prompt_of(50), max_tokens=7, stream=True) as stream:
        assert all(chunk.choices for chunk in stream)


def responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL_NAME, input="How does a forebay work?", max_output_tokens=8)
    assert answer.usage
    assert answer.usage.output_tokens


def responses_stream(client: openai.OpenAI) -> None:
    with client.responses.create(model=MODEL_NAME, input="Tell me", max_output_tokens=8, stream=True) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in {"response.completed", "response.incomplete"}


def messages(client: openai.OpenAI) -> None:
    with _anthropic_client(client) as other:
        answer = other.messages.create(model=MODEL_NAME, max_tokens=8, messages=HELLO)
    assert answer.usage.output_tokens


def messages_stream(client: openai.OpenAI) -> None:
    with (
        _anthropic_client(client) as other,
        other.messages.create(model=MODEL_NAME, max_tokens=8, messages=HELLO, stream=True) as stream,
    ):
        kinds = [event.type for event in stream]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def _anthropic_client(client: openai.OpenAI) -> anthropic.Anthropic:
    url = str(client.base_url).removesuffix("/v1/")
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=30)


USES: list[Callable[[openai.OpenAI], None]] = [
    chat, chat_stream, chat_stream_with_usage, chat_stream_with_running_usage, completion,
    completion_stream, responses, responses_stream, messages, messages_stream,
]  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_an_answer_costs_what_vllm_counted(
    gateway: GatewayProcess, vllm: VllmServer, client: openai.OpenAI, use: Callable[[openai.OpenAI], None]
) -> None:
    """The gateway's ledger and vLLM's own counters move by the same number of tokens."""
    used, counted = used_tokens(gateway), sum(vllm.tokens())
    use(client)
    gateway.settles()
    assert used_tokens(gateway) - used == sum(vllm.tokens()) - counted > 0


def test_the_ledger_holds_under_concurrency(gateway: GatewayProcess, vllm: VllmServer) -> None:
    used, counted = used_tokens(gateway), sum(vllm.tokens())

    def one(index: int) -> int:
        return ask(gateway.port, generation(5 + index, stream=index % 2 == 0), path="/v1/completions", within=20).status

    statuses = in_parallel(one, range(16))
    gateway.settles()
    assert statuses.count(200) >= SLOTS
    assert used_tokens(gateway) - used == sum(vllm.tokens()) - counted > 0


def test_several_choices_cost_their_usage(gateway: GatewayProcess, vllm: VllmServer, client: openai.OpenAI) -> None:
    """vLLM's counter takes the prompt once for each choice, its `usage` once: the caller is charged by the latter."""
    used, counted = used_tokens(gateway), vllm.tokens()
    answer = client.chat.completions.create(model=MODEL_NAME, messages=HELLO, max_tokens=9, n=3)
    gateway.settles()
    assert len(answer.choices) == 3
    assert answer.usage
    assert used_tokens(gateway) - used == answer.usage.total_tokens
    prompt, generated = (now - then for now, then in zip(vllm.tokens(), counted, strict=True))
    assert (prompt, generated) == (3 * answer.usage.prompt_tokens, answer.usage.completion_tokens)


def used_tokens(gateway: GatewayProcess) -> int:
    return int(gateway.metric("forebay_tokens_total", kind="used"))


def test_control_routes_and_errors_are_vllms_own(
    gateway: GatewayProcess, vllm: VllmServer, client: openai.OpenAI
) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    body = {"model": MODEL_NAME, "prompt": "one two three"}
    assert ask(gateway.port, body, path="/tokenize").body == vllm.request("POST", "/tokenize", body)[1]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="unknown", messages=HELLO)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL_NAME, prompt=prompt_of(4200), max_tokens=5)  # longer than the context
    assert client.completions.create(model=MODEL_NAME, prompt="one", max_tokens=2).choices


# ---- leaving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
def test_clients_that_leave_free_vllms_slots(gateway: GatewayProcess, vllm: VllmServer, stream: bool) -> None:
    _, generated = vllm.tokens()
    with ExitStack() as crowd:
        clients = [crowd.enter_context(RawClient(gateway.port)) for _ in range(SLOTS)]
        for each in clients:
            each.request(generation(LONG, stream=stream), path="/v1/completions")
        # On two cores vLLM leaves the gateway little of them while it begins.
        eventually(lambda: gateway.gauges() == (SLOTS, 0), within=8, what="all slots taken")
        if stream:
            for each in clients:
                head = each.read_head(within=20)
                assert head.status == 200, head.raw
                assert each.read_event(within=20)
        else:
            time.sleep(0.3)  # vLLM is at work; its metrics are too slow now to say so
    gateway.settles(within=1)
    eventually(lambda: vllm.load() == (0, 0), within=2, what="vLLM idle")
    assert vllm.tokens()[1] - generated < SLOTS * LONG, "the work was given up, not finished"
    assert gateway.ready()


# ---- overload -------------------------------------------------------------------------------------------------------


def test_overload_is_kept_out_of_vllm(gateway: GatewayProcess, vllm: VllmServer) -> None:
    """Twelve times as many clients as slots: vLLM is full and has no queue; who does not fit is told when to come
    back."""
    span_s = 6.0

    def client(index: int, until: float) -> list[Answer]:
        answers = []
        while time.monotonic() < until:
            answer = ask(gateway.port, generation(300, stream=index % 2 == 0), path="/v1/completions", within=20)
            answers.append(answer)
            if answer.status != 200:
                time.sleep(0.1)  # less patient than it should be
        return answers

    def generated_by(clients: int) -> tuple[float, list[Answer]]:
        """(tokens that vLLM generated, all answers) while so many ask again and again."""
        before, until = vllm.tokens()[1], time.monotonic() + span_s
        answers = [answer for got in in_parallel(lambda index: client(index, until), range(clients)) for answer in got]
        return vllm.tokens()[1] - before, answers

    loads: list[tuple[float, float]] = []  # (running, waiting) in vLLM, as often as it finds the time to say
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            loads.append(vllm.load())

    capacity, answers = generated_by(SLOTS)
    assert {answer.status for answer in answers} == {200}
    watcher = threading.Thread(target=watch)
    watcher.start()
    generated, answers = generated_by(12 * SLOTS)
    over.set()
    watcher.join()

    assert {answer.status for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status == 503:
            assert answer.reason in {"queue_full", "queue_wait", "expired"}
            assert 1 <= answer.retry_after <= 121
        else:
            assert answer.ended == "whole"
            assert b'{"error"' not in answer.body
    assert max(running + waiting for running, waiting in loads) <= SLOTS
    assert statistics.mean(waiting for _, waiting in loads) < 0.5
    assert generated > capacity / 2, "vLLM was kept busy"
