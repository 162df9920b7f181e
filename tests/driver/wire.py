"""The whole HTTP data plane on the clock-jumping loop: its own connections, relays and pools, over wires in memory.

Bytes arrive in the same instant in which they were sent. Who pauses reading lets bytes pile up, and beyond a bound the
other side is asked to pause writing, as a kernel's socket buffers would have it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from random import Random
from typing import Any

import httptools

from forebay.config.build import KeyEntry
from forebay.config.schema import ANONYMOUS
from forebay.core.events import EngineUp, Observer
from forebay.core.instant import SECOND, Instant
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.engines.openai import OpenAIEngine
from forebay.ingress.http.routes import Routes
from forebay.ingress.http.server import ServerConnection
from forebay.ingress.http.site import HttpLimits, Site
from forebay.live.gateway import Gateway
from forebay.testing.loop import JumpLoop

PILE_MOST = 64 * 1024


class Wire(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self.peer: Wire
        self._closing = False
        self._reading = True
        self._pile: list[bytes | None] = []  # what came and was not read; None is the end
        self._peer_paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self._loop.call_soon(self.peer._come, bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self._loop.call_soon(self.peer._come, None)

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._loop.call_soon(self._read)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self.peer._come, None)
            self._loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The bound is the wire's own."""

    def _come(self, data: bytes | None) -> None:
        self._pile.append(data)
        self._read()
        if not self._peer_paused and sum(len(piece) for piece in self._pile if piece) > PILE_MOST:
            self._peer_paused = True
            self.peer._protocol.pause_writing()

    def _read(self) -> None:
        while self._reading and self._pile and not self._closing:
            data = self._pile.pop(0)
            if data is None:
                if not self._protocol.eof_received():
                    self.close()
            else:
                self._protocol.data_received(data)
        if self._peer_paused and not self._pile:
            self._peer_paused = False
            self.peer._protocol.resume_writing()


def connect(loop: asyncio.AbstractEventLoop, ours: asyncio.Protocol, theirs: asyncio.Protocol) -> Wire:
    """Connect two protocols; returns our end."""
    near, far = Wire(loop, ours), Wire(loop, theirs)
    near.peer, far.peer = far, near
    theirs.connection_made(far)
    ours.connection_made(near)
    return near


class WiredLoop(JumpLoop):
    """Connections that are asked for lead to protocols in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.listening: dict[tuple[str, int], Callable[[], asyncio.Protocol]] = {}

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **how: Any) -> Any:  # type: ignore[override]
        del how
        if (host, port) not in self.listening:
            raise ConnectionRefusedError(111, "nobody listens")
        protocol = factory()
        return connect(self, protocol, self.listening[host, port]()), protocol


class ScriptedEngine(asyncio.Protocol):
    """A connection at an engine: calls `script(engine, headers, body)` for every whole request."""

    def __init__(self, script: Callable[[ScriptedEngine, dict[bytes, bytes], bytes], None]) -> None:
        self._script = script
        self.parser = httptools.HttpRequestParser(self)
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Wire = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self._script(self, self.headers, self.body)

    def send(self, data: bytes) -> None:
        if not self.lost:
            self.transport.write(data)


class Client(asyncio.Protocol):
    """A client's connection: keeps what it got, and when."""

    def __init__(self, loop: JumpLoop) -> None:
        self._loop = loop
        self.got = b""
        self.last_at: Instant = 0
        self.closed_at: Instant | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Wire = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.got += data
        self.last_at = self._loop.clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed_at = self._loop.clock()

    @property
    def status(self) -> int:
        return int(self.got.split(b" ", 2)[1])

    def header(self, name: bytes) -> bytes | None:
        head = self.got.partition(b"\r\n\r\n")[0]
        for line in head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b": ")
            if key == name:
                return value
        return None


class NoAudit:
    """Nobody asks for requests that never reach the pipeline."""

    def rejected(self, status: int, reason: str, request_id: str, detail: str) -> None:
        """Not kept."""

    def passed(self, route: str) -> None:
        """Not kept."""


class WiredGateway:
    """The data port, its pipeline and its engines, on one jumping loop."""

    def __init__(
        self,
        config: PipelineConfig,
        chance: Random,
        observer: Observer,
        script: Callable[[ScriptedEngine, dict[bytes, bytes], bytes], None],
        limits: HttpLimits | None = None,
    ) -> None:
        self.loop = loop = WiredLoop()
        self.pipeline = Pipeline(config, chance, observer)
        self.gateway = Gateway(self.pipeline, loop, loop.clock)
        names = [name for pool in config.pools for name in pool.engines]
        for number, name in enumerate(names):
            loop.listening[f"engine-{number}", 80] = lambda: ScriptedEngine(script)
            self.gateway.report(EngineUp(name))
        self.engines = {name: OpenAIEngine(name, f"http://engine-{n}", loop) for n, name in enumerate(names)}
        self.site = Site(
            loop=loop,
            gateway=self.gateway,
            engines=self.engines,
            routes=Routes(()),
            keys={},
            anonymous=KeyEntry(ANONYMOUS, 0, "default", None, None, None),
            limits=limits or HttpLimits(),
            audit=NoAudit(),
        )

    def client(self) -> Client:
        """A new connection to the data port."""
        client = Client(self.loop)
        connect(self.loop, client, ServerConnection(self.site))
        return client

    def run_to(self, seconds: float) -> None:
        """Let everything up to this second happen."""
        self.loop.run_to(round(seconds * SECOND))

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.site.stop()
        self.gateway.stop()
        self.loop.close()


def post(body: dict[str, Any], *headers: str, path: str = "/v1/chat/completions") -> bytes:
    """The bytes of a request."""
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + data


def answer(body: dict[str, Any], status: int = 200) -> bytes:
    """The bytes of an engine's answer."""
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(data),
        data,
    )


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(payload: dict[str, Any] | None) -> bytes:
    """A server-sent event in a chunk of its own; None is the terminator of the stream."""
    data = b"data: " + (b"[DONE]" if payload is None else json.dumps(payload).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
