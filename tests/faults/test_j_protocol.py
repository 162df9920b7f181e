"""J. HTTP protocol edges, first part: expectations, slow senders, pipelines, versions, heads and methods."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from .rig import scripts
from .rig.backend import FakeBackend
from .rig.checks import exchange, head_of, still_serves, untouched
from .rig.client import Answer, EndedShortError, RawClient, ask, chat, marker, wire
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, serving, wait_until
from .rig.waiting import eventually

EXPECTS = ("expect", "100-continue")
MEGABYTE = 1024 * 1024


@pytest.fixture(scope="module")
def gateway(shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One gateway for the cases that leave nothing behind: keys `sk-a` (free) and `sk-b` (one request a minute)."""
    keys = [key("a"), key("b", requests_per_minute=1), key("c")]
    with serving(config_for(shared_backend, keys=keys), tmp_path_factory.mktemp("gateway")) as process:
        yield process


def refused_at_once(gateway: GatewayProcess, head: bytes) -> Answer:
    """The final answer to a head that expects 100: at once, without one, and the body is never asked for."""
    with RawClient(gateway.port) as client:
        began = time.monotonic()
        client.send(head)
        answer = client.read_answer(2)
        assert answer.head.at - began < 0.2
        assert client.interim == []
        assert answer.header("connection") == "close"
        assert client.closed_by_peer()
    return answer


