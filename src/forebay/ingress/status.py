"""THE table: how each refusal looks on the wire. Status, error type and code, whether a retry can work, what to do.

429 is the caller's own limit, 503 the shared capacity; the 503s can be mapped in the config. Bodies follow the
dialect of the route.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from forebay.core.instant import MILLISECOND, SECOND, Instant
from forebay.core.model import Refusal
from forebay.core.quota.path import Path
from forebay.ingress.http.routes import Dialect


class Rejection(StrEnum):
    """Refusals of the protocol layer: the request never reached the pipeline."""

    INVALID_KEY = "invalid_key"
    KEY_FORBIDDEN = "key_forbidden"
    MALFORMED = "malformed"
    NEVER_FITS = "never_fits"
    NO_ENGINE = "no_engine"
    QUEUE_FULL = "queue_full"
    LEDGER_AWAY = "ledger_away"
    STORE_AWAY = "store_away"


class Answer(msgspec.Struct, frozen=True):
    """How one reason is answered."""

    status: int
    type: str
    code: str
    advice: str
    shared: bool = False  # its status may be mapped


RETRY_AFTER_OBEYED_S = 60  # the longest time that every official SDK waits for

_OVERLOADED = "overloaded_error"
_UNAVAILABLE = "service_unavailable_error"
_COME_BACK = "retry after the time given in retry-after"

TABLE: dict[str, Answer] = {
    "invalid_key": Answer(
        401, "authentication_error", "invalid_api_key", "send a valid key as 'authorization: Bearer …'"
    ),
    "key_forbidden": Answer(403, "permission_error", "model_not_allowed", "ask for access, or use an allowed model"),
    "key_requests": Answer(429, "rate_limit_error", "rate_limit_exceeded", _COME_BACK),
    "key_tokens": Answer(429, "rate_limit_error", "token_limit_exceeded", _COME_BACK),
    "key_concurrency": Answer(429, "rate_limit_error", "concurrency_limit_exceeded", "wait for an open request to end"),
    "key_credits": Answer(429, "insufficient_quota", "insufficient_quota", "buy credits"),
    "key_share": Answer(429, "rate_limit_error", "fair_share_exceeded", _COME_BACK),
    "retry_budget": Answer(
        429, "rate_limit_error", "retry_budget_exceeded", "retry at the times given in retry-after, and only then"
    ),
    "ledger_away": Answer(503, _UNAVAILABLE, "ledger_unavailable", _COME_BACK, True),
    "store_away": Answer(503, _UNAVAILABLE, "store_unavailable", _COME_BACK, True),
    "never_fits": Answer(413, "invalid_request_error", "request_too_large", "send a smaller request"),
    "malformed": Answer(400, "invalid_request_error", "invalid_request", "correct the request"),
    "queue_full": Answer(503, _OVERLOADED, "queue_full", _COME_BACK, True),
    "queue_wait": Answer(503, _OVERLOADED, "queue_wait_exceeded", _COME_BACK, True),
    "expired": Answer(503, _OVERLOADED, "queue_timeout", _COME_BACK, True),
    "displaced": Answer(503, _OVERLOADED, "displaced", _COME_BACK, True),
    "warming": Answer(503, _UNAVAILABLE, "warming_up", _COME_BACK, True),
    "no_engine": Answer(503, _UNAVAILABLE, "no_engine", _COME_BACK, True),
    "draining": Answer(503, _UNAVAILABLE, "draining", "retry: another replica may take it", True),
    "engine_error": Answer(502, "server_error", "engine_error", "retry, or look at the engine's log"),
    "engine_timeout": Answer(504, "server_error", "engine_timeout", "retry, or ask for fewer tokens"),
    "over_budget": Answer(429, "rate_limit_error", "token_limit_exceeded", "retry later, or ask for fewer tokens"),
}

_WHAT = {
    "key_requests": "The request limit is used up",
    "key_tokens": "The token limit is used up",
    "key_concurrency": "Too many requests are open",
    "key_credits": "This key has not enough credits left",
    "key_share": "This key has had its fair share for now, and others wait for theirs",
    "retry_budget": "The engines are overloaded, and this key has retried more often than it was told to",
    "never_fits": "This request is larger than can ever be served",
    "queue_full": "The queue is full",
    "queue_wait": "The predicted queue wait is longer than the wait budget",
    "expired": "The request waited in the queue for as long as it may",
    "displaced": "The request gave its place to one of a higher class, or of a key that had less",
    "warming": "The engine is warming up",
    "no_engine": "No engine is available",
    "draining": "This gateway is shutting down",
}

REASON_PHRASES = {
    200: "OK", 204: "No Content", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
    405: "Method Not Allowed", 408: "Request Timeout", 411: "Length Required", 413: "Content Too Large",
    414: "URI Too Long", 415: "Unsupported Media Type", 417: "Expectation Failed", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 501: "Not Implemented", 502: "Bad Gateway",
    503: "Service Unavailable", 504: "Gateway Timeout", 505: "HTTP Version Not Supported", 529: "Overloaded",
}  # fmt: skip


_RATE_LIMIT_LINES = {
    name: (
        f"x-ratelimit-limit-{name}: %d\r\nx-ratelimit-remaining-{name}: %d\r\nx-ratelimit-reset-{name}: %b\r\n"
    ).encode()
    for name in ("requests", "tokens")
}
_BOTH_RATE_LIMITS = _RATE_LIMIT_LINES["requests"] + _RATE_LIMIT_LINES["tokens"]


def explain(refusal: Refusal) -> str:
    """One sentence for a person: which limit, the figures behind the decision, what to do."""
    reason = refusal.reason.value
    text = _WHAT.get(reason, reason)
    if refusal.level:
        text += f": {_figure(refusal.actual)} of {_figure(refusal.limit)} {refusal.unit} of {refusal.level}"
    elif refusal.unit:
        text += f": {_figure(refusal.actual)} against a limit of {_figure(refusal.limit)} {refusal.unit}"
    return f"{text}; {TABLE[reason].advice}."


def _figure(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.1f}"


def error_body(dialect: Dialect, *, message: str, type: str, code: str | None, param: str | None = None) -> bytes:  # noqa: A002
    """An error object in the route's own dialect."""
    body: dict[str, Any]
    if dialect is Dialect.KSERVE:
        body = {"error": message}
    elif dialect is Dialect.ANTHROPIC:
        body = {"type": "error", "error": {"type": type, "message": message}}
    else:
        body = {"error": {"message": message, "type": type, "param": param, "code": code}}
    return msgspec.json.encode(body)


