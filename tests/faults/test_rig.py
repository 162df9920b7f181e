"""The rig itself: the backend and the client see each other exactly, before any gateway stands between them."""

from __future__ import annotations

import pytest

from .rig import scripts
from .rig.backend import FakeBackend
from .rig.client import EndedShortError, RawClient, ask, chat, marker
from .rig.waiting import eventually, in_parallel


def test_an_ordinary_answer_and_its_log(backend: FakeBackend) -> None:
    mark = marker()
    answer = ask(backend.port, chat(mark), key="k")
    assert answer.json() == scripts.completion()
    call = backend.call(mark)
    assert call is not None
    assert call.header("authorization") == "Bearer k"
    assert call.raw_body == call.body
    eventually(lambda: not call.open)
    assert call.peer_closed_at is None


def test_a_chunked_request_is_decoded_and_kept_raw(backend: FakeBackend) -> None:
    mark = marker()
    assert ask(backend.port, chat(mark), chunked=True).status == 200
    call = backend.call(mark)
    assert call is not None
    assert call.raw_body == b"%x\r\n%b\r\n0\r\n\r\n" % (len(call.body), bytes(call.body))


def test_events_come_one_by_one_on_a_kept_connection(backend: FakeBackend) -> None:
    with RawClient(backend.port) as client:
        for _ in range(2):
            client.request(chat(stream=True))
            assert client.read_head().status == 200
            assert list(client.events()) == [*scripts.deltas(3), scripts.delta("", "stop"), scripts.DONE]
    assert backend.accepted == 1


def test_the_backend_sees_its_peer_close(backend: FakeBackend) -> None:
    backend.script = scripts.silent
    mark = marker()
    with RawClient(backend.port) as client:
        client.request(chat(mark))
        eventually(lambda: backend.call(mark))
        assert backend.open_calls == 1
    eventually(lambda: backend.open_calls == 0)
    call = backend.call(mark)
    assert call is not None
    assert call.peer_closed_at is not None
    assert call.peer_closed_at - (client.closed_at or 0) < 0.2


def test_the_high_water_mark_counts_requests_open_at_once(backend: FakeBackend) -> None:
    backend.script = scripts.says(after=0.1)
    in_parallel(lambda _: ask(backend.port), range(5))
    ask(backend.port)
    assert backend.high_water == 5


def test_a_reset_is_seen_as_one(backend: FakeBackend) -> None:
    backend.plan.append(scripts.steps(scripts.answer(200, b"abc")[:-1], 0.05, scripts.Do.RESET))
    assert ask(backend.port).ended == "rst"


def test_a_dead_backend_refuses_and_comes_back_on_its_port(backend: FakeBackend) -> None:
    backend.die()
    with pytest.raises(ConnectionRefusedError):
        RawClient(backend.port)
    backend.listen()
    assert ask(backend.port).status == 200


def test_an_answer_on_the_head_leaves_the_body_unread(backend: FakeBackend) -> None:
    backend.script = scripts.on_head(scripts.answer(413), scripts.Do.CLOSE)
    with RawClient(backend.port) as client:
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert client.read_head().status == 413
        with pytest.raises(EndedShortError):
            client.read_head()


def test_back_pressure_reaches_the_script(backend: FakeBackend) -> None:
    backend.script = scripts.steps(scripts.answer(200, b"x" * 50_000_000))
    with RawClient(backend.port, receive_buffer=16384) as client:
        client.request(chat())
        assert client.read_head().status == 200
        call = backend.calls[0]
        eventually(lambda: call.bytes_sent > 100_000)
        assert call.bytes_sent < 10_000_000


def test_probes_are_counted_apart(backend: FakeBackend) -> None:
    assert ask(backend.port, method="GET", path="/health").status == 200
    assert ask(backend.port, method="GET", path="/v1/models").json()["data"][0]["id"] == "m"
    assert (len(backend.probes), len(backend.calls)) == (2, 0)
