"""Upstream connections: a last-in-first-out stack of idle ones, each an asyncio protocol with a response parser.

The connection reads one response at a time and tells its `Exchange` about it: the head, the body as it comes, the end,
or a failure. It never looks at the meaning of what it carries. A connection that may not be reused is closed.

Last in, first out keeps few connections warm and lets the rest be closed by the engine; a reused connection that closes
without a single byte was stale, and the request goes once to a fresh one (the only retry there is).
"""

from __future__ import annotations

import asyncio
import ssl
from enum import Enum
from typing import Any, Protocol, cast

import httptools

from forebay.engines.deadlines import Deadlines

HEAD_MAX = 64 * 1024
HEADS_KEPT = 128
CONTENT_LENGTH = b"\r\ncontent-length: "  # as uvicorn, hyper and our own engines spell it
FINISH_GRACE_S = 1.0
STALE_S = 1.0  # a reused connection that closes later than this was not stale: the engine worked, and died of it


class Breakage(Enum):
    """How an exchange can fail."""

    UNDELIVERED = "the engine took no byte of the request"
    UNREACHED = "no connection to the engine was made in time"
    BROKEN = "the engine broke off"
    TIMEOUT = "the engine did not answer in time"
    GARBLED = "the engine's answer is not HTTP"


class ResponseHead:
    """The head of a response. Engines send the same one again and again, but for its length: it is read once.

    `digest` is the reader's to keep what it made of the head.
    """

    __slots__ = ("digest", "headers", "keep", "status")

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = headers  # names are lower case
        self.keep = False  # may the connection be used again?
        self.digest: Any = None


class Exchange(Protocol):
    """The other side of a connection: one request and its response."""

    gone: bool  # the client left: do not begin

    def payload(self) -> list[bytes]:
        """The whole request, head and body."""
        ...

    def connected(self, connection: Upstream) -> None:
        """The request is on its way on this connection."""
        ...

    def head(self, head: ResponseHead, length: int | None) -> None:
        """A final response head (never 1xx), and the length that it declares for its body."""
        ...

    def whole(self, head: ResponseHead, body: bytes) -> None:
        """A whole response at once, with a head that was read before. The connection is no longer ours."""
        ...

    def body(self, pieces: list[bytes], done: bool) -> None:
        """Body bytes, framing taken off. With `done` the response ended and the connection is no longer ours."""
        ...

    def broke(self, breakage: Breakage, detail: str) -> None:
        """It failed. Called at most once, never after a body with `done`."""
        ...


