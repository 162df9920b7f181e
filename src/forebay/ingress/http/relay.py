"""Carries one answer from an engine to a client, and reads in passing what it cost.

Bytes of a body reach the client as they were received; only the framing is ours. The status line of a stream is held
until its first event (or a moment), because engines send some refusals as the first event of a 200. The usage event
that the gateway asked for is taken out again when the client did not ask for it.
"""

from __future__ import annotations

import zlib
from collections import deque
from datetime import datetime
from email.utils import parsedate_to_datetime
from math import ceil
from typing import TYPE_CHECKING, Any

from forebay.core.events import Failed, Finished, FirstToken, Undelivered
from forebay.core.instant import FOREVER, SECOND
from forebay.core.model import Lease, Usage
from forebay.core.outcome import FailReason
from forebay.core.quota.path import FRAME_EVENTS, UNMETERED
from forebay.core.verdicts import come_back_ns
from forebay.engines.pool import Breakage, ResponseHead, Upstream
from forebay.ingress.http.routes import Dialect
from forebay.ingress.http.usage import DONE, TAIL, StreamReader, document_usage, first_event_error, split_events
from forebay.ingress.status import REASON_PHRASES, TABLE, error_body, rate_limit_lines, retry_headers

if TYPE_CHECKING:
    from forebay.engines.openai import OpenAIEngine
    from forebay.ingress.http.inbound import Inbound

EVENT_MAX = 16 * 1024 * 1024  # bytes of one event, held back or not
DOCUMENT_MAX = 1024 * 1024  # bytes of a JSON answer that are read for its usage; of larger ones only the end
INFLATED_MAX = 256 * 1024 * 1024
RETRY_AFTER_MOST_S = 55
ENGINE_BUSY = frozenset({429, 503, 529})
NO_BODY = frozenset({204, 304})

# Response headers that are not simply passed on: hop-by-hop ones and those that are ours to set are dropped.
DROP, TYPE, CONNECTION, RETRY_AFTER, ENCODING = range(5)
HEADERS: dict[bytes, int] = dict.fromkeys(
    (
        b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
        b"x-request-id", b"retry-after-ms", b"x-should-retry", b"server-timing",
        b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests", b"x-ratelimit-reset-requests",
        b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens", b"x-ratelimit-reset-tokens",
    ),
    DROP,
) | {
    b"content-length": DROP,
    b"content-type": TYPE,
    b"connection": CONNECTION,
    b"retry-after": RETRY_AFTER,
    b"content-encoding": ENCODING,
}  # fmt: skip

STATUS_LINES = {
    status: b"HTTP/1.1 %d %b\r\nx-request-id: " % (status, phrase.encode()) for status, phrase in REASON_PHRASES.items()
}


class HeadDigest:
    """What a relay needs to know of a response head, made once for all responses that begin with it."""

    __slots__ = ("cache_control", "compressed", "cors", "lines", "plain", "retry_after", "sse")

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.sse = False
        self.compressed = False
        self.retry_after: int | None = None
        self.cors = b""  # the engine's own word on pages of other origins; ours goes before it
        lines: list[bytes] = []
        nominated: tuple[bytes, ...] = ()
        for name, value in headers:
            kind = HEADERS.get(name)
            if kind is None:
                line = b"%b: %b\r\n" % (name, value)
                if name.startswith(b"access-control-"):
                    self.cors += line
                else:
                    lines.append(line)
            elif kind == TYPE:
                self.sse = value.startswith(b"text/event-stream")
                lines.append(b"content-type: %b\r\n" % value)
            elif kind == CONNECTION:
                nominated = tuple(token.strip().lower() + b":" for token in value.split(b",") if token.strip())
            elif kind == RETRY_AFTER:
                self.retry_after = _sane_retry_after(value)
            elif kind == ENCODING:
                if value.lower() in {b"gzip", b"x-gzip", b"deflate"}:
                    self.compressed = True
                else:
                    lines.append(b"content-encoding: %b\r\n" % value)
        if nominated:
            lines = [line for line in lines if not line.startswith(nominated)]
        self.cache_control = any(line.startswith(b"cache-control:") for line in lines)
        self.lines = b"".join(lines)
        self.plain = not self.sse and not self.compressed and self.retry_after is None


