"""One client connection: bytes in through llhttp, requests in order, answers out with bounded buffers."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools
import msgspec

from forebay.engines.serving.exchange import STREAM_TYPE, Exchange, error_body

if TYPE_CHECKING:
    from forebay.engines.serving.server import Server

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_UNSENT_BYTES = 1024 * 1024  # what a client that does not read may hold of our memory before it is cut off
MAX_PIPELINED = 8

_REASONS = {
    200: b"OK", 400: b"Bad Request", 403: b"Forbidden", 404: b"Not Found", 405: b"Method Not Allowed",
    413: b"Content Too Large", 429: b"Too Many Requests", 431: b"Request Header Fields Too Large",
    500: b"Internal Server Error", 502: b"Bad Gateway", 503: b"Service Unavailable", 504: b"Gateway Timeout",
    529: b"Site is overloaded",
}  # fmt: skip


class Request(msgspec.Struct):
    """A request that has arrived whole."""

    method: bytes
    path: bytes
    body: bytes
    keep_alive: bool
    chunked: bool
    """Whether the client understands chunked answers: HTTP/1.1."""


class Connection(asyncio.Protocol):
    """Parses, answers one request at a time, and tells the engine at once when the client leaves."""

    def __init__(self, server: Server) -> None:
        self.exchange: Exchange | None = None
        self.busy = False
        self.last_active = server.loop.time()
        self._server = server
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self._pumping = False
        self._rejected = False
        self._reading_paused = False
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._dirty = False
        self._writing_paused = False
        self._reset_message()

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports are not subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._server.connections.discard(self)
        self._leave()

    def eof_received(self) -> bool:
        # Half-closed counts as gone: what nobody waits for must not hold a slot.
        self._leave()
        return False

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._out:
            self._mark_dirty()

    def data_received(self, data: bytes) -> None:
        if self._rejected:
            return
        self.last_active = self._server.loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request was delivered; what follows is in a protocol that is not spoken here.
            self._rejected = True
            self._close_after_last()
        except httptools.HttpParserError as error:
            self._reject(400, f"The request is not valid HTTP: {error}")
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._reject(431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes")

    @property
    def is_loopback(self) -> bool:
        """Whether the client is on this machine."""
        peer = self._transport.get_extra_info("peername")
        return bool(peer) and (str(peer[0]).startswith("127.") or peer[0] in ("::1", "::ffff:127.0.0.1"))

    def close_if_idle(self, since: float) -> None:
        """Close when nothing is being answered and nothing has arrived since `since` (loop time)."""
        if not self.busy and self.last_active <= since:
            self._transport.close()

    def kill(self) -> None:
        """End at once, whatever is unsent."""
        self._leave()
        self._transport.abort()

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        self._reset_message()
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect":
            self._expects = value.strip().lower() == b"100-continue"
        elif name == b"upgrade":
            self._offers_upgrade = True
        elif name == b"content-length" and value.strip().isdigit():
            self._announced = int(value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._announced > MAX_BODY_BYTES:
            self._reject(413, f"The body has {self._announced} bytes, the most allowed is {MAX_BODY_BYTES}")
        elif self._expects and not self.busy and not self._waiting:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._rejected:
            return
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            self._reject(413, f"The body is larger than {MAX_BODY_BYTES} bytes")
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._rejected:
            return
        if self._offers_upgrade and self._parser.get_method() == b"POST":
            # The parser takes all that follows for the other protocol, so the body cannot be had.
            self._reject(400, "This server speaks HTTP/1.1 only: send the request without an Upgrade header")
            return
        request = Request(
            method=self._parser.get_method(),
            path=self._url.partition(b"?")[0],
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
            keep_alive=self._parser.should_keep_alive(),
            chunked=self._parser.get_http_version() == "1.1",
        )
        self._reset_message()
        self._waiting.append(request)
        if len(self._waiting) > MAX_PIPELINED and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()
        self._pump()

    def _reset_message(self) -> None:
        self._url = b""
        self._body: list[bytes] = []
        self._body_bytes = self._head_bytes = self._announced = 0
        self._expects = self._in_head = self._offers_upgrade = False

    # --- requests, one after the other ---

    def _pump(self) -> None:
        # A loop, not a call from one answer to the next: pipelined requests must not grow the stack.
        if self._pumping:
            return
        self._pumping = True
        while self._waiting and not self.busy and not self._transport.is_closing():
            self._current = self._waiting.popleft()
            self.busy = True
            self._server.route(self, self._current)
        self._pumping = False
        if self._reading_paused and len(self._waiting) <= MAX_PIPELINED and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()

    def _finish(self) -> None:
        self.exchange = None
        self.busy = False
        self.last_active = self._server.loop.time()
        keep = self._current is not None and self._current.keep_alive and not self._server.draining
        self._current = None
        if not keep:
            self._waiting.clear()
        self._pump()
        if not self.busy and not self._waiting and (self._rejected or not keep):
            self._close()

    def _reject(self, status: int, message: str) -> None:
        """Refuse what cannot be parsed or is too large; nothing after it can be trusted."""
        if self._rejected:
            return
        self._rejected = True
        if self.busy:
            # An earlier request is being answered: answering this one now would be taken for its answer.
            self._close_after_last()
            return
        self._current = Request(b"", b"", b"", keep_alive=False, chunked=True)
        self.busy = True
        self.respond(status, error_body(status, message, "BadRequestError"))

    def _close_after_last(self) -> None:
        if not self.busy:
            self._close()

    def _leave(self) -> None:
        self._waiting.clear()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.abort()

    # --- answers (`exchange.Channel`) ---

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        """A whole answer; `extra` is header lines with their line ends."""
        request = self._current
        if request is None:
            return
        head = b"HTTP/1.1 %d %b\r\n%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
            status,
            _REASONS.get(status, b"Status"),
            self._server.common_head(),
            content_type,
            len(body),
            extra,
            self._connection_header(request),
        )
        self._queue(head if request.method == b"HEAD" else head + body)
        self._finish()

    def open_stream(self) -> None:
        """The head of a streamed answer: chunked, or ended by the close for an HTTP/1.0 client."""
        request = self._current
        if request is None:
            return
        if not request.chunked:
            request.keep_alive = False
        self._queue(
            b"HTTP/1.1 200 OK\r\n%bcontent-type: %b\r\n%b%b\r\n"
            % (
                self._server.common_head(),
                STREAM_TYPE,
                b"transfer-encoding: chunked\r\n" if request.chunked else b"",
                self._connection_header(request),
            )
        )

    def write_stream(self, data: bytes) -> None:
        if self._current is not None and self._current.chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._queue(data)

    def close_stream(self) -> None:
        if self._current is not None and self._current.chunked:
            self._queue(b"0\r\n\r\n")
        self._finish()

    def _connection_header(self, request: Request) -> bytes:
        if not request.keep_alive or self._server.draining:
            return b"connection: close\r\n"
        return b"" if request.chunked else b"connection: keep-alive\r\n"

    def _queue(self, data: bytes) -> None:
        self._out.append(data)
        self._out_bytes += len(data)
        if not self._dirty:
            self._mark_dirty()
        # One answer may exceed the bound; what counts is what piles up behind a reader that stopped.
        if self._writing_paused and self._out_bytes > MAX_UNSENT_BYTES:
            self.kill()

    def _mark_dirty(self) -> None:
        self._dirty = True
        self._server.flush_soon(self)

    def flush(self) -> None:
        """Write all that was queued since the last time in one piece, unless the client is not reading."""
        self._dirty = False
        if not self._writing_paused:
            self._write_out()

    def _write_out(self) -> None:
        out = self._out
        if out and not self._transport.is_closing():
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        out.clear()
        self._out_bytes = 0

    def _close(self) -> None:
        self._write_out()
        self._transport.close()
