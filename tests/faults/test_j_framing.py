"""J. HTTP protocol edges, second part: paths, reused connections, upgrades, framing, uploads that never end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator

import pytest

from .rig.backend import FakeBackend
from .rig.checks import exchange, head_of, still_serves, untouched
from .rig.client import EndedShortError, RawClient, ask, chat, marker, wire
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, serving, wait_until
from .rig.scripts import chunk
from .rig.waiting import eventually, in_parallel

MEGABYTE = 1024 * 1024
LIMIT = 8 * MEGABYTE


@pytest.fixture(scope="module")
def gateway(shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One gateway for the cases that leave nothing behind."""
    config = config_for(shared_backend, keys=[key("a")], server={"max_body_bytes": LIMIT})
    with serving(config, tmp_path_factory.mktemp("gateway")) as process:
        yield process


UNKNOWN_PATHS = [
    "/v1/chat/completions/",
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/v1/%2e%2e/admin",
    "/v1/../admin",
    "/v1/./chat/completions",
    "/v1/chat%2Fcompletions",
    "/v1/chat/%63ompletions",
    "/V1/CHAT/COMPLETIONS",
    "/v1/chat/completions;param=1",
    "/v1/v1/chat/completions",
    "/v1/models/",
    "/v1/models/../chat/completions",
    "/v1/models/%2e%2e",
    "/v2/models/m/../../health/live",
    "/v2/models/%2e%2e/infer",
    "/v2/models//infer",
    "/v2/",
    "/",
    "*",
]
ADMIN_PATHS = ["/metrics", "/dashboard", "/openapi.json", "/api/v1/status", "/api/v1/snapshot", "/api/v1/config"]
ADMIN_VARIANTS = ["/v1/../metrics", "/v1/%2e%2e/metrics", "//metrics", "/metrics/", "/METRICS", "/healthz/../metrics"]


@pytest.mark.parametrize("path", [*UNKNOWN_PATHS, *ADMIN_PATHS, *ADMIN_VARIANTS])
def test_j10_path_tricks(gateway: GatewayProcess, shared_backend: FakeBackend, path: str) -> None:
    with untouched(gateway, shared_backend):
        for method in ("POST", "GET"):
            answer = exchange(gateway, wire(chat(), path=path, method=method, key="sk-a"))
            assert answer.status in {404, 405}
            assert answer.header("location") is None
            assert answer.error["type"] == "invalid_request_error"


def test_j10_a_query_is_passed_on(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    mark = marker()
    target = "/v1/chat/completions?api-version=2026-01-01&x=%2F..%2F"
    assert ask(gateway.port, chat(mark), path=target, key="sk-a").status == 200
    call = shared_backend.call(mark)
    assert call is not None
    assert call.target == target


def test_j10_the_absolute_form_is_the_same_path(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    mark = marker()
    assert ask(gateway.port, chat(mark), path="http://gateway.test/v1/chat/completions?a=1", key="sk-a").status == 200
    call = shared_backend.call(mark)
    assert call is not None
    assert call.target == "/v1/chat/completions?a=1"
    assert call.header("host") == shared_backend.url.removeprefix("http://")
    with untouched(gateway, shared_backend):
        for path in (
            "http://gateway.test",
            "http:///v1/x",
            "ftp://gateway.test/v1/chat/completions",
            "http://x/metrics",
        ):
            assert exchange(gateway, wire(chat(), path=path, key="sk-a")).status in {400, 404}


def test_j11_connections_may_be_reused_until_they_are_closed(backend: FakeBackend, start_gateway: StartGateway) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "forebay", "config", "show"], check=True, capture_output=True, text=True, timeout=20
    )
    assert tomllib.loads(shown.stdout)["server"]["keep_alive_s"] > 60

    gateway = start_gateway(config_for(backend, slots=64, server={"keep_alive_s": 1.0}))
    clients = [RawClient(gateway.port) for _ in range(50)]
    errors = 0
    for _ in range(10):
        began = time.monotonic()
        for client in clients:
            client.request(chat())
        errors += sum(client.read_answer().status != 200 for client in clients)
        wait_until(began + 0.25)
    assert errors == 0
    # A large POST that begins near the time-out and ends behind it.
    body = json.dumps(chat(pad="x" * MEGABYTE)).encode()
    wait_until(time.monotonic() + 0.7)
    for client in clients[:5]:
        client.send(head_of(len(body)) + body[:1000])
    wait_until(time.monotonic() + 0.5)
    for client in clients[:5]:
        client.send(body[1000:])
        assert client.read_answer().status == 200
    for client in clients:
        assert client.closed_by_peer(2)
        client.close()


