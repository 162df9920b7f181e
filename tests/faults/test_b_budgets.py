"""B. Token, request and budget accounting. The ledger is read from `x-ratelimit-remaining-tokens` of a request that
never fits, which costs nothing; monthly quotas make it exact, as nothing of them refills while a test runs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import openai
import pytest

from forebay.core.quota.path import FRAME_EVENTS

from .rig import scripts
from .rig.backend import FakeBackend, Script
from .rig.client import Answer, RawClient, ask, chat, marker, wire
from .rig.crowd import Crowd
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, serving, wait_until
from .rig.scripts import DONE, Do
from .rig.waiting import eventually

MONTH = 1_000_000
BURSTS, FLOODS = 50, 20
LIMITS: dict[str, dict[str, float]] = {
    "tpm": {"tokens_per_minute": 1_000},
    "rpm": {"requests_per_minute": 3},
    "one": {"concurrency": 1},
    "free": {},
    "no-tokens": {"tokens_per_minute": 0},
    "no-requests": {"requests_per_minute": 0},
    "none": {"concurrency": 0},
    "stream": {"tokens_per_minute": 400},
    "steady": {"tokens_per_second": 100, "burst_s": 1.0},
    "steadier": {"tokens_per_second": 100, "burst_s": 1.0, "requests_per_minute": 600},
    "edge": {"requests_per_minute": 60},
    "flood": {"tokens_per_second": 20, "burst_s": 2.5},
    "debt": {"tokens_per_minute": 1_000},
    "capless": {"tokens_per_minute": 5_000},
    "series": {"requests_per_minute": 100, "tokens_per_month": MONTH},
}
KEYS = [
    *(key(name, **limits) for name, limits in LIMITS.items()),
    *(key(f"burst-{n}", tokens_per_minute=100) for n in range(BURSTS)),
    *(key(f"flood-{n}", requests_per_minute=10) for n in range(FLOODS)),
    *(key(f"book-{n}", tokens_per_month=MONTH) for n in range(12)),
    *(key(f"crowd-{n}", tokens_per_month=20_000) | {"team": f"crowd-{n // 2}"} for n in range(6)),
    key("a") | {"team": "ops"},
    key("b") | {"team": "ops"},
]
TEAMS = {"ops": {"limits": {"tokens_per_month": 1_000}}} | {
    f"crowd-{n}": {"limits": {"tokens_per_month": 30_000}} for n in range(3)
}


@pytest.fixture(scope="module")
def gateway(shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    config = config_for(shared_backend, slots=1_000, keys=KEYS, teams=TEAMS)
    with serving(config, tmp_path_factory.mktemp("gateway")) as process:
        yield process


@pytest.fixture
def backend(fresh_backend: FakeBackend) -> FakeBackend:
    return fresh_backend


def remaining(gateway: GatewayProcess, name: str) -> int:
    """What is left of the key's tokens, as told by a request that can never fit."""
    refused = ask(gateway.port, chat(max_tokens=10_000_000), key=f"sk-{name}")
    assert (refused.status, refused.reason) == (413, "never_fits")
    return int(refused.header("x-ratelimit-remaining-tokens") or "")


def spent(gateway: GatewayProcess, name: str, of: int = MONTH) -> int:
    gateway.settles()
    return of - remaining(gateway, name)


def used(tokens_in: int, tokens_out: int) -> dict[str, int]:
    return {"prompt_tokens": tokens_in, "completion_tokens": tokens_out, "total_tokens": tokens_in + tokens_out}


def ids(count: int) -> dict[str, Any]:
    """An embeddings request of exactly so many tokens."""
    return {"model": "m", "input": [1] * count, "user": marker()}


def test_b01_a_parallel_burst_does_not_walk_past_the_token_limit(gateway: GatewayProcess, backend: FakeBackend) -> None:
    for number in range(BURSTS):
        gate = scripts.Gate(scripts.says())
        backend.script = gate
        calls = len(backend.calls)
        with Crowd(gateway.port, 5) as crowd:
            for each in range(5):
                crowd.send(each, wire(chat(max_tokens=60), key=f"sk-burst-{number}"))
            crowd.read(10, until=4)
            gate.open(backend)
            crowd.read(10)
            assert len(crowd.with_status(200)) == 1
            refused = crowd.with_status(429)
            assert len(refused) == 4
            assert all(crowd.heads[each].get("retry-after") for each in refused)
        assert len(backend.calls) == calls + 1


