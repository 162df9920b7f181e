"""L. Start, health, drain, reload, first part: cold starts, signals, kills, a limit that is lowered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from .rig import scripts
from .rig.backend import FakeBackend
from .rig.client import Answer, EndedShortError, RawClient, ask, chat, marker, wire
from .rig.crowd import Crowd
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, serving, to_toml, wait_until
from .rig.scripts import DONE
from .rig.waiting import eventually

PATIENT: dict[str, Any] = {"mode": "hybrid", "wait_budget_ms": 30_000}


# ---- L-01: cold start ---------------------------------------------------------------------------------------------


def test_l01_cold_start(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """L-01: the port is open, /v1/models answers 200, /health 503, and completions hang. Nobody is let through before
    it is ready, everybody is told when to come back, nothing waits; then the first request succeeds.

    The time to come back is 30 s before any start was seen, and what the last one took afterwards."""
    starting = scripts.refuses(503)

    async def probe(call: Any) -> None:
        await (starting if call.target == "/health" else scripts.healthy)(call)

    backend.probe, backend.script = probe, scripts.silent
    gateway = start_gateway(config_for(backend, **PATIENT), ready=False)
    began, asked = time.monotonic(), 0
    while time.monotonic() < began + 0.8:
        answer, asked = ask(gateway.port, chat(stream=True)), asked + 1
        assert (answer.status, answer.reason) == (503, "warming")
        assert 28 <= answer.retry_after <= 31 + asked, "one return per second, while nothing is known of the engine"
        assert gateway.gauges() == (0, 0)
        time.sleep(0.1)  # the engine stays cold for 0.8 s: asked now and then
    assert not backend.calls
    assert ask(gateway.port, method="GET", path="/readyz").status == 503
    backend.probe, backend.script = scripts.healthy, scripts.ordinary
    eventually(gateway.ready)
    assert ask(gateway.port).status == 200
    backend.probe = probe
    eventually(lambda: not gateway.ready())
    learnt = ask(gateway.port)
    assert (learnt.status, learnt.reason) == (503, "warming")
    assert learnt.retry_after <= 4, "the last start took about a second"


def test_a_waiting_room_serves_those_who_came_too_early(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """The official client meets a cold engine: two wait until it is up, the third is sent away."""
    backend.probe = scripts.refuses(503)
    room = {"waiting_room": 2, "waiting_room_s": 60}
    gateway = start_gateway(config_for(backend, admission=room), ready=False)
    eventually(lambda: ask(gateway.port, method="GET", path="/readyz").status == 503)

    def call() -> str:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "early"}])
        return "served"

    with ThreadPoolExecutor(2) as workers:
        early = [workers.submit(call) for _ in range(2)]
        eventually(lambda: gateway.gauges() == (0, 2), 10, "both wait")
        sent_away = ask(gateway.port)
        assert (sent_away.status, sent_away.reason) == (503, "warming")
        backend.probe = scripts.healthy
        assert [one.result(timeout=30) for one in early] == ["served", "served"]
    assert len(backend.calls) == 2


# ---- L-02, L-03: signals ------------------------------------------------------------------------------------------


@contextmanager
def streaming(gateway: GatewayProcess, count: int) -> Iterator[list[RawClient]]:
    """Streams whose first event is read."""
    clients = [RawClient(gateway.port) for _ in range(count)]
    try:
        for client in clients:
            client.send(wire(chat(stream=True)))
            assert client.read_head().status == 200
            client.read_event()
        yield clients
    finally:
        for client in clients:
            client.close()


def test_l02_sigterm_with_work_in_progress(backend: FakeBackend, tmp_path: Path) -> None:
    """L-02: two streams run, three requests wait, connections are idle, and new ones come for as long as load
    balancers take to hear of it. Readiness is 503 at once; what is new is served during server.drain_delay_s and told
    503 and `connection: close` afterwards, never reset; what was admitted ends; exit 0 before the deadline."""
    delay_s, running_s = 0.6, 1.8
    server = {"drain_delay_s": delay_s, "drain_timeout_s": 10}
    gateway = GatewayProcess(config_for(backend, slots=2, server=server, **PATIENT), tmp_path)
    try:
        backend.plan.extend([scripts.streams(scripts.deltas(25), every=running_s / 25)] * 2)
        with (
            streaming(gateway, 2) as streams,
            Crowd(gateway.port, 3) as waiting,
            Crowd(gateway.port, 5) as idle,
        ):
            idle.clients[0].request(method="GET", path="/healthz")
            assert idle.clients[0].read_answer(method="GET").status == 200
            for number in range(3):
                waiting.send(number, wire(chat()))
            eventually(lambda: gateway.gauges() == (2, 3))
            gateway.signal(signal.SIGTERM)
            signalled = time.monotonic()
            ready = eventually(lambda: _is_503(gateway), 0.5)
            assert ready.head.at - signalled < 0.3, "at once"
            late = _arrivals(gateway, signalled, delay_s, until=signalled + 1.2)
            for client in streams:
                assert list(client.events())[-1] == DONE
            waiting.read(5.0)
            assert len(waiting.with_status(200)) == 3
            assert all(client.closed_by_peer(2) for client in idle.clients)
        gateway.process.wait(3)
        assert gateway.process.returncode == 0, gateway.stderr
        assert time.monotonic() - signalled < running_s + 3
        assert "Traceback" not in gateway.stderr
        assert {status for status, _ in late} == {200, 503}
    finally:
        gateway.kill()


def _is_503(gateway: GatewayProcess) -> Answer | None:
    answer = ask(gateway.port, method="GET", path="/readyz")
    return answer if answer.status == 503 else None


def _arrivals(gateway: GatewayProcess, signalled: float, delay_s: float, until: float) -> list[tuple[int, float]]:
    """New connections every 50 ms: those of the delay join the queue, those after it are told at once."""
    seen: list[tuple[int, float]] = []
    threads = []

    def one() -> None:
        sent = time.monotonic()
        answer = ask(gateway.port, within=8)
        assert answer.ended == "whole"
        if answer.status == 503:
            assert sent >= signalled + delay_s - 0.1
            assert (answer.reason, answer.header("connection")) == ("draining", "close")
            assert answer.retry_after >= 1
        seen.append((answer.status, sent))

    count = 0
    while time.monotonic() < until:
        count += 1
        threads.append(threading.Thread(target=one))
        threads[-1].start()
        time.sleep(0.05)  # the rate of the load
    for thread in threads:
        thread.join()
    assert len(seen) == count, "every one has a complete answer"
    return seen


def test_l02_an_idle_gateway_stays_for_the_delay(backend: FakeBackend, tmp_path: Path) -> None:
    """L-02: with nothing to do it does not leave before the load balancers had time to hear that it is not ready."""
    gateway = GatewayProcess(config_for(backend, server={"drain_delay_s": 0.6, "drain_timeout_s": 5}), tmp_path)
    try:
        gateway.signal(signal.SIGTERM)
        signalled = time.monotonic()
        eventually(lambda: _is_503(gateway), 0.5)
        while time.monotonic() < signalled + 0.4:
            assert ask(gateway.port).status == 200
            time.sleep(0.05)  # asked now and then during the delay
        gateway.process.wait(3)
        assert gateway.process.returncode == 0
        assert 0.55 <= time.monotonic() - signalled < 2.0
    finally:
        gateway.kill()


def test_l03_sigterm_with_a_stream_that_never_ends(backend: FakeBackend, tmp_path: Path) -> None:
    """L-03: an endless stream, a backend that says nothing, and one who waits. At the deadline each client gets its
    error and a close, the backend sees the close, and the process ends with 0."""
    drain_s = 0.8
    gateway = GatewayProcess(config_for(backend, slots=2, server={"drain_timeout_s": drain_s}, **PATIENT), tmp_path)
    try:
        backend.plan.extend([scripts.streams(scripts.deltas(10_000), every=0.02), scripts.silent])
        with streaming(gateway, 1) as (endless,), Crowd(gateway.port, 2) as others:
            for number in range(2):
                others.send(number, wire(chat()))
                eventually(lambda number=number: gateway.gauges() == (2, number))
            gateway.signal(signal.SIGTERM)
            signalled = time.monotonic()
            events = list(endless.events(3.0))
            assert b'"error"' in events[-1], events[-1]
            assert DONE not in events
            assert endless.closed_by_peer()
            others.read(1.0)
            silent, waited = (others.heads[number] for number in range(2))
            assert silent.status in {502, 503}
            assert (waited.status, waited.get("x-forebay-reason")) == (503, "draining")
            assert all(drain_s - 0.05 <= head.at - signalled < drain_s + 0.5 for head in (silent, waited))
        gateway.process.wait(3)
        assert time.monotonic() - signalled < drain_s + 1.0
        assert gateway.process.returncode == 0, gateway.stderr
        assert "Traceback" not in gateway.stderr
        eventually(lambda: not backend.open_calls)
        assert all(call.peer_closed_at is not None for call in backend.calls)
    finally:
        gateway.kill()


@pytest.mark.parametrize("delay_s", [0, 20], ids=["draining", "in the delay"])
def test_l03_the_second_signal_is_immediate(backend: FakeBackend, tmp_path: Path, delay_s: float) -> None:
    """L-03: a second signal ends the drain, and the delay before it."""
    server = {"drain_timeout_s": 20} | ({"drain_delay_s": delay_s} if delay_s else {})
    gateway = GatewayProcess(config_for(backend, slots=2, server=server), tmp_path)
    try:
        backend.plan.append(scripts.streams(scripts.deltas(10_000), every=0.02))
        with streaming(gateway, 1) as (endless,):
            gateway.signal(signal.SIGTERM)
            eventually(lambda: _is_503(gateway))
            gateway.signal(signal.SIGTERM)
            again = time.monotonic()
            events = list(endless.events(2.0))
            assert b'"error"' in events[-1]
        gateway.process.wait(3)
        assert time.monotonic() - again < 1.0
        assert gateway.process.returncode == 0
        eventually(lambda: not backend.open_calls)
    finally:
        gateway.kill()


# ---- L-04: kills --------------------------------------------------------------------------------------------------


def test_l04_a_killed_gateway_leaves_nothing_behind(backend: FakeBackend, tmp_path: Path) -> None:
    """L-04: of two gateways before one backend one is killed with five requests in flight: their clients get a reset
    at once and no hang, the backend sees its connections closed, and the other gateway does not notice.

    Counters live in the process, so that there are no ghosts to expire; a shared store is to be tested when there is
    one."""
    config = config_for(backend, slots=5, keys=[key("a", concurrency=5)])
    with serving(config, tmp_path / "stays") as stays:
        killed = GatewayProcess(config, tmp_path / "killed")
        try:
            backend.script = scripts.streams(scripts.deltas(1000), every=0.05)
            clients = [RawClient(killed.port) for _ in range(5)]
            for client in clients:
                client.send(wire(chat(stream=True), key="sk-a"))
                assert client.read_head().status == 200
            assert backend.open_calls == 5
        finally:
            killed.kill()
        at = time.monotonic()
        for client in clients:
            with pytest.raises(EndedShortError):
                list(client.events(1.0))
            client.close()
        assert time.monotonic() - at < 1.0
        eventually(lambda: backend.open_calls == 0, 1.0)
        backend.script = scripts.Gate(scripts.says())
        with Crowd(stays.port, 5) as crowd:
            for number in range(5):
                crowd.send(number, wire(chat(), key="sk-a"))
            eventually(lambda: backend.open_calls == 5, 1.0, "all five slots are to be had")
            backend.script.open(backend)
            crowd.read(2.0)
            assert len(crowd.with_status(200)) == 5


# ---- L-06: files --------------------------------------------------------------------------------------------------

GOOD = to_toml({"engines": [{"name": "e", "urls": ["http://127.0.0.1:1"]}], "queue": {"depth_limit": 5}})
BAD_FILES = {
    "broken": (GOOD + "[queue\n", ":3:"),
    "unknown field": (GOOD + "[server]\nprot = 1\n", "port"),
    "partial": (GOOD[: len(GOOD) // 2], ":1:"),
    "not text": (b"\xff\xfe\x00".decode("latin-1"), "UTF-8"),
}


@pytest.mark.parametrize("name", [*BAD_FILES, "unreadable"])
def test_l06_a_bad_file_is_refused_at_start(tmp_path: Path, name: str) -> None:
    """L-06 at the start (test_l_reload.py has the rest): a file that is broken, has unknown fields, is half written or
    cannot be read is refused with what is wrong and where, and nothing listens."""
    path = tmp_path / "forebay.toml"
    text, said = BAD_FILES.get(name, ("", "is a directory"))
    if name == "unreadable":
        path.mkdir()  # root reads any file, but not this
    else:
        path.write_bytes(text.encode("latin-1"))
    command = [sys.executable, "-m", "forebay", "serve", "--config", str(path), "--port", "0", "--admin-port", "0"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FOREBAY_")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode == 2
    assert str(path) in ended.stderr
    assert said in ended.stderr
    assert "listening" not in ended.stdout
    assert "Traceback" not in ended.stderr


# ---- L-07: a lower limit ------------------------------------------------------------------------------------------


def test_l07_a_limit_that_lowers_itself_below_what_is_running(
    backend: FakeBackend, start_gateway: StartGateway
) -> None:
    """L-07: eight run and four wait when the limit falls to two. None is killed, none starts until fewer than two run,
    and those that wait stay in line. Here a guarded limit lowers itself."""
    limit = {"kind": "guarded", "limit": 8, "least": 2, "most": 8}
    gateway = start_gateway(config_for(backend, mode="backpressure", engine={"concurrency": limit}))
    slow, ends = [marker() for _ in range(8)], threading.Event()

    async def stream(call: Any) -> None:
        """Far slower than the objective, until told to end."""
        await call.send(scripts.sse_head())
        while not ends.is_set() or call.marker == slow[0]:
            await scripts.run(call, [scripts.chunk(scripts.delta()), 0.25])
        await scripts.run(call, [scripts.chunk(DONE), scripts.LAST_CHUNK])

    backend.by_marker.update(dict.fromkeys(slow, stream))
    backend.script = scripts.Gate(scripts.says())
    with Crowd(gateway.port, 12) as crowd:
        for number, mark in enumerate(slow):
            crowd.send(number, wire(chat(mark, stream=True)))
        eventually(lambda: gateway.gauges() == (8, 0))
        for number in range(8, 12):
            crowd.send(number, wire(chat()))
        eventually(lambda: gateway.engines()[0]["concurrency_limit"] == 2, 8)
        assert gateway.gauges() == (8, 4)
        assert len(backend.calls) == backend.open_calls == 8, "none is killed, none starts"
        ends.set()
        eventually(lambda: gateway.gauges() == (2, 3), 3, "one goes on, and one more fits")
        assert len(backend.calls) == 9
        wait_until(time.monotonic() + 0.2)
        assert len(backend.calls) == 9
        crowd.read(0.1)
        assert len(crowd.with_status(200)) == 8
        backend.script.open(backend)
        crowd.read(5.0)
        assert len(crowd.with_status(200)) == 12
        crowd.clients[0].close()
    gateway.settles()


def test_l07_limits_that_a_reload_lowers_below_what_is_there(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """L-07: by a reload S falls from 8 to 2 with 8 running, Q from 10 to 1 with 5 waiting, and the key of one that
    waits is taken away. None that is in is killed, none starts until fewer than two run, nobody new gets in."""
    keys = [key("a"), key("b")]
    before = config_for(backend, slots=8, places=10, keys=keys, **PATIENT)
    after = config_for(backend, slots=2, places=1, keys=keys[:1], **PATIENT)
    gateway = start_gateway(before)
    gates = [scripts.Gate(scripts.says()) for _ in range(8)]
    backend.plan.extend(gates)
    rest = backend.script = scripts.Gate(scripts.says())
    with Crowd(gateway.port, 13) as crowd:
        for number in range(8):
            crowd.send(number, wire(chat(), key="sk-a"))
        eventually(lambda: backend.open_calls == 8)
        for number in range(8, 13):
            crowd.send(number, wire(chat(), key="sk-b" if number == 8 else "sk-a"))
        eventually(lambda: gateway.gauges() == (8, 5))
        gateway.config_file.write_text(to_toml(after))
        gateway.signal(signal.SIGHUP)
        eventually(lambda: gateway.engines()[0]["concurrency_limit"] == 2)
        assert gateway.gauges() == (8, 5)
        assert (ask(gateway.port, key="sk-a").reason, ask(gateway.port, key="sk-b").status) == ("queue_full", 401)
        for gate in gates[:6]:
            gate.open(backend)
        eventually(lambda: gateway.gauges() == (2, 5))
        assert len(backend.calls) == 8, "none starts"
        gates[6].open(backend)
        eventually(lambda: gateway.gauges() == (2, 4))
        gates[7].open(backend)
        rest.open(backend)
        crowd.read(5.0)
        assert len(crowd.with_status(200)) == 13
        assert backend.high_water == 8
    gateway.settles()