UPGRADES = [
    [("upgrade", "h2c"), ("connection", "Upgrade, HTTP2-Settings"), ("http2-settings", "AAMAAABkAARAAAAAAAIAAAAA")],
    [
        ("upgrade", "websocket"),
        ("connection", "upgrade"),
        ("sec-websocket-key", "eA=="),
        ("sec-websocket-version", "13"),
    ],
]


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("offer", UPGRADES, ids=["h2c", "websocket"])
def test_j12_an_offered_upgrade_is_not_taken(
    gateway: GatewayProcess, shared_backend: FakeBackend, offer: list[tuple[str, str]], chunked: bool
) -> None:
    mark = marker()
    first, again = (wire(chat(each), key="sk-a", headers=offer, chunked=chunked) for each in (mark, marker()))
    with RawClient(gateway.port) as client:
        # Whole, then cut, then two in one segment with a plain one behind them.
        client.send(first)
        assert client.read_answer().status == 200
        client.send(again[:-20])
        wait_until(time.monotonic() + 0.05)
        client.send(again[-20:])
        assert client.read_answer().status == 200
        client.send(again * 2 + wire(chat(), key="sk-a"))
        assert [client.read_answer().status for _ in range(3)] == [200, 200, 200]
    call = shared_backend.call(mark)
    assert call is not None
    assert not {"upgrade", "http2-settings", "connection"} & {name for name, _ in call.headers}


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("offer", UPGRADES, ids=["h2c", "websocket"])
def test_j12_the_body_limit_holds_behind_an_upgrade(
    gateway: GatewayProcess, shared_backend: FakeBackend, offer: list[tuple[str, str]], chunked: bool
) -> None:
    declared = ("transfer-encoding", "chunked") if chunked else ("content-length", str(200 * MEGABYTE))
    before = gateway.rss_bytes()
    with untouched(gateway, shared_backend), RawClient(gateway.port) as client:
        client.send(wire(headers=[*offer, declared], key="sk-a"))
        if chunked:
            for _ in range(3 * LIMIT // 65536):
                client.send(chunk(b"x" * 65536))
        assert client.read_answer().status == 413
    assert gateway.rss_bytes() - before < 3 * LIMIT


def test_j12_a_thousand_upgrades_in_one_segment(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    with untouched(gateway, shared_backend), RawClient(gateway.port) as client:
        client.send(
            wire(b"", path="/x", headers=[("content-length", "0"), ("upgrade", "x"), ("connection", "upgrade")]) * 1000
        )
        assert client.read_answer().status == 404
    still_serves(gateway, key="sk-a")


BODY = json.dumps(chat()).encode()
CHUNKED = wire(key="sk-a", headers=[("content-type", "application/json"), ("transfer-encoding", "chunked")])
BROKEN = {
    "bad chunk size": CHUNKED + b"zz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "negative chunk size": CHUNKED + b"-1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "hex prefix": CHUNKED + b"0x5\r\nabcde\r\n0\r\n\r\n",
    "chunk size overflow": CHUNKED + b"f" * 20 + b"\r\n" + BODY,
    "no line end after a chunk": CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"0\r\n\r\n",
    "bare lf": CHUNKED + b"%x\n" % len(BODY) + BODY + b"\n0\n\n",
    "empty size": CHUNKED + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "zero-length chunk first": CHUNKED + b"0\r\n\r\n" + chunk(BODY),
    "longer than its length": head_of(len(BODY) - 1, key="sk-a") + BODY,
    "shorter chunked than said": CHUNKED + b"%x\r\n" % (len(BODY) - 2) + BODY + b"\r\n0\r\n\r\n",
    "gzip as transfer coding": wire(
        BODY, key="sk-a", headers=[("transfer-encoding", "gzip, chunked"), ("content-length", "")]
    ),
    "chunked not last": wire(BODY, key="sk-a", headers=[("transfer-encoding", "chunked, identity")]),
    "space before the colon": wire(BODY, key="sk-a", headers=[("x-odd ", "1")]),
    "no version": b"POST /v1/chat/completions\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9.9": wire(BODY, key="sk-a", version="9.9"),
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x07" * 200,
}


@pytest.mark.parametrize("bytewise", [False, True], ids=["at once", "bytewise"])
@pytest.mark.parametrize("name", BROKEN)
def test_j13_broken_framing(gateway: GatewayProcess, shared_backend: FakeBackend, name: str, bytewise: bool) -> None:
    data = BROKEN[name]
    with untouched(gateway, shared_backend), RawClient(gateway.port) as client:
        try:
            for piece in [data[i : i + 1] for i in range(len(data))] if bytewise else [data]:
                client.send(piece)
            assert client.read_answer().status in {400, 501, 505}
            while True:
                assert client.read_answer().status in {400, 501, 505}
        except (EndedShortError, OSError):
            pass  # closed: nothing after it is read as a request
    still_serves(gateway, key="sk-a")


@pytest.mark.parametrize(
    "data",
    [
        CHUNKED + chunk(BODY),
        CHUNKED + chunk(BODY) + b"0\r\n",
        head_of(len(BODY) + 1, key="sk-a") + BODY,
        CHUNKED,
        head_of(5, key="sk-a")[:60],
    ],
    ids=["no last chunk", "no end of trailers", "shorter than its length", "head only", "half a head"],
)
@pytest.mark.parametrize("how", ["fin", "half-close", "reset"])
def test_j13_an_incomplete_body_reaches_nobody(
    gateway: GatewayProcess, shared_backend: FakeBackend, data: bytes, how: str
) -> None:
    with untouched(gateway, shared_backend), RawClient(gateway.port) as client:
        client.send(data)
        wait_until(time.monotonic() + 0.02)
        if how == "half-close":
            client.half_close()
            with pytest.raises(EndedShortError):
                client.read_answer(1)
        elif how == "reset":
            client.reset()


def test_j13_extensions_are_dropped_and_bounded(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    mark = marker()
    body = json.dumps(chat(mark)).encode()
    with RawClient(gateway.port) as client:
        client.send(CHUNKED + b'%x;name=value;other="quoted"\r\n' % len(body) + body + b"\r\n0;last\r\n\r\n")
        assert client.read_answer().status == 200
    call = shared_backend.call(mark)
    assert call is not None
    assert call.raw_body == body  # one framing: the gateway's own
    before = gateway.rss_bytes()
    with untouched(gateway, shared_backend), RawClient(gateway.port) as client:
        client.send(CHUNKED)
        try:
            client.send(b"5;" + b"x" * 20 * MEGABYTE)
        except OSError:
            pass
        client.reset()
    assert gateway.rss_bytes() - before < 4 * MEGABYTE


def test_j13_trailers_are_no_headers(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    mark = marker()
    body = json.dumps(chat(mark)).encode()
    trailers = b"authorization: Bearer sk-b\r\nhost: evil\r\nx-trailer: 1\r\nx-last: 2\r\n"
    with RawClient(gateway.port) as client:
        client.send(CHUNKED + chunk(body) + b"0\r\n" + trailers + b"\r\n")
        assert client.read_answer().status == 200
        second = marker()
        client.send(wire(chat(second), key="sk-a"))
        assert client.read_answer().status == 200
    for each in (mark, second):
        call = shared_backend.call(each)
        assert call is not None
        assert not {"x-trailer", "x-last", "authorization"} & {name for name, _ in call.headers}


def test_j14_clients_vanish_during_upload(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    descriptors, memory = gateway.open_fds(), gateway.rss_bytes()

    def vanish(i: int) -> None:
        with RawClient(gateway.port) as client:
            client.send(head_of(LIMIT, key="sk-a") + b"x" * (64 * 1024))
            if i % 2:
                client.reset()

    with untouched(gateway, shared_backend):
        for _ in range(10):
            in_parallel(vanish, range(20))
    eventually(lambda: gateway.open_fds() <= descriptors, 2, "sockets back to where they were")
    assert json.loads(gateway.admin("/api/v1/status"))["buffered_body_bytes"] == 0
    before = gateway.cpu_s()
    wait_until(time.monotonic() + 0.5)
    assert gateway.cpu_s() - before < 0.1
    assert gateway.rss_bytes() - memory < 30 * MEGABYTE


def test_j15_no_length_at_all(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    with untouched(gateway, shared_backend):
        assert exchange(gateway, wire(key="sk-a", headers=[("content-type", "application/json")])).status == 411
        assert exchange(gateway, wire(b"", key="sk-a")).status == 400


def test_j15_a_get_with_a_body_stays_in_step(gateway: GatewayProcess) -> None:
    body = wire(chat(), key="sk-wrong")  # were it read as a request, it would be refused
    with RawClient(gateway.port) as client:
        client.send(wire(body, method="GET", path="/v1/models", key="sk-a") + wire(chat(), key="sk-a"))
        assert [client.read_answer().status for _ in range(2)] == [200, 200]
        client.send(wire(body, method="GET", path="/healthz") + wire(chat(), key="sk-a"))
        assert [client.read_answer().status for _ in range(2)] == [200, 200]