def test_b02_a_parallel_burst_does_not_walk_past_the_request_limit(
    gateway: GatewayProcess, backend: FakeBackend
) -> None:
    for number in range(FLOODS):
        calls = len(backend.calls)
        with Crowd(gateway.port, 100) as crowd:
            for each in range(100):
                crowd.send(each, wire(chat(), key=f"sk-flood-{number}"))
            crowd.read(20)
            # A slow machine may take longer than the six seconds in which one more is allowed.
            late = (max(head.at for head in crowd.heads.values()) - min(crowd.sent.values())) // 6
            assert 10 <= len(crowd.with_status(200)) == len(backend.calls) - calls <= 10 + late


def test_b05_request_and_token_limits_share_no_clock(gateway: GatewayProcess, backend: FakeBackend) -> None:
    """80 of 100 tokens in each of three windows, with and without a request limit beside them."""
    backend.script = scripts.says()
    body = ids(20)
    backend.script = scripts.steps(scripts.answer(200, {"object": "list", "data": [], "usage": used(20, 0)}))
    for _ in range(3):
        began = time.monotonic()
        for name in ("steady", "steadier"):
            statuses = [ask(gateway.port, body, path="/v1/embeddings", key=f"sk-{name}").status for _ in range(4)]
            assert statuses == [200] * 4, name
        wait_until(began + 1.0)


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        ("tpm", [200, 200, 413]),  # the last asks for more than there can be
        ("rpm", [200, 200, 200, 429]),
        ("free", [200] * 6),
        ("no-tokens", [429]),
        ("no-requests", [429]),
        ("none", [429]),
    ],
)
def test_b06_each_limit_works_alone(
    gateway: GatewayProcess, backend: FakeBackend, name: str, statuses: list[int]
) -> None:
    bodies = [chat(max_tokens=100)] * (len(statuses) - 1) + [chat(max_tokens=2_000)]
    assert [ask(gateway.port, body, key=f"sk-{name}").status for body in bodies] == statuses


def test_b06_one_place_alone(gateway: GatewayProcess, backend: FakeBackend) -> None:
    gate = scripts.Gate(scripts.says())
    backend.script = gate
    with RawClient(gateway.port) as first:
        first.request(chat(), key="sk-one")
        eventually(lambda: backend.calls)
        refused = ask(gateway.port, key="sk-one")
        assert (refused.status, refused.reason) == (429, "key_concurrency")
        assert "2 of 1 open requests of this key" in refused.error["message"]
        gate.open(backend)
        assert first.read_answer().status == 200
    assert ask(gateway.port, key="sk-one").status == 200


def test_b07_a_stream_without_usage_is_charged_by_its_events(gateway: GatewayProcess, backend: FakeBackend) -> None:
    backend.script = scripts.streams(scripts.deltas(500))
    answer = ask(gateway.port, chat(stream=True), key="sk-stream")
    assert answer.body.count(b"data: {") == 500, "it is not cut"
    assert json.loads(backend.calls[0].body)["stream_options"] == {"include_usage": True}
    gateway.settles()
    refused = ask(gateway.port, chat(stream=True, max_tokens=10), key="sk-stream")
    assert (refused.status, refused.header("x-ratelimit-remaining-tokens")) == (429, "0")


@pytest.mark.parametrize(
    ("options", "sees"),
    [("absent", False), ({"include_usage": True}, True), ({}, False), (None, False)],
    ids=["absent", "asked", "empty", "null"],
)
def test_b08_usage_events_are_for_those_who_asked(
    gateway: GatewayProcess, backend: FakeBackend, options: Any, sees: bool
) -> None:
    events = [*scripts.deltas(4), scripts.delta("", "stop")]
    backend.script = scripts.streams([*events, scripts.usage_event()])
    body = chat(stream=True) if options == "absent" else chat(stream=True, stream_options=options)
    answer = ask(gateway.port, body, key="sk-free")
    assert answer.body == b"".join([*events, *([scripts.usage_event()] if sees else []), DONE])
    more: dict[str, Any] = {} if options == "absent" else {"extra_body": {"stream_options": options}}
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-free", max_retries=0) as client:
        message: Any = {"role": "user", "content": "hi"}
        chunks = list(client.chat.completions.create(model="m", messages=[message], stream=True, **more))
    assert [chunk.usage is not None for chunk in chunks] == [False] * 5 + [True] * sees
    if not sees:
        assert all(chunk.choices[0] for chunk in chunks), "a naive client reads choices[0]"


