"""G. Streaming fidelity: the bytes, their timing and their ending mean the same on both sides."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .rig import scripts
from .rig.backend import Call, FakeBackend, Script
from .rig.checks import charged
from .rig.client import Answer, RawClient, ask, chat, marker
from .rig.gateway import GatewayProcess, StartGateway, config_for, key, serving, wait_until
from .rig.scripts import DONE, LAST_CHUNK, Do, chunk
from .rig.waiting import eventually, in_parallel

WITH_USAGE = {"stream_options": {"include_usage": True}}


def payload(event: bytes) -> Any:
    """The JSON of an event's data."""
    return json.loads(b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")))


def ends_with_an_error(body: bytes) -> None:
    """The stream's last event is an error in its own format, and no terminator was invented."""
    assert DONE.strip() not in body
    last = body.rstrip(b"\n").rpartition(b"\n\n")[2]
    assert set(payload(last)["error"]) >= {"message", "type"}


def bytewise(data: bytes) -> list[scripts.Step]:
    """One chunk for each byte."""
    return [chunk(data[i : i + 1]) for i in range(len(data))]


@pytest.fixture(scope="module")
def shared_gateway(shared_backend: FakeBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with serving(config_for(shared_backend), tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


ODD_FIELDS = b"".join(
    [
        b"\xef\xbb\xbf: a comment after a BOM\n\n",
        b"event: message\nid: 17\nretry: 3000\n" + scripts.delta("a"),
        b"\n\n\n",
        b": keep-alive\n\n",
        b"unknown: field\n" + scripts.delta("b"),
        b"data:" + scripts.delta("no space")[6:],
        scripts.delta("crlf").replace(b"\n", b"\r\n"),
        b"data\n\n",
        b"id\nevent:\n\n",
        b'data: {"choices": [{"index": 0,\ndata: "delta": {"content": "two lines"}}]}\n\n',
        DONE,
        b": after the end\n\n",
    ]
)


@pytest.mark.parametrize("asked", [{}, WITH_USAGE], ids=["usage not asked", "usage asked"])
@pytest.mark.parametrize("cut", ["whole", "bytewise"])
def test_g02_fields_other_than_data(
    fresh_backend: FakeBackend, shared_gateway: GatewayProcess, cut: str, asked: dict[str, Any]
) -> None:
    pieces = [chunk(ODD_FIELDS)] if cut == "whole" else bytewise(ODD_FIELDS)
    fresh_backend.script = scripts.steps(scripts.sse_head(), *pieces, LAST_CHUNK)
    answer = ask(shared_gateway.port, chat(stream=True, **asked))
    assert (answer.status, answer.ended) == (200, "whole")
    # Bytes after the terminator belong to no event; a gateway may end the answer before them.
    assert answer.body in {ODD_FIELDS, ODD_FIELDS.removesuffix(b": after the end\n\n")}


def test_g02_line_ends_may_be_mixed(fresh_backend: FakeBackend, shared_gateway: GatewayProcess) -> None:
    """The usage event is taken out, and it alone, whatever line ends stand around it."""
    shown = [scripts.delta("a"), b": ping\r\n\r\n", scripts.delta("b").replace(b"\n", b"\r\n"), scripts.delta("c")]
    body = b"".join([*shown, scripts.usage_event(), DONE])
    for pieces in ([chunk(body)], bytewise(body)):
        fresh_backend.script = scripts.steps(scripts.sse_head(), *pieces, LAST_CHUNK)
        assert ask(shared_gateway.port, chat(stream=True)).body == b"".join([*shown, DONE])


USED_300 = {"prompt_tokens": 100, "completion_tokens": 200, "total_tokens": 300}


@pytest.fixture
def metered_gateway(backend: FakeBackend, start_gateway: StartGateway) -> GatewayProcess:
    """Two keys that refill too slowly to hide a charge."""
    return start_gateway(config_for(backend, keys=[key("a", tokens_per_minute=600), key("b", tokens_per_minute=600)]))


# Characters that str.splitlines() takes for line ends, and the wire format does not.
SEPARATORS = "\u2028\u2029\u0085\u000b\u000c\u001c\u001d\u001e"


@pytest.mark.parametrize("asked", [{}, WITH_USAGE], ids=["usage not asked", "usage asked"])
def test_g03_characters_that_look_like_line_ends(
    backend: FakeBackend, metered_gateway: GatewayProcess, asked: dict[str, Any]
) -> None:
    # Control characters raw in a JSON string are not valid JSON, but sloppy encoders send them, and a relay relays.
    content = b'{"choices":[{"index":0,"delta":{"content":"a' + SEPARATORS.encode() + b'b"}}]}'
    events = [b"data: " + content + b"\n\n", scripts.delta("", "stop")]
    backend.script = scripts.streams([*events, scripts.usage_event(USED_300)])
    answer = ask(metered_gateway.port, chat(stream=True, **asked), key="sk-a")
    assert answer.body == b"".join([*events, *([scripts.usage_event(USED_300)] if asked else []), DONE])
    assert 250 <= charged(metered_gateway, backend) <= 350, "usage was found"


def test_g04_events_are_not_held_back(fresh_backend: FakeBackend, shared_gateway: GatewayProcess) -> None:
    sent: list[float] = []

    async def script(call: Call) -> None:
        await call.send(scripts.sse_head())
        sent.append(time.monotonic())
        for pause in (1.0, 0.5, 0.5):
            await asyncio.sleep(pause)
            await call.send(chunk(b'data: {"choices":[],"n":12345}\n\n'))
            sent.append(time.monotonic())
        await call.send(chunk(DONE) + LAST_CHUNK)

    fresh_backend.script = script
    with RawClient(shared_gateway.port) as client:
        client.request(chat(stream=True), headers=[("accept-encoding", "gzip, br")])
        head = client.read_head()
        arrivals = [head.at]
        for _ in range(3):
            assert client.read_event()
            arrivals.append(time.monotonic())
        assert client.read_event() == DONE
    late = [arrival - at for arrival, at in zip(arrivals, sent, strict=True)]
    assert late[0] < 0.1
    assert max(late[1:]) < 0.05
    assert head.get("content-encoding") is None
    assert (head.get("content-type") or "").startswith("text/event-stream")
    assert head.get("x-accel-buffering") == "no"
    assert "no-cache" in (head.get("cache-control") or "")


def decoded(answer: Answer) -> bytes:
    """The body as a client sees it, by the answer's own Content-Encoding."""
    coding = answer.header("content-encoding")
    assert coding in {None, "gzip", "identity"}
    return gzip.decompress(answer.body) if coding == "gzip" else answer.body


def gzipped_events(events: list[bytes]) -> list[bytes]:
    """A gzip stream in pieces, one decodable up to each event."""
    packer = zlib.compressobj(wbits=31)
    pieces = [packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH) for event in events]
    return [*pieces, packer.flush()]


def test_g05_compressed_json(backend: FakeBackend, metered_gateway: GatewayProcess) -> None:
    body = json.dumps(scripts.completion("zipped", USED_300)).encode()
    headers = [("content-encoding", "gzip"), ("content-type", "application/json")]
    backend.script = scripts.steps(scripts.answer(200, gzip.compress(body), headers))
    answer = ask(metered_gateway.port, chat(), key="sk-a")
    assert (answer.status, decoded(answer)) == (200, body)
    assert 250 <= charged(metered_gateway, backend) <= 350


@pytest.mark.parametrize("asked", [{}, WITH_USAGE], ids=["usage not asked", "usage asked"])
def test_g05_compressed_stream(backend: FakeBackend, metered_gateway: GatewayProcess, asked: dict[str, Any]) -> None:
    events = [*scripts.deltas(3), scripts.usage_event(USED_300), DONE]
    pieces = gzipped_events(events)
    sent = [chunk(piece) for piece in pieces[:-1]] + [chunk(pieces[-1]) + LAST_CHUNK]
    backend.script = scripts.steps(scripts.sse_head([("content-encoding", "gzip")]), *sent)
    answer = ask(metered_gateway.port, chat(stream=True, **asked), key="sk-a")
    seen = decoded(answer)
    shown = [event for event in events if asked or b'"usage"' not in event]
    assert seen in {b"".join(shown), b"".join(events)}
    assert 250 <= charged(metered_gateway, backend) <= 350


def test_g05_corrupt_gzip_frees_the_slot(backend: FakeBackend, metered_gateway: GatewayProcess) -> None:
    pieces = gzipped_events(scripts.deltas(3))
    corrupt: list[scripts.Step] = [
        chunk(pieces[0]),
        0.15,
        chunk(b"\x00\xff" * 40),
        LAST_CHUNK,
    ]  # apart, or it is a plain 502
    backend.script = scripts.steps(scripts.sse_head([("content-encoding", "gzip")]), *corrupt)
    answer = ask(metered_gateway.port, chat(stream=True), key="sk-a")
    if answer.header("content-encoding") == "gzip":
        # Passed on as it came: the client's own decoder meets what the engine sent.
        assert answer.body == pieces[0] + b"\x00\xff" * 40
    else:
        ends_with_an_error(answer.body)
    metered_gateway.settles()
    backend.script = scripts.ordinary
    assert ask(metered_gateway.port, key="sk-a").status == 200


def test_g06_long_silence_before_the_first_token(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """The part without keep-alive comments: silence within the time-outs is no reason to cut, or to invent."""
    gateway = start_gateway(config_for(backend, engine={"timeouts": {"idle_s": 4}}))
    backend.script = scripts.streams(scripts.deltas(3), first_after=2.0)
    answer = ask(gateway.port, chat(stream=True))
    assert answer.body == b"".join([*scripts.deltas(3), DONE])
    assert answer.head.at < answer.pieces[0][0] - 1.5, "the head does not wait for the first token"


def test_g07_comments_are_no_progress(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, engine={"timeouts": {"idle_s": 1}}))

    async def script(call: Call) -> None:
        await call.send(scripts.sse_head() + chunk(scripts.delta()))
        while True:
            await asyncio.sleep(0.2)
            await call.send(chunk(b": keepalive\n\n"))

    backend.script = script
    began = time.monotonic()
    answer = ask(gateway.port, chat(stream=True))
    assert 0.9 < time.monotonic() - began < 2.5
    ends_with_an_error(answer.body)
    gateway.settles()
    eventually(lambda: backend.open_calls == 0)
    assert gateway.outcome("failed") == 1


def test_g09_backend_dies_mid_stream(
    backend: FakeBackend, other_backend: FakeBackend, start_gateway: StartGateway
) -> None:
    # Ten reservations of 400 leave no room for one of 1000; five of them given back do.
    limited = key("a", tokens_per_minute=4500)
    gateway = start_gateway(config_for(backend, other_backend, slots=8, keys=[limited]))
    lasting = scripts.streams(scripts.deltas(30), every=0.1)
    backend.script = other_backend.script = lasting
    answers: list[Answer] = []

    def stream() -> None:
        answers.append(ask(gateway.port, chat(stream=True, max_tokens=400), key="sk-a", within=10))

    readers = [threading.Thread(target=stream) for _ in range(10)]
    for reader in readers:
        reader.start()
    eventually(lambda: (backend.open_calls, other_backend.open_calls) == (5, 5))
    assert ask(gateway.port, chat(max_tokens=1000), key="sk-a").reason == "key_tokens"
    time.sleep(0.35)  # the backend is to die after three events, one every 0.1 s
    backend.die()
    eventually(lambda: gateway.gauges() == (5, 0), 1.0, "the dead backend's slots settle")
    eventually(lambda: sorted(e["readiness"] for e in gateway.engines()) == ["down", "up"], 2.0)
    served = ask(gateway.port, chat(stream=True, max_tokens=1000), key="sk-a", within=10)
    assert served.body == b"".join([*scripts.deltas(30), DONE])
    for reader in readers:
        reader.join()

    whole = [a for a in answers if a.body.endswith(DONE)]
    cut = [a for a in answers if not a.body.endswith(DONE)]
    assert (len(whole), len(cut)) == (5, 5)
    for answer in whole:
        assert answer.body == served.body
    for answer in cut:
        assert answer.status == 200
        ends_with_an_error(answer.body)
        assert answer.body.startswith(b"".join(scripts.deltas(3)))
    gateway.settles()
    assert gateway.outcome("failed") == 5

    other_backend.die()
    eventually(lambda: {e["readiness"] for e in gateway.engines()} == {"down"}, 2.0)
    refused = ask(gateway.port, key="sk-a")
    assert (refused.status, refused.reason) == (503, "no_engine")
    backend.listen()
    backend.script = scripts.ordinary
    eventually(lambda: ask(gateway.port, key="sk-a").status == 200, 5.0, "it recovers by itself")


@pytest.mark.parametrize("finish", ["null", "absent"])
def test_g10_no_finish_reason(fresh_backend: FakeBackend, shared_gateway: GatewayProcess, finish: str) -> None:
    completed = shared_gateway.outcome("completed")
    event = (
        scripts.delta() if finish == "null" else scripts.event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
    )
    fresh_backend.script = scripts.streams([event] * 3)
    assert ask(shared_gateway.port, chat(stream=True)).body == event * 3 + DONE
    shared_gateway.settles()
    assert shared_gateway.outcome("completed") == completed + 1


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_g11_terminator_ends_the_answer(backend: FakeBackend, start_gateway: StartGateway, framing: str) -> None:
    gateway = start_gateway(config_for(backend, slots=1, mode="admission"))
    head = scripts.sse_head() if framing == "chunked" else scripts.head(200, [("content-type", "text/event-stream")])
    wrap: Callable[[bytes], bytes] = chunk if framing == "chunked" else bytes
    mark = marker()
    backend.by_marker[mark] = scripts.steps(head, wrap(scripts.delta()), wrap(DONE), Do.HOLD)
    with RawClient(gateway.port) as client:
        client.request(chat(mark, stream=True))
        answer = client.read_answer(1.0)
        assert (answer.body, answer.ended) == (scripts.delta() + DONE, "whole")
        gateway.settles(within=1.0)
        client.request(chat())  # the slot is free, and the connection still good
        assert client.read_answer().status == 200
    assert gateway.outcome("completed") == 2
    call = backend.call(mark)
    assert call is not None
    eventually(lambda: call.peer_closed_at is not None, 5.0, "the held connection is not kept for ever")


def test_g12_slow_readers_fill_no_memory(backend: FakeBackend, start_gateway: StartGateway) -> None:
    gateway = start_gateway(config_for(backend, slots=32))
    big = chunk(scripts.delta("x" * 20_000))

    async def flood(call: Call) -> None:
        await call.send(scripts.sse_head())
        for _ in range(10_000):  # 200 MB
            await call.send(big)

    assert ask(gateway.port, chat(stream=True)).status == 200
    backend.script = flood
    before = gateway.rss_bytes()
    clients = [RawClient(gateway.port, receive_buffer=32 * 1024) for _ in range(20)]
    try:
        for client in clients:
            client.request(chat(stream=True))
        for client in clients:
            assert client.read_head().status == 200
        peak = 0
        until = time.monotonic() + 3
        while time.monotonic() < until:
            for client in clients:
                client.sock.recv(1000)
            peak = max(peak, gateway.rss_bytes())
            wait_until(time.monotonic() + 0.1)
        assert peak - before < 20_000_000
        sent = [call.bytes_sent for call in backend.calls[1:]]
        assert len(sent) == 20
        assert max(sent) < 20_000_000, "the pressure reaches the backend"
    finally:
        for client in clients:
            client.close()
    gateway.settles()


def test_g12_pressure_ends_with_its_answer(fresh_backend: FakeBackend, shared_gateway: GatewayProcess) -> None:
    """A reader that is slow at the very end must not leave its pause to the next request on the same connection."""
    for size in range(100_000, 6_000_000, 300_000):
        body = scripts.completion("x" * size)
        fresh_backend.plan.append(scripts.steps(scripts.answer(200, body)))
        with RawClient(shared_gateway.port, receive_buffer=16 * 1024) as client:
            client.request(chat())
            assert client.read_head().status == 200
            wait_until(time.monotonic() + 0.02)
            assert json.loads(client.read_rest()) == body
        assert ask(shared_gateway.port, within=2.0).status == 200
    shared_gateway.settles()


def test_g13_five_megabyte_event_passes(fresh_backend: FakeBackend, shared_gateway: GatewayProcess) -> None:
    events = [scripts.delta("x" * 5_000_000), scripts.delta("after")]
    fresh_backend.script = scripts.streams(events)
    assert ask(shared_gateway.port, chat(stream=True), within=10).body == b"".join([*events, DONE])
    shared_gateway.settles()


@pytest.mark.parametrize("asked", [{}, WITH_USAGE], ids=["usage not asked", "usage asked"])
def test_g13_endless_event_is_bounded(backend: FakeBackend, start_gateway: StartGateway, asked: dict[str, Any]) -> None:
    gateway = start_gateway(config_for(backend))
    assert ask(gateway.port, chat(stream=True)).status == 200
    before, cpu_before = gateway.rss_bytes(), gateway.cpu_s()
    piece = chunk(b"x" * 1_000_000)

    async def endless(call: Call) -> None:
        await call.send(scripts.sse_head() + chunk(scripts.delta() + b"data: "))
        for _ in range(100):
            await call.send(piece)
        await call.send(chunk(b"\n\n" + DONE) + LAST_CHUNK)

    backend.script = endless
    peak = before
    with RawClient(gateway.port) as client:
        client.request(chat(stream=True, **asked))
        assert client.read_head().status == 200
        seen, tail = 0, b""
        while (piece_read := client.read_piece(10)) is not None:
            seen += len(piece_read)
            tail = (tail + piece_read)[-1000:]
            peak = max(peak, gateway.rss_bytes())
    assert seen < 100_000_000, "beyond the bound the stream ends"
    assert b'"error"' in tail
    assert DONE.strip() not in tail
    assert peak - before < 64_000_000
    assert gateway.cpu_s() - cpu_before < 1.5, "a large event is not copied for each of its pieces"
    gateway.settles()
    assert gateway.outcome("failed") == 1


JSON_ANSWERS: dict[str, tuple[int, bytes, str]] = {
    "400": (
        400,
        b'{"error": {"message": "no", "type": "BadRequestError", "param": null, "code": 400}}',
        "application/json",
    ),
    "400 with charset": (400, b'{"object":"error","message":"no"}', "application/json; charset=utf-8"),
    "200": (200, json.dumps(scripts.completion(), indent=2).encode(), "application/json"),
    "200 chunked": (200, json.dumps(scripts.completion()).encode(), "application/json"),
}


@pytest.mark.parametrize("name", JSON_ANSWERS)
def test_g14_stream_answered_with_json(fresh_backend: FakeBackend, shared_gateway: GatewayProcess, name: str) -> None:
    completed = shared_gateway.outcome("completed")
    status, body, content_type = JSON_ANSWERS[name]
    headers = [("content-type", content_type)]
    if name.endswith("chunked"):
        whole = scripts.head(status, [*headers, ("transfer-encoding", "chunked")]) + chunk(body) + LAST_CHUNK
    else:
        whole = scripts.answer(status, body, headers)
    fresh_backend.script = scripts.steps(whole)
    answer = ask(shared_gateway.port, chat(stream=True))
    assert (answer.status, answer.header("content-type"), answer.body) == (status, content_type, body)
    shared_gateway.settles()
    assert shared_gateway.outcome("completed") == completed + 1


def test_streams_of_many_clients_do_not_mix(backend: FakeBackend, start_gateway: StartGateway) -> None:
    """Each client gets the events of its own request, all of them and in order."""
    gateway = start_gateway(config_for(backend, slots=32))

    def own(mark: str) -> Script:
        return scripts.streams(scripts.deltas(20, f"{mark}-"), every=0.005)

    marks = [marker() for _ in range(32)]
    backend.by_marker.update({mark: own(mark) for mark in marks})
    answers = in_parallel(lambda mark: ask(gateway.port, chat(mark, stream=True)), marks)
    for mark, answer in zip(marks, answers, strict=True):
        assert answer.body == b"".join([*scripts.deltas(20, f"{mark}-"), DONE])
