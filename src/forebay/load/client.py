"""The HTTP/1.1 client of the load: protocol-level, no task per request, a pool that never hides a wait.

A `Call` is one offered request through all its attempts. When no connection is free and the pool is at its cap the call
waits in a queue in sight: its latency runs from the intended time, and the wait is counted.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import cast

import httptools

from forebay.client import RETRY_TICKET
from forebay.load.sse import SseCounter, usage_of
from forebay.load.target import Target
from forebay.load.workload import Shot
from forebay.workload.arrival import Arrival
from forebay.workload.retry import CONNECTION_ERROR, RetryPolicy, SdkRetry

MAX_BODY_BYTES = 64 << 20
DEFAULT_MAX_CONNECTIONS = 16384
CONNECT_TIMEOUT_S = 10.0
SPARE_FILES = 64

_KEPT_HEADERS = frozenset(
    {
        RETRY_TICKET.encode(),
        b"x-forebay-reason",
        b"retry-after",
        b"retry-after-ms",
        b"x-should-retry",
        b"server-timing",
        b"content-type",
        b"content-length",
        b"transfer-encoding",
    }
)


class Call:
    """One offered request. Times are nanoseconds of the monotonic clock; -1 until they happen."""

    __slots__ = (
        "arrival",
        "attempts",
        "body",
        "complete",
        "connection",
        "done_ns",
        "error",
        "first_token_ns",
        "headers",
        "index",
        "intended_ns",
        "left",
        "output_tokens",
        "prompt_tokens",
        "sent_ns",
        "shot",
        "status",
        "stream",
        "ticket",
        "timer",
    )

    def __init__(self, index: int, arrival: Arrival, shot: Shot, intended_ns: int) -> None:
        self.index = index
        self.arrival = arrival
        self.shot = shot
        self.intended_ns = intended_ns
        self.sent_ns = -1
        self.first_token_ns = -1
        self.done_ns = -1
        self.attempts = 0
        self.prompt_tokens = shot.prompt_tokens
        self.output_tokens = 0
        self.left = False
        self.ticket = ""  # the retry ticket of the last refusal
        self.connection: Connection | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forgets the answer of the attempt before."""
        self.status = CONNECTION_ERROR
        self.headers: dict[str, str] = {}
        self.error = ""
        self.complete = False
        self.stream: SseCounter | None = None
        self.body: list[bytes] = []

    def close_books(self) -> None:
        """Takes tokens and the first token's time out of what the last attempt received."""
        stream = self.stream
        usage = stream.usage if stream is not None else None
        if stream is not None:
            self.first_token_ns = stream.first_token_ns
            self.output_tokens = stream.output_tokens
        elif self.body:
            usage = usage_of(b"".join(self.body))
            self.output_tokens = usage.completion_tokens if usage is not None else 0
        if usage is not None and usage.prompt_tokens:
            self.prompt_tokens = usage.prompt_tokens


