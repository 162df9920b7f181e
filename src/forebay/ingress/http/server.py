"""A connection of the data port: bytes in, requests out, answers in the order of the requests.

No task or future per request. llhttp parses strictly; whatever it refuses is answered 400 and the connection closed.
Requests that arrive behind one that is being answered wait in line and are decided only when it is their turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

import httptools

from forebay.core.model import Mode
from forebay.core.outcome import FailReason
from forebay.ingress.http.headers import KNOWN
from forebay.ingress.http.inbound import Inbound
from forebay.ingress.http.site import Site

PIPELINED_MAX = 64
HEADS_KEPT = 2048
DRAINED_MAX = 64 * 1024  # unread bytes of a refused body that are read for the sake of keeping the connection


class ServerConnection(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_closing",
        "_current",
        "_head_bytes",
        "_head_max",
        "_head_tail",
        "_held",
        "_last_head",
        "_length_name",
        "_line",
        "_parser",
        "_resuming",
        "_transport",
        "_write_paused",
        "alive_at",
        "site",
    )

    def __init__(self, site: Site) -> None:
        self.site = site
        self.alive_at = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._line: deque[Inbound] = deque()  # requests in order; the first is being served
        self._current: Inbound | None = None  # the one that is being received
        self._head_bytes = 0  # of the head that is being received, up to the last segment
        self._head_tail = b""  # where that segment ended
        self._head_max = site.limits.header_bytes
        self._closing = False  # nothing more is served; what comes is thrown away
        self._length_name = b"\r\nContent-Length: "  # as this client spells it
        self._last_head = (b"", b"", b"")  # a known one: what stands before its length, what behind, the two as one
        self._held = False  # the sender waits for buffer room
        self._resuming = False  # the parser is being brought to where the last one stopped
        self._write_paused = False

    # ---- asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        site = self.site
        self._transport = cast("asyncio.Transport", transport)
        site.connections.add(self)
        self.alive_at = site.loop.time()
        if len(site.connections) > site.limits.connections:
            self._transport.close()
            return
        site.keep_alive.watch(self)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        before = self._current
        if before is None and not self._line:
            self.site.keep_alive.release(self)
            if self._begin_known(data):
                return
        if len(data) + self._head_bytes > self._head_max and self._head_too_large(data):
            return
        self._feed(data)
        current = self._current
        if current is not None and not current.head_done and not self._closing:
            # A head behind other requests of this segment counts from the next one on: where it began is not known.
            alone = current is before or (before is None and not self._line)
            self._incomplete(data, len(data) if alone else 1)
        if self._line:
            if before is None and current is None and len(self._line) == 1:
                self._remember(self._line[0], data)
            self._advance()
        elif current is None and self._transport is not None:
            self.site.keep_alive.watch(self)  # nothing but line ends came

    def _begin_known(self, data: bytes) -> bool:
        """A whole request in one segment, whose head was read and judged before but for the digits of its length.

        Clients send the same head with every request of a connection. The same bytes parse the same way, so the parser
        is spared; anything that differs, in any byte, takes the long way.
        """
        site = self.site
        before, behind, head = self._last_head
        after = data.find(b"\r", len(before))
        if not head or not data.startswith(before) or not data.startswith(behind, after):
            end = data.find(b"\r\n\r\n")
            at = data.find(self._length_name, 0, end)
            if at < 0 or end < 0:
                return False
            at += len(self._length_name)
            after = data.find(b"\r", at)
            before, behind = data[:at], data[after : end + 4]
            head = before + behind
        known = site.heads.get(head)
        begin = after + len(behind)
        digits, size = data[len(before) : after], len(data) - begin
        if known is None or not size or not digits.isdigit() or len(digits) > 9 or int(digits) != size:
            return False
        if size > site.limits.body_bytes or site.buffered_bytes + size > site.limits.buffered_bytes:
            return False
        self._last_head = before, behind, head
        inbound = Inbound(self)
        inbound.follow(known, data[begin:], size)
        self._line.append(inbound)
        inbound.start()
        return True

    def _remember(self, inbound: Inbound, data: bytes) -> None:
        """Keep the head of a plain request that came in one segment, for the next that begin alike."""
        end = data.find(b"\r\n\r\n")
        at = data[:end].lower().find(b"\r\ncontent-length: ")
        if at < 0 or not inbound.plain:
            return
        after = at + len(b"\r\ncontent-length: ")
        self._length_name = data[at:after]
        heads = self.site.heads
        if len(heads) >= HEADS_KEPT:
            del heads[next(iter(heads))]
        heads[data[:after] + data[data.find(b"\r", after) : end + 4]] = inbound.pattern()

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._unreadable(str(error))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """An offer to change protocols is not taken, but llhttp stops reading at it: go on with a parser of our own
        making that stands where the head ended."""
        inbound, self._current = self._current, None
        if inbound is None:
            # CONNECT was refused; what follows it was meant for a tunnel.
            self._closing = True
            if self._line:
                self._line[-1].keep_alive = False
            return
        parser = self._parser = httptools.HttpRequestParser(self)
        length = b"content-length: %d" % (inbound.content_length or 0)
        self._resuming = True
        parser.feed_data(
            b"POST / HTTP/1.1\r\n%b\r\n\r\n" % (b"transfer-encoding: chunked" if inbound.chunked else length)
        )
        self._resuming = False
        self._current = inbound
        inbound.upgrade = False
        if not inbound.chunked and not inbound.content_length:
            self.on_message_complete()
        if rest and not self._closing:
            self._feed(rest)

    def _head_too_large(self, data: bytes) -> bool:
        """Refuse a head that ends in this segment beyond the limit. `_incomplete` sees to those that do not end."""
        current = self._current
        if current is not None and current.head_done:
            return False
        before, tail = (self._head_bytes, self._head_tail) if current is not None else (0, b"")
        end = (tail + data).find(b"\r\n\r\n")
        if end < 0 or before - len(tail) + end + 4 <= self._head_max:
            return False
        self._current = current or Inbound(self)
        self._refuse_head(431, "the request head is too large")
        return True

    def _incomplete(self, data: bytes, size: int) -> None:
        """A head is not whole yet: bound its size, and the time it may take. `size` bytes of it came."""
        site = self.site
        if not self._head_bytes:
            self._head_tail = b""
            self.alive_at = site.loop.time()
            site.header.watch(self)
        self._head_bytes += size
        self._head_tail = (self._head_tail + data)[-3:]
        if self._head_bytes > self._head_max:
            self._refuse_head(431, "the request head is too large")

    def eof_received(self) -> bool:
        """The client closed its side: it is gone. A half-close looks the same, and leaving is what is common."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self._closing = True
        site = self.site
        site.connections.discard(self)
        for deadlines in (site.keep_alive, site.header, site.body, site.linger, site.stalled):
            deadlines.release(self)
        if self._held:
            site.held.remove(self)
            self._held = False
        if self._current is not None and self._current not in self._line:
            self._current.drop_body()
        line, self._line = self._line, deque()
        self._current = None
        for inbound in line:
            inbound.client_gone()

    def pause_writing(self) -> None:
        self._write_paused = True
        self.alive_at = self.site.loop.time()
        self.site.stalled.watch(self)
        if self._line and self._line[0].relay is not None:
            self._line[0].relay.pause()

    def resume_writing(self) -> None:
        self._write_paused = False
        self.site.stalled.release(self)
        if self._line and self._line[0].relay is not None:
            self._line[0].relay.resume()

    # ---- httptools -------------------------------------------------------------------------------------------

    # While `_current` is None, callbacks belong to a request that is already given up, or to `_ignore_upgrade`.

    def on_message_begin(self) -> None:
        if not self._resuming:
            self._head_bytes = 0
            self._current = Inbound(self)

    def on_url(self, url: bytes) -> None:
        inbound = self._current
        if inbound is not None:
            inbound.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        inbound = self._current
        if inbound is None or inbound.head_done:  # a trailer is no header: it came after all was judged
            return
        inbound.header_count += 1
        lower = name.lower()
        known = KNOWN.get(lower)
        if known is None:
            inbound.forward.append(b"%b: %b\r\n" % (lower, value))
        else:
            inbound.header(known, value)

    def on_headers_complete(self) -> None:
        inbound = self._current
        if inbound is None:
            return
        parser = self._parser
        inbound.method = parser.get_method()
        version = parser.get_http_version()
        if version != "1.1":
            inbound.version_1_0 = version == "1.0"
            if not inbound.version_1_0:
                inbound.reject(505, "malformed", f"HTTP/{version} is not spoken here", code="http_version")
        if not parser.should_keep_alive():
            inbound.keep_alive = False
        if inbound.header_count > self.site.limits.headers:
            inbound.reject(431, "malformed", "too many headers", code="headers_too_large")
        if self._head_bytes:
            self.site.header.release(self)
        inbound.begin()
        line = self._line
        line.append(inbound)
        if len(line) > PIPELINED_MAX:
            inbound.reject(400, "malformed", "too many requests were sent ahead", code="pipeline_too_deep")
            inbound.keep_alive = False

    def on_body(self, piece: bytes) -> None:
        inbound = self._current
        if inbound is None or inbound.answered or inbound.rejection is not None or inbound.refusal is not None:
            return  # the rest of a body that was refused
        site = self.site
        size = len(piece)
        inbound.pieces.append(piece)
        inbound.body_size += size
        site.buffered_bytes += size
        if inbound.body_size > site.limits.body_bytes:
            inbound.too_large(inbound.body_size)
            inbound.drop_body()
            return
        if site.buffered_bytes > site.limits.buffered_bytes:
            self._hold_or_refuse(inbound)

    def on_message_complete(self) -> None:
        inbound = self._current
        if inbound is None or (inbound.upgrade and self._parser.should_upgrade()):
            return
        inbound.complete = True
        self._current = None
        if inbound.screened:
            self.site.body.release(self)
        if not inbound.keep_alive:
            self._closing = True  # nothing that follows is a request

    # ---- the line --------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Serve the first request in line, and those behind it for as long as they end at once."""
        line = self._line
        while line:
            inbound = line[0]
            if inbound.started:
                return
            if inbound.rejection is not None or inbound.refusal is not None:
                inbound.answer()
            elif inbound.complete:
                inbound.start()
            elif not inbound.screened:
                inbound.screen()
                if inbound.refusal is None:
                    self._await_body()
                    return
            else:
                self._await_body()
                return

    def _await_body(self) -> None:
        """The sender must keep up the least rate: every byte buys time."""
        site, inbound = self.site, self._current
        if inbound is None or self._held:
            return
        if not inbound.body_began:
            inbound.body_began = self.alive_at = site.loop.time()
            site.body.watch(self)
        self.alive_at = inbound.body_began + inbound.body_size / site.limits.body_bytes_per_s

    def write(self, data: bytes) -> None:
        """Bytes to the client. The transport's buffer is bounded by pausing the engine, not here."""
        if self._transport is not None:
            self._transport.write(data)

    @property
    def busy(self) -> bool:
        """Is a request in line, or are bytes of an answer still to be taken by the client?"""
        return bool(self._line) or (self._transport is not None and self._transport.get_write_buffer_size() > 0)

    def can_keep(self, inbound: Inbound) -> bool:
        """After a refusal: can the connection be used again, or is too much of the body still to come?"""
        if inbound.complete:
            return True
        if inbound.expects or inbound.content_length is None:
            return False
        return inbound.content_length - inbound.body_size <= DRAINED_MAX

    def ended(self, inbound: Inbound, keep: bool) -> None:
        """The answer to the first request in line was written."""
        line = self._line
        assert line[0] is inbound, "server: an answer out of order"
        line.popleft()
        inbound.answered = True
        inbound.drop_body()
        if not keep or self.site.draining:
            self._close(inbound)
            return
        if self._write_paused and line and line[0].relay is not None:
            line[0].relay.pause()
        if line:
            self.site.loop.call_soon(self._advance_later)
        else:
            self.alive_at = self.site.loop.time()
            self.site.keep_alive.watch(self)

    def _advance_later(self) -> None:
        if self._line and not self._line[0].started:
            self._advance()

    def _close(self, inbound: Inbound) -> None:
        """Close, but let the client read the answer first when it is still sending."""
        self._closing = True
        transport = self._transport
        if transport is None:
            return
        if inbound.complete:
            transport.close()
            return
        if transport.can_write_eof():
            transport.write_eof()
        self.site.body.release(self)
        self.alive_at = self.site.loop.time()
        self.site.linger.watch(self)

    # ---- bounds and time-outs --------------------------------------------------------------------------------

    def _hold_or_refuse(self, inbound: Inbound) -> None:
        """Bodies fill the memory they may: hold the sender in backpressure mode, refuse the request otherwise."""
        mode = inbound.key.mode if inbound.key is not None else None
        pools = self.site.gateway.pipeline.pools
        if (mode or pools[0].mode) is Mode.BACKPRESSURE:
            if not self._held and not inbound.beyond and self._transport is not None:
                self._held = True
                self.site.body.release(self)
                self.site.held.append(self)
                self._transport.pause_reading()
                self.site.make_way()
            return
        inbound.reject(503, "queue_full", "request bodies fill the memory set aside for them; retry shortly",
                       extra=b"retry-after: 1\r\nretry-after-ms: 1000\r\nx-should-retry: true\r\n")  # fmt: skip
        inbound.drop_body()

    @property
    def partial_bytes(self) -> int:
        """Bytes in memory of the body that is being received."""
        return self._current.body_size if self._current is not None else 0

    def release_sender(self, *, beyond: bool = False) -> None:
        """The sender may go on; the time that it was held does not count."""
        self._held = False
        if self._transport is not None:
            self._transport.resume_reading()
            if self._current is not None:
                self._current.beyond = beyond
                self._current.body_began = 0.0
                if self._line[0] is self._current:
                    self._await_body()

    def _unreadable(self, detail: str) -> None:
        """Not HTTP: answer what was read before it, then 400."""
        inbound = self._current
        if inbound is None:
            inbound = Inbound(self)
        inbound.keep_alive = False
        self._current = None
        self._closing = True
        if inbound.started or inbound.answered:
            if self._transport is not None:
                self._transport.close()
            return
        inbound.complete = True
        inbound.head_done = True
        inbound.refusal = None
        inbound.drop_body()
        inbound.reject(400, "malformed", f"the request is not valid HTTP: {detail}", code="bad_http")
        if inbound not in self._line:
            self._line.append(inbound)

    def _refuse_head(self, status: int, message: str) -> None:
        inbound = self._current
        assert inbound is not None
        inbound.keep_alive = False
        inbound.reject(status, "malformed", message, code="request_head")
        self._line.append(inbound)
        self._current = None
        self._closing = True
        self._advance()

    def idle_for_too_long(self) -> None:
        if self._transport is not None and not self._line:
            self._transport.close()

    def head_too_slow(self) -> None:
        if self._current is not None and not self._current.head_done:
            self._refuse_head(408, "the request head did not arrive in time")

    def body_too_slow(self) -> None:
        """The body comes slower than the least rate. The request holds no place anywhere yet."""
        inbound = self._current
        if inbound is None or not self._line or self._line[0] is not inbound:
            if self._transport is not None:
                self._transport.abort()
            return
        inbound.keep_alive = False
        inbound.reject(408, "malformed", "the request body did not arrive in time", code="body_timeout")
        self._advance()

    def lingered(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def reader_stalled(self) -> None:
        """The client reads nothing: its answer cannot be finished, and the engine is wanted by others."""
        if self._transport is not None:
            self._transport.abort()

    def shut_down(self) -> None:
        """The gateway drains: close if nothing is being served, and refuse a request whose body is still to come."""
        if self._transport is None:
            return
        inbound = self._current
        if inbound is None and not self._line:
            self._transport.close()
        elif inbound is not None and inbound.screened and not inbound.answered:
            inbound.screen()
            self._advance()

    def stop(self, reason: str) -> None:
        """The drain is over: end what is left."""
        if self._line:
            relay = self._line[0].relay
            if relay is not None:
                relay.stop(FailReason.ENGINE_ERROR, reason)
        if self._transport is not None:
            self._transport.close()
