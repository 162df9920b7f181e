"""Request headers that are read, and not passed on as they are."""

from __future__ import annotations

CONTENT_LENGTH, TRANSFER_ENCODING, AUTHORIZATION, API_KEY, HOST, EXPECT, REQUEST_ID, CONTENT_TYPE = range(8)
CONTENT_ENCODING, DEADLINE_MS, PRIORITY, DROP, CONNECTION, FLOW, READ_TIMEOUT, UPGRADE = range(8, 16)
RETRY_TICKET, USER_AGENT, RETRY_COUNT, IDEMPOTENCY, ORIGIN, PREFLIGHT_METHOD, PREFLIGHT_HEADERS = range(16, 23)
KNOWN: dict[bytes, int] = {
    b"content-length": CONTENT_LENGTH,
    b"transfer-encoding": TRANSFER_ENCODING,
    b"authorization": AUTHORIZATION,
    b"api-key": API_KEY,
    b"x-api-key": API_KEY,
    b"host": HOST,
    b"expect": EXPECT,
    b"x-request-id": REQUEST_ID,
    b"content-type": CONTENT_TYPE,
    b"content-encoding": CONTENT_ENCODING,
    b"x-forebay-deadline-ms": DEADLINE_MS,
    b"x-stainless-read-timeout": READ_TIMEOUT,
    b"x-forebay-priority": PRIORITY,
    b"x-forebay-ticket": RETRY_TICKET,
    b"x-llm-d-inference-fairness-id": FLOW,
    b"connection": CONNECTION,
    b"keep-alive": DROP,
    b"proxy-authorization": DROP,
    b"proxy-connection": DROP,
    b"te": DROP,
    b"trailer": DROP,
    b"upgrade": UPGRADE,
    b"accept-encoding": DROP,
    b"user-agent": USER_AGENT,
    b"x-stainless-retry-count": RETRY_COUNT,
    b"idempotency-key": IDEMPOTENCY,
    b"origin": ORIGIN,
    b"access-control-request-method": PREFLIGHT_METHOD,
    b"access-control-request-headers": PREFLIGHT_HEADERS,
}

PASSED_ON = {number: name for name, number in KNOWN.items() if number >= USER_AGENT or number == READ_TIMEOUT}
"""Those that engines are told as well; what browsers send of a page (from ORIGIN on) only where pages are theirs."""
REQUEST_ID_MAX = 128
_ID_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/+=@")


def is_request_id(value: bytes) -> bool:
    """Is it one that we pass on?"""
    return 0 < len(value) <= REQUEST_ID_MAX and _ID_CHARACTERS.issuperset(value)


def whole(value: bytes, digits: int) -> int | None:
    """A whole number of at most so many digits; None for anything else."""
    return int(value) if value.isdigit() and len(value) <= digits else None


def milliseconds(value: bytes) -> int | None:
    """Seconds as the SDK writes them (600, 600.0, None)."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return int(seconds * 1000) if 0 < seconds < 1e6 else None
