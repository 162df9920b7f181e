"""The admin port: metrics, status, keys and credits over HTTP/1.1, on the gateway's own event loop.

It serves a scraper and a few people, so it is bounded tightly and answers one request at a time per connection. What it
offers stands in a table (ingress/api); here is who may ask, and how the answer leaves.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec
from prometheus_client import CollectorRegistry

from forebay.config.check import is_loopback
from forebay.core.snapshot import Snapshot
from forebay.errors import ConfigError, UsageError
from forebay.ingress.api.base import BaseEndpoints
from forebay.ingress.api.openapi import document
from forebay.ingress.api.table import Asked, Endpoint, Problem, Reply, Table, phrase, problem

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 64
HEAD_BYTES_MAX = 16 * 1024
REQUEST_BYTES_MAX = 80 * 1024  # head and body together
IDLE_S = 75.0  # a scraper's interval is shorter
REQUEST_S = 10.0  # from a request's first byte to its last
UNSENT_BYTES_MAX = 4 * 1024 * 1024
UNREAD_S = 30.0  # a client that reads nothing of a long answer

_HEADERS = {
    b"authorization": "authorization", b"content-type": "content_type", b"idempotency-key": "idempotency",
    b"host": "host", b"origin": "origin",
}  # fmt: skip


class AdminServer:
    """Serves the admin port. `status` returns plain JSON data; `token` None asks for none (loopback only)."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        status: Callable[[], dict[str, Any]],
        registry: CollectorRegistry,
        token: str | None,
        reload: Callable[[], tuple[str, ...]] | None = None,
        explain: Callable[[str], dict[str, Any] | None] | None = None,
        tuners: Callable[[bool | None], dict[str, Any]] = lambda _: {},
        *,
        read_token: str | None = None,
        more: Iterable[Endpoint] = (),
        absent: Mapping[str, str] | None = None,
        version: str = "",
    ) -> None:
        """`read_token` may ask, and change nothing; `more`: further endpoints; `absent`: see Table; `tuners` says what
        the tuners found, and with True or False freezes them first, or lets them go on."""
        base = BaseEndpoints(snapshot, status, registry, reload, explain, tuners)
        described = Endpoint("GET", "/openapi.json", "This description.", self._describe)
        self._table = Table((*base.endpoints(), described, *more), absent)
        self._version = version
        self._document = b""
        self._token = None if token is None else token.encode()
        self._read_token = None if read_token is None else read_token.encode()
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (the one taken, for port 0).

        Raises UsageError when the address cannot be listened on, ConfigError when it is open to others without a token.
        """
        loop = asyncio.get_running_loop()
        if self._token is None and not is_loopback(host):
            raise ConfigError(f"the admin port on {host} is open to others; set [admin] token, or listen on 127.0.0.1")
        try:
            self._server = await loop.create_server(lambda: _Connection(self, loop), host, port)
        except OSError as error:
            reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            raise UsageError(
                f"the admin port cannot listen on {host}:{port}: {reason}; choose another with --admin-port"
            ) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self.connections):
            connection.close()
        await self._server.wait_closed()
        self._server = None

    async def respond(self, method: str, path: str, asked: Asked, headers: dict[str, bytes]) -> Reply:
        """The answer to one request."""
        try:
            endpoint, place = self._find(method, path, headers.get("authorization", b""))
            actor = self._admitted(endpoint, headers)
            return await endpoint.answer(asked._replace(place=place, actor=actor))
        except Problem as wrong:
            return wrong.reply
        except Exception:
            # The data port must not care; the operator should hear of it.
            log.exception("the admin port failed to answer %s", path)
            return Reply(500, problem("internal_error", "the answer could not be made; see the log"))

    def _find(self, method: str, path: str, authorization: bytes) -> tuple[Endpoint, str]:
        """Without the token nobody learns which paths there are. Raises Problem."""
        if path != "/healthz":
            self._who(authorization)
        return self._table.find(method, path)

    def _admitted(self, endpoint: Endpoint, headers: dict[str, bytes]) -> str:
        """Who asks, for the trail. Raises Problem when they may not."""
        if endpoint.open:
            return ""
        actor, may_change = self._who(headers.get("authorization", b""))
        if endpoint.changes and not may_change:
            raise Problem(403, "read_only", "this token may only read; changes take [admin] token")
        if endpoint.changes and self._token is None and _from_elsewhere(headers):
            raise Problem(403, "foreign_origin", "a web page of another origin may change nothing here")
        return actor

    def _who(self, authorization: bytes) -> tuple[str, bool]:
        """(name for the trail, may it change anything). Compared in constant time. Raises Problem."""
        scheme, _, presented = authorization.strip().partition(b" ")
        presented = presented.strip() if scheme.lower() == b"bearer" else b""
        if self._token is None:
            return "loopback", True
        if hmac.compare_digest(presented, self._token):
            return f"token:{_fingerprint(self._token)}", True
        if self._read_token is not None and hmac.compare_digest(presented, self._read_token):
            return f"token:{_fingerprint(self._read_token)}", False
        message = "send the admin token as 'authorization: Bearer …'"
        raise Problem(401, "invalid_token", message, extra=b"www-authenticate: Bearer\r\n")

    async def _describe(self, asked: Asked) -> Reply:
        del asked
        self._document = self._document or msgspec.json.encode(document(self._table, self._version))
        return Reply(200, self._document)


def _fingerprint(token: bytes) -> str:
    """Tells tokens apart, and does not help to guess one."""
    return blake2b(token, digest_size=4, person=b"forebay admin").hexdigest()


def _from_elsewhere(headers: dict[str, bytes]) -> bool:
    """Does a browser send it for a page that is not this port's own? It then names the page's origin; others do not."""
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        parts = urlsplit(origin.decode("ascii"))
        return parts.netloc.encode() != headers.get("host", b"") or not is_loopback(parts.hostname or "")
    except ValueError:
        return True


class _Connection(asyncio.Protocol):
    """One client: bytes in through llhttp, one answer at a time."""

    def __init__(self, server: AdminServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._url = b""
        self._headers: dict[str, bytes] = {}
        self._body = b""
        self._received = 0  # bytes of the request at hand
        self._head_size = 0
        self._head_done = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = False  # nothing more is read from this client, or written to it
        self._last = False  # the connection ends with the request at hand
        self._streams = False  # the answer at hand is sent as it is made

    # ---- the transport's side --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports are not subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        if len(self._server.connections) >= CONNECTIONS_MAX:
            self._ended = True
            self._transport.abort()
            return
        self._server.connections.add(self)
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self._arm(IDLE_S)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._ended = True
        self._server.connections.discard(self)
        self._disarm()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._ended or self._last:
            return
        if not self._received:
            self._arm(REQUEST_S)
        self._received += len(data)
        if self._received > REQUEST_BYTES_MAX:
            self._refuse(413, "request_too_large", f"requests here are at most {REQUEST_BYTES_MAX} bytes")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The offer is declined by answering in HTTP/1.1; what follows may be in the other protocol.
            self._last = True
        except httptools.HttpParserError:
            if not self._ended:
                self._refuse(400, "malformed", "the request is not valid HTTP/1.1")
        if not self._head_done and self._received > HEAD_BYTES_MAX and not self._ended:
            self._head_too_large()

    def pause_writing(self) -> None:
        # More than one whole answer is unsent: this client does not read. A long one waits for it.
        if self._streams:
            self._writable.clear()
        else:
            self.close()

    def resume_writing(self) -> None:
        self._writable.set()

    def close(self) -> None:
        """End at once."""
        self._ended = True
        self._transport.abort()

    # ---- the parser's side -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = self._body = b""
        self._headers = {}
        self._head_size = 0
        self._head_done = False

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value)
        if (known := _HEADERS.get(name.lower())) is not None:
            self._headers[known] = value

    def on_headers_complete(self) -> None:
        self._head_done = True
        if self._head_size > HEAD_BYTES_MAX and not self._ended:
            self._head_too_large()

    def _head_too_large(self) -> None:
        self._refuse(413, "request_too_large", f"request heads here are at most {HEAD_BYTES_MAX} bytes")

    def on_body(self, piece: bytes) -> None:
        self._body += piece

    def on_message_complete(self) -> None:
        if self._ended:
            return
        if self._task is not None:
            # Pipelining is legal and nobody's scraper does it: the second request is not served.
            self._refuse(400, "malformed", "send the next request after the answer")
            return
        method, keep = self._parser.get_method(), self._parser.should_keep_alive()
        self._disarm()
        self._task = self._loop.create_task(self._serve(method.decode("latin-1"), keep))

    async def _serve(self, method: str, keep: bool) -> None:
        path, _, query = self._url.decode("latin-1").partition("?")
        headers = self._headers
        idempotency = headers.get("idempotency")
        asked = Asked(
            path,
            query=query,
            body=self._body,
            content_type=headers.get("content_type", b"").decode("latin-1"),
            idempotency=None if idempotency is None else idempotency.decode("latin-1"),
        )
        reply = await self._server.respond(method, path, asked, headers)
        if self._ended:
            return
        keep = keep and not self._last
        if reply.pieces is not None and method != "HEAD":
            await self._send_pieces(reply, reply.pieces)
            return
        self._task = None
        self._send(reply, keep=keep, head_only=method == "HEAD")
        if keep:
            self._received = 0
            self._arm(IDLE_S)

    async def _send_pieces(self, reply: Reply, pieces: AsyncIterator[bytes]) -> None:
        """A long answer, as fast as the client reads it; its end is the end of the connection."""
        self._streams = True
        self._transport.write(_head(reply, b"connection: close\r\n"))
        async for piece in pieces:
            self._transport.write(piece)
            await asyncio.wait_for(self._writable.wait(), UNREAD_S)
        self._finish()

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(Reply(status, problem(code, message)), keep=False, head_only=False)

    def _send(self, reply: Reply, *, keep: bool, head_only: bool) -> None:
        head = _head(reply, b"content-length: %d\r\n%b" % (len(reply.body), b"" if keep else b"connection: close\r\n"))
        self._transport.write(head if head_only else head + reply.body)
        if not keep:
            self._finish()

    def _finish(self) -> None:
        self._ended = True
        self._arm(REQUEST_S)
        self._transport.close()

    # ---- time ------------------------------------------------------------------------------------------------

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, self.close)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _head(reply: Reply, extra: bytes) -> bytes:
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncache-control: no-store\r\n%b%b\r\n" % (
        reply.status, phrase(reply.status), reply.kind, reply.extra, extra,
    )  # fmt: skip