def test_b09_usage_on_a_last_chunk_that_has_choices(gateway: GatewayProcess, backend: FakeBackend) -> None:
    usage = used(40, 9) | {"prompt_tokens_details": {"cached_tokens": 16}}
    last = scripts.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage})
    events = [*scripts.deltas(9), last]
    backend.script = scripts.streams(events)
    assert ask(gateway.port, chat(stream=True), key="sk-book-0").body == b"".join([*events, DONE])
    assert spent(gateway, "book-0") == 49


def test_b10_a_disconnect_is_charged_for_what_was_generated(gateway: GatewayProcess, backend: FakeBackend) -> None:
    """The prompt as estimated, and each event that came before the engine was told to stop."""
    mark = marker()
    backend.by_marker[mark] = scripts.streams(scripts.deltas(6), done=False, end=[Do.HOLD])
    with RawClient(gateway.port) as client:
        client.request(chat(mark, stream=True, max_tokens=4_000), key="sk-book-1")
        assert client.read_head().status == 200
        for _ in range(6):
            client.read_event()
    eventually(lambda: (call := backend.call(mark)) is not None and call.peer_closed_at is not None)
    prompt = 1 + len(json.dumps(chat(marker(), stream=True, max_tokens=4_000))) / 4.2
    assert 6 < spent(gateway, "book-1") <= (prompt + 6) * 1.2


@pytest.mark.parametrize(("name", "stream"), [("book-2", False), ("book-3", True)])
def test_b11_zero_usage_is_not_missing_usage(
    gateway: GatewayProcess, backend: FakeBackend, name: str, stream: bool
) -> None:
    nothing = used(0, 0)
    backend.script = (
        scripts.streams([scripts.delta("x"), scripts.usage_event(nothing)])
        if stream
        else scripts.steps(scripts.answer(200, scripts.completion(usage=nothing)))
    )
    assert ask(gateway.port, chat(stream=stream), key=f"sk-{name}").status == 200
    assert spent(gateway, name) == 0


def test_b12_running_totals_are_not_added_up(gateway: GatewayProcess, backend: FakeBackend) -> None:
    backend.script = scripts.streams([scripts.delta("x", usage=used(30, n + 1)) for n in range(100)])
    assert ask(gateway.port, chat(stream=True), key="sk-book-4").status == 200
    assert spent(gateway, "book-4") == 130


def test_b14_a_request_without_a_cap_is_not_refused_for_it(gateway: GatewayProcess, backend: FakeBackend) -> None:
    backend.script = scripts.steps(scripts.answer(200, scripts.completion(usage=used(10, 20))))
    answers = [ask(gateway.port, chat(), key="sk-capless") for _ in range(10)]
    assert [answer.status for answer in answers] == [200] * 10
    left = [int(answer.header("x-ratelimit-remaining-tokens") or "") for answer in answers]
    assert left[0] == 4_970
    assert left[-1] >= 4_700, "each is settled to its 30 tokens"


def test_b21_a_large_request_is_refused_with_a_true_time_and_then_served(
    gateway: GatewayProcess, backend: FakeBackend
) -> None:
    """Nothing waits for a bucket. Small ones keep taking from it; the time is that of the bucket as it stands."""
    backend.script = scripts.steps(scripts.answer(200, {"object": "list", "data": [], "usage": used(40, 0)}))
    embed = {"path": "/v1/embeddings", "key": "sk-flood"}
    wait_until(time.monotonic() + 2.6)
    assert ask(gateway.port, ids(40), **embed).status == 200
    refused = ask(gateway.port, ids(40), **embed)
    assert refused.status == 429
    assert re.search(r"(69|7\d|80) of 50 tokens at once, at 20 tokens/s, of this key", refused.error["message"])
    wait_until(refused.head.at + refused.retry_after)
    assert ask(gateway.port, ids(40), **embed).status == 200


