"""A scripted OpenAI-style backend at socket level, on its own thread: it does to each request what a script says.

A script is `async def script(call: Call)`; rig/scripts.py makes the usual ones. It runs once the whole request is
here (a script marked with `@early` runs on the head alone) and is cancelled when the peer closes. Every request is
logged as a `Call`. Times are `time.monotonic()` seconds, the clock the client side of the rig uses too.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

MARKER = re.compile(rb"mk-[0-9a-f]+")
ABORT_UNDERWAY_S = 0.02
LINGER_RESET = struct.pack("ii", 1, 0)
WRITE_HIGH_WATER = 64 * 1024

T = TypeVar("T")


@dataclass
class Call:
    """One request as the backend saw it, and the script's means to answer it."""

    connection: _Connection
    method: str
    target: str
    headers: list[tuple[str, str]]  # names in lower case, in order of arrival
    raw_head: bytes
    arrived: float
    raw_body: bytearray = field(default_factory=bytearray)  # as on the wire, chunk framing included
    body: bytearray = field(default_factory=bytearray)  # decoded
    body_complete: asyncio.Event = field(default_factory=asyncio.Event)
    peer_closed_at: float | None = None  # the gateway closed or reset the connection during this request
    ended_at: float | None = None  # the script ended, or the peer left
    bytes_sent: int = 0  # handed to the kernel

    @property
    def marker(self) -> str | None:
        found = MARKER.search(self.body)
        return found.group().decode() if found else None

    @property
    def probe(self) -> bool:
        """Not a gated request: a probe, or a control request that was passed on."""
        return self.method in {"GET", "HEAD"}

    @property
    def open(self) -> bool:
        return self.ended_at is None

    def header(self, name: str) -> str | None:
        """The only value of a header, or None; a header sent twice is an error."""
        values = [value for key, value in self.headers if key == name]
        assert len(values) <= 1, f"{name} was sent {len(values)} times"
        return values[0] if values else None

    async def send(self, data: bytes) -> None:
        """Write bytes as they are; waits while the peer does not take them."""
        # In pieces, so that bytes_sent shows how far the peer's back-pressure let us come.
        for start in range(0, len(data), WRITE_HIGH_WATER):
            piece = data[start : start + WRITE_HIGH_WATER]
            self.connection.transport.write(piece)
            await self.connection.writable.wait()
            self.bytes_sent += len(piece)

    def reset(self) -> None:
        """Drop the connection with RST."""
        self.connection.reset()

    def close(self) -> None:
        """Close the connection once what was written is sent."""
        self.connection.transport.close()

    def stop_reading(self) -> None:
        """Leave the rest of the request in the socket."""
        self.connection.transport.pause_reading()

    async def hold(self) -> None:
        """Do nothing until the peer closes (which cancels the script)."""
        await asyncio.Event().wait()


Script = Callable[[Call], Awaitable[None]]


def early(script: Script) -> Script:
    """Mark a script to run on the request's head, before its body is here."""
    script.early = True  # type: ignore[attr-defined]
    return script


class _Connection(asyncio.Protocol):
    def __init__(self, backend: FakeBackend, sock: socket.socket) -> None:
        self.backend = backend
        self.sock = sock
        self.transport: asyncio.Transport
        self.writable = asyncio.Event()
        self.writable.set()
        self.buffer = bytearray()
        self.call: Call | None = None
        self.script: Script | None = None
        self.task: asyncio.Task[None] | None = None
        self.chunked = False
        self.body_left = 0

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        self.backend.connections.add(self)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self._advance()

    def eof_received(self) -> bool:
        self.peer_left()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.backend.connections.discard(self)
        self.peer_left()

    # ---- requests

    def peer_left(self) -> None:
        """The peer closed: the request that is open ends here."""
        call = self.call
        if call is not None and call.ended_at is None:
            call.peer_closed_at = call.ended_at = time.monotonic()
            if self.task is not None:
                self.task.cancel()

    def half_gone(self) -> bool:
        """Has the peer closed already, though the loop has not told us yet?"""
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def reset(self) -> None:
        if not self.transport.is_closing():
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
        self.transport.abort()

    def _advance(self) -> None:
        if self.call is None and not self._read_head():
            return
        call = self.call
        assert call is not None
        if not call.body_complete.is_set() and self._read_body(call):
            call.body_complete.set()
            chosen = self.backend.by_marker.get(call.marker or "")
            if chosen is not None and self.task is None:
                self.script = chosen
        if self.task is None and (call.body_complete.is_set() or getattr(self.script, "early", False)):
            self.task = asyncio.get_running_loop().create_task(self._run(call))

    def _read_head(self) -> bool:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        raw = bytes(self.buffer[: end + 4])
        del self.buffer[: end + 4]
        lines = raw[:-4].decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:])]
        call = self.call = Call(self, method, target, headers, raw, time.monotonic())
        self.chunked = "chunked" in (call.header("transfer-encoding") or "")
        self.body_left = int(call.header("content-length") or 0)
        self.script = self.backend._arrived(call)
        return True

    def _read_body(self, call: Call) -> bool:
        """Move what arrived into the call; True once the body is whole."""
        if not self.chunked:
            piece = self.buffer[: self.body_left]
            del self.buffer[: self.body_left]
            self.body_left -= len(piece)
            call.raw_body += piece
            call.body += piece
            return self.body_left == 0
        while (end := self.buffer.find(b"\r\n")) >= 0:
            size = int(bytes(self.buffer[:end]).split(b";")[0], 16)
            whole = end + 2 + size + 2
            if len(self.buffer) < whole:
                return False
            call.raw_body += self.buffer[:whole]
            call.body += self.buffer[end + 2 : end + 2 + size]
            del self.buffer[:whole]
            if size == 0:
                return True
        return False

    async def _run(self, call: Call) -> None:
        assert self.script is not None
        try:
            await self.script(call)
        except asyncio.CancelledError:
            return
        except Exception as error:
            self.backend.errors.append(error)
            self.reset()
            return
        if call.ended_at is None:
            call.ended_at = time.monotonic()
        self.call = self.script = self.task = None
        if self.buffer and not self.transport.is_closing():
            self._advance()


