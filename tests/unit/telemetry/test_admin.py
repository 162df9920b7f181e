"""The admin port over a real socket: what it serves, to whom, and its bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry, Gauge

from forebay.core.snapshot import Snapshot
from forebay.errors import ConfigError, UsageError
from forebay.ingress import admin
from forebay.ingress.admin import AdminServer
from forebay.ingress.api.table import Asked, Endpoint, Reply

SNAPSHOT = Snapshot(draining=False, offered=3, outcomes={"completed": 3}, queued=0, in_flight=0, keys=1, pools=())


def server(
    token: str | None = None,
    status: Callable[[], dict[str, Any]] = lambda: {"mode": "hybrid"},
    more: tuple[Endpoint, ...] = (),
) -> AdminServer:
    registry = CollectorRegistry()
    Gauge("forebay_one", "One.", registry=registry).set(1)
    Gauge("forebay_two", "Two.", registry=registry).set(2)
    return AdminServer(lambda: SNAPSHOT, status, registry, token, tuners=lambda frozen: {"frozen": frozen}, more=more)


def serve(made: AdminServer, talk: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
        port = await made.start("127.0.0.1", 0)
        try:
            await asyncio.wait_for(talk(port), 10)
        finally:
            await made.stop()
        assert not made.connections

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run())


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def exchange(port: int, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, read until the server closes: (status, headers, body)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    try:
        data = await reader.read()
    finally:
        await close(writer)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, body


def get(path: str, headers: str = "", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n".encode()


def test_it_serves_health_metrics_status_and_snapshot() -> None:
    async def talk(port: int) -> None:
        assert (await exchange(port, get("/healthz")))[2] == b'{"status":"alive"}'
        status, headers, body = await exchange(port, get("/metrics?x=1"))
        assert status == 200
        assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert headers["content-length"] == str(len(body))
        assert b"forebay_one 1.0\n" in body
        assert body.endswith(b"forebay_two 2.0\n")
        assert json.loads((await exchange(port, get("/api/v1/status")))[2]) == {"mode": "hybrid"}
        assert json.loads((await exchange(port, get("/api/v1/snapshot")))[2])["offered"] == 3
        status, headers, body = await exchange(port, get("/metrics", method="HEAD"))
        assert (status, body) == (200, b"")
        assert int(headers["content-length"]) > 50

    serve(server(), talk)


def test_errors_are_json_and_say_what_to_do() -> None:
    async def talk(port: int) -> None:
        status, _, body = await exchange(port, get("/nope"))
        assert status == 404
        assert json.loads(body)["error"]["code"] == "not_found"
        status, headers, _ = await exchange(port, get("/metrics", method="POST"))
        assert (status, headers["allow"]) == (405, "GET, HEAD")
        status, headers, _ = await exchange(port, b"nonsense\r\n\r\n")
        assert (status, headers["connection"]) == (400, "close")
        status, _, _ = await exchange(port, b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 20_000)
        assert status == 413

    serve(server(), talk)


def test_a_token_opens_everything_and_its_lack_only_health() -> None:
    async def talk(port: int) -> None:
        for path in ("/metrics", "/api/v1/status", "/nope"):
            status, headers, body = await exchange(port, get(path))
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert json.loads(body)["error"]["code"] == "invalid_token"
        for wrong in ("Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "s3cret", "Bearer"):
            assert (await exchange(port, get("/metrics", f"authorization: {wrong}\r\n")))[0] == 401
        assert (await exchange(port, get("/metrics", "Authorization: bearer s3cret\r\n")))[0] == 200
        assert (await exchange(port, get("/healthz")))[0] == 200

    serve(server("s3cret"), talk)


def test_a_connection_is_kept_and_a_second_request_on_it_is_served() -> None:
    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"connection: close" not in head
            await reader.readexactly(18)
        await close(writer)

    serve(server(), talk)


def test_an_offer_of_another_protocol_is_declined_with_the_answer() -> None:
    async def talk(port: int) -> None:
        raw = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
        status, _, body = await exchange(port, raw)
        assert (status, body) == (200, b'{"status":"alive"}')

    serve(server(), talk)


def test_a_failing_status_is_a_500_and_the_port_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no figures")

    async def talk(port: int) -> None:
        status, _, body = await exchange(port, get("/api/v1/status"))
        assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
        assert b"no figures" not in body
        assert (await exchange(port, get("/healthz")))[0] == 200

    serve(server(status=broken), talk)
    assert "no figures" in caplog.text


async def _echo(asked: Asked) -> Reply:
    """What was asked, as it arrived."""
    said = {"body": len(asked.body), "query": asked.query, "place": asked.place, "word": asked.idempotency}
    return Reply(201, json.dumps(said).encode())


def post(path: str, body: bytes, headers: str = "") -> bytes:
    return get(path, f"content-length: {len(body)}\r\n{headers}", "POST") + body


def test_a_body_a_query_and_an_idempotency_key_arrive() -> None:
    async def talk(port: int) -> None:
        raw = post("/echo/a%20b?x=1&y=%2F", b"z" * 60_000, "Idempotency-Key: w\r\n")
        status, _, body = await exchange(port, raw)
        assert status == 201
        assert json.loads(body) == {"body": 60_000, "query": "x=1&y=%2F", "place": "a b", "word": "w"}
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in (raw[:50], raw[50:9000], raw[9000:]):
            writer.write(piece)
            await asyncio.sleep(0)
        assert b" 201 Created\r\n" in await reader.read()
        await close(writer)

    serve(server(more=(Endpoint("POST", "/echo/{place}", "", _echo),)), talk)


def test_what_is_too_large_is_refused_before_it_is_all_there() -> None:
    async def talk(port: int) -> None:
        for raw in (
            post("/echo/a", b"z" * 100_000),
            get("/echo/a", "x: " + "y" * 17_000 + "\r\n"),
            b"POST /echo/a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"4000\r\n" * 1 + b"z" * 90_000,
        ):
            status, _, body = await exchange(port, raw)
            assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")

    serve(server(more=(Endpoint("POST", "/echo/{place}", "", _echo),)), talk)


def test_a_long_answer_is_sent_as_fast_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are made only while the client takes them: memory holds a few, not the whole."""
    monkeypatch.setattr(admin, "UNSENT_BYTES_MAX", 100_000)
    made: list[int] = []

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(400):
            made.append(number)
            yield b"x" * 50_000

    async def long(asked: Asked) -> Reply:
        made.clear()
        return Reply(200, kind=b"text/csv", pieces=pieces())

    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/long"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-type: text/csv\r\n" in head
        assert b"content-length" not in head
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(made) < 300, "it went on though nobody reads"
        assert len(await reader.read()) == 400 * 50_000
        await close(writer)
        status, _, body = await exchange(port, get("/long", method="HEAD"))
        assert (status, body) == (200, b"")

    serve(server(more=(Endpoint("GET", "/long", "", long),)), talk)


