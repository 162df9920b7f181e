"""L. Start, health, drain, reload, second part: liveness and readiness, whatever else happens."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .rig import scripts
from .rig.backend import FakeBackend
from .rig.client import RawClient, ask, chat, wire
from .rig.crowd import Crowd
from .rig.gateway import GatewayProcess, StartGateway, config_for, key
from .rig.waiting import eventually

SOON_S = 0.1
PATIENT: dict[str, Any] = {"mode": "hybrid", "wait_budget_ms": 30_000}


def series(gateway: GatewayProcess, path: str, count: int) -> Iterator[tuple[int, float]]:
    """Status and seconds of one probe after the other, on connections of their own and on one that is kept."""
    with RawClient(gateway.port) as kept:
        for number in range(count):
            with RawClient(gateway.port) if number % 2 else contextlib.nullcontext(kept) as client:
                began = time.monotonic()
                client.request(method="GET", path=path)
                answer = client.read_answer(method="GET")
                yield answer.status, time.monotonic() - began


def live_and_ready(gateway: GatewayProcess, ready: int, count: int = 20) -> None:
    """Liveness is 200 in time, readiness tells the truth, and neither is counted anywhere."""
    before = gateway.snapshot()
    live = list(series(gateway, "/healthz", count))
    assert {status for status, _ in live} == {200}
    # One in ten may be late for another reason: this machine has other work.
    assert sorted(took for _, took in live)[count * 9 // 10] < SOON_S, live
    assert {status for status, _ in series(gateway, "/readyz", count // 2)} == {ready}
    after = gateway.snapshot()
    assert (after["offered"], after["in_flight"], after["queued"]) == (
        before["offered"], before["in_flight"], before["queued"],
    )  # fmt: skip


def test_l08_liveness_under_load(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """L-08: 1,000 connections, all slots taken, the queue full, the key at its limit."""
    keys = [key("a", requests_per_minute=5, concurrency=5)]
    gateway = start_gateway(config_for(backend, slots=2, places=3, keys=keys, **PATIENT))
    backend.script = scripts.silent
    with Crowd(gateway.port, 1000) as crowd:
        for number in range(5):
            crowd.send(number, wire(chat(), key="sk-a"))
        eventually(lambda: gateway.gauges() == (2, 3))
        for number in range(5, 500):
            crowd.send(number, b"GET /healthz HTTP/1.1\r\n")  # heads that do not end
        assert ask(gateway.port, key="sk-a").status == 429
        live_and_ready(gateway, ready=200)
        assert gateway.gauges() == (2, 3)
        assert gateway.admin("/healthz")
    gateway.settles()


def test_l08_liveness_without_engines(
    backend: FakeBackend, other_backend: FakeBackend, start_gateway: StartGateway
) -> None:
    """L-08: liveness says nothing of engines that are frozen or gone; readiness does, and only when none is left."""
    gateway = start_gateway(config_for(backend, other_backend))
    live_and_ready(gateway, ready=200)
    backend.die()
    eventually(lambda: [engine["readiness"] for engine in gateway.engines()] == ["down", "up"])
    live_and_ready(gateway, ready=200)
    other_backend.probe = scripts.silent
    eventually(lambda: [engine["readiness"] for engine in gateway.engines()] == ["down", "warming"], 4)
    live_and_ready(gateway, ready=503)
    backend.listen()
    eventually(lambda: ask(gateway.port, method="GET", path="/readyz").status == 200)


def test_l09_liveness_answers_while_engines_are_slow_to_start(backend: FakeBackend, tmp_path: Path) -> None:
    """L-09: the engine accepts and says nothing, as one that loads its model may for minutes. Liveness answers within
    2 s of the start of the process, on the data port, and before that on the admin port."""
    backend.probe = scripts.silent
    measured = []
    for attempt in range(3):  # the best of three: importing Python's own parts takes what the machine takes
        measured.append(_start(backend, tmp_path / str(attempt)))
        if max(measured[-1]) < 2.0:
            break
    assert max(measured[-1]) < 2.0, measured


def _start(backend: FakeBackend, folder: Path) -> tuple[float, float]:
    """Seconds from the start of the process to the first 200 of the data and the admin port."""
    data, admin = _free_port(), _free_port()
    began = time.monotonic()
    gateway = GatewayProcess(config_for(backend, engine={"probe": {"timeout_s": 10}}), folder, ports=(data, admin))
    try:
        admin_s = eventually(lambda: _alive(admin) and time.monotonic() - began, 20)
        data_s = eventually(lambda: _alive(data) and time.monotonic() - began, 20)
        assert ask(data, method="GET", path="/readyz").status == 503
        gateway.stop()
    finally:
        gateway.kill()
    return data_s, admin_s


def _alive(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port
