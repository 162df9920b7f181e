"""One request on the data port, from its first header to the last byte of its answer.

Its life: head -> (screened, when the body is not here yet) -> body -> offered -> queued or dispatched -> relayed.
The connection calls `start` when the request is whole and it is its turn; the gateway then calls back as its Owner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.core.instant import MILLISECOND
from forebay.core.model import Lease, Refusal, Request, Ticket, Usage
from forebay.ingress.http.amend import with_cap
from forebay.ingress.http.head import Head
from forebay.ingress.http.peek import BadRequest, Peek, opaque, with_usage
from forebay.ingress.http.prefix import prefix_of
from forebay.ingress.http.prepaid import Prepaid
from forebay.ingress.http.relay import Relay
from forebay.ingress.http.routes import Dialect, Route, kserve_model
from forebay.ingress.status import REASON_PHRASES, TABLE, error_body, explain, rate_limit_lines, retry_headers

if TYPE_CHECKING:
    from forebay.config.build import KeyEntry
    from forebay.ingress.http.retry_ticket import ShownTicket
    from forebay.ingress.http.server import ServerConnection


class Inbound(Head):
    """One request: its head, then its body and its turn; the Owner of its ticket."""

    complete = False
    screened = False
    started = False
    answered = False
    model = ""
    body_size = 0
    body_began = 0.0
    beyond = False  # it is read though bodies fill the memory they may, so that one always goes on
    peeked: Peek | None = None
    ticket: Ticket | None = None
    prepaid: Prepaid | None = None  # of a key that pays with credit
    relay: Relay | None = None
    refusal: Refusal | None = None
    strips_usage = False  # we asked for a usage event that the client did not ask for
    _output_cap: int | None = None  # of ours, where the body's own was above it

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.site = connection.site
        self.forward = []
        self.pieces: list[bytes] = []

    # ---- a head that was read before -----------------------------------------------------------------------

    @property
    def plain(self) -> bool:
        """Is the head one that tells nothing of this one request but the length of its body?"""
        return (
            self.complete
            and self.keep_alive
            and self.rejection is None
            and self.key is not None
            and self.route is not None
            and self.route.gated
            and not (self.version_1_0 or self.chunked or self.expects or self.upgrade or self._named)
            and self.nominated in {None, b"keep-alive"}
        )

    def pattern(self) -> Head:
        """A copy of what the head says, to `follow`."""
        made = Inbound.__new__(Inbound)  # of no connection
        made.follow(self, b"", 0)
        made.forward = [b"".join(self.forward)]
        return made

    def follow(self, known: Head, body: bytes, size: int) -> None:
        """Be a request with the same head and this body."""
        self.method = known.method
        self.target = known.target
        self.path = known.path
        self.route = known.route
        self.key = known.key
        self.forward = known.forward
        self.cors = known.cors
        self._secret = known._secret
        self._deadline_ms = known._deadline_ms
        self._patience_ms = known._patience_ms
        self._priority = known._priority
        self._flow = known._flow
        self._obeys_ns = known._obeys_ns
        self._retries = known._retries
        self.head_done = self.complete = True
        if size:  # a pattern has no body
            site = self.site
            self.content_length = self.body_size = size
            self.pieces = [body]
            self.request_id = site.request_id()
            site.buffered_bytes += size

    # ---- the turn ------------------------------------------------------------------------------------------

    def screen(self) -> None:
        """The body is still to come: refuse now what would be refused anyway, before a byte of it is read."""
        self.screened = True
        route = self.route
        if route is not None and route.gated:
            self._screen(route)
        if self.refusal is None and self.expects and not self.version_1_0:
            self.connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _screen(self, route: Route) -> None:
        """Ask for a verdict with the least that the body can cost: only what no body could mend is refused here."""
        pipeline = self.site.gateway.pipeline
        if len(pipeline.pools) > 1 and not pipeline.draining:
            return  # the model stands in the body, and each pool has a verdict of its own
        model = pipeline.pools[0].config.models[0]
        desk, key = self.site.desk, self.key
        if desk is not None and key is not None and not desk.knows(key.id):
            return  # what it may spend is only being asked for
        least = Peek(max_output_tokens=0, counted_tokens=1)
        request = self._request(route, least, self.content_length or 0, model)
        self.refusal = self.site.gateway.screen(request)

    def start(self) -> None:
        """The request is whole and it is its turn."""
        self.started = True
        route = self.route
        assert route is not None
        if not route.gated:
            self._pass_on(route)
            return
        site, key = self.site, self.key
        assert key is not None
        gateway = site.gateway
        pipeline = gateway.pipeline
        path = pipeline.budget(key.id).path
        if pipeline.queued or path.refusing:
            self._screen(route)  # in times of refusals, refuse before the body is looked at
            if self.refusal is not None:
                self.answer()
                return
        body = self.body()
        try:
            seen = site.read(body, generates=route.generates) if route.json else opaque(body)
        except BadRequest as error:
            self.reject(400, "malformed", error.message, param=error.field)
            self.answer()
            return
        self.peeked = seen
        if key.max_output_tokens is not None and route.generates:
            self._cap_output(seen, key.max_output_tokens)
        self.strips_usage = seen.stream and route.usage_events and not seen.include_usage
        model = self.model = seen.model or (kserve_model(self.path) if route.dialect is Dialect.KSERVE else "")
        if pipeline.pool_for(model) is None or (key.models is not None and model not in key.models):
            self._refuse_model(key, model)
            return
        request = self._request(route, seen, len(body), model)
        if pipeline.asks_prefixes:
            request.prefix = prefix_of(pipeline, model, body)
        if path.credit is None or site.desk is None:
            gateway.offer(request)
        else:
            self.prepaid = Prepaid(self, request, site.desk)
            self.prepaid.offer()

    def _cap_output(self, seen: Peek, cap: int) -> None:
        """No request of this key asks the engine for more. One that stated no cap is still estimated by its like."""
        stated = seen.max_output_tokens
        if stated is None or stated > cap:
            self._output_cap = cap
            seen.max_output_tokens = stated if stated is None else cap

    def _refuse_model(self, key: KeyEntry, model: str) -> None:
        """Nobody serves this model, or not for this key."""
        if key.models is not None and model not in key.models:
            self.reject(403, "key_forbidden", f"this key may not use the model {model!r}")
        else:
            text = f"no engine serves the model {model!r}" if model else "the body names no model"
            self.reject(404, "malformed", text, code="model_not_found", param="model")
        self.answer()

    def _request(self, route: Route, seen: Peek, size: int, model: str) -> Request:
        key = self.key
        assert key is not None
        deadline, patience = self._deadline_ms, self._patience_ms
        # By position: this is made for every request.
        request = Request(
            key.id,
            model,
            route.name,
            self,
            size,
            seen.text_bytes,
            seen.byte_class,
            seen.counted_tokens,
            seen.max_output_tokens,
            seen.completions * seen.prompts,
            route.generates,
            seen.stream,
            key.priority if self._priority is None else min(self._priority, key.priority),
            key.priority_class,
            key.mode or route.mode,
            None if deadline is None else self.site.clock() + deadline * MILLISECOND,
            None if patience is None else self.site.clock() + patience * MILLISECOND,
            key.id + "/" + self._flow if self._flow and key.names_flows else "",
            key.weight,
            key.hold_back,
            key.wait_budget_ns,
            key.ttft_ns,
            self._obeys_ns,
            self._retries,
            seen.tokens_per_byte,
            seen.media_tokens,
        )
        if self._retry_ticket is not None:
            self._show(self._retry_ticket, request)
        return request

    def _show(self, ticket: ShownTicket, request: Request) -> None:
        """Does its retry ticket hold a place? It is a return then, whether its library numbers it or not."""
        tickets, pool = self.site.retry_tickets, self.site.gateway.pipeline.pool_for(request.model)
        if tickets is not None and pool is not None and ticket.holds(tickets, request.key, pool.config.name):
            request.holds_place, request.retries = True, request.retries or 1

    def _pass_on(self, route: Route) -> None:
        """A control request: to any engine that is up."""
        engine = self.site.engine_that_is_up()
        if engine is None:
            self.reject(503, "no_engine", "no engine is available; retry shortly", extra=retry_headers(1_000_000_000))
            self.answer()
            return
        self.site.audit.passed(route.name)
        self.relay = Relay(self, None, engine)
        engine.send(self.relay)

    # ---- what the engine is sent ---------------------------------------------------------------------------

    def body(self) -> bytes:
        """The whole body, as one bytes object from here on."""
        pieces = self.pieces
        if len(pieces) > 1:
            self.pieces = pieces = [b"".join(pieces)]
        return pieces[0] if pieces else b""

    def upstream_body(self) -> bytes:
        """The body as the engine is to get it: unchanged, but for a usage event that we ask for, and a cap of ours."""
        body = self.body()
        if self._output_cap is not None and self.route is not None and self.route.json:
            body = with_cap(body, self._output_cap, self.route.name)
        return with_usage(body, self.peeked) if self.strips_usage and self.peeked is not None else body

    def upstream_head(self, engine_head: bytes, size: int, forward_key: bool) -> bytes:
        """The request head for an engine: hop-by-hop and nominated headers, and the key, stay here."""
        lines = self.forward
        if self.nominated is not None and self.nominated not in {b"keep-alive", b"close"}:
            names = tuple(name.strip() + b":" for name in self.nominated.split(b",") if name.strip())
            lines = [line for line in lines if not line.startswith(names)]
        key = b"authorization: Bearer %b\r\n" % self._secret if forward_key and self._secret else b""
        length = b"content-length: %d\r\n" % size if size or self.method == b"POST" else b""
        tail = (b"x-request-id: ", self.request_id, b"\r\n", key, length, b"\r\n")
        return b"".join((engine_head, *lines, *tail))

    # ---- Owner: what the gateway says ----------------------------------------------------------------------

    def queued(self, ticket: Ticket) -> None:
        self.ticket = ticket

    def dispatched(self, lease: Lease) -> None:
        self.ticket = lease.ticket
        engine = self.site.engines[lease.engine.name]
        self.relay = Relay(self, lease, engine)
        if self.prepaid is not None:
            self.prepaid.dispatched(lease)
        engine.send(self.relay)

    def refused(self, refusal: Refusal) -> None:
        self.refusal = refusal
        self.answer()

    def aborted(self, lease: Lease) -> None:
        del lease
        if self.relay is not None:
            self.relay.abort()

    def client_gone(self) -> None:
        """The connection closed. Whatever was generated is charged; the engine is told at once."""
        ticket, relay = self.ticket, self.relay
        if self.prepaid is not None:
            self.prepaid.leave()
        if ticket is not None:
            usage = None
            if relay is not None:
                usage = Usage(ticket.demand.input_tokens, relay.events, exact=False)
            self.site.gateway.cancel(ticket, usage)
        if relay is not None:
            relay.abort()
        self.drop_body()

    def drop_body(self) -> None:
        """The body is not needed any more."""
        self.prepaid = None
        if self.body_size:
            size, self.body_size = self.body_size, 0
            self.pieces = []
            self.site.release_bytes(size)

    # ---- answers of our own --------------------------------------------------------------------------------

    def answer(self) -> None:
        """Write the refusal or rejection, and end. Runs when it is this request's turn."""
        if self.answered:
            return
        if self.rejection is None:
            assert self.refusal is not None
            self._prepare_refusal(self.refusal)
        assert self.rejection is not None
        status, rest = self.rejection
        self.answered = True
        self.ticket = None
        connection = self.connection
        self.drop_body()
        keep = self.keep_alive and connection.can_keep(self)
        head = b"HTTP/1.1 %d %b\r\nx-request-id: %b\r\n%b%b" % (
            status, REASON_PHRASES.get(status, "Refused").encode(), self.request_id or self.site.request_id(),
            self.cors, b"" if keep else b"connection: close\r\n",
        )  # fmt: skip
        connection.write(head + rest)
        connection.ended(self, keep)

    def _prepare_refusal(self, refusal: Refusal) -> None:
        reason = refusal.reason.value
        answer = TABLE[reason]
        status = self.site.overload_status if answer.shared else answer.status
        if reason == "draining":
            self.keep_alive = False
        route = self.route
        dialect = route.dialect if route is not None else Dialect.OPENAI
        body = error_body(dialect, message=explain(refusal), type=answer.type, code=answer.code)
        headers = b"content-type: application/json\r\nx-forebay-reason: %b\r\n" % reason.encode()
        headers += retry_headers(refusal.retry_after_ns, refusal.obeyed)
        if refusal.reserved:
            headers += self._ticket_line(refusal)
        if self.key is not None:
            path = self.site.gateway.pipeline.budget(self.key.id).path_for(self.model)
            headers += rate_limit_lines(path, self.site.clock())
        self._prepare(status, headers, body)

    def _ticket_line(self, refusal: Refusal) -> bytes:
        """The retry ticket for the place that the refusal promises; none when these were switched off meanwhile."""
        tickets, key, wait_ns = self.site.retry_tickets, self.key, refusal.retry_after_ns
        pipeline = self.site.gateway.pipeline
        pool = pipeline.pool_for(self.model) or pipeline.pools[0]  # as it was screened, with its body unread
        if tickets is None or key is None or wait_ns is None:
            return b""
        return b"x-forebay-ticket: %b\r\n" % tickets.issue(key.id, pool.config.name, wait_ns)

    def failed(self, reason: str, detail: str) -> None:
        """The engine failed before a byte of the answer was sent."""
        self.refusal = None
        answer = TABLE[reason]
        self.rejection = None
        dialect = self.route.dialect if self.route is not None else Dialect.OPENAI
        body = error_body(dialect, message=f"{detail}; {answer.advice}.", type=answer.type, code=answer.code)
        headers = b"content-type: application/json\r\nx-forebay-reason: %b\r\n" % reason.encode()
        self._prepare(answer.status, headers, body)
        self.answer()

    def keeps_plainly(self) -> bool:
        """Does the answer need no word about its connection, and have a body?"""
        return self.keep_alive and not self.version_1_0 and not self.site.draining and self.method != b"HEAD"