class Connection(asyncio.Protocol):
    """One connection, one attempt at a time."""

    __slots__ = (
        "_body_bytes",
        "_client",
        "_framed",
        "_lasting",
        "_parser",
        "_transport",
        "call",
        "fresh",
        "got_bytes",
        "lost",
    )

    def __init__(self, client: Client) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self.call: Call | None = None
        self.fresh = True
        self.lost = False
        self._parser = httptools.HttpResponseParser(self)
        self._lasting = True
        self.got_bytes = False
        self._framed = False
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio.Transport, so the type is stated, not checked.
        self._transport = cast("asyncio.Transport", transport)

    def start(self, call: Call, data: bytes) -> None:
        """Writes a request; its answer goes to `call`."""
        assert self._transport is not None
        self.call = call
        call.connection = self
        self.got_bytes = False
        self._framed = False
        self._body_bytes = 0
        self._transport.write(data)

    def abort(self) -> None:
        """Closes at once, as a client does that gives up."""
        self.call = None
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self.got_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP/1.1: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        call = self.call
        self.lost = True
        self._client.forget(self)
        if call is None:
            return
        if call.status and not self._framed and exc is None:
            # No length and no chunks: the end of the connection is the end of the answer.
            self.on_message_complete()
        elif not self.got_bytes and not self.fresh:
            # The server closed an idle connection as the request went out; every HTTP client sends it again.
            self.call = None
            self._client.resend(call)
        elif call.status:
            self._fail("the connection was closed in the middle of the answer")
        else:
            self._fail(f"the connection was closed without an answer{f': {exc}' if exc else ''}")

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if self.call is None:
            self._client.stray_bytes += 1
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _KEPT_HEADERS and self.call is not None:
            self.call.headers[name.decode()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        call = self.call
        if call is None:
            return
        call.status = self._parser.get_status_code()
        self._lasting = self._parser.should_keep_alive()
        headers = call.headers
        self._framed = "content-length" in headers or "transfer-encoding" in headers
        if call.status == 200 and headers.get("content-type", "").startswith("text/event-stream"):
            call.stream = SseCounter()

    def on_body(self, body: bytes) -> None:
        call = self.call
        if call is None:
            return
        if call.stream is not None:
            call.stream.feed(body, time.monotonic_ns())
            return
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            self._fail(f"the answer exceeds {MAX_BODY_BYTES} bytes")
            return
        call.body.append(body)

    def on_message_complete(self) -> None:
        call = self.call
        if call is None:
            return
        if 100 <= call.status < 200:
            call.begin_attempt()
            return
        stream = call.stream
        if stream is not None:
            call.error = stream.error or ("" if stream.finished else "the stream ended without [DONE]")
        elif call.status >= 400:
            call.error = b"".join(call.body)[:500].decode(errors="replace")
        call.complete = not call.error
        self.call = None
        call.connection = None
        self.fresh = False
        if self._lasting and self._framed:
            self._client.release(self)
        elif self._transport is not None:
            self._transport.close()
        self._client.answered(call)

    def _fail(self, error: str) -> None:
        call = self.call
        self.abort()
        if call is not None:
            call.connection = None
            call.error = error
            self._client.answered(call)


@dataclass(slots=True)
class Tally:
    """Running totals of a client, for progress and for honesty about the client's own limits."""

    sent: int = 0
    finished: int = 0
    attempts: int = 0
    resent: int = 0
    waited_for_connection: int = 0
    most_late_ns: int = 0


class Client:
    """Sends calls to one target and hands each back once, when its last attempt ended or its patience did.

    `patience_s` counts from the intended time, over all attempts. `done` is called with every finished call.
    """

    def __init__(
        self,
        target: Target,
        policy: RetryPolicy,
        done: Callable[[Call], None],
        *,
        patience_s: float | None = None,
        seed: int = 1,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        self._target = target
        self._policy = policy
        self._shows_tickets = isinstance(policy, SdkRetry) and policy.shows_tickets
        self._done = done
        self._patience_ns = None if patience_s is None else int(patience_s * 1e9)
        self._rng = Random(f"{seed}/retries")
        self._loop = asyncio.get_running_loop()
        self._ssl: ssl.SSLContext | None = target.ssl_context()
        self._max_connections = min(max_connections, _raise_file_limit() - SPARE_FILES)
        # Last in, first out: the warm connections stay in use, the others may time out.
        self._idle: dict[Connection, None] = {}
        self._open: set[Connection] = set()
        self._connecting = 0
        self._waiting: deque[Call] = deque()
        self._connects: set[asyncio.Task[None]] = set()
        self._live: dict[int, Call] = {}
        self._attempt_headers: dict[int, bytes] = {}
        self.stray_bytes = 0
        self.tally = Tally()

    @property
    def in_flight(self) -> int:
        """Calls begun and not finished, those backing off included."""
        return len(self._live)

    def send(self, call: Call) -> None:
        """Begins a call now."""
        now_ns = time.monotonic_ns()
        self.tally.sent += 1
        self.tally.most_late_ns = max(self.tally.most_late_ns, now_ns - call.intended_ns)
        self._live[call.index] = call
        if self._patience_ns is not None:
            left_ns = call.intended_ns + self._patience_ns - now_ns
            call.timer = self._loop.call_later(max(0.0, left_ns / 1e9), self.leave, call)
        self._attempt(call)

    def leave(self, call: Call) -> None:
        """The client's patience ended: the connection is closed, the call is cancelled."""
        if call.index not in self._live:
            return
        call.left = True
        connection, call.connection = call.connection, None
        if connection is not None:
            connection.abort()
        self._finish(call)

    def leave_all(self) -> None:
        """Abandons every call in flight: the run is over."""
        for call in list(self._live.values()):
            self.leave(call)

    async def close(self) -> None:
        """Closes all connections."""
        self.leave_all()
        for task in list(self._connects):
            task.cancel()
        for connection in list(self._open):
            connection.abort()
        await asyncio.sleep(0)

    # Called by connections.

    def release(self, connection: Connection) -> None:
        """A connection is free again: the longest waiting call takes it, else it rests on top of the idle ones."""
        if call := self._next_waiting():
            self._write(connection, call)
        else:
            self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """A connection is gone."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._connect_for_waiting()

    def resend(self, call: Call) -> None:
        """Writes an attempt again that a stale connection swallowed."""
        self.tally.resent += 1
        call.connection = None
        if call.index in self._live:
            call.begin_attempt()
            self._take_connection(call, fresh=True)

    def answered(self, call: Call) -> None:
        """An attempt ended: retry as the client model says, or finish."""
        if call.index not in self._live:
            return
        if call.complete and 200 <= call.status < 300:
            self._finish(call)
            return
        # A stream that broke after its first bytes is not retried by any client: tokens were handed out already.
        broke_late = call.stream is not None
        delay_s = (
            None
            if broke_late
            else self._policy.delay_s(call.attempts - 1, call.status, call.headers, self._rng, time.time())
        )
        call.ticket = call.headers.get(RETRY_TICKET, "") if self._shows_tickets else ""
        if delay_s is None:
            self._finish(call)
        elif delay_s <= 0:
            self._loop.call_soon(self._attempt, call)
        else:
            self._loop.call_later(delay_s, self._attempt, call)

    def _attempt(self, call: Call) -> None:
        if call.index not in self._live:
            return
        call.begin_attempt()
        call.attempts += 1
        self.tally.attempts += 1
        self._take_connection(call)

    def _take_connection(self, call: Call, *, fresh: bool = False) -> None:
        if self._idle and not fresh:
            self._write(self._idle.popitem()[0], call)
            return
        self._waiting.append(call)
        if len(self._open) + self._connecting >= self._max_connections:
            self.tally.waited_for_connection += 1
        self._connect_for_waiting()

    def _connect_for_waiting(self) -> None:
        while self._connecting < len(self._waiting) and len(self._open) + self._connecting < self._max_connections:
            self._connecting += 1
            task = self._loop.create_task(self._connect())
            self._connects.add(task)
            task.add_done_callback(self._connects.discard)

    async def _connect(self) -> None:
        target = self._target
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self), target.host, target.port, ssl=self._ssl
                )
        except (OSError, TimeoutError) as error:
            self._connecting -= 1
            if call := self._next_waiting():
                call.error = f"no connection to {target.authority}: {error or 'timed out'}"
                self.answered(call)
            return
        except BaseException:
            self._connecting -= 1
            raise
        self._connecting -= 1
        if connection.lost:
            # Accepted and closed in one breath: the waiting call gets the error, or it would try for ever.
            if call := self._next_waiting():
                call.error = f"{target.authority} closed the connection at once"
                self.answered(call)
            return
        self._open.add(connection)
        self.release(connection)

    def _next_waiting(self) -> Call | None:
        while self._waiting:
            call = self._waiting.popleft()
            if call.index in self._live:
                return call
        return None

    def _write(self, connection: Connection, call: Call) -> None:
        if call.sent_ns < 0:
            call.sent_ns = time.monotonic_ns()
        retries = call.attempts - 1
        headers = self._attempt_headers.get(retries)
        if headers is None:
            headers = self._attempt_headers[retries] = self._policy.request_headers(retries) + b"\r\n"
        if call.ticket:
            headers = f"{RETRY_TICKET}: {call.ticket}\r\n".encode() + headers
        connection.start(call, b"".join((call.shot.head, headers, call.shot.body)))

    def _finish(self, call: Call) -> None:
        del self._live[call.index]
        call.done_ns = time.monotonic_ns()
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        call.close_books()
        self.tally.finished += 1
        self._done(call)


def _raise_file_limit() -> int:
    """Lifts the soft limit of open files to the hard one, as a load with many streams needs; the limit now in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 16)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft
    return wanted
