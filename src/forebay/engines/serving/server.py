"""The server: routes, the shared flush, start and drain."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate

import msgspec

from forebay.engines.serving.connection import Connection, Request
from forebay.engines.serving.engine import ServedEngine, kinds_of
from forebay.engines.serving.exchange import error_body, exchange_for
from forebay.engines.serving.requests import (
    Asked,
    BadRequestError,
    parse_chat,
    parse_completion,
    parse_embedding,
)
from forebay.errors import EngineError

Control = Callable[[str, bytes], tuple[int, bytes]]
"""A control endpoint: method and body in, status and JSON body out. For clients on this machine only."""

Parser = Callable[[bytes, ServedEngine], Asked]

KEEP_ALIVE_S = 75.0
DRAIN_S = 10.0
BACKLOG = 2048

_PARSERS: dict[bytes, tuple[str, Parser]] = {
    b"/v1/chat/completions": ("chat", parse_chat),
    b"/v1/completions": ("completion", parse_completion),
    b"/v1/embeddings": ("embedding", parse_embedding),
}


class Server:
    """What all connections share."""

    def __init__(self, engine: ServedEngine, loop: asyncio.AbstractEventLoop, controls: Mapping[str, Control]) -> None:
        self.engine, self.loop = engine, loop
        self.connections: set[Connection] = set()
        self.started = False
        self.draining = False
        self._controls = {path.encode(): control for path, control in controls.items()}
        self._created = int(time.time())
        self._dirty: list[Connection] = []
        self._head = b""
        self._head_second = -1
        self._getters: dict[bytes, Callable[[Connection], None]] = {
            b"/health": self._health,
            b"/metrics": self._metrics,
            b"/v1/models": self._models,
        }

    def route(self, connection: Connection, request: Request) -> None:
        """Answer a request, or start the exchange that will."""
        parser = _PARSERS.get(request.path)
        if parser is not None:
            if request.method == b"POST":
                self._generate(connection, request, *parser)
            else:
                self._not_allowed(connection, b"POST")
        elif request.path in self._getters:
            if request.method in (b"GET", b"HEAD"):
                self._getters[request.path](connection)
            else:
                self._not_allowed(connection, b"GET, HEAD")
        elif request.path in self._controls:
            self._control(connection, request)
        else:
            connection.respond(404, error_body(404, "There is nothing at this path", "NotFoundError"))

    def flush_soon(self, connection: Connection) -> None:
        """Write `connection`'s bytes at the end of this turn of the loop, in one write for all its tokens."""
        if not self._dirty:
            self.loop.call_soon(self._flush)
        self._dirty.append(connection)

    def common_head(self) -> bytes:
        """The header lines that every answer has."""
        second = int(time.time())
        if second != self._head_second:
            self._head_second = second
            self._head = b"date: %b\r\nserver: forebay-engine\r\n" % formatdate(second, usegmt=True).encode()
        return self._head

    def close_idle(self, idle_s: float) -> None:
        """Close connections that are between requests and have been silent for `idle_s`."""
        since = self.loop.time() - idle_s
        for connection in list(self.connections):
            connection.close_if_idle(since)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            connection.flush()

    def _generate(self, connection: Connection, request: Request, kind: str, parse: Parser) -> None:
        if kind not in kinds_of(self.engine):
            message = f"The model `{self.engine.model_id}` does not serve {request.path.decode()}"
            connection.respond(404, error_body(404, message, "NotFoundError"))
            return
        if self.draining or not (self.started and self.engine.ready()):
            message = "The engine is shutting down" if self.draining else "The engine is still loading"
            connection.respond(503, error_body(503, message, "Service Unavailable"))
            return
        try:
            asked = parse(request.body, self.engine)
        except BadRequestError as error:
            body = error_body(error.status, error.message, error.kind, error.param)
            connection.respond(error.status, body)
            return
        exchange = exchange_for(asked, self.engine, connection)
        connection.exchange = exchange
        exchange.start()

    def _control(self, connection: Connection, request: Request) -> None:
        if not connection.is_loopback:
            message = "This endpoint answers to clients on the same machine only"
            connection.respond(403, error_body(403, message, "PermissionDeniedError"))
            return
        status, body = self._controls[request.path](request.method.decode(), request.body)
        connection.respond(status, body)

    def _health(self, connection: Connection) -> None:
        up = self.started and not self.draining and self.engine.ready()
        connection.respond(200 if up else 503, b"")

    def _metrics(self, connection: Connection) -> None:
        connection.respond(200, self.engine.metrics().encode(), b"text/plain; version=0.0.4; charset=utf-8")

    def _models(self, connection: Connection) -> None:
        model = {
            "id": self.engine.model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "forebay",
            "root": self.engine.model_id,
            "parent": None,
            "max_model_len": self.engine.max_model_len,
        }
        connection.respond(200, msgspec.json.encode({"object": "list", "data": [model]}))

    def _not_allowed(self, connection: Connection, allow: bytes) -> None:
        body = error_body(405, f"Use {allow.decode()} here", "MethodNotAllowed")
        connection.respond(405, body, extra=b"allow: %b\r\n" % allow)


async def serve(
    engine: ServedEngine,
    host: str,
    port: int,
    *,
    on_started: Callable[[int], None] | None = None,
    controls: Mapping[str, Control] | None = None,
    drain_s: float = DRAIN_S,
) -> None:
    """Serve `engine` on `host:port` (0: any) until SIGTERM, SIGINT or cancellation, then drain.

    The port opens before `engine.start()` and answers 503 until that is through; `on_started` gets the port
    after it. Draining answers what runs, refuses new requests with 503, and cuts off what is left after
    `drain_s` or at a second signal. Raises `EngineError` when the port cannot be had.
    """
    loop = asyncio.get_running_loop()
    server = Server(engine, loop, controls or {})
    try:
        listener = await loop.create_server(lambda: Connection(server), host, port, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EngineError(f"cannot listen on {host}:{port}: {reason}; choose another --port, or 0 for any") from None
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    signals = _on_signals(loop, on_signal)
    sweep = loop.create_task(_close_idle_now_and_then(server))
    try:
        await engine.start()
        server.started = True
        if on_started is not None:
            on_started(listener.sockets[0].getsockname()[1])
        await stop.wait()
        server.draining = True
        listener.close()
        await _drain(server, hurry, drain_s)
    finally:
        sweep.cancel()
        listener.close()
        for connection in list(server.connections):
            connection.kill()
        await engine.stop()
        for number in signals:
            loop.remove_signal_handler(number)


def run(
    engine: ServedEngine,
    host: str,
    port: int,
    *,
    on_started: Callable[[int], None] | None = None,
    controls: Mapping[str, Control] | None = None,
) -> None:
    """`serve` as a program's main part, on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:  # not made for Windows
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(engine, host, port, on_started=on_started, controls=controls))


def _on_signals(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> list[int]:
    installed: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, call)
        except (NotImplementedError, RuntimeError, ValueError):  # another thread, another system
            continue
        installed.append(number)
    return installed


async def _close_idle_now_and_then(server: Server) -> None:
    while True:
        await asyncio.sleep(KEEP_ALIVE_S / 5)
        server.close_idle(KEEP_ALIVE_S)


async def _drain(server: Server, hurry: asyncio.Event, drain_s: float) -> None:
    """Wait until no connection is left, `drain_s` at most."""
    deadline = server.loop.time() + drain_s
    server.close_idle(0.0)
    while server.connections and server.loop.time() < deadline and not hurry.is_set():
        await asyncio.sleep(0.02)
        server.close_idle(1.0)
