"""The head of a request: what its lines say, and what they alone decide: path, method, key, declared size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.core.model import OBEYED_NS
from forebay.ingress.http.headers import (
    API_KEY,
    AUTHORIZATION,
    CONNECTION,
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    CONTENT_TYPE,
    DEADLINE_MS,
    DROP,
    EXPECT,
    FLOW,
    HOST,
    IDEMPOTENCY,
    ORIGIN,
    PASSED_ON,
    PREFLIGHT_HEADERS,
    PRIORITY,
    READ_TIMEOUT,
    REQUEST_ID,
    REQUEST_ID_MAX,
    RETRY_COUNT,
    RETRY_TICKET,
    TRANSFER_ENCODING,
    UPGRADE,
    USER_AGENT,
    is_request_id,
    milliseconds,
    whole,
)  # fmt: skip
from forebay.ingress.http.retry_ticket import ShownTicket
from forebay.ingress.http.routes import Dialect
from forebay.ingress.libraries import obeys_ns
from forebay.ingress.status import TABLE, Rejection, error_body, retry_headers

if TYPE_CHECKING:
    from forebay.config.build import KeyEntry
    from forebay.ingress.http.routes import Route
    from forebay.ingress.http.site import Site


class Head:
    """One head. `header` takes its lines, `begin` judges the whole, and `reject` says no with an answer of its own."""

    # Defaults stand on the class: a request pays only for what differs. (One of these is made per request.)
    site: Site
    forward: list[bytes]  # header lines that are passed on
    method = b""
    target = b""
    path = b""
    route: Route | None = None
    key: KeyEntry | None = None
    header_count = 0
    nominated: bytes | None = None
    request_id = b""
    content_length: int | None = None
    content_type: bytes | None = None
    chunked = False
    encoded = False
    expects = False
    upgrade = False
    keep_alive = True
    version_1_0 = False
    head_done = False
    rejection: tuple[int, bytes] | None = None  # status, rendered head lines and body
    cors = b""  # header lines for the page that asks; none when no origins are configured
    _preflight: bytes | None = None  # the request headers that a preflight asks for
    _named = False  # by an id or a key of this one request
    _secret: bytes | None = None
    _auth_conflict = False
    _has_host = False
    _deadline_ms: int | None = None
    _patience_ms: int | None = None
    _priority: int | None = None
    _flow = ""
    _obeys_ns = OBEYED_NS
    _retries: int | None = None
    _idempotency = b""
    _retry_ticket: ShownTicket | None = None

    def header(self, known: int, value: bytes) -> None:
        """One of the header lines that are read; the connection passes the others on unread."""
        if known == CONTENT_LENGTH:
            self.content_length = int(value) if value.isdigit() else -1
        elif known == CONTENT_TYPE:
            if self.content_type is not None and self.content_type != value:
                self.reject(400, "malformed", "two different content-type headers", code="duplicate_header")
            self.content_type = value
            self.forward.append(b"content-type: %b\r\n" % value)
        elif known == HOST:
            if self._has_host:
                self.reject(400, "malformed", "two host headers", code="duplicate_header")
            self._has_host = True
        elif known in (AUTHORIZATION, API_KEY):
            self._credential(known, value)
        elif known != DROP:
            self._rare_header(known, value)

    def _rare_header(self, known: int, value: bytes) -> None:
        if known in PASSED_ON and (known < ORIGIN or self.site.cors is None):
            self.forward.append(b"%b: %b\r\n" % (PASSED_ON[known], value))
        if known == TRANSFER_ENCODING:
            self.chunked = True
            if value.strip().lower() != b"chunked":
                text = "chunked is the only transfer coding that is understood"
                self.reject(501, "malformed", text, code="unsupported_transfer_coding")
        elif known == UPGRADE:
            self.upgrade = True
        elif known == REQUEST_ID:
            if is_request_id(value):
                self.request_id = value
                self._named = True
        elif known == EXPECT:
            self.expects = value.lower() == b"100-continue"
        elif known == CONTENT_ENCODING:
            self.encoded = value.strip().lower() not in {b"", b"identity"}
        elif known == CONNECTION:
            self.nominated = value.lower()
        elif known == DEADLINE_MS:
            self._deadline_ms = whole(value, 9)
        elif known == READ_TIMEOUT:
            self._patience_ms = milliseconds(value)
        elif known == USER_AGENT:
            self._obeys_ns = obeys_ns(value)
        elif known == RETRY_COUNT:
            self._retries = whole(value, 3)
        elif known == PRIORITY:
            self._priority = whole(value, 4)
        elif known == FLOW:
            self._flow = value[:REQUEST_ID_MAX].decode("latin-1")
        elif known == IDEMPOTENCY:
            self._idempotency, self._named = value, True
        elif known == RETRY_TICKET:
            self._retry_ticket, self._named = ShownTicket(value), True
        else:
            self._from_a_page(known, value)

    def _from_a_page(self, known: int, value: bytes) -> None:
        """What a browser says of the page. Where no origins are configured, this decides nothing."""
        if known == ORIGIN:
            self.cors = b"" if self.site.cors is None else self.site.cors.lines(value)
        elif known == PREFLIGHT_HEADERS:
            self._preflight = value
        else:
            self._preflight = self._preflight or b""

    def _credential(self, known: int, value: bytes) -> None:
        secret = value
        if known == AUTHORIZATION:
            secret = value[7:] if value[:7].lower() == b"bearer " else b""
        secret = secret.strip()
        if self._secret is not None and self._secret != secret:
            self._auth_conflict = True
        self._secret = secret

    def begin(self) -> None:
        """The head is whole: decide all that it decides."""
        self.head_done = True
        if not self.request_id:
            self.request_id = self.site.request_id()
        if self.rejection is not None:
            return
        path, _, query = self.target.partition(b"?")
        self.path = path
        if path in {b"/healthz", b"/readyz"}:
            self._own(path)
            return
        if not self._has_host and not self.version_1_0:
            self.reject(400, "malformed", "the host header is missing", code="missing_host")
            return
        route = self.route = self.site.routes.find(path)
        if route is None:
            if self.target.startswith((b"http://", b"https://")):
                self._absolute_form()
                return
            text = f"no such path: {path[:200].decode('latin-1')}; see the routes in the documentation"
            self.reject(404, "malformed", text, code="not_found")
        elif self.method == b"OPTIONS" and self.cors and self._preflight is not None:
            assert self.site.cors is not None
            self._prepare(200, self.site.cors.preflight(route.methods, self._preflight), b"")
        elif self.method not in route.methods:
            allow = b"allow: " + b", ".join(route.methods) + b"\r\n"
            name = self.method.decode("latin-1")
            self.reject(405, "malformed", f"{name} is not allowed here", code="method_not_allowed", extra=allow)
        elif query and (b"api-key=" in query or b"api_key=" in query or query.startswith(b"key=") or b"&key=" in query):
            self.reject(401, "invalid_key", "a key does not belong in the URL; send it as 'authorization: Bearer …'")
        elif self._identify():
            self._check_head(route)

    def _absolute_form(self) -> None:
        """The whole URL stands in the request line, as clients send it to proxies: its path counts."""
        _, _, path = self.target.partition(b"://")[2].partition(b"/")
        self.target = b"/" + path
        self.begin()

    def _own(self, path: bytes) -> None:
        """The gateway's own health: never gated, keyed or counted."""
        if self.method not in {b"GET", b"HEAD"}:
            self.reject(405, "malformed", "only GET and HEAD", code="method_not_allowed", extra=b"allow: GET, HEAD\r\n")
            return
        fine = path == b"/healthz" or self.site.ready()
        body = b'{"status":"ok"}' if fine else b'{"status":"not ready"}'
        self._prepare(200 if fine else 503, b"content-type: application/json\r\n", body)

    def _identify(self) -> bool:
        """Whose request is it?"""
        site, secret = self.site, self._secret
        if self._auth_conflict:
            self.reject(401, "invalid_key", "two different keys were sent; send one")
            return False
        if secret and site.keyed:
            self.key = site.key(secret)
            if self.key is None:
                self._unknown(secret)
        elif site.anonymous is not None:
            self.key = site.anonymous
        else:
            self.reject(401, "invalid_key", "a key is required; send it as 'authorization: Bearer …'")
        return self.key is not None

    def _unknown(self, secret: bytes) -> None:
        """Nobody's key, as far as is known: before the store was there, that may be only not yet."""
        site = self.site
        if site.stored is None or site.desk is None or not site.stored.may_know(secret):
            self.reject(401, "invalid_key", site.why_not(secret))
            return
        reason = Rejection.STORE_AWAY.value
        text = f"the store of keys has not been reached since this gateway started; {TABLE[reason].advice}."
        self.reject(site.overload_status, reason, text, extra=retry_headers(site.desk.come_back_ns()))

    def _check_head(self, route: Route) -> None:
        limit = self.site.limits.body_bytes
        key = self.key
        assert key is not None
        if self._idempotency:
            before = self.site.repeats.count(key.id, self._idempotency, self.site.clock())
            self._retries = max(self._retries or 0, before)
        if key.routes is not None and route.name not in key.routes:
            self.reject(
                403, "key_forbidden", f"this key may not use the route {route.name!r}", code="route_not_allowed"
            )
        elif self.content_length is not None and self.content_length > limit:
            self.too_large(self.content_length)
        elif self.content_length is None and not self.chunked and route.gated:
            self.reject(411, "malformed", "a body is required, with content-length or chunked", code="length_required")
        elif self.encoded:
            text = "compressed request bodies are not supported; send identity"
            self.reject(415, "malformed", text, code="unsupported_content_encoding")
        elif route.json and self.content_type is not None and b"json" not in self.content_type.lower():
            text = "this route takes a JSON body; send 'content-type: application/json'"
            self.reject(415, "malformed", text, code="unsupported_media_type")

    def too_large(self, size: int) -> None:
        """The body has more bytes than any may have."""
        limit = self.site.limits.body_bytes
        self.reject(413, "never_fits", f"the body has {size} bytes, the limit is {limit} bytes; send a smaller request")

    def reject(
        self, status: int, reason: str, message: str, *, code: str | None = None, param: str | None = None,
        extra: bytes = b"",
    ) -> None:  # fmt: skip
        """Refuse at the protocol level; the first reason stays."""
        if self.rejection is not None:
            return
        answer = TABLE[reason]
        route = self.route
        dialect = route.dialect if route is not None else Dialect.OPENAI
        body = error_body(dialect, message=message, type=answer.type, code=code or answer.code, param=param)
        if status < 500 and b"x-should-retry" not in extra:
            extra += b"x-should-retry: false\r\n"
        extra += b"x-forebay-reason: %b\r\n" % reason.encode()
        self._prepare(status, b"content-type: application/json\r\n" + extra, body)
        self.site.audit.rejected(status, reason, self.request_id.decode("ascii"), message)

    def _prepare(self, status: int, headers: bytes, body: bytes) -> None:
        headers += b"content-length: %d\r\n" % len(body)
        self.rejection = (status, headers + b"\r\n" + (b"" if self.method == b"HEAD" else body))