def test_b22_the_edge_of_a_window_doubles_no_allowance(gateway: GatewayProcess, backend: FakeBackend) -> None:
    began = time.monotonic()
    first = [ask(gateway.port, key="sk-edge").status for _ in range(60)]
    then = [ask(gateway.port, key="sk-edge").status for _ in range(60)]
    refill = int(time.monotonic() - began) + 1
    assert first.count(200) + then.count(200) <= 60 + refill
    assert first == [200] * 60


def test_b23_a_flood_of_refusals_digs_no_debt(gateway: GatewayProcess, backend: FakeBackend) -> None:
    """A burst of five, and two more a second."""
    backend.script = scripts.steps(scripts.answer(200, {"object": "list", "data": [], "usage": used(10, 0)}))
    embed = {"path": "/v1/embeddings", "key": "sk-flood"}
    statuses = []
    with RawClient(gateway.port) as client:
        for _ in range(2_000):
            client.request(ids(10), **embed)
            answer = client.read_answer()
            statuses.append(answer.status)
            assert int(answer.header("x-ratelimit-remaining-tokens") or "") >= 0
    assert statuses.count(429) > 1_000
    wait_until(time.monotonic() + 2.6)
    assert [ask(gateway.port, ids(10), **embed).status for _ in range(5)] == [200] * 5


def test_b24_first_requests_of_the_unknown_do_not_race(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, limits={"default": {"tokens_per_minute": 1}}))
    with Crowd(gateway.port, 8) as crowd:
        for number in range(8):
            crowd.send(number, wire(chat()))
        crowd.read(10)
        assert len(crowd.with_status(413, 429)) == 8
    assert not backend.calls


def test_b25_usage_beyond_the_reservation_is_a_debt(gateway: GatewayProcess, backend: FakeBackend) -> None:
    backend.script = scripts.streams([*scripts.deltas(50), scripts.usage_event(used(10, 1_490))])
    answer = ask(gateway.port, chat(stream=True, max_tokens=50), key="sk-debt")
    assert answer.body == b"".join([*scripts.deltas(50), DONE]), "the stream is not cut"
    gateway.settles()
    refused = ask(gateway.port, chat(max_tokens=10), key="sk-debt")
    assert (refused.status, refused.header("x-ratelimit-remaining-tokens")) == (429, "0")
    # 500 are owed and about 30 are asked for, at 1,000 a minute.
    assert 25 <= refused.retry_after <= 35


FAILURES: dict[str, tuple[Script, int]] = {
    "400": (scripts.refuses(400), 400),
    "500": (scripts.refuses(500), 500),
    "time-out": (scripts.silent, 504),
    "dies after the head of a stream": (scripts.streams([], done=False, end=[Do.RESET]), 502),
    "dies after the head": (scripts.steps(scripts.head(200, [("content-length", "100")]), Do.RESET), 502),
}