def _closing(call: Call, at: float) -> bool:
    return call.peer_closed_at is not None and call.peer_closed_at - at < ABORT_UNDERWAY_S


def _itself(connection: _Connection) -> _Connection:
    return connection


class FakeBackend:
    """The scripted backend. `script` answers gated requests, `probe` answers GETs; `plan` holds one-off scripts
    that go first, in order of arrival, and `by_marker` scripts for requests known by the marker in their body."""

    def __init__(self, script: Script | None = None, probe: Script | None = None) -> None:
        from . import scripts

        self.script: Script = script or scripts.ordinary
        self.probe: Script = probe or scripts.healthy
        self.plan: deque[Script] = deque()
        self.by_marker: dict[str, Script] = {}
        self.calls: list[Call] = []  # gated requests, in order of arrival
        self.probes: list[Call] = []
        self.connections: set[_Connection] = set()
        self.accepted = 0
        self._crowds: list[tuple[float, list[Call]]] = []  # what was open when a gated request arrived
        self.probe_high_water = 0
        self.errors: list[Exception] = []
        self.port = 0
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="fake-backend")
        self._thread.start()
        self.listen()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def high_water(self) -> int:
        """Most gated requests that were open at once.

        The gateway sends an abort and the request that takes its place in one turn of its loop, and the kernel may
        deliver them in either order: a request that its peer closes within a moment of the arrival does not count.
        """
        return max((sum(not _closing(call, at) for call in crowd) for at, crowd in list(self._crowds)), default=0)

    def forget_high_water(self) -> None:
        """Measure anew."""
        self._crowds.clear()

    @property
    def open_calls(self) -> int:
        return sum(call.open for call in list(self.calls))

    def call(self, marker: str) -> Call | None:
        """The one request that carried this marker; a marker seen twice is a replay, and an error."""
        found = [call for call in list(self.calls) if call.marker == marker]
        assert len(found) <= 1, f"{marker} reached the backend {len(found)} times"
        return found[0] if found else None

    def restart(self) -> None:
        """Forget scripts and logs; healthy again. Connections stay."""
        from . import scripts

        self.script, self.probe = scripts.ordinary, scripts.healthy
        for held in (self.plan, self.by_marker, self.calls, self.probes, self._crowds):
            held.clear()
        self.accepted = self.probe_high_water = 0

    def listen(self) -> None:
        """Accept connections; again on the same port after `die`."""
        self._on_loop(self._listen())

    def die(self) -> None:
        """As a killed process: the port refuses and every connection is reset."""
        self._on_loop(self._die())

    def soon(self, action: Callable[[], object]) -> None:
        """Run this on the backend's thread, where its scripts run."""
        self._loop.call_soon_threadsafe(action)

    def close_idle(self) -> None:
        """Close the connections on which no request is open."""
        self._on_loop(self._close_idle())

    def close(self) -> None:
        """Stop for good; raises what a script raised."""
        self.die()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self.errors:
            raise self.errors[0]

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(5)

    async def _listen(self) -> None:
        assert self._listener is None
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(1024)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._accepting = self._loop.create_task(self._accept(listener))

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(listener)
            except OSError as error:
                if error.errno in {errno.EBADF, errno.EINVAL}:
                    return
                raise
            self.accepted += 1
            # The real socket is kept beside the transport: asyncio's own wrapper neither peeks nor lingers.
            connection = _Connection(self, sock)
            await self._loop.connect_accepted_socket(partial(_itself, connection), sock)

    async def _die(self) -> None:
        if self._listener is not None:
            assert self._accepting is not None
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
            self._listener.close()
            self._listener = None
        for connection in list(self.connections):
            connection.reset()
        await asyncio.sleep(0)

    async def _close_idle(self) -> None:
        for connection in list(self.connections):
            if connection.call is None:
                connection.transport.close()

    def _arrived(self, call: Call) -> Script:
        """Log a request and choose its script."""
        probe = call.probe
        log = self.probes if probe else self.calls
        # A request and the close that made room for it may be read in one turn of the loop, in either order.
        for connection in list(self.connections):
            if connection.call is not None and connection.call is not call and connection.half_gone():
                connection.peer_left()
        log.append(call)
        crowd = [c.call for c in self.connections if c.call is not None and c.call.open and c.call.probe == probe]
        if probe:
            self.probe_high_water = max(self.probe_high_water, len(crowd))
            return self.probe
        self._crowds.append((call.arrived, crowd))
        return self.plan.popleft() if self.plan else self.script
