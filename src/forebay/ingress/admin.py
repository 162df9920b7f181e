"""The admin port: metrics, status and snapshot over HTTP/1.1, on the gateway's own event loop.

It serves a scraper and a few people, so it is bounded tightly, answers one request at a time per connection, and
renders metrics family by family with the loop free in between: a scrape never delays the data port noticeably.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import httptools
import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from forebay.config.check import is_loopback
from forebay.core.snapshot import Snapshot
from forebay.errors import ConfigError, ForebayError, UsageError

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 64
REQUEST_BYTES_MAX = 16 * 1024  # head and body together; nothing here takes a body
IDLE_S = 75.0  # a scraper's interval is shorter
REQUEST_S = 10.0  # from a request's first byte to its last
UNSENT_BYTES_MAX = 4 * 1024 * 1024

JSON = b"application/json"
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
RELOAD = b"/api/v1/config/reload"
TUNER = b"/api/v1/tuner"
FREEZE = {b"/api/v1/tuner/freeze": True, b"/api/v1/tuner/unfreeze": False}
EXPLAIN = b"/api/v1/explain/"
PATHS = frozenset({b"/healthz", b"/metrics", b"/api/v1/status", b"/api/v1/snapshot", TUNER, *FREEZE, RELOAD})

_PHRASES = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 404: b"Not Found", 405: b"Method Not Allowed",
    409: b"Conflict", 413: b"Content Too Large", 500: b"Internal Server Error",
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
    ) -> None:
        """`tuners` says what the tuners found; with True or False it freezes them first, or lets them go on."""
        self._snapshot = snapshot
        self._status = status
        self._registry = registry
        self._token = None if token is None else token.encode()
        self._reload = reload
        self._explain = explain
        self._tuners = tuners
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

    def may(self, authorization: bytes) -> bool:
        """Does this credential open the port? Compared in constant time."""
        if self._token is None:
            return True
        scheme, _, presented = authorization.strip().partition(b" ")
        return hmac.compare_digest(presented.strip(), self._token) and scheme.lower() == b"bearer"

    async def answer(self, path: bytes) -> tuple[int, bytes, bytes]:
        """(status, content type, body) of a GET on a known path."""
        if path == b"/healthz":
            return 200, JSON, b'{"status":"alive"}'
        try:
            if path == b"/metrics":
                return 200, PROMETHEUS, await self._metrics()
            if path == TUNER:
                return 200, JSON, msgspec.json.encode(self._tuners(None))
            body = self._snapshot() if path == b"/api/v1/snapshot" else self._status()
            return 200, JSON, msgspec.json.encode(body)
        except Exception:
            # The data port must not care; the operator should hear of it.
            log.exception("the admin port failed to answer %s", path.decode("ascii", "replace"))
            return 500, JSON, _error("internal_error", "the answer could not be made; see the log")

    def explain(self, request_id: bytes) -> tuple[int, bytes, bytes]:
        """(status, content type, body) of the question about one request."""
        found = self._explain(request_id.decode("latin-1")) if self._explain is not None else None
        if found is None:
            return 404, JSON, _error("not_kept", "no decision on this request is kept; see [telemetry] explain")
        return 200, JSON, msgspec.json.encode(found)

    def reload(self) -> tuple[int, bytes, bytes]:
        """(status, content type, body) of a reload: 200 with its warnings, or 409 with what is wrong."""
        try:
            warnings = self._reload() if self._reload is not None else ()
        except ForebayError as error:
            return 409, JSON, _error("not_reloaded", f"nothing has changed: {error}")
        log.info("the configuration was reloaded")
        return 200, JSON, msgspec.json.encode({"reloaded": True, "warnings": warnings})

    def freeze(self, frozen: bool) -> tuple[int, bytes, bytes]:
        """(status, content type, body) of a freeze or its end."""
        log.info("the depth tuners were %s", "frozen" if frozen else "let go on")
        return 200, JSON, msgspec.json.encode(self._tuners(frozen))

    async def _metrics(self) -> bytes:
        parts = []
        for family in self._registry.collect():
            parts.append(generate_latest(cast("CollectorRegistry", _Single(family))))
            await asyncio.sleep(0)
        return b"".join(parts)


class _Single(Collector):
    """A registry of one family: the encoder asks for nothing but `collect`."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


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
        self._authorization = b""
        self._received = 0
        self._ended = False  # nothing more is read from this client, or written to it
        self._last = False  # the connection ends with the request at hand

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
            self._refuse(400, "malformed", "the request is not valid HTTP/1.1")

    def pause_writing(self) -> None:
        # More than one whole answer is unsent: this client does not read.
        self.close()

    def close(self) -> None:
        """End at once."""
        self._ended = True
        self._transport.abort()

    # ---- the parser's side -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = self._authorization = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"authorization":
            self._authorization = value

    def on_message_complete(self) -> None:
        if self._ended:
            return
        if self._task is not None:
            # Pipelining is legal and nobody's scraper does it: the second request is not served.
            self._refuse(400, "malformed", "send the next request after the answer")
            return
        method, keep = self._parser.get_method(), self._parser.should_keep_alive()
        self._disarm()
        self._task = self._loop.create_task(self._serve(method, self._url.partition(b"?")[0], keep))

    async def _serve(self, method: bytes, path: bytes, keep: bool) -> None:
        status, kind, body, extra = await self._respond(method, path)
        self._task = None
        if self._ended:
            return
        keep = keep and not self._last
        self._send(status, kind, body, extra, keep=keep, head_only=method == b"HEAD")
        if keep:
            self._received = 0
            self._arm(IDLE_S)

    async def _respond(self, method: bytes, path: bytes) -> tuple[int, bytes, bytes, bytes]:
        if path != b"/healthz" and not self._server.may(self._authorization):
            message = "send the admin token as 'authorization: Bearer …'"
            return 401, JSON, _error("invalid_token", message), b"www-authenticate: Bearer\r\n"
        if path.startswith(EXPLAIN) and method in (b"GET", b"HEAD"):
            return (*self._server.explain(path[len(EXPLAIN) :]), b"")
        if path not in PATHS:
            known = ", ".join(sorted(known.decode() for known in PATHS))
            return 404, JSON, _error("not_found", f"nothing is here; there is: {known}"), b""
        if path == RELOAD or path in FREEZE:
            if method != b"POST":
                return 405, JSON, _error("method_not_allowed", "use POST"), b"allow: POST\r\n"
            return (*(self._server.reload() if path == RELOAD else self._server.freeze(FREEZE[path])), b"")
        if method not in (b"GET", b"HEAD"):
            return 405, JSON, _error("method_not_allowed", "use GET"), b"allow: GET, HEAD\r\n"
        return (*await self._server.answer(path), b"")

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, JSON, _error(code, message), b"", keep=False, head_only=False)

    def _send(self, status: int, kind: bytes, body: bytes, extra: bytes, *, keep: bool, head_only: bool) -> None:
        head = b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\ncache-control: no-store\r\n%s%s\r\n" % (
            status, _PHRASES[status], kind, len(body), extra, b"" if keep else b"connection: close\r\n",
        )  # fmt: skip
        self._transport.write(head if head_only else head + body)
        if not keep:
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


def _error(code: str, message: str) -> bytes:
    return msgspec.json.encode({"error": {"code": code, "message": message}})