def test_j02_expect_100_when_the_answer_is_a_refusal(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    big = 20 * MEGABYTE
    ask(gateway.port, key="sk-b")
    cases = {
        "bad key": (head_of(big, EXPECTS, key="sk-unknown"), 401),
        "no key": (head_of(big, EXPECTS), 401),
        "over its limit": (head_of(big, EXPECTS, key="sk-b"), 429),
        "too large": (head_of(50 * MEGABYTE, EXPECTS, key="sk-a"), 413),
        "unknown path": (head_of(big, EXPECTS, key="sk-a", path="/v1/unknown"), 404),
        "wrong type": (
            wire(key="sk-a", headers=[("content-type", "text/plain"), ("content-length", "9"), EXPECTS]),
            415,
        ),
        "too large for a control path": (head_of(50 * MEGABYTE, EXPECTS, key="sk-a", path="/tokenize"), 413),
    }
    with untouched(gateway, shared_backend):
        for name, (head, status) in cases.items():
            assert refused_at_once(gateway, head).status == status, name


def test_j02_expect_100_when_the_queue_is_full(backend: FakeBackend, start_gateway: StartGateway) -> None:
    full = start_gateway(config_for(backend, slots=1, mode="admission"))
    backend.script = scripts.silent
    with RawClient(full.port) as holder:
        holder.request(chat())
        eventually(lambda: full.gauges() == (1, 0))
        answer = refused_at_once(full, head_of(20 * MEGABYTE, EXPECTS))
        assert (answer.status, answer.reason) == (503, "queue_full")
        assert answer.retry_after >= 1


def test_j03_expect_100_when_admitted(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    mark = marker()
    body = json.dumps(chat(mark, pad="x" * 5 * MEGABYTE)).encode()
    shared_backend.by_marker[mark] = scripts.says()
    with RawClient(gateway.port) as client:
        began = time.monotonic()
        client.send(head_of(len(body), EXPECTS, key="sk-a"))
        interim = _interim(client)
        assert time.monotonic() - began < 0.2
        assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        assert client.read_answer().status == 200
        assert client.interim == []  # one is enough
    call = shared_backend.call(mark)
    assert call is not None
    assert bytes(call.body) == body
    assert call.header("expect") is None


def _interim(client: RawClient) -> bytes:
    client.sock.settimeout(2)
    return client.sock.recv(1000)


def test_j03_control_paths_and_chunked_bodies_too(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    mark = marker()
    body = json.dumps(chat(mark)).encode()
    for head, rest in [
        (head_of(len(body), EXPECTS, key="sk-a", path="/tokenize"), body),
        (head_of(None, ("transfer-encoding", "chunked"), EXPECTS, key="sk-a"), scripts.chunk(body) + b"0\r\n\r\n"),
    ]:
        with RawClient(gateway.port) as client:
            client.send(head)
            assert _interim(client) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(rest)
            assert client.read_answer().status == 200


def test_j03_an_expectation_that_nobody_knows(gateway: GatewayProcess) -> None:
    answer = ask(gateway.port, key="sk-a", headers=[("expect", "a-miracle")])
    assert answer.status in {200, 417}
    assert answer.interim == []


def test_j03_http_1_0_gets_no_interim_answer(gateway: GatewayProcess) -> None:
    body = json.dumps(chat()).encode()
    with RawClient(gateway.port) as client:
        client.send(head_of(len(body), EXPECTS, key="sk-a", version="1.0"))
        with pytest.raises(TimeoutError):
            client.read_head(0.2)
        client.send(body)
        assert client.read_answer().status == 200
        assert client.interim == []


SLOW = {
    "header_timeout_s": 1,
    "body_timeout_s": 1,
    "min_body_rate_bytes_s": 100_000,
    "keep_alive_s": 1,
    "stalled_reader_s": 1,
}
CROWD = 100


def test_j04_slow_senders(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """Heads and bodies that trickle are ended at their deadlines; honest slow traffic beside them is not."""
    gateway = start_gateway(config_for(backend, server=SLOW))
    upload = json.dumps(chat(pad="x" * 3 * MEGABYTE)).encode()
    slow_stream = marker()
    backend.by_marker[slow_stream] = scripts.streams(scripts.deltas(16), every=0.2)
    heads = [RawClient(gateway.port) for _ in range(CROWD)]
    bodies = [RawClient(gateway.port) for _ in range(CROWD)]
    began = time.monotonic()
    for client in heads:
        client.send(b"P")
    for client in bodies:
        client.send(head_of(1000) + b"{")
    crowd = ThreadPoolExecutor(2)
    honest = [
        crowd.submit(_upload_at, gateway, upload, 1.2 * MEGABYTE),
        crowd.submit(_read_stream, gateway, slow_stream),
    ]
    tail = iter("OST /v1/chat/completions HTTP/1.1")
    normal: list[float] = []
    while time.monotonic() - began < 0.9:
        letter = next(tail).encode()
        for client in heads:
            client.send(letter)
        for client in bodies:
            client.send(b" ")
        asked = time.monotonic()
        assert ask(gateway.port).status == 200
        normal.append(time.monotonic() - asked)
        # They trickle: nothing of theirs is in a slot or in the queue.
        assert sum(gateway.gauges()) <= 2
        wait_until(asked + 0.2)
    for client in [*heads, *bodies]:
        answer = client.read_answer(3)
        assert (answer.status, answer.header("connection")) == (408, "close")
        assert answer.head.at - began < 2.5
        client.close()
    assert [each.result(10) for each in honest] == [200, 17]
    crowd.shutdown()
    assert max(normal) < 0.1


def _upload_at(gateway: GatewayProcess, body: bytes, bytes_per_s: float) -> int:
    """An upload that takes longer than the grace time, at an honest rate."""
    with RawClient(gateway.port) as client:
        client.send(head_of(len(body)))
        began, piece = time.monotonic(), 64 * 1024
        for start in range(0, len(body), piece):
            wait_until(began + start / bytes_per_s)
            client.send(body[start : start + piece])
        return client.read_answer().status


def _read_stream(gateway: GatewayProcess, mark: str) -> int:
    """The number of events of a stream that lasts longer than any time-out on the client's side."""
    with RawClient(gateway.port) as client:
        client.request(chat(mark, stream=True))
        assert client.read_head().status == 200
        return sum(1 for _ in client.events())


def completions(*texts: str) -> list[bytes]:
    return [json.dumps(scripts.completion(text)).encode() for text in texts]


def test_j05_pipelined_requests_are_answered_in_order(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, slots=1, server={"keep_alive_s": 0.3}))
    marks = [marker() for _ in range(10)]
    for i, mark in enumerate(marks):
        # The second outlasts the keep-alive time.
        backend.by_marker[mark] = scripts.says(mark, after=0.8 if i == 1 else 0.0)
    with RawClient(gateway.port) as client:
        client.send(b"".join(wire(chat(mark)) for mark in marks))
        answers = [client.read_answer() for _ in marks]
        assert [answer.body for answer in answers] == completions(*marks)
        assert client.closed_by_peer(2), "idle for longer than the keep-alive time"
    assert [call.marker for call in backend.calls] == marks
    assert backend.high_water == 1  # each was gated when it was its turn


def test_j05_each_of_a_pipeline_is_gated_on_its_own(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    mark = marker()
    calls = len(shared_backend.calls)
    with RawClient(gateway.port) as client:
        client.send(
            wire(chat(), key="sk-wrong") + wire(chat(mark), key="sk-c") + wire(b"{", key="sk-c") + wire(b"", path="/x")
        )
        assert [client.read_answer().status for _ in range(4)] == [401, 200, 400, 404]
    assert len(shared_backend.calls) == calls + 1


def test_j05_nothing_after_connection_close(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    for junk in (b"\x00\xff junk \r\n\r\n", wire(chat(), key="sk-c")):
        calls = len(shared_backend.calls)
        with RawClient(gateway.port) as client:
            client.send(wire(chat(), key="sk-c", headers=[("connection", "close")]) + junk)
            answer = client.read_answer()
            assert (answer.status, answer.header("connection")) == (200, "close")
            assert client.closed_by_peer()
        assert len(shared_backend.calls) == calls + 1


def test_j05_a_pipeline_has_an_end(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    """One connection may not make the gateway hold requests without bound."""
    with untouched(gateway, shared_backend), RawClient(gateway.port) as client:
        client.send(wire(b"", path="/nowhere", headers=[("content-length", "0")]) * 500)
        statuses = list(_until_closed(client))
    assert 0 < len(statuses) < 500
    assert set(statuses) <= {400, 404}


def _until_closed(client: RawClient) -> Iterator[int]:
    while True:
        try:
            yield client.read_answer().status
        except EndedShortError:
            return


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("keep", [False, True], ids=["plain", "keep-alive"])
@pytest.mark.parametrize("host", [False, True], ids=["no host", "host"])
def test_j06_http_1_0(gateway: GatewayProcess, stream: bool, keep: bool, host: bool) -> None:
    data = wire(chat(stream=stream), key="sk-a", version="1.0", headers=[("connection", "keep-alive")] if keep else [])
    if not host:
        data = data.replace(b"host: gateway.test\r\n", b"")
    with RawClient(gateway.port) as client:
        client.send(data)
        answer = client.read_answer()
        assert (answer.status, answer.ended) == (200, "whole")
        assert answer.header("transfer-encoding") is None
        if stream:
            assert answer.body.endswith(scripts.DONE)
        else:
            assert answer.json() == scripts.completion()
        if keep and not stream:
            assert answer.header("connection") == "keep-alive"
            client.send(data)
            assert client.read_answer().status == 200
        else:
            assert client.closed_by_peer()


def test_j06_http_1_1_needs_a_host(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    with untouched(gateway, shared_backend):
        assert exchange(gateway, wire(chat(), key="sk-a").replace(b"host: gateway.test\r\n", b"")).status == 400


DUPLICATES = {
    "good and bad key": (("authorization", "Bearer sk-a"), ("authorization", "Bearer sk-bad"), 401),
    "bad and good key": (("authorization", "Bearer sk-bad"), ("authorization", "Bearer sk-a"), 401),
    "two good keys": (("authorization", "Bearer sk-a"), ("authorization", "Bearer sk-c"), 401),
    "two ways, two keys": (("authorization", "Bearer sk-a"), ("x-api-key", "sk-c"), 401),
    "two ways, two keys, again": (("api-key", "sk-c"), ("authorization", "Bearer sk-a"), 401),
    "two key headers": (("x-api-key", "sk-a"), ("x-api-key", "sk-c"), 401),
    "another scheme beside it": (("authorization", "Basic c2st"), ("authorization", "Bearer sk-a"), 401),
    "two hosts": (("authorization", "Bearer sk-a"), ("host", "other.test"), 400),
    "two types": (("content-type", "application/json"), ("content-type", "text/plain"), 400),
    "two lengths": (("content-length", "5"), ("content-length", "6"), 400),
    "two equal lengths": (("content-length", "5"), ("content-length", "5"), 400),
    "length and chunked": (("content-length", "5"), ("transfer-encoding", "chunked"), 400),
    "chunked twice": (("transfer-encoding", "chunked"), ("transfer-encoding", "chunked"), 400),
}


@pytest.mark.parametrize("name", DUPLICATES)
def test_j07_duplicate_headers(gateway: GatewayProcess, shared_backend: FakeBackend, name: str) -> None:
    *both, status = DUPLICATES[name]
    with untouched(gateway, shared_backend):
        answer = exchange(gateway, wire(chat(), headers=list(both)))  # type: ignore[arg-type]
        assert answer.status == status
        assert answer.reason == ("invalid_key" if status == 401 else "malformed")


def test_j07_one_key_in_two_places_is_one_key(gateway: GatewayProcess) -> None:
    same = [("authorization", "Bearer sk-a"), ("x-api-key", "sk-a")]
    assert ask(gateway.port, chat(), headers=same).status == 200


OVERSIZED = {
    "64 KB value": wire(chat(), key="sk-a", headers=[("x-long", "a" * 64 * 1024)]),
    "200 KB value": wire(chat(), key="sk-a", headers=[("x-long", "a" * 200 * 1024)]),
    "2,000 headers": wire(chat(), key="sk-a", headers=[(f"x-{i}", "a") for i in range(2000)]),
    "2,000 equal headers": wire(chat(), key="sk-a", headers=[("accept", "a")] * 2000),
    "64 KB name": wire(chat(), key="sk-a", headers=[("x" * 64 * 1024, "a")]),
    "64 KB path": wire(chat(), key="sk-a", path="/" + "a" * 64 * 1024),
    "64 KB query": wire(chat(), key="sk-a", path="/v1/chat/completions?" + "a" * 64 * 1024),
}


@pytest.mark.parametrize("pieces", [1, 7], ids=["at once", "in pieces"])
@pytest.mark.parametrize("name", OVERSIZED)
def test_j08_header_size_and_count(
    gateway: GatewayProcess, shared_backend: FakeBackend, name: str, pieces: int
) -> None:
    data = OVERSIZED[name]
    size = len(data) // pieces + 1
    with untouched(gateway, shared_backend), RawClient(gateway.port) as client:
        for start in range(0, len(data), size):
            client.send(data[start : start + size])
        answer = client.read_answer()
        assert answer.status in {431, 414}
    still_serves(gateway, key="sk-a")


@pytest.mark.parametrize("value", ["a\x00b", "a\rb", "a\nb", "a\r\n b"], ids=["nul", "cr", "lf", "fold"])
def test_j08_control_characters_in_a_value(gateway: GatewayProcess, shared_backend: FakeBackend, value: str) -> None:
    with untouched(gateway, shared_backend):
        assert exchange(gateway, wire(chat(), key="sk-a", headers=[("x-odd", value)])).status == 400


def test_j08_the_body_does_not_count_as_head(gateway: GatewayProcess) -> None:
    """A head that begins in the segment in which a large body ends is judged by its own size."""
    first = wire(chat(pad="x" * 200_000), key="sk-a")
    second = wire(chat(), key="sk-a")
    with RawClient(gateway.port) as client:
        client.send(first + second[:40])
        assert client.read_answer().status == 200
        client.send(second[40:])
        assert client.read_answer().status == 200


METHODS = {
    ("HEAD", "/healthz"): 200,
    ("GET", "/healthz"): 200,
    ("HEAD", "/v1/models"): 200,
    ("HEAD", "/v1/chat/completions"): 405,
    ("GET", "/v1/chat/completions"): 405,
    ("PUT", "/v1/chat/completions"): 405,
    ("DELETE", "/v1/models"): 405,
    ("POST", "/v1/models"): 405,
    ("POST", "/healthz"): 405,
    ("OPTIONS", "/v1/chat/completions"): 405,
    ("OPTIONS", "*"): 404,
    ("TRACE", "/v1/models"): 405,
    ("CONNECT", "example.org:443"): 404,
    ("FOO", "/v1/models"): 400,
    ("post", "/v1/chat/completions"): 400,
}


@pytest.mark.parametrize(("method", "path"), METHODS)
def test_j09_methods(gateway: GatewayProcess, shared_backend: FakeBackend, method: str, path: str) -> None:
    with untouched(gateway, shared_backend), RawClient(gateway.port) as client:
        client.send(wire(method=method, path=path, key="sk-a"))
        answer = client.read_answer(method=method)
        assert answer.status == METHODS[method, path]
        if answer.status == 405:
            allowed = answer.header("allow") or ""
            assert allowed
            assert method not in allowed.split(", ")
        if method == "HEAD":
            assert int(answer.header("content-length") or 0) > 0
        if answer.status not in {400, 404}:
            # Nothing of a body followed: the next answer begins where this one ended.
            client.send(wire(method="GET", path="/healthz"))
            assert client.read_answer().status == 200


def test_j09_connect_opens_no_tunnel(gateway: GatewayProcess, shared_backend: FakeBackend) -> None:
    with untouched(gateway, shared_backend), RawClient(gateway.port) as client:
        client.send(b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nhost: x\r\n\r\n" + wire(method="GET", path="/healthz"))
        assert client.read_answer().status == 404
        try:
            assert client.read_answer(1).status == 200
        except EndedShortError:
            pass


def test_j04_a_fast_upload_does_not_shelter_a_slow_one(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """Who ran ahead of the least rate may rest for long; who trickles beside it may not."""
    gateway = start_gateway(config_for(backend, server=SLOW | {"min_body_rate_bytes_s": 1000}))
    with RawClient(gateway.port) as ahead:
        ahead.send(head_of(2 * MEGABYTE) + b"x" * MEGABYTE)
        wait_until(time.monotonic() + 1.3)  # its deadline has been looked at, and is far away
        with RawClient(gateway.port) as slow:
            slow.send(head_of(1000) + b"{")
            assert slow.read_answer(3).status == 408
        assert not ahead.closed_by_peer(0.1)
