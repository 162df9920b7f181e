"""Upstream connections on an in-memory transport: reuse, the one retry, time-outs, and what counts as an answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import pytest

from forebay.engines import pool as module
from forebay.engines.pool import HEAD_MAX, Breakage, ConnectionPool, ResponseHead, Upstream

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class MemoryTransport:
    """Keeps what is written; its peer is the test."""

    def __init__(self, protocol: Upstream) -> None:
        self.protocol = protocol
        self.written = b""
        self.unsent = 0
        self.reading = True
        self.closed = self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, pieces: list[bytes]) -> None:
        self.written += b"".join(pieces)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    # ---- the peer's side

    def answers(self, data: bytes) -> None:
        self.protocol.data_received(data)

    def hangs_up(self, error: Exception | None = None) -> None:
        self.closed = True
        self.protocol.connection_lost(error)


class MemoryLoop:
    """An event loop whose connections are made in memory."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.made: list[MemoryTransport] = []
        self.refuses: OSError | None = None
        self.ahead = 0.0  # seconds that the clock was moved

    def time(self) -> float:
        return self._loop.time() + self.ahead

    def call_at(self, at: float, callback: Callable[[], Any]) -> asyncio.TimerHandle:
        return self._loop.call_at(at - self.ahead, callback)

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._loop.create_task(work)

    async def create_connection(self, make: Callable[[], Upstream], *where: Any, ssl: Any) -> tuple[Any, Upstream]:
        if self.refuses is not None:
            raise self.refuses
        protocol = make()
        transport = MemoryTransport(protocol)
        self.made.append(transport)
        protocol.connection_made(cast("asyncio.Transport", transport))
        return transport, protocol


class Asked:
    """One request, and all that it heard."""

    def __init__(self, *payload: bytes) -> None:
        self.gone = False
        self.connection: Upstream | None = None
        self.status = 0
        self.received = b""
        self.done = 0
        self.breakages: list[Breakage] = []
        self._payload = list(payload or (b"POST / HTTP/1.1\r\n\r\n",))

    def payload(self) -> list[bytes]:
        return self._payload

    def connected(self, connection: Upstream) -> None:
        self.connection = connection

    def head(self, head: ResponseHead, length: int | None) -> None:
        self.status = head.status

    def whole(self, head: ResponseHead, body: bytes) -> None:
        self.status = head.status
        self.body([body], True)

    def body(self, pieces: list[bytes], done: bool) -> None:
        self.received += b"".join(pieces)
        self.done += done

    def broke(self, breakage: Breakage, detail: str) -> None:
        assert detail
        self.breakages.append(breakage)


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


Case = Callable[[MemoryLoop, ConnectionPool], Awaitable[None]]


def in_memory(case: Case) -> Callable[[], None]:
    """A test on a pool of its own, on a running loop."""

    def test() -> None:
        async def run() -> None:
            loop = MemoryLoop(asyncio.get_running_loop())
            pool = ConnectionPool(
                cast("asyncio.AbstractEventLoop", loop), "engine", 80, tls=None, connect_s=1, first_byte_s=60, idle_s=60
            )
            try:
                await case(loop, pool)
            finally:
                pool.close()

        asyncio.run(run())

    test.__name__ = case.__name__
    test.__doc__ = case.__doc__
    return test


async def sent(pool: ConnectionPool, *payload: bytes) -> Asked:
    asked = Asked(*payload)
    pool.send(asked)
    await turns()
    return asked


async def warm(loop: MemoryLoop, pool: ConnectionPool) -> MemoryTransport:
    """One idle connection."""
    await sent(pool)
    loop.made[-1].answers(OK)
    return loop.made[-1]


@in_memory
async def test_an_answer_in_any_cut_is_the_same(loop: MemoryLoop, pool: ConnectionPool) -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n1;x\r\ni\r\n0\r\nt: 1\r\n\r\n"
    for data in (OK, OK, chunked):
        for size in (len(data), 1, 7):
            asked = await sent(pool)
            for at in range(0, len(data), size):
                loop.made[-1].answers(data[at : at + size])
            assert (asked.status, asked.received, asked.done, asked.breakages) == (200, b"hi", 1, [])
    assert len(loop.made) == 1, "a whole answer leaves the connection for the next"


@in_memory
async def test_the_connection_used_last_is_used_next(loop: MemoryLoop, pool: ConnectionPool) -> None:
    asked = [await sent(pool) for _ in range(3)]
    for transport in loop.made:
        transport.answers(OK)
    assert [each.received for each in asked] == [b"hi"] * 3
    again = await sent(pool)
    assert again.connection is loop.made[2].protocol


@in_memory
async def test_a_stale_connection_is_replaced_once(loop: MemoryLoop, pool: ConnectionPool) -> None:
    stale = await warm(loop, pool)
    asked = await sent(pool, b"once")
    assert stale.written.endswith(b"once")
    stale.hangs_up(ConnectionResetError())
    await turns()
    assert asked.breakages == []
    assert loop.made[1].written == b"once"
    loop.made[1].hangs_up()
    await turns()
    assert (asked.breakages, len(loop.made)) == ([Breakage.BROKEN], 2)


@in_memory
async def test_what_may_have_been_read_goes_to_no_other_engine(loop: MemoryLoop, pool: ConnectionPool) -> None:
    """UNDELIVERED lets another engine have it; that is for a request that no engine has seen."""
    stale = await warm(loop, pool)
    loop.refuses = ConnectionRefusedError("refused")
    asked = await sent(pool)
    stale.hangs_up()
    await turns()
    assert asked.breakages == [Breakage.BROKEN]
    assert (await sent(pool)).breakages == [Breakage.UNDELIVERED]


