"""I. Hostile and odd request bodies, second part: sizes, the event loop, and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .rig import scripts
from .rig import watch as watching
from .rig.backend import FakeBackend
from .rig.checks import head_of, untouched
from .rig.client import RawClient, ask, chat, marker
from .rig.gateway import GatewayProcess, StartGateway, config_for
from .rig.scripts import LAST_CHUNK, chunk
from .rig.waiting import eventually, in_parallel

MEGABYTE = 1024 * 1024
LIMIT = 1 * MEGABYTE


def body_of(size: int, mark: str = "") -> bytes:
    """A chat body of exactly so many bytes."""
    frame = json.dumps(chat(mark or marker(), pad=""), separators=(",", ":")).encode()
    return frame[:-2] + b"x" * (size - len(frame)) + frame[-2:]


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_i08_the_limit_is_exact(backend: FakeBackend, start_gateway: StartGateway, chunked: bool) -> None:
    gateway = start_gateway(config_for(backend, server={"max_body_bytes": LIMIT}))
    backend.script = scripts.says()
    for size in (LIMIT - 1, LIMIT):
        assert ask(gateway.port, body_of(size), chunked=chunked).status == 200
    with untouched(gateway, backend):
        answer = ask(gateway.port, body_of(LIMIT + 1), chunked=chunked)
        assert (answer.status, answer.reason) == (413, "never_fits")
        assert str(LIMIT) in answer.error["message"]


def test_i08_far_over_the_limit_is_not_read(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, server={"max_body_bytes": LIMIT}))
    before = gateway.rss_bytes()
    with untouched(gateway, backend):
        with RawClient(gateway.port) as client:
            began = time.monotonic()
            client.send(head_of(10_000_000_000))
            assert client.read_answer().status == 413
            assert time.monotonic() - began < 0.2
        with RawClient(gateway.port) as client:
            client.send(head_of(None, ("transfer-encoding", "chunked")))
            for _ in range(5):
                client.send(chunk(b"x" * (LIMIT // 4)))
            answer = client.read_answer()
            assert (answer.status, answer.header("connection")) == (413, "close")
            client.send(LAST_CHUNK)  # too late: no reset while the answer is on its way
            assert client.closed_by_peer(3)
    assert gateway.rss_bytes() - before < 5 * LIMIT


def test_i08_the_defaults_admit_long_prompts(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend))
    backend.script = scripts.says()
    for size in (100_000, MEGABYTE, 8 * MEGABYTE):
        assert ask(gateway.port, body_of(size)).status == 200
    assert [len(call.body) for call in backend.calls] == [100_000, MEGABYTE, 8 * MEGABYTE]


STREAMS = 20
EVERY_S = 0.05


def test_i09_a_big_body_does_not_freeze_the_event_loop(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, slots=64))
    backend.script = scripts.streams(scripts.deltas(60), every=EVERY_S)
    # The best of three: a busy machine makes gaps of its own, the gateway would make them each time.
    measured = [_health_and_gaps(gateway, backend)]
    while max(measured[-1]) >= 0.1 and len(measured) < 3:
        measured.append(_health_and_gaps(gateway, backend))
    assert max(measured[-1]) < 0.1, measured


def _health_and_gaps(gateway: GatewayProcess, backend: FakeBackend) -> tuple[float, float]:
    """p99 of the health path's latency and of the streams' lateness, in seconds, around one body of 27 MB."""
    mark = marker()
    backend.by_marker[mark] = scripts.says()
    message = '{"role": "user", "content": "h\\u00e9"}, '  # as json.dumps writes it: spaces and escapes
    big = ('{"model": "m", "messages": [' + message * 700_000).rstrip(
        ", "
    ).encode() + b'], "user": "%b"}' % mark.encode()
    assert len(big) > 26 * MEGABYTE
    watch = [sys.executable, str(Path(watching.__file__)), str(gateway.port), str(STREAMS)]
    with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as watcher:
        eventually(lambda: backend.open_calls == STREAMS, 5)
        assert ask(gateway.port, big, within=10).status == 200
        seen, _ = watcher.communicate(timeout=20)
    assert watcher.returncode == 0
    series = json.loads(seen)
    assert len(series["health_s"]) > 50
    return percentile(series["health_s"], 0.99), percentile(series["gaps_s"], 0.99) - EVERY_S


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


def test_i10_memory_stays_a_small_multiple_of_the_bodies(backend: FakeBackend, start_gateway: StartGateway) -> None:
    size, count = 12 * MEGABYTE, 10
    gateway = start_gateway(
        config_for(backend, slots=1, mode="backpressure", queue={"deadline_s": 20, "tokens_limit": 1_000_000_000})
    )
    backend.script = scripts.silent
    ask(gateway.port, b"{")
    before = gateway.rss_bytes()
    clients = [RawClient(gateway.port) for _ in range(count + 1)]
    try:
        clients[0].request(chat())
        eventually(lambda: gateway.gauges() == (1, 0))
        frame = ('{"model": "m", "user": "h\\u00e9", "messages": ["' + "x" * size + '"]}').encode()
        most = 0
        for client in clients[1:]:
            client.send(head_of(len(frame)) + frame)
            most = max(most, gateway.rss_bytes())
        eventually(lambda: gateway.gauges() == (1, count), within=10)
        most = max(most, gateway.rss_bytes())
        assert size * count * 0.9 < most - before <= 3 * size * count
        held = json.loads(gateway.admin("/api/v1/status"))["buffered_body_bytes"]
        assert size * count <= held < size * count * 1.01
    finally:
        for client in clients:
            client.close()
    gateway.settles()
    assert json.loads(gateway.admin("/api/v1/status"))["buffered_body_bytes"] == 0
    eventually(lambda: gateway.rss_bytes() - before < size * count / 3, 3, "memory given back")


def test_i10_held_senders_do_not_wait_for_each_other(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """Bodies fill the memory that they may while none of them is whole: one goes on, and makes room for the next."""
    size = {"max_body_bytes": MEGABYTE, "max_buffered_body_bytes": MEGABYTE, "body_timeout_s": 5}
    gateway = start_gateway(config_for(backend, mode="backpressure", server=size))
    backend.script = scripts.says()
    bodies = [body_of(900_000) for _ in range(6)]
    clients = [RawClient(gateway.port) for _ in bodies]
    for client, body in zip(clients, bodies, strict=True):
        client.send(head_of(len(body)) + body[:300_000])
    eventually(lambda: json.loads(gateway.admin("/api/v1/status"))["buffered_body_bytes"] > MEGABYTE)

    def finish(turn: tuple[RawClient, bytes]) -> int:
        client, body = turn
        client.send(body[300_000:])
        return client.read_answer(8).status

    assert in_parallel(finish, zip(clients, bodies, strict=True)) == [200] * 6
    for client in clients:
        client.close()
    gateway.settles()
    assert json.loads(gateway.admin("/api/v1/status"))["buffered_body_bytes"] == 0
