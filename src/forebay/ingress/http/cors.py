"""Which web pages may call from a browser (CORS): the answer to a preflight, and the lines on every other answer.

A page sees an answer, refusals included, only when its origin is named in it; and of the headers only those exposed.
"""

from __future__ import annotations

import re

MAX_AGE_S = 600  # browsers ask again after at most so long anyway, or after less
ANY = "*"

EXPOSED = (
    b"retry-after, retry-after-ms, x-should-retry, x-request-id, x-forebay-reason, "
    b"x-forebay-ticket, server-timing, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_ELSEWHERE = b"vary: origin\r\n"
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}){0,63}")


class Cors:
    """The origins that are allowed. `origins` as a browser spells them (https://app.example), or `*` for any."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._any = ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def lines(self, origin: bytes) -> bytes:
        """Header lines of any answer to a page of this origin. They always say that the answer depends on it."""
        if not self._any and origin not in self._origins:
            return _ELSEWHERE
        allowed = b"*" if self._any else origin
        return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\n%b" % (
            allowed, EXPOSED, _ELSEWHERE,
        )  # fmt: skip

    def preflight(self, methods: tuple[bytes, ...], wanted: bytes) -> bytes:
        """Further lines of the answer to a preflight: the route's methods, and the headers that the page `wanted`.

        Credentials in cookies are not used here, so any request header may be sent; names that are none are not echoed.
        """
        headers = b"access-control-allow-headers: %b\r\n" % wanted if _NAMES.fullmatch(wanted) else b""
        return b"access-control-allow-methods: %b\r\n%baccess-control-max-age: %d\r\n" % (
            b", ".join(methods), headers, MAX_AGE_S,
        )  # fmt: skip