def test_the_loop_is_free_between_metric_families() -> None:
    ticks: list[int] = []

    async def talk(port: int) -> None:
        async def tick() -> None:
            while True:
                ticks.append(1)
                await asyncio.sleep(0)

        task = asyncio.create_task(tick())
        before = len(ticks)
        await made.respond("GET", "/metrics", Asked(), {})
        assert len(ticks) - before >= 2
        task.cancel()

    made = server()
    serve(made, talk)


def test_connections_are_bounded_and_silent_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(admin, "IDLE_S", 0.05)

    async def talk(port: int) -> None:
        silent, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        await silent.readuntil(b'alive"}')
        with pytest.raises((ConnectionError, IndexError)):
            await exchange(port, get("/healthz"))
        assert await silent.read() == b""
        await close(writer)
        assert (await exchange(port, get("/healthz")))[0] == 200

    made = server()
    serve(made, talk)


def test_it_refuses_to_be_open_to_others_or_to_share_a_port() -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match=r"open to others; set \[admin\] token"):
            await server().start("0.0.0.0", 0)
        first = server()
        port = await first.start("127.0.0.1", 0)
        with pytest.raises(UsageError, match=f"on 127.0.0.1:{port}: it is in use; choose another with --admin-port"):
            await server().start("127.0.0.1", port)
        await first.stop()
        await first.stop()

    asyncio.run(run())


def test_tuners_are_shown_and_held_by_a_post_alone() -> None:
    async def talk(port: int) -> None:
        assert json.loads((await exchange(port, get("/api/v1/tuner")))[2]) == {"frozen": None}
        for word, frozen in (("freeze", True), ("unfreeze", False)):
            status, headers, _ = await exchange(port, get(f"/api/v1/tuner/{word}"))
            assert (status, headers["allow"]) == (405, "POST")
            raw = get(f"/api/v1/tuner/{word}").replace(b"GET", b"POST")
            status, _, body = await exchange(port, raw)
            assert (status, json.loads(body)) == (200, {"frozen": frozen})

    serve(server(), talk)