def retry_headers(retry_after_ns: int | None, obeyed: bool | None = None) -> bytes:
    """retry-after in whole seconds, rounded up (never earlier than the load allows), and in milliseconds.

    A time beyond what the caller's library waits for is told all the same, with the word not to retry by itself: it
    would come back early, in vain. `obeyed` is what is known of the library; None: as every official one does.
    """
    if retry_after_ns is None:
        return b"x-should-retry: false\r\n"
    seconds = max(1, -(-retry_after_ns // SECOND))
    millis = max(1, -(-retry_after_ns // MILLISECOND))
    if obeyed is None:
        obeyed = seconds <= RETRY_AFTER_OBEYED_S
    should = b"true" if obeyed else b"false"
    return b"retry-after: %d\r\nretry-after-ms: %d\r\nx-should-retry: %b\r\n" % (seconds, millis, should)


def rate_limit_lines(path: Path, now: Instant) -> bytes:
    """x-ratelimit-* of the tightest limits that requests on this path meet."""
    if not path.limited:
        return b""
    rows = path.headers(now)
    if len(rows) == 2:  # as most keys with limits have: written in one go
        (_, of_requests, requests, requests_ns), (_, of_tokens, tokens, tokens_ns) = rows
        return _BOTH_RATE_LIMITS % (
            of_requests, requests, go_duration(requests_ns), of_tokens, tokens, go_duration(tokens_ns),
        )  # fmt: skip
    return b"".join(
        _RATE_LIMIT_LINES[name] % (limit, remaining, go_duration(reset_ns)) for name, limit, remaining, reset_ns in rows
    )


def go_duration(duration_ns: int) -> bytes:
    """A duration as OpenAI writes resets: 12ms, 1s, 6m0s; rounded up."""
    millis = -(-duration_ns // MILLISECOND)
    if millis < 1000:
        return b"%dms" % millis
    seconds = -(-millis // 1000)
    if seconds < 60:
        return b"%ds" % seconds
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return b"%dm%ds" % (minutes, seconds)
    return b"%dh%dm%ds" % (*divmod(minutes, 60), seconds)