class Relay:
    """One answer. Implements `engines.pool.Exchange`."""

    connection: Upstream | None = None
    gone = False
    alive_at = 0.0
    _status = 0
    _digest: HeadDigest
    _head_sent = False
    _held = b""
    _length: int | None = None
    _chunked = False
    _close_after = False
    _sse = False
    _first_token = False
    _reader: StreamReader | None = None
    _document = b""  # what was seen of an answer that is not a stream
    _document_cut = False  # only its end was kept
    _inflate: Any = None
    _inflated_bytes = 0
    _client_slow = False
    _slowed = False  # its key has to earn what was passed on before more is
    _backlog: deque[bytes] | None = None  # events that have to be earned, of a stream that may be slowed

    def __init__(self, inbound: Inbound, lease: Lease | None, engine: OpenAIEngine) -> None:
        self.inbound = inbound
        self.lease = lease
        self.engine = engine

    @property
    def events(self) -> int:
        """Stream events seen so far: about the tokens that were generated."""
        return self._reader.events if self._reader is not None else 0

    # ---- towards the engine ----------------------------------------------------------------------------------

    def payload(self) -> list[bytes]:
        inbound = self.inbound
        body = inbound.upstream_body()
        method = b"GET" if inbound.method == b"HEAD" else inbound.method
        engine = self.engine
        head = inbound.upstream_head(engine.head(method, inbound.target), len(body), engine.forward_key)
        if not body:
            return [head]
        # One segment leaves in one write; a large body is not copied for it.
        return [head + body] if len(body) < 65_536 else [head, body]

    def connected(self, connection: Upstream) -> None:
        self.connection = connection

    def abort(self) -> None:
        """The client left, or the drain is over."""
        if self.gone:
            return
        self.gone = True
        self.inbound.site.hold.release(self)
        if self.connection is not None:
            self.connection.abort()
            self.connection = None

    def pause(self) -> None:
        self._client_slow = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        self._client_slow = False
        self._read_on()

    def _read_on(self) -> None:
        if self.connection is not None and not (self._client_slow or self._slowed):
            self.connection.resume()

    # ---- from the engine -------------------------------------------------------------------------------------

    def head(self, head: ResponseHead, length: int | None) -> None:
        digest: HeadDigest | None = head.digest
        if digest is None:
            digest = head.digest = HeadDigest(head.headers)
        self._status = head.status
        self._digest = digest
        self._sse = digest.sse
        if digest.compressed:
            # The declared length is that of the compressed bytes.
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
        else:
            self._length = length
        if digest.sse:
            self._begin_stream(head.status)

    def whole(self, head: ResponseHead, body: bytes) -> None:
        """The common answer, a document in one piece: one write, and nothing is kept of it."""
        digest: HeadDigest | None = head.digest
        inbound, lease = self.inbound, self.lease
        if digest is None or not digest.plain or lease is None or not inbound.keeps_plainly():
            self.head(head, len(body))
            self.body([body], True)
            return
        if self.gone:
            return
        self.gone = True
        self.connection = inbound.relay = inbound.ticket = None
        ticket, connection = lease.ticket, inbound.connection
        usage, _ = document_usage(body, ticket.demand.input_tokens)
        if usage is None:
            self._status, self._document = 200, body
        # Settled before the head is written: its x-ratelimit-* tell what the request really cost.
        inbound.site.gateway.report(self._verdict(lease) if usage is None else Finished(lease, usage))
        wait_us = (ticket.dispatched - ticket.arrived) // 1000
        connection.write(
            b"HTTP/1.1 200 OK\r\nx-request-id: %b\r\n%b%bcontent-length: %d\r\n"
            b"server-timing: queue;dur=%d.%03d\r\n%b\r\n%b"
            % (
                inbound.request_id,
                digest.lines,
                inbound.cors or digest.cors,
                len(body),
                wait_us // 1000,
                wait_us % 1000,
                rate_limit_lines(ticket.path, inbound.site.clock()),
                body,
            )
        )
        connection.ended(inbound, True)

    def _begin_stream(self, status: int) -> None:
        inbound = self.inbound
        if self.lease is not None:
            strip = status == 200 and inbound.strips_usage
            self._reader = StreamReader(strip=strip)
            if strip:
                self._length = None
            if self.lease.ticket.paid_output < UNMETERED and inbound.site.gateway.slows:
                self._backlog = deque()  # from its first read on, so that no event goes ahead of its payment
        self.alive_at = inbound.site.loop.time()
        inbound.site.hold.watch(self)

    def body(self, pieces: list[bytes], done: bool) -> None:
        if self.gone:
            return
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._inflate is not None:
            try:
                data = self._inflated(data, done)
            except zlib.error as error:
                self.broke(Breakage.GARBLED, f"its compressed body is corrupt ({error})")
                return
        if self._sse:
            if self._backlog is None:
                self._stream(data, done)
            else:
                self._pace(self._backlog, data, done)
            return
        if self.lease is not None:
            self._observe(data)
        self._forward(data, done)
        if done:
            self._finish()

    def _observe(self, data: bytes) -> None:
        """Keep what a document says of its cost: all of it, or the end of a very large one."""
        seen = self._document
        self._document = seen = seen + data if seen else data
        if len(seen) > DOCUMENT_MAX:
            self._document = seen[-TAIL:]
            self._document_cut = True

    def _stream(self, data: bytes, done: bool) -> None:
        """The next bytes of an event stream."""
        reader, held_ns = self._reader, 0
        if reader is not None:
            if not self._first_token and b"data:" in data:
                self._first_token = True
                assert self.lease is not None
                self.inbound.site.gateway.report(FirstToken(self.lease))
            data = reader.pass_through(data, done)
            if (lease := self.lease) is not None:
                lease.generated = reader.events
                if reader.events - FRAME_EVENTS > lease.ticket.paid_output:
                    held_ns = self.inbound.site.gateway.meter(lease)
            if reader.pending > EVENT_MAX:
                self.broke(Breakage.GARBLED, "an event of the stream is too large")
                return
            if reader.finished and not done:
                # The stream said its last word though the message is still open: the client need not wait for framing.
                connection, self.connection = self.connection, None
                if connection is not None:
                    connection.finish_alone()
                done = True
        if not self._head_sent:
            if not done and b"\n\n" not in (held := self._held + data) and b"\r\n\r\n" not in held:
                self._held = held
                return
            data, self._held = self._held + data, b""
            if self._refused_inside(data):
                return
        self._forward(data, done)
        if done:
            self._finish()
        elif held_ns:
            self._hold_back(held_ns)

    def _hold_back(self, held_ns: int) -> None:
        """The key cannot pay for more just now, or not at all."""
        if held_ns >= FOREVER:
            self.stop(FailReason.OVER_BUDGET, f"the key cannot pay for more than these {self.events} tokens")
            return
        self._slowed = True
        if self._backlog is None:
            self._backlog = deque()
        if self.connection is not None:
            self.connection.pause()
        self.inbound.site.loop.call_later(held_ns / SECOND, self._earned, self._backlog)

    def _pace(self, backlog: deque[bytes], data: bytes, done: bool) -> None:
        """The next bytes of a stream that is slowed: an event at a time, as its key earns them. What is here when the
        engine's work has ended is passed on at once: there is nothing left to slow."""
        if done or DONE in data:
            data = b"".join((*backlog, data))
            backlog.clear()
            self._stream(data, done)
        else:
            backlog.extend(split_events(data))
            self._trickle(backlog)

    def _earned(self, backlog: deque[bytes]) -> None:
        self._slowed = False
        self._trickle(backlog)

    def _trickle(self, backlog: deque[bytes]) -> None:
        while backlog and not (self._slowed or self.gone):
            self._stream(backlog.popleft(), False)
        self._read_on()

    def _inflated(self, data: bytes, done: bool) -> bytes:
        """The plain bytes of a compressed body, bounded. Raises zlib.error."""
        plain: bytes = self._inflate.decompress(data, INFLATED_MAX - self._inflated_bytes)
        self._inflated_bytes += len(plain)
        if self._inflate.unconsumed_tail:
            raise zlib.error("it inflates to more than is allowed")
        if done and not self._inflate.eof:
            raise zlib.error("it ends too early")
        return plain

    def _forward(self, data: bytes, done: bool) -> None:
        """Write body bytes in the client's framing, with the head when it was not sent yet: one write."""
        if not self._head_sent:
            head = self._render_head()
            if self.inbound.method == b"HEAD":
                self.inbound.connection.write(head)
                return
        elif self.inbound.method == b"HEAD":
            return
        else:
            head = b""
        if self._chunked:
            if data:
                head += b"%x\r\n%b\r\n" % (len(data), data)
            if done:
                head += b"0\r\n\r\n"
        else:
            head = head + data if head else data
        if head:
            self.inbound.connection.write(head)

    def _render_head(self) -> bytes:
        """Decide the framing and render the head."""
        inbound, status, extra = self.inbound, self._status, self.inbound.cors or self._digest.cors
        self._head_sent = True
        if status in NO_BODY:
            pass
        elif self._length is not None:
            extra += b"content-length: %d\r\n" % self._length
        elif inbound.version_1_0:
            self._close_after = True
        else:
            self._chunked = True
            extra += b"transfer-encoding: chunked\r\n"
        lease = self.lease
        if lease is not None:
            ticket = lease.ticket
            extra += b"server-timing: queue;dur=%d.%03d\r\n" % divmod(
                (ticket.dispatched - ticket.arrived) // 1000, 1000
            )
            if status in ENGINE_BUSY:
                status = inbound.site.overload_status
                extra += b"x-forebay-reason: engine_error\r\n" + retry_headers(self._come_back_ns())
            elif self._digest.retry_after is not None:
                extra += retry_headers(self._digest.retry_after * SECOND)
            extra += rate_limit_lines(ticket.path, inbound.site.clock())
        if self._sse:
            inbound.site.hold.release(self)
            extra += b"x-accel-buffering: no\r\n"
            if not self._digest.cache_control:
                extra += b"cache-control: no-cache\r\n"
        if self._close_after or not inbound.keep_alive or inbound.site.draining:
            self._close_after = True
            extra += b"connection: close\r\n"
        elif inbound.version_1_0:
            extra += b"connection: keep-alive\r\n"
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d %b\r\nx-request-id: " % (
            status,
            b"OK" if status < 300 else b"Status",
        )
        return b"%b%b\r\n%b%b\r\n" % (line, inbound.request_id, self._digest.lines, extra)

    def _come_back_ns(self) -> int:
        """When to come back to a busy engine: as it says, else by our own ladder."""
        if self._digest.retry_after is not None:
            return self._digest.retry_after * SECOND
        assert self.lease is not None
        ticket = self.lease.ticket
        return come_back_ns(ticket.pool, ticket.request, self.inbound.site.clock())

    def held_long_enough(self) -> None:
        """The first event does not come: the client gets the head now."""
        if not self._head_sent and not self.gone:
            data, self._held = self._held, b""
            self._forward(data, False)

    def _refused_inside(self, data: bytes) -> bool:
        """A 200 whose first event is an error is the refusal that it should have been."""
        if self._status != 200 or (refused := first_event_error(data)) is None:
            return False
        self._status, body = refused
        self._sse = False
        self.inbound.site.hold.release(self)
        self._digest = JSON_DIGEST
        self._length = len(body)
        self._reader = None
        self._document = body
        if self.connection is not None:
            self.connection.abort()
            self.connection = None
        self._forward(body, True)
        self._finish()
        return True

    def _finish(self) -> None:
        """The answer is whole."""
        inbound, lease = self.inbound, self.lease
        self.gone = True
        # No reference from here back to the request: what ends needs no garbage collector.
        self.connection = inbound.relay = inbound.ticket = None
        inbound.connection.ended(inbound, not self._close_after)
        if lease is not None:
            inbound.site.gateway.report(self._verdict(lease))

    def _verdict(self, lease: Lease) -> Finished | Failed:
        """What the answer says about the request's cost and the engine's state."""
        status, reader = self._status, self._reader
        if status in ENGINE_BUSY:
            return Failed(lease, FailReason.ENGINE_ERROR, blame=False)
        if status >= 500:
            return Failed(lease, FailReason.ENGINE_ERROR)
        if status >= 400:
            return Finished(lease, None)
        request, estimated_input = lease.ticket.request, lease.ticket.demand.input_tokens
        is_error = False
        if reader is not None:
            usage = reader.usage(estimated_input)
            said = reader.error_status()
            if said is not None and said >= 500:
                return Failed(lease, FailReason.ENGINE_ERROR, usage, blame=said not in ENGINE_BUSY)
        else:
            usage, is_error = document_usage(self._document, estimated_input, cut=self._document_cut)
        if usage is not None:
            return Finished(lease, usage)
        if request.generates or is_error:
            # A success without content: an error object, a page of HTML, nothing.
            return Failed(lease, FailReason.ENGINE_ERROR, blame=False)
        return Finished(lease, Usage(estimated_input, 0, exact=False))

    def broke(self, breakage: Breakage, detail: str) -> None:
        if self.gone:
            return
        self.gone = True
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()
        inbound, lease = self.inbound, self.lease
        inbound.site.hold.release(self)
        unsent = breakage in {Breakage.UNDELIVERED, Breakage.UNREACHED}
        if unsent and lease is not None:
            inbound.relay = None
            inbound.site.gateway.report(Undelivered(lease, away=breakage is Breakage.UNDELIVERED))
            return
        timed_out = breakage is Breakage.TIMEOUT
        reason = FailReason.ENGINE_TIMEOUT if timed_out else FailReason.ENGINE_ERROR
        # Where an engine lives is nobody's business outside: connect errors name its address.
        text = f"{breakage.value}: {detail}" if detail and not unsent else breakage.value
        if self._head_sent:
            self._break_off(reason, text)
        else:
            inbound.failed(reason.value, text)
        if lease is not None:
            usage = None
            if self.events:
                usage = Usage(lease.ticket.demand.input_tokens, self.events, exact=False)
            inbound.site.gateway.report(Failed(lease, reason, usage))

    def _break_off(self, reason: FailReason, text: str) -> None:
        """The answer had begun: say so in the stream's own form, then end the connection."""
        inbound = self.inbound
        if self._sse:
            dialect = inbound.route.dialect if inbound.route is not None else Dialect.OPENAI
            answer = TABLE[reason.value]
            body = error_body(dialect, message=text, type=answer.type, code=answer.code)
            event = b"event: error\ndata: " if dialect is Dialect.ANTHROPIC else b"data: "
            event = b"\n\n" * bool(self._reader is not None and self._reader.inside_event) + event + body + b"\n\n"
            if self._chunked:
                inbound.connection.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
            else:
                inbound.connection.write(event)
        inbound.connection.ended(inbound, False)

    def stop(self, reason: FailReason, text: str) -> None:
        """The gateway itself ends it (the drain is over)."""
        if self.gone:
            return
        if not self._head_sent:
            self.broke(Breakage.BROKEN, text)
            return
        self.gone = True
        if self.connection is not None:
            self.connection.abort()
            self.connection = None
        self._break_off(reason, text)
        if self.lease is not None:
            usage = Usage(self.lease.ticket.demand.input_tokens, self.events, exact=False)
            self.inbound.site.gateway.report(Failed(self.lease, reason, usage, blame=False))


def _sane_retry_after(value: bytes) -> int | None:
    """Seconds or an HTTP date as whole seconds from 1 to 55, or None for anything that is neither."""
    text = value.strip()
    if text.isdigit():
        seconds = float(text[:7])
    else:
        try:
            at = parsedate_to_datetime(text.decode("latin-1"))
            seconds = (at - datetime.now(at.tzinfo)).total_seconds()
        except (ValueError, OverflowError):
            return None
    return min(RETRY_AFTER_MOST_S, max(1, ceil(seconds)))


JSON_DIGEST = HeadDigest([(b"content-type", b"application/json")])