class Upstream(asyncio.Protocol):
    """One connection to an engine."""

    __slots__ = (
        "_bulky",
        "_done",
        "_head",
        "_head_bytes",
        "_head_seen",
        "_headers",
        "_keep",
        "_pieces",
        "_pool",
        "_read_paused",
        "_status",
        "_watch",
        "alive_at",
        "exchange",
        "parser",
        "reused",
        "silent",
        "transport",
    )

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.exchange: Exchange | None = None
        self.reused = False
        self.silent = True  # no byte of the current response has come
        self.alive_at = 0.0
        self._watch: Deadlines[Upstream] | None = None  # the deadline that runs
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._head: ResponseHead | None = None
        self._head_bytes = 0
        self._head_seen = False
        self._status = 0
        self._done = False
        self._keep = False
        self._bulky = False  # the request was too large for one write
        self._read_paused = False

    # ---- used by the pool and the exchange ---------------------------------------------------------------

    def send(self, exchange: Exchange) -> None:
        """Put a request on the wire."""
        transport = self.transport
        assert transport is not None
        pool = self._pool
        self.exchange = exchange
        self.silent = True
        self._head_seen = self._done = False
        self._head_bytes = 0
        self.alive_at = pool.loop.time()
        self._watch = pool.first_byte
        pool.first_byte.watch(self)
        exchange.connected(self)
        payload = exchange.payload()
        if len(payload) == 1:
            transport.write(payload[0])
        else:
            self._bulky = True
            transport.writelines(payload)

    def abort(self) -> None:
        """Close at once; the exchange hears no more."""
        self._forget()
        if self.transport is not None:
            self.transport.abort()

    def finish_alone(self) -> None:
        """The exchange has all it wants: read the rest of the framing, briefly, then be pooled or closed."""
        self.exchange = None
        self._run(self._pool.finishing)

    def pause(self) -> None:
        """Stop reading: the client is slow."""
        # Writing the last bytes of an answer may ask for a pause; by then the connection is the next request's.
        if self.transport is not None and self.exchange is not None and not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()
            self._run(None)  # silence is now our own doing

    def resume(self) -> None:
        if self.transport is not None and self._read_paused:
            self._read_paused = False
            self.transport.resume_reading()
            if self.exchange is not None:
                self._run(self._pool.first_byte if self.silent else self._pool.idle)

    def timed_out(self) -> None:
        """No sign of life for too long."""
        exchange = self.exchange
        silent = self.silent
        self.abort()
        self._pool.drop_idle()  # the path to the engine may be dead, and the idle ones with it
        if exchange is not None:
            exchange.broke(Breakage.TIMEOUT, "no answer began in time" if silent else "the answer stopped")

    # ---- asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        self._pool.heard += 1
        if exchange is None and self._watch is not self._pool.finishing:
            self.abort()  # an idle connection has nothing to say
            return
        fresh, self.silent = self.silent, False
        if fresh and exchange is not None and self._read_known(data, exchange):
            return
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._done:
                self._break(Breakage.GARBLED, str(error))
                return
            self._keep = False  # bytes after the end of a response: not ours to relay
        if fresh and self._done:
            self._remember(data)
        pieces = self._pieces
        if pieces:
            self._pieces = []
        if self._done:
            self._ended()
        elif not self._go_on(pieces, len(data)):
            return
        if exchange is not None and (pieces or self._done):
            exchange.body(pieces, self._done)

    def _read_known(self, data: bytes, exchange: Exchange) -> bool:
        """A whole response in one segment whose head was read before, but for the digits of its length."""
        end = data.find(b"\r\n\r\n")
        at = data.find(CONTENT_LENGTH, 0, end)
        if at < 0:
            return False
        at += len(CONTENT_LENGTH)
        after = data.find(b"\r", at)
        digits = data[at:after]
        head = self._pool.heads.get(data[:at] + data[after:end])
        if head is None or not digits.isdigit() or int(digits) != len(data) - end - 4:
            return False
        self._done = True
        self._forget()
        if self._read_paused or (self._bulky and self._unsent()):
            self.abort()
        else:
            self._pool.spare.append(self)
        exchange.whole(head, data[end + 4 :])
        return True

    def _remember(self, data: bytes) -> None:
        """Keep the head of a whole response that may come again."""
        head, end = self._head, data.find(b"\r\n\r\n")
        at = data.find(CONTENT_LENGTH, 0, end)
        if head is None or not self._keep or at < 0 or head.status != 200 or data.find(CONTENT_LENGTH, at + 1, end) > 0:
            return
        at += len(CONTENT_LENGTH)
        after = data.find(b"\r", at)
        if data[at:after].isdigit() and int(data[at:after]) == len(data) - end - 4:
            heads = self._pool.heads
            if len(heads) >= HEADS_KEPT:
                del heads[next(iter(heads))]
            heads[data[:at] + data[after:end]] = head

    def _go_on(self, pieces: list[bytes], size: int) -> bool:
        """The response is not whole yet: watch that it goes on, within bounds."""
        if not self._head_seen:
            self._head_bytes += size
            if self._head_bytes > HEAD_MAX:
                self._break(Breakage.GARBLED, "the response head is too large")
                return False
        pool = self._pool
        if self._watch is pool.first_byte and not self._read_paused:
            self._run(pool.idle)
        # Comment lines are keep-alives of the connection, not progress of the work.
        elif pieces and not pieces[0].startswith(b":"):
            self.alive_at = pool.loop.time()
        return True

    def _ended(self) -> None:
        """A response is complete: the connection is free, or closed."""
        self._forget()
        if self._bulky and self._unsent():
            self.abort()
        elif self._keep and not self._read_paused:
            self._pool.put_back(self)
        elif self.transport is not None:
            self.transport.close()

    def _unsent(self) -> bool:
        """Was the request answered before it was written whole? The engine may never read the rest."""
        self._bulky = False
        return self.transport is not None and self.transport.get_write_buffer_size() > 0

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self)
        exchange = self.exchange
        if exchange is None:
            self._forget()
            return
        if not self.silent and self._head_seen and not self._done and self._until_close():
            return
        stale = self.silent and self.reused and self._pool.loop.time() - self.alive_at < STALE_S
        self._forget()
        if stale:
            self._pool.retry(exchange)
        else:
            exchange.broke(Breakage.BROKEN, str(exc) if exc else "the connection closed before the answer was whole")

    def _until_close(self) -> bool:
        """A response without a length ends with its connection: that is a proper end."""
        if any(name in {b"content-length", b"transfer-encoding"} for name, _ in self._headers):
            return False
        exchange = self.exchange
        self._done = True
        self._forget()
        if exchange is not None:
            exchange.body([], True)
        return True

    def _break(self, breakage: Breakage, detail: str) -> None:
        exchange = self.exchange
        self.abort()
        if exchange is not None:
            exchange.broke(breakage, detail)

    def _forget(self) -> None:
        self.exchange = None
        if self._watch is not None:
            self._watch.release(self)
            self._watch = None

    def _run(self, deadlines: Deadlines[Upstream] | None) -> None:
        """Let this deadline run from now, and no other."""
        if self._watch is not None:
            self._watch.release(self)
        self._watch = deadlines
        if deadlines is not None:
            self.alive_at = self._pool.loop.time()
            deadlines.watch(self)

    # ---- httptools -------------------------------------------------------------------------------------------

    # Callbacks of bytes behind the end of a response only make sure that the connection is not used again.

    def on_message_begin(self) -> None:
        if not self._done:
            self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._done:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._done:
            self._keep = False
            return
        self._status = self.parser.get_status_code()
        if self._status < 200:
            return
        self._head_seen = True
        head = self._head = ResponseHead(self._status, self._headers)
        if self.exchange is not None:
            self.exchange.head(head, _declared_length(self._headers))

    def on_body(self, piece: bytes) -> None:
        if not self._done:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._status >= 200 and not self._done:
            self._done = True
            self._keep = self.parser.should_keep_alive()


