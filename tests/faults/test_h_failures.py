"""H. Backend failures, first part: time-outs, dead and silent engines, reused connections, replays."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .rig import scripts
from .rig.backend import Call, FakeBackend
from .rig.client import Answer, EndedShortError, RawClient, ask, chat, marker
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, wait_until
from .rig.scripts import DONE, LAST_CHUNK, Do, chunk
from .rig.waiting import eventually, in_parallel

UNDER_5_S = 6.0  # longer than the time-out that HTTP libraries come with


def remaining_tokens(answer: Answer) -> int:
    return int(answer.header("x-ratelimit-remaining-tokens") or -1)


def refused_quickly(gateway: GatewayProcess, statuses: set[int], **how: str) -> Answer:
    began = time.monotonic()
    answer = ask(gateway.port, chat(max_tokens=500), **how)
    assert time.monotonic() - began < 0.5
    assert answer.status in statuses
    return answer


def test_h01_backend_refuses(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, slots=2, keys=[key("a", tokens_per_minute=600)]))
    before = remaining_tokens(ask(gateway.port, chat(max_tokens=1), key="sk-a"))
    backend.die()
    for _ in range(10):
        refused_quickly(gateway, {502, 503}, key="sk-a")
    gateway.settles()
    backend.listen()
    eventually(gateway.ready)
    after = remaining_tokens(ask(gateway.port, chat(max_tokens=1), key="sk-a"))
    assert after >= before - 50, "what was held for the failed ones was given back"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid:8000"], ids=["closed port", "name"])
def test_h01_nothing_there_from_the_start(start_gateway: StartGateway, url: str) -> None:
    gateway = start_gateway(config_for(url), ready=False)
    answer = refused_quickly(gateway, {503})
    assert answer.reason in {"no_engine", "warming"}
    assert answer.retry_after >= 1
    assert ask(gateway.port, method="GET", path="/v1/models").status == 503
    gateway.settles()


def test_h01_a_live_one_beside_a_dead_one(
    backend: FakeBackend, other_backend: FakeBackend, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(config_for(backend, other_backend))
    other_backend.die()
    assert {answer.status for answer in in_parallel(lambda _: ask(gateway.port), range(4))} == {200}
    assert {ask(gateway.port).status for _ in range(10)} == {200}


def test_h01_a_name_with_a_dead_address(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """`localhost` is ::1 and 127.0.0.1 on most machines, and the backend has only the latter."""
    gateway = start_gateway(config_for(f"http://localhost:{backend.port}"))
    assert ask(gateway.port).status == 200


def test_h02_accepts_and_never_answers(
    backend: FakeBackend, other_backend: FakeBackend, start_gateway: StartGateway
) -> None:
    backend.script = scripts.silent
    other_backend.script = scripts.says(after=0.05)
    limits = {"timeouts": {"first_byte_s": 1.0}}
    gateway = start_gateway(config_for(backend, other_backend, slots=50, engine=limits))
    began = time.monotonic()
    answers = in_parallel(lambda _: ask(gateway.port), range(100))
    silent = [answer for answer in answers if answer.status == 504]
    served = [answer for answer in answers if answer.status == 200]
    assert len(silent) + len(served) == 100
    assert len(silent) == len(backend.calls) > 20
    assert all(0.9 < answer.head.at - began < 2.0 for answer in silent)
    assert all(answer.head.at - began < 0.9 for answer in served)
    assert all(answer.reason == "engine_timeout" for answer in silent)
    assert [engine["ejected"] for engine in gateway.engines()] == [True, False]
    assert {ask(gateway.port).status for _ in range(10)} == {200}
    assert len(backend.calls) == len(silent)
    eventually(lambda: not backend.open_calls)
    eventually(lambda: len(backend.connections) <= 1, what="only a probe may be open")
    gateway.settles()


def test_h03_pauses_longer_than_a_library_default(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend))
    whole = scripts.answer(200, scripts.completion())
    plans = [
        (scripts.says(after=UNDER_5_S), False),
        (scripts.streams(scripts.deltas(2), every=UNDER_5_S), True),
        (scripts.streams(scripts.deltas(1), first_after=UNDER_5_S), True),
        (scripts.steps(whole[:-30], UNDER_5_S, whole[-30:]), False),
    ]

    def run(plan: tuple[scripts.Script, bool]) -> Answer:
        script, stream = plan
        backend.by_marker[mark := marker()] = script
        return ask(gateway.port, chat(mark, stream=stream), within=UNDER_5_S + 3)

    for answer in in_parallel(run, plans):
        assert (answer.status, answer.ended) == (200, "whole")
        assert answer.body.endswith(DONE) or answer.json() == scripts.completion()


@contextmanager
def frozen(backend: FakeBackend) -> Iterator[None]:
    """Stop the backend as SIGSTOP does: its connections stay open, and nothing on them is read or answered."""
    thaw, asleep = threading.Event(), threading.Event()

    def sleep() -> None:
        asleep.set()
        thaw.wait(20)

    backend._loop.call_soon_threadsafe(sleep)
    assert asleep.wait(2)
    try:
        yield
    finally:
        thaw.set()


def test_h04_half_open_connection(backend: FakeBackend, start_gateway: StartGateway) -> None:
    limits = {"timeouts": {"idle_s": 0.8}, "probe": {"interval_s": 10, "timeout_s": 5}}
    gateway = start_gateway(config_for(backend, slots=8, engine=limits))
    backend.script = scripts.says(after=0.1)
    in_parallel(lambda _: ask(gateway.port), range(4))  # four idle connections
    backend.script = scripts.streams(scripts.deltas(3), end=(Do.HOLD,), done=False)
    with RawClient(gateway.port) as client:
        client.request(chat(stream=True))
        assert client.read_head().status == 200
        events = [client.read_event() for _ in range(3)]
        assert events == scripts.deltas(3)
        with frozen(backend):
            began = time.monotonic()
            last = client.read_event(3)
            assert 0.5 < time.monotonic() - began < 1.5
            assert last is not None
            assert b'"error"' in last
            assert b"engine_timeout" in last
            assert client.read_event() is None
            assert client.closed_by_peer()
            gateway.settles()
    accepted = backend.accepted
    backend.script = scripts.says()
    assert ask(gateway.port).status == 200
    assert backend.accepted == accepted + 1, "an idle connection from before was used"


KEEP_S = 0.05


async def hangs_up_when_idle(call: Call) -> None:
    """Answer, and close the connection when it has been idle for KEEP_S, as servers do."""
    await call.send(scripts.answer(200, scripts.completion()))
    connection = call.connection

    def close_if_idle() -> None:
        if connection.call is None:
            connection.transport.close()

    asyncio.get_running_loop().call_later(KEEP_S, close_if_idle)


def test_h05_reuse_of_a_connection_the_backend_just_closed(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, slots=16))
    backend.script = hangs_up_when_idle
    marks = [[marker() for _ in range(50)] for _ in range(10)]

    def client_side(mine: list[str]) -> set[int]:
        chance = random.Random(mine[0])
        statuses = set()
        with RawClient(gateway.port) as client:
            for mark in mine:
                began = time.monotonic()
                client.request(chat(mark))
                statuses.add(client.read_answer().status)
                wait_until(began + KEEP_S + chance.uniform(-0.004, 0.006))
        return statuses

    assert in_parallel(client_side, marks) == [{200}] * 10
    for mark in (mark for mine in marks for mark in mine):
        assert backend.call(mark) is not None  # and exactly one
    assert backend.accepted > 50, "connections were closed under the requests"


def warm(gateway: GatewayProcess) -> None:
    """Leave one idle connection to the backend, which the next request uses."""
    assert ask(gateway.port).status == 200


@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused"])
def test_h07_a_500_after_the_work_is_not_replayed(
    backend: FakeBackend, other_backend: FakeBackend, start_gateway: StartGateway, reused: bool
) -> None:
    gateway = start_gateway(config_for(backend, other_backend))
    if reused:
        in_parallel(lambda _: warm(gateway), range(4))
    mark = marker()
    for each in (backend, other_backend):
        each.by_marker[mark] = scripts.steps(0.2, scripts.answer(500, {"error": {"message": "boom"}}))
    answer = ask(gateway.port, chat(mark))
    assert (answer.status, answer.json()) == (500, {"error": {"message": "boom"}})
    assert len([call for each in (backend, other_backend) for call in each.calls if call.marker == mark]) == 1


def test_h07_a_503_is_replayed_at_most_once(
    backend: FakeBackend, other_backend: FakeBackend, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(config_for(backend, other_backend))
    mark = marker()
    for each in (backend, other_backend):
        each.by_marker[mark] = scripts.refuses(503)
    answer = ask(gateway.port, chat(mark))
    assert answer.status == 503
    assert answer.retry_after >= 1
    assert all(sum(call.marker == mark for call in each.calls) <= 1 for each in (backend, other_backend))


def test_h07_a_reset_before_the_body_was_read(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """On a fresh connection it is the engine's doing: 502, once. On a reused one it may have been stale: once more."""
    gateway = start_gateway(config_for(backend))
    backend.script = scripts.on_head(Do.RESET)
    answer = ask(gateway.port, chat(pad="x" * 100_000))
    assert (answer.status, answer.reason) == (502, "engine_error")
    assert len(backend.calls) == 1
    backend.script = scripts.ordinary
    warm(gateway)
    backend.plan.append(scripts.on_head(Do.RESET))
    assert ask(gateway.port, chat(pad="x" * 100_000)).status == 200
    assert len(backend.calls) == 4


