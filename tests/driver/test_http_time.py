"""Every time-out of the data plane, to the nanosecond, without waiting for one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode
from forebay.core.outcome import Outcome
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.testing import check_empty

from .test_gateway import Quiet
from .wire import LAST_CHUNK, SSE_HEAD, Client, ScriptedEngine, WiredGateway, answer, event, post

Script = Callable[[ScriptedEngine, dict[bytes, bytes], bytes], None]
Make = Callable[..., WiredGateway]
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
DELTA = {"choices": [{"delta": {"content": "x"}}]}


def silent(engine: ScriptedEngine, headers: dict[bytes, bytes], body: bytes) -> None:
    """An engine that says nothing."""


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[WiredGateway] = []

    def gateway(script: Script = silent, *, mode: Mode = Mode.HYBRID, places: int = 4) -> WiredGateway:
        pool = PoolConfig("e", ("e/0",), mode=mode, limit=FixedConfig(limit=places))
        made.append(WiredGateway(PipelineConfig((pool,)), Random(1), Quiet(), script))
        return made[-1]

    yield gateway
    for one in made:
        one.run_to(one.loop.time() + 1_000)
        check_empty(one.pipeline, one.loop.clock())
        one.close()


def error(client: Client) -> dict[str, Any]:
    found = json.loads(client.got.partition(b"\r\n\r\n")[2])["error"]
    assert isinstance(found, dict)
    return found


def test_an_engine_that_never_answers_is_given_up_after_its_time(make: Make) -> None:
    gateway = make()
    client = gateway.client()
    client.transport.write(post(CHAT))
    gateway.run_to(599.9)
    assert client.got == b""
    gateway.run_to(700)
    assert client.status == 504
    assert error(client)["code"] == "engine_timeout"
    assert client.last_at == 600 * SECOND
    assert gateway.pipeline.outcomes[Outcome.FAILED] == 1


def test_a_stream_that_falls_silent_is_ended_with_an_error_event(make: Make) -> None:
    def stalls(engine: ScriptedEngine, headers: dict[bytes, bytes], body: bytes) -> None:
        engine.send(SSE_HEAD + event(DELTA))
        gateway.loop.call_later(100, engine.send, event(DELTA))

    gateway = make(stalls)
    client = gateway.client()
    client.transport.write(post(CHAT | {"stream": True}))
    gateway.run_to(219.9)
    assert client.got.count(b'"content"') == 2
    assert b"error" not in client.got
    gateway.run_to(221)
    assert b'"code":"engine_timeout"' in client.got
    assert b"[DONE]" not in client.got
    assert client.closed_at == 220 * SECOND


def test_comment_lines_are_no_sign_of_life(make: Make) -> None:
    def only_comments(engine: ScriptedEngine, headers: dict[bytes, bytes], body: bytes) -> None:
        engine.send(SSE_HEAD + event(DELTA))
        for number in range(1, 30):
            gateway.loop.call_later(10 * number, engine.send, b"b\r\n: waiting\n\n\r\n")

    gateway = make(only_comments)
    client = gateway.client()
    client.transport.write(post(CHAT | {"stream": True}))
    gateway.run_to(119)
    assert b"error" not in client.got
    gateway.run_to(121)
    assert b'"code":"engine_timeout"' in client.got


def test_a_stream_without_a_first_event_shows_its_head_after_a_moment(make: Make) -> None:
    def slow_first(engine: ScriptedEngine, headers: dict[bytes, bytes], body: bytes) -> None:
        engine.send(SSE_HEAD)
        gateway.loop.call_later(5, engine.send, event(DELTA) + event(None) + LAST_CHUNK)

    gateway = make(slow_first)
    client = gateway.client()
    client.transport.write(post(CHAT | {"stream": True}))
    gateway.run_to(0.0749)
    assert client.got == b""
    gateway.run_to(1)
    assert client.status == 200
    assert client.last_at == 75 * MILLISECOND
    gateway.run_to(6)
    assert client.got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_head_has_ten_seconds_from_its_first_byte(make: Make) -> None:
    gateway = make()
    client = gateway.client()
    gateway.run_to(50)
    client.transport.write(b"POST /v1/chat/completions HT")
    gateway.loop.call_later(9, client.transport.write, b"TP/1.1\r\n")
    gateway.run_to(59.9)
    assert client.got == b""
    gateway.run_to(61)
    assert client.status == 408
    assert client.last_at == 60 * SECOND


def test_a_body_has_its_grace_and_then_the_least_rate(make: Make) -> None:
    gateway = make()
    starved, fed = gateway.client(), gateway.client()
    for client in (starved, fed):
        client.transport.write(post(CHAT | {"pad": "x" * 200_000})[:1_000])
    for number in range(1, 100):
        gateway.loop.call_later(number, fed.transport.write, b"x" * 2_000)
    gateway.run_to(29)
    assert starved.got == b""
    gateway.run_to(90)
    assert starved.status == 408
    assert 30 * SECOND <= starved.last_at <= 32 * SECOND
    assert fed.got == b"", "it sends twice the least rate"


def test_an_idle_connection_is_kept_for_seventy_five_seconds(make: Make) -> None:
    def answers(engine: ScriptedEngine, headers: dict[bytes, bytes], body: bytes) -> None:
        engine.send(answer(COMPLETION))

    gateway = make(answers)
    client = gateway.client()
    gateway.run_to(70)
    client.transport.write(post(CHAT))
    gateway.run_to(140)
    assert client.status == 200
    assert client.closed_at is None
    gateway.run_to(146)
    assert client.closed_at == 145 * SECOND


def test_a_request_held_in_backpressure_mode_expires_at_its_time(make: Make) -> None:
    gateway = make(mode=Mode.BACKPRESSURE, places=1)
    running, waiting, hasty = gateway.client(), gateway.client(), gateway.client()
    for client, headers in ((running, ()), (waiting, ()), (hasty, ("x-forebay-deadline-ms: 1500",))):
        client.transport.write(post(CHAT, *headers))
    gateway.run_to(31)
    assert (hasty.status, hasty.header(b"x-forebay-reason"), hasty.last_at) == (503, b"expired", 1_500 * MILLISECOND)
    assert (waiting.status, waiting.header(b"x-forebay-reason"), waiting.last_at) == (503, b"expired", 30 * SECOND)
    assert running.got == b""


def test_a_reader_that_stalls_is_cut_off_and_its_engine_set_free(make: Make) -> None:
    ended: list[int] = []

    def endless(engine: ScriptedEngine, headers: dict[bytes, bytes], body: bytes) -> None:
        engine.send(SSE_HEAD)

        def more() -> None:
            if engine.lost:
                ended.append(gateway.loop.clock())
            else:
                engine.send(event({"choices": [{"delta": {"content": "x" * 10_000}}]}))
                gateway.loop.call_later(1, more)

        more()

    gateway = make(endless)
    client = gateway.client()
    client.transport.write(post(CHAT | {"stream": True}))
    gateway.loop.call_later(5, client.transport.pause_reading)
    gateway.run_to(100)
    assert gateway.pipeline.snapshot(gateway.loop.clock()).in_flight == 1
    gateway.run_to(200)
    assert gateway.pipeline.outcomes[Outcome.CANCELLED] == 1
    assert len(ended) == 1
    assert 120 * SECOND < ended[0] < 140 * SECOND


def test_a_client_that_leaves_frees_its_place_in_the_same_instant(make: Make) -> None:
    gateway = make(places=1, mode=Mode.BACKPRESSURE)
    leaving, waiting = gateway.client(), gateway.client()
    leaving.transport.write(post(CHAT))
    waiting.transport.write(post(CHAT))
    gateway.run_to(3)
    assert gateway.pipeline.queued == 1
    gateway.loop.call_soon(leaving.transport.abort)
    gateway.run_to(3)
    assert gateway.pipeline.queued == 0
    assert gateway.pipeline.snapshot(gateway.loop.clock()).in_flight == 1
    assert gateway.pipeline.outcomes[Outcome.CANCELLED] == 1