def _declared_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    for name, value in headers:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


class ConnectionPool:
    """Idle connections to one engine address, and the making of new ones."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None,
        connect_s: float,
        first_byte_s: float,
        idle_s: float,
    ) -> None:
        self.loop = loop
        self.first_byte: Deadlines[Upstream] = Deadlines(loop, first_byte_s, Upstream.timed_out)
        self.idle: Deadlines[Upstream] = Deadlines(loop, idle_s, Upstream.timed_out)
        self.finishing: Deadlines[Upstream] = Deadlines(loop, FINISH_GRACE_S, Upstream.timed_out)
        self._host = host
        self._port = port
        self._tls = tls
        self._connect_s = connect_s
        self.heads: dict[bytes, ResponseHead] = {}  # by their bytes, the digits of the length left out
        self.heard = 0  # times that bytes came from the engine
        self.spare: list[Upstream] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._closed = False

    def send(self, exchange: Exchange) -> None:
        """Send on the connection that was used last, or on a new one."""
        spare = self.spare
        while spare:
            connection = spare.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                connection.reused = True
                connection.send(exchange)
                return
        self._open(exchange, Breakage.UNDELIVERED)

    def retry(self, exchange: Exchange) -> None:
        """Send on a fresh connection what went to a stale one. The engine may have seen it: no other engine may."""
        self._open(exchange, Breakage.BROKEN)

    def _open(self, exchange: Exchange, unreachable: Breakage) -> None:
        task = self.loop.create_task(self._connect(exchange, unreachable))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, exchange: Exchange, unreachable: Breakage) -> None:
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await self.loop.create_connection(
                    lambda: Upstream(self), self._host, self._port, ssl=self._tls
                )
        except OSError as error:  # a time-out is one too
            late = isinstance(error, TimeoutError) and unreachable is Breakage.UNDELIVERED
            detail = str(error) or "no connection in time"
            where = f"cannot connect to {self._host}:{self._port}: {detail}"
            exchange.broke(Breakage.UNREACHED if late else unreachable, where)
            return
        if exchange.gone:
            self.put_back(connection)
            return
        connection.send(exchange)

    def put_back(self, connection: Upstream) -> None:
        if self._closed or connection.transport is None or connection.transport.is_closing():
            if connection.transport is not None:
                connection.transport.close()
            return
        self.spare.append(connection)

    def lost(self, connection: Upstream) -> None:
        """A connection closed."""
        connection.transport = None
        if connection.exchange is None and connection in self.spare:
            self.spare.remove(connection)

    def drop_idle(self) -> None:
        """Close every idle connection: the engine behind them may have been replaced."""
        spare, self.spare = self.spare, []
        for connection in spare:
            if connection.transport is not None:
                connection.transport.close()

    def close(self) -> None:
        self._closed = True
        self.heads.clear()  # what still ends takes the long way, and is not kept
        self.drop_idle()
        for task in self._connecting:
            task.cancel()
        for deadlines in (self.first_byte, self.idle, self.finishing):
            deadlines.stop()