@in_memory
async def test_a_connection_that_closes_late_was_not_stale(loop: MemoryLoop, pool: ConnectionPool) -> None:
    reused = await warm(loop, pool)
    asked = await sent(pool)
    loop.ahead += module.STALE_S
    reused.hangs_up()
    await turns()
    assert (asked.breakages, len(loop.made)) == ([Breakage.BROKEN], 1)


@in_memory
async def test_after_a_byte_of_the_answer_nothing_is_replayed(loop: MemoryLoop, pool: ConnectionPool) -> None:
    reused = await warm(loop, pool)
    asked = await sent(pool)
    reused.answers(b"H")
    reused.hangs_up()
    await turns()
    assert (asked.breakages, len(loop.made)) == ([Breakage.BROKEN], 1)


@in_memory
async def test_a_closed_idle_connection_is_not_used(loop: MemoryLoop, pool: ConnectionPool) -> None:
    (await warm(loop, pool)).hangs_up()
    assert pool.spare == []
    await sent(pool)
    assert len(loop.made) == 2


@in_memory
async def test_an_idle_connection_that_talks_is_closed(loop: MemoryLoop, pool: ConnectionPool) -> None:
    idle = await warm(loop, pool)
    idle.answers(b"HTTP/1.1 408 Too Late\r\n\r\n")
    assert idle.aborted
    await sent(pool)
    assert len(loop.made) == 2


@in_memory
async def test_bytes_behind_an_answer_end_the_connection(loop: MemoryLoop, pool: ConnectionPool) -> None:
    for answer in (OK + OK, OK + b"x", b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi"):
        asked = await sent(pool)
        loop.made[-1].answers(answer)
        assert (asked.received, asked.done) == (b"hi", 1)
        assert loop.made[-1].closed
        assert pool.spare == []


@in_memory
async def test_an_answer_before_the_request_was_written(loop: MemoryLoop, pool: ConnectionPool) -> None:
    await warm(loop, pool)
    for unsent in (0, 5000):
        asked = await sent(pool, b"head", b"x" * 100_000)
        loop.made[0].unsent = unsent
        loop.made[0].answers(OK)
        assert asked.done == 1
        assert loop.made[0].aborted is bool(unsent), "the rest would stand in front of the next request"


@in_memory
async def test_what_is_not_http_is_garbled(loop: MemoryLoop, pool: ConnectionPool) -> None:
    for data in (
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nx: " + b"x" * HEAD_MAX,
    ):
        asked = await sent(pool)
        loop.made[-1].answers(data)
        assert asked.breakages == [Breakage.GARBLED]
        assert loop.made[-1].aborted


@in_memory
async def test_interim_answers_are_passed_over(loop: MemoryLoop, pool: ConnectionPool) -> None:
    asked = await sent(pool)
    loop.made[0].answers(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
    assert asked.status == 0
    loop.made[0].answers(OK)
    assert (asked.status, asked.received, asked.done) == (200, b"hi", 1)


@in_memory
async def test_an_answer_without_a_length_ends_with_its_connection(loop: MemoryLoop, pool: ConnectionPool) -> None:
    asked = await sent(pool)
    loop.made[0].answers(b"HTTP/1.1 200 OK\r\n\r\nhi")
    assert asked.done == 0
    loop.made[0].hangs_up()
    assert (asked.received, asked.done, asked.breakages) == (b"hi", 1, [])


@in_memory
async def test_a_truncated_answer_is_broken(loop: MemoryLoop, pool: ConnectionPool) -> None:
    for data in (OK[:-1], b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n", b"HTTP/1.1 2"):
        asked = await sent(pool)
        loop.made[-1].answers(data)
        loop.made[-1].hangs_up()
        await turns()
        assert (asked.done, asked.breakages) == (0, [Breakage.BROKEN])


@in_memory
async def test_a_time_out_drops_the_idle_connections_too(loop: MemoryLoop, pool: ConnectionPool) -> None:
    both = [await sent(pool) for _ in range(2)]
    idle, silent = loop.made
    idle.answers(OK)
    silent.protocol.timed_out()
    assert (both[1].breakages, silent.aborted, idle.closed, pool.spare) == ([Breakage.TIMEOUT], True, True, [])


@in_memory
async def test_a_client_that_left_while_connecting(loop: MemoryLoop, pool: ConnectionPool) -> None:
    asked = Asked()
    pool.send(asked)
    asked.gone = True
    await turns()
    assert loop.made[0].written == b""
    assert pool.spare == [loop.made[0].protocol], "the connection serves the next"


@in_memory
async def test_closing_the_pool(loop: MemoryLoop, pool: ConnectionPool) -> None:
    idle = await warm(loop, pool)
    asked = await sent(pool)
    more = await sent(pool)
    loop.made[1].answers(OK)
    pool.close()
    assert loop.made[1].closed
    idle.answers(OK)
    assert (asked.done, more.done) == (1, 1)
    assert idle.closed, "what ends after the close is not kept"


class Awaited(Asked):
    """A request whose end can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    def body(self, pieces: list[bytes], done: bool) -> None:
        super().body(pieces, done)
        if done:
            self.ended.set()


def test_the_live_one_of_two_addresses_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """On real sockets: a name stands for a dead address and a live one."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        asked, left = Awaited(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)
            await reader.read()
            writer.close()
            await writer.wait_closed()
            left.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        def both(*_: Any, **__: Any) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        pool = ConnectionPool(loop, "two.test", port, tls=None, connect_s=5, first_byte_s=5, idle_s=5)
        pool.send(asked)
        await asyncio.wait_for(asked.ended.wait(), 5)
        assert asked.received == b"hi"
        pool.close()
        await asyncio.wait_for(left.wait(), 5)
        server.close()
        await server.wait_closed()

    asyncio.run(run())
