"""C. What a refusal looks like: status, time to come back, body, cost, and what the operator can see of it."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from typing import Any

import anthropic
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .refusals import ENGINE, FINAL, OWN_LIMIT, SHARED, STATUS, Collected, collect
from .rig import scripts
from .rig.backend import FakeBackend
from .rig.client import Answer, RawClient, ask, chat, marker
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, serving, wait_until
from .rig.waiting import eventually, in_parallel

REFUSALS = [(reason, stream) for reason in STATUS for stream in (False, True)]
IDS = [f"{reason}{'-stream' if stream else ''}" for reason, stream in REFUSALS]


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    return collect(tmp_path_factory.mktemp("refusals"))


def names_a_time(answer: Answer) -> None:
    """It says when to come back, twice, and both agree."""
    assert 1 <= answer.retry_after <= 60
    millis = answer.header("retry-after-ms")
    assert millis is not None
    assert (answer.retry_after - 1) * 1000 < int(millis) <= answer.retry_after * 1000
    assert answer.header("x-should-retry") == "true"


@pytest.mark.parametrize(("reason", "stream"), REFUSALS, ids=IDS)
def test_c01_every_refusal_says_when_to_come_back(collected: Collected, reason: str, stream: bool) -> None:
    answer = collected.answers[reason, stream]
    assert (answer.status, answer.reason) == (STATUS[reason], reason)
    if reason in OWN_LIMIT | SHARED:
        names_a_time(answer)
    elif reason in FINAL:
        assert answer.header("x-should-retry") == "false"
        assert answer.header("retry-after") is None


def test_c02_retry_after_is_true(backend: FakeBackend, start_gateway: StartGateway) -> None:
    by_requests = key("r", requests_per_minute=15)
    # A refill of 20 tokens a second, and 90 are missing: four and a half seconds.
    by_tokens = key("t", tokens_per_minute=1200)
    gateway = start_gateway(config_for(backend, slots=32, keys=[by_requests, by_tokens]))

    def use_up_requests() -> None:
        assert {ask(gateway.port, key="sk-r").status for _ in range(15)} == {200}

    def use_up_tokens() -> None:
        usage = {"prompt_tokens": 5, "completion_tokens": 1085, "total_tokens": 1090}
        mark = marker()
        backend.by_marker[mark] = scripts.steps(scripts.answer(200, scripts.completion(usage=usage)))
        assert ask(gateway.port, chat(mark), key="sk-t").status == 200

    def check(use_up: Callable[[], None], secret: str, body: dict[str, Any], needed: float) -> None:
        use_up()
        refused = ask(gateway.port, body, key=secret)
        assert refused.status == 429
        seconds = refused.retry_after
        assert 3 < seconds <= needed + 2
        wait_until(refused.head.at + seconds - 2)
        assert ask(gateway.port, body, key=secret).status == 429
        wait_until(refused.head.at + seconds)
        assert ask(gateway.port, body, key=secret).status == 200

    in_parallel(
        lambda case: check(*case),
        [
            (use_up_requests, "sk-r", chat(), 4.0),
            (use_up_tokens, "sk-t", chat(max_tokens=170), 5.0),
        ],
    )


def openai_call(gateway: GatewayProcess, secret: str, retries: int, stream: bool = False) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=secret, max_retries=retries) as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=stream)


def anthropic_call(gateway: GatewayProcess, secret: str, retries: int) -> None:
    with anthropic.Anthropic(base_url=gateway.url, api_key=secret, max_retries=retries) as client:
        client.messages.create(model="m", max_tokens=10, messages=[{"role": "user", "content": "hi"}])


CLIENTS: dict[str, tuple[Callable[..., None], type[Exception], type[Exception]]] = {
    "openai": (openai_call, openai.InternalServerError, openai.RateLimitError),
    "anthropic": (anthropic_call, anthropic.InternalServerError, anthropic.RateLimitError),
}


@pytest.fixture
def busy_gateway(backend: FakeBackend, start_gateway: StartGateway) -> Iterator[GatewayProcess]:
    """Its one slot is taken, and nobody may wait."""
    keys = [key("a"), key("shut", requests_per_minute=0)]
    gateway = start_gateway(config_for(backend, slots=1, mode="admission", keys=keys))
    backend.script = scripts.streams([scripts.delta()], done=False, end=[scripts.Do.HOLD])
    with RawClient(gateway.port) as client:
        client.request(chat(stream=True), key="sk-a")
        assert client.read_head().status == 200
        yield gateway


@pytest.mark.parametrize("name", CLIENTS)
def test_c03_official_clients_obey_and_stop(busy_gateway: GatewayProcess, name: str) -> None:
    call, overloaded, limited = CLIENTS[name]
    before = busy_gateway.outcome("shed")
    began = time.monotonic()
    with pytest.raises(overloaded):
        call(busy_gateway, "sk-a", 2)
    assert busy_gateway.outcome("shed") - before == 3
    assert time.monotonic() - began >= 2, "two pauses of a second at least: the client waited as it was told"

    # A limit that no wait will lift ends the matter at the first call.
    before = busy_gateway.outcome("shed")
    with pytest.raises(limited):
        call(busy_gateway, "sk-shut", 2)
    assert busy_gateway.outcome("shed") - before == 1


@pytest.mark.parametrize(("reason", "stream"), REFUSALS, ids=IDS)
def test_c05_error_body_shape(collected: Collected, reason: str, stream: bool) -> None:
    has_the_shape(collected.answers[reason, stream], collected.backend_addresses)


def has_the_shape(answer: Answer, addresses: tuple[str, ...] = ()) -> None:
    assert (answer.header("content-type") or "").startswith("application/json")
    error = answer.error
    assert set(error) == {"message", "type", "param", "code"}
    for name in ("message", "type"):
        assert isinstance(error[name], str)
        assert error[name]
    assert answer.header("x-request-id")
    text = answer.head.raw.decode() + answer.body.decode()
    for leak in ("Traceback", 'File "', "127.0.0.1", *addresses):
        assert leak not in text


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ({"path": "/v1/nowhere"}, 404),
        ({"method": "GET"}, 405),
        ({"method": "PUT"}, 405),
        ({"headers": [("content-encoding", "zip")]}, 415),
        ({"body": b"not json"}, 400),
        ({"body": chat() | {"model": "unknown"}}, 404),
        ({"body": chat() | {"max_tokens": -5}}, 400),
    ],
    ids=str,
)
def test_c05_protocol_errors_have_the_shape_too(
    backend: FakeBackend, gateway_of_module: GatewayProcess, how: dict[str, Any], status: int
) -> None:
    answer = ask(gateway_of_module.port, **({"body": chat()} | how))
    assert answer.status == status
    has_the_shape(answer)


def test_c05_dead_engine_is_not_named(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """Control routes meet the engine without a queue before it; their errors say nothing of its address either."""
    gateway = start_gateway(config_for(backend))
    backend.die()
    answer = ask(gateway.port, path="/v1/models", method="GET")
    assert answer.status in {502, 503}
    has_the_shape(answer, (str(backend.port),))


@pytest.fixture(scope="module")
def gateway_of_module(
    shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    config = config_for(
        shared_backend,
        engine={"models": ["m"], "timeouts": {"first_byte_s": 0.3}},
        keys=[key("a"), key("shut", requests_per_minute=0), key("narrow") | {"models": ["other"]}],
    )
    config["keys"]["anonymous"] = True
    with serving(config, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("secret", "more", "expected"),
    [
        ("sk-wrong", {}, openai.AuthenticationError),
        ("sk-narrow", {}, openai.PermissionDeniedError),
        ("sk-shut", {}, openai.RateLimitError),
        ("sk-a", {"model": "unknown"}, openai.NotFoundError),
        ("sk-a", {"max_tokens": -5}, openai.BadRequestError),
        ("sk-a", {"messages": [{"role": "user", "content": "x" * 40_000_000}]}, openai.APIStatusError),
    ],
    ids=["401", "403", "429", "404", "400", "413"],
)
def test_c05_official_client_raises_its_typed_exception(
    gateway_of_module: GatewayProcess, secret: str, more: dict[str, Any], expected: type[openai.APIStatusError]
) -> None:
    request: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | more
    with (
        openai.OpenAI(base_url=f"{gateway_of_module.url}/v1", api_key=secret, max_retries=0) as client,
        pytest.raises(expected) as raised,
    ):
        client.chat.completions.create(**request)
    assert raised.value.status_code in {400, 401, 403, 404, 413, 429}
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["message"]
    assert raised.value.request_id


@pytest.mark.parametrize("reason", STATUS)
def test_c06_no_refusal_is_wrapped_in_200(collected: Collected, reason: str) -> None:
    answer = collected.answers[reason, True]
    assert answer.status >= 400
    assert (answer.header("content-type") or "").startswith("application/json")
    assert not answer.body.startswith(b"data:")


def test_c06_backend_refusal_inside_a_stream_becomes_one(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """An engine that says 200, opens a stream and puts its refusal into the first event."""
    gateway = start_gateway(config_for(backend))
    refusal = {"error": {"message": "too busy", "type": "ServiceUnavailable", "param": None, "code": 503}}
    backend.script = scripts.streams([scripts.event(refusal)])
    answer = ask(gateway.port, chat(stream=True))
    assert answer.status == 503
    assert answer.error["message"] == "too busy"
    gateway.settles()


OVERLOADS = [(status, said, stream) for status in (429, 503, 529) for said in (None, "7") for stream in (False, True)]


@pytest.fixture(scope="module")
def overload_gateway(shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A key of its own for each case."""
    keys = [key(str(i), tokens_per_minute=600, concurrency=1) for i in range(len(OVERLOADS))]
    with serving(config_for(shared_backend, keys=keys), tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.mark.parametrize("case", range(len(OVERLOADS)), ids=[str(case) for case in OVERLOADS])
def test_c07_backend_overload_stays_overload(
    fresh_backend: FakeBackend, overload_gateway: GatewayProcess, case: int
) -> None:
    gateway, secret = overload_gateway, f"sk-{case}"
    status, said, stream = OVERLOADS[case]
    fresh_backend.plan.append(scripts.refuses(status, headers=[] if said is None else [("retry-after", said)]))
    answer = ask(gateway.port, chat(stream=stream, max_tokens=500), key=secret)
    assert answer.status == 503, "the engine's limit is not the caller's own"
    assert 1 <= answer.retry_after <= 60
    if said is not None:
        assert answer.retry_after == 7
    assert answer.error["message"]
    assert gateway.outcome("shed") == 0, "counted apart from the gateway's own refusals"
    assert gateway.metric("forebay_requests_total", outcome="shed") == 0
    assert gateway.metric("forebay_requests_total", outcome="failed", reason="engine_error") >= 1
    # The reservation came back: the same again fits.
    assert ask(gateway.port, chat(max_tokens=500), key=secret).status == 200


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def test_c08_refusing_is_cheap(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """Scaled to what the test's own side can send: 150 refusals a second of 200 KB each, for up to six seconds."""
    gateway = start_gateway(config_for(backend, slots=1, mode="admission"))
    backend.script = scripts.streams(scripts.deltas(1000), every=0.02)
    refused_body = chat(padding="x" * 200_000)
    arrivals: list[float] = []
    over = threading.Event()

    def read_stream() -> None:
        with RawClient(gateway.port) as client:
            client.request(chat(stream=True))
            assert client.read_head().status == 200
            while not over.is_set():
                client.read_event()
                arrivals.append(time.monotonic())

    def refusals(worker: int) -> list[float]:
        start = time.monotonic()
        took = []
        for i in range(50):
            wait_until(start + worker / 150 + i * 0.04)
            began = time.monotonic()
            answer = ask(gateway.port, refused_body)
            took.append(time.monotonic() - began)
            assert (answer.status, answer.reason) == (503, "queue_full")
        return took

    def gaps(since: float, until: float) -> list[float]:
        return [b - a for a, b in pairwise(arrivals) if since <= a < until]

    def cheap() -> bool:
        start, cpu_before = time.monotonic(), gateway.cpu_s()
        took = [each for worker in in_parallel(refusals, range(6)) for each in worker]
        end, cpu = time.monotonic(), gateway.cpu_s() - cpu_before
        figures.append((p99(took), p99(gaps(start, end)), cpu / (end - start)))
        latency, gap, share = figures[-1]
        return latency < 0.1 and gap < 2 * max(quiet, 0.025) and share < 0.5

    reader = threading.Thread(target=read_stream)
    reader.start()
    try:
        eventually(lambda: len(arrivals) > 50)  # a second of quiet
        quiet = p99(gaps(0, time.monotonic()))
        figures: list[tuple[float, float, float]] = []
        # Other work on the machine may spoil a window; a gateway that refuses dearly spoils all three.
        assert any(cheap() for _ in range(3)), f"refusal p99, stream gap p99, CPU share: {figures}; quiet {quiet}"
    finally:
        over.set()
        reader.join()
    assert len(backend.calls) == 1, "a refused request never reaches the backend"


COUNTERS = {"forebay_requests_total", "forebay_rejected_total"}  # decided by the pipeline, and before it
LOGGED = OWN_LIMIT | SHARED | ENGINE
COUNTED = (OWN_LIMIT | SHARED | ENGINE) - {"draining"}  # the metrics were read before the drain began


@pytest.mark.parametrize("reason", sorted(COUNTED | FINAL))
def test_c09_a_metric_tells_why(collected: Collected, reason: str) -> None:
    families = text_string_to_metric_families(collected.metrics)
    samples = [s for f in families for s in f.samples if s.name in COUNTERS]
    assert sum(s.value for s in samples if s.labels["reason"] == reason) == 2


@pytest.mark.parametrize("reason", sorted(LOGGED))
def test_c09_a_log_line_tells_why(collected: Collected, reason: str) -> None:
    lines = [line for line in collected.log if line.get("reason") == reason]
    assert len(lines) == 2, "one line per refusal"
    ids = {collected.answers[reason, stream].header("x-request-id") for stream in (False, True)}
    assert {line["id"] for line in lines} == ids
    truth = {"key_requests": (2, 3), "key_tokens": (1000, None), "key_concurrency": (1, 2), "queue_full": (0, 0)}
    if reason in truth:
        limit, actual = truth[reason]
        assert [line["limit"] for line in lines] == [limit, limit]
        if actual is not None:
            assert [line["actual"] for line in lines] == [actual, actual]


def test_c09_no_log_or_metric_holds_a_secret(collected: Collected) -> None:
    for secret in collected.secrets:
        assert secret not in collected.metrics
        assert secret not in json.dumps(collected.log)


def http_date(seconds_from_now: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds_from_now), usegmt=True)


HOSTILE: dict[str, list[str]] = {
    "negative": ["-5"],
    "zero": ["0"],
    "fraction": ["1.5"],
    "past date": [http_date(-3600)],
    "year 9999": ["Fri, 31 Dec 9999 23:59:59 GMT"],
    "word": ["soon"],
    "overflow": ["1e309"],
    "many digits": ["9" * 400],
    "two": ["5", "9"],
    "empty": [""],
}


def test_c10_hostile_retry_after_from_the_backend(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend))
    chance = random.Random(10)
    cases = list(HOSTILE.items())
    chance.shuffle(cases)
    for name, values in cases:
        backend.plan.append(scripts.refuses(503, headers=[("retry-after", value) for value in values]))
        answer = ask(gateway.port)
        assert answer.status == 503, name
        assert 1 <= answer.retry_after <= 60, name
        assert len(answer.head.all("retry-after")) == 1, name
        # Whatever it said, the backend is tried again.
        eventually(lambda: ask(gateway.port).status == 200, 3.0, f"tried again after {name}")
    backend.plan.append(scripts.refuses(503, headers=[("retry-after", http_date(20))]))
    assert 17 <= ask(gateway.port).retry_after <= 21, "an HTTP date is understood"