def test_h07_a_request_that_kills_the_engine_is_not_handed_on(
    backend: FakeBackend, other_backend: FakeBackend, start_gateway: StartGateway
) -> None:
    """The poison request: whoever works on it dies without a byte of an answer. It must not take the next one along."""
    gateway = start_gateway(config_for(backend, other_backend))
    in_parallel(lambda _: warm(gateway), range(8))
    mark = marker()

    async def dies(call: Call) -> None:
        await asyncio.sleep(1.2)
        call.reset()

    for each in (backend, other_backend):
        each.by_marker[mark] = dies
    answer = ask(gateway.port, chat(mark))
    assert (answer.status, answer.reason) == (502, "engine_error")
    assert sum(call.marker == mark for each in (backend, other_backend) for call in each.calls) == 1


def test_h07_nothing_is_replayed_after_a_byte_of_the_answer(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend))
    warm(gateway)
    for script in (
        scripts.streams(scripts.deltas(1), done=False, end=(0.1, Do.RESET)),
        scripts.steps(scripts.sse_head(), 0.3, Do.RESET),
        scripts.steps(b"HTTP/1.1 200 ", 0.1, Do.CLOSE),
        scripts.steps(scripts.answer(200, scripts.completion())[:-5], 0.1, Do.RESET),
    ):
        mark = marker()
        backend.by_marker[mark] = script
        calls = len(backend.calls)
        try:
            answer = ask(gateway.port, chat(mark, stream=True))
            assert answer.status == 502 or b'"error"' in answer.body or answer.ended != "whole"
            assert DONE not in answer.body
        except EndedShortError:
            pass
        assert len(backend.calls) == calls + 1
        warm(gateway)