def test_b26_a_failure_gives_the_reservation_back(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """All of it, the prompt too: what gave nothing costs nothing."""
    engine = {"timeouts": {"first_byte_s": 0.3}, "probe": {"interval_s": 0.1, "timeout_s": 5}}
    gateway = start_gateway(config_for(backend, keys=[key("k", tokens_per_month=1_000)], engine=engine))
    nothing = scripts.steps(scripts.answer(200, scripts.completion(usage=used(0, 0))))

    def fits() -> None:
        assert spent(gateway, "k", of=1_000) == 0
        backend.plan.append(nothing)
        assert ask(gateway.port, chat(max_tokens=900), key="sk-k").status == 200

    for failure, (script, status) in FAILURES.items():
        backend.plan.append(script)
        answer = ask(gateway.port, chat(stream="stream" in failure, max_tokens=900), key="sk-k")
        assert answer.status == status, failure
        fits()
    backend.die()
    assert ask(gateway.port, chat(max_tokens=900), key="sk-k").status == 503
    backend.listen()
    eventually(gateway.ready, within=5)
    fits()


def seconds(duration: str) -> float:
    """A Go-style duration."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    return sum(float(n) * units[unit] for n, unit in re.findall(r"([\d.]+)(ms|h|m|s)", duration))


def test_b27_rate_limit_headers_fall_at_once_and_are_exact(gateway: GatewayProcess, backend: FakeBackend) -> None:
    def told(answer: Answer, what: str, of: str) -> int:
        return int(answer.header(f"x-ratelimit-{what}-{of}") or "")

    left, answers = MONTH, []
    for number in range(10):
        stream = bool(number % 2)
        backend.plan.append(
            scripts.streams([scripts.delta("x"), scripts.usage_event(used(10, 2 + number))])
            if stream
            else scripts.steps(scripts.answer(200, scripts.completion(usage=used(10, 2 + number))))
        )
        answer = ask(gateway.port, chat(stream=stream, max_tokens=500), key="sk-series")
        gateway.settles()
        answers.append(answer)
        shown = told(answer, "remaining", "tokens")
        if stream:
            assert left - 560 < shown <= left - 500, "what is reserved is gone while it streams"
        else:
            assert shown == left - 12 - number, "settled before it is told"
        left -= 12 + number
        assert remaining(gateway, "series") == left
    assert [told(answer, "limit", "tokens") for answer in answers] == [MONTH] * 10
    requests = [told(answer, "remaining", "requests") for answer in answers]
    refills = [before - after for before, after in pairwise(requests)]
    assert requests[0] == 99
    assert all(step in {0, 1} for step in refills), "by one each, but for what came back meanwhile"
    resets = [seconds(answer.header("x-ratelimit-reset-tokens") or "") for answer in answers]
    assert all(0 < after <= before for before, after in pairwise(resets))


def test_a_shared_limit_names_its_level(gateway: GatewayProcess, backend: FakeBackend) -> None:
    backend.script = scripts.steps(scripts.answer(200, scripts.completion(usage=used(300, 600))))
    assert ask(gateway.port, chat(max_tokens=600), key="sk-a").status == 200
    refused = ask(gateway.port, chat(max_tokens=200), key="sk-b")
    assert (refused.status, refused.reason) == (429, "key_tokens")
    assert re.search(r"11\d\d of 1000 tokens/month of team ops", refused.error["message"])
    assert refused.header("x-ratelimit-remaining-tokens") == "100"
    assert ask(gateway.port, chat(max_tokens=10), key="sk-b").status == 200


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_on_two_keys_overshoots_nothing_and_the_books_balance(
    gateway: GatewayProcess, backend: FakeBackend, seed: int
) -> None:
    """A thousand clients released together; some leave. The two keys' budgets, and their team's, are never exceeded."""
    chance = Random(seed)
    gate = scripts.Gate(scripts.steps(scripts.answer(200, scripts.completion(usage=used(40, 50)))))
    backend.script = gate
    names = [f"crowd-{2 * seed}", f"crowd-{2 * seed + 1}"]
    cap = 400
    with Crowd(gateway.port, 1_000) as crowd:
        asked = [chance.choice(names) for _ in crowd.clients]
        for number, name in enumerate(asked):
            crowd.send(number, wire(chat(max_tokens=cap), key=f"sk-{name}"))
        eventually(lambda: gateway.outcome("shed") >= 1_000 * (seed + 1) - 30_000 // cap, within=30)
        eventually(lambda: len(backend.calls) == gateway.gauges()[0], within=5)
        admitted = len(backend.calls)
        assert admitted * cap <= 30_000, "of the team"
        assert admitted * (cap + 60) > 30_000 - 2 * (cap + 60), "and no allowance is lost"
        crowd.read(20, until=1_000 - admitted)
        waiting = [number for number in range(1_000) if number not in crowd.heads]
        assert {head.status for head in crowd.heads.values()} == {429}
        assert len(waiting) == admitted
        for number in chance.sample(waiting, admitted // 3):
            crowd.clients[number].close()
            waiting.remove(number)
        eventually(lambda: gateway.gauges()[0] == len(waiting), within=5)
        gate.open(backend)
        gateway.settles(5)
        total = sum(20_000 - remaining(gateway, name) for name in names)
        prompts = total - 90 * len(waiting)
        assert 0 < prompts <= 60 * (admitted - len(waiting)), "who left pays the prompt, and nothing was generated"


def test_a_stream_that_its_key_cannot_pay_is_ended(backend: FakeBackend, start_gateway: StartGateway) -> None:
    keys = [key("k", tokens_per_second=100, burst_s=2.0)]
    gateway = start_gateway(config_for(backend, keys=keys, admission={"over_budget": "stop"}))
    events = scripts.deltas(280)
    backend.script = scripts.streams(events, every=0.001, done=False, end=[Do.HOLD])
    answer = ask(gateway.port, chat(stream=True), key="sk-k", within=20)
    *whole, last = [event + b"\n\n" for event in answer.body.split(b"\n\n") if event]
    assert whole == events[: len(whole)]
    assert 150 < len(whole) < 280
    error = json.loads(last[6:])["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "token_limit_exceeded")
    eventually(lambda: backend.calls[0].peer_closed_at is not None)
    gateway.settles()
    assert gateway.outcome("failed") == 1


def test_a_stream_that_its_key_cannot_pay_is_slowed(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """The engine makes 500 events a second; beyond its burst the key earns 50."""
    keys = [key("k", tokens_per_second=50, burst_s=1.0)]
    gateway = start_gateway(config_for(backend, keys=keys, admission={"over_budget": "slow"}))
    events = scripts.deltas(2_000)
    backend.script = scripts.streams(events, every=0.002, done=False, end=[Do.HOLD])
    began = time.monotonic()
    with RawClient(gateway.port) as client:
        client.request(chat(stream=True), key="sk-k")
        assert client.read_head().status == 200
        for number in range(150):
            assert client.read_event() == events[number]
    # Of the 150, 50 were there, 8 are for free, and one goes ahead of its payment; the prompt is in the burst, too.
    assert time.monotonic() - began >= 1.8
    gateway.settles()


def test_no_event_of_the_first_read_goes_ahead_of_its_payment(
    backend: FakeBackend, start_gateway: StartGateway
) -> None:
    """All events come in one piece: what is beyond the burst is passed on as it is earned, not as it was read."""
    keys = [key("k", tokens_per_second=50, burst_s=1.0)]
    gateway = start_gateway(config_for(backend, keys=keys, admission={"over_budget": "slow"}))
    events = scripts.deltas(400)
    backend.script = scripts.steps(scripts.sse_head(), scripts.chunk(b"".join(events)), Do.HOLD)
    with RawClient(gateway.port) as client:
        began = time.monotonic()
        client.request(chat(stream=True), key="sk-k")
        assert client.read_head().status == 200
        for number in range(100):
            assert client.read_event() == events[number]
            paid = 50 + FRAME_EVENTS + 50 * (time.monotonic() - began)
            assert number <= paid + 1, "one event may be under way before it is paid"
    gateway.settles()


def test_output_is_capped_where_the_operator_asks(backend: FakeBackend, start_gateway: StartGateway) -> None:
    keys = [key("k"), key("small") | {"cap_output_tokens": 50}]
    gateway = start_gateway(config_for(backend, keys=keys, estimate={"cap_output_tokens": 300}))

    def forwarded(name: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
        mark = body["user"]
        assert ask(gateway.port, body, key=f"sk-{name}", path=path).status == 200
        call = backend.call(mark)
        assert call is not None
        sent: dict[str, Any] = json.loads(call.body)
        return sent

    for body in (chat(max_tokens=300), chat(max_completion_tokens=7)):
        assert forwarded("k", body) == body, "within the cap nothing is touched"
    for body, caps in (
        (chat(), {"max_tokens": 300}),
        (chat(max_tokens=None), {"max_tokens": 300}),
        (chat(max_tokens=301, max_completion_tokens=900), {"max_tokens": 300, "max_completion_tokens": 300}),
        (chat(max_completion_tokens=999), {"max_completion_tokens": 300}),
    ):
        assert forwarded("k", body) == body | caps
    assert forwarded("small", body := chat()) == body | {"max_tokens": 50}
    responses = {"model": "m", "input": "hi", "user": marker()}
    assert forwarded("k", responses, "/v1/responses") == responses | {"max_output_tokens": 300}