def test_h09_connections_after_an_abnormal_end(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, slots=40, engine={"timeouts": {"idle_s": 0.5}}))
    warm(gateway)
    descriptors = gateway.open_fds()
    ends: dict[str, scripts.Script] = {
        "read time-out": scripts.streams(scripts.deltas(2), done=False, end=(Do.HOLD,)),
        "client cancel": scripts.streams(scripts.deltas(200), every=0.05),
        "backend reset": scripts.streams(scripts.deltas(2), done=False, end=(0.05, Do.RESET)),
        "bad chunk framing": scripts.streams(scripts.deltas(2), done=False, end=(0.05, b"zz\r\nxx\r\n")),
    }

    def one(how: str) -> None:
        backend.by_marker[mark := marker()] = ends[how]
        with RawClient(gateway.port) as client:
            client.request(chat(mark, stream=True))
            assert client.read_head().status == 200
            assert client.read_event() == scripts.delta("x0")
            if how != "client cancel":
                rest = b"".join(client.events(3))
                assert b'"error"' in rest
                assert DONE not in rest

    in_parallel(one, [how for how in ends for _ in range(10)])
    gateway.settles()
    eventually(lambda: not backend.open_calls)
    # So many failures in a row speak against an engine: it is set aside for a moment.
    eventually(lambda: ask(gateway.port).status == 200, 5)
    eventually(lambda: gateway.open_fds() <= descriptors + 1, 2, "sockets back to the idle level")
    eventually(lambda: len(backend.connections) <= 2)


def test_h09_a_whole_answer_leaves_its_connection_for_the_next(
    backend: FakeBackend, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(config_for(backend, engine={"probe": {"interval_s": 60}}))
    warm(gateway)
    accepted = backend.accepted
    for script in (scripts.ordinary, scripts.refuses(400), scripts.streams(scripts.deltas(3))):
        for _ in range(5):
            backend.script = script
            ask(gateway.port, chat(stream=script is not scripts.ordinary))
    assert backend.accepted == accepted
    # Bytes behind the end of an answer would be taken for the next one: such a connection is not used again.
    backend.script = scripts.steps(scripts.answer(200, scripts.completion()) + scripts.answer(200, b"smuggled"))
    assert ask(gateway.port).json() == scripts.completion()
    backend.script = scripts.ordinary
    assert ask(gateway.port).json() == scripts.completion()
    assert backend.accepted == accepted + 1
    backend.script = scripts.steps(scripts.sse_head(), chunk(scripts.delta() + DONE) + LAST_CHUNK + chunk(b"more"))
    assert ask(gateway.port, chat(stream=True)).body == scripts.delta() + DONE
    backend.script = scripts.ordinary
    assert ask(gateway.port).json() == scripts.completion()
