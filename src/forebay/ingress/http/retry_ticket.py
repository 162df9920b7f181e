"""Retry tickets: what a refusal promises, signed, so that the retry that brings it back is known to hold a place.

A ticket says for which pool and instant of the wall clock the place is, and is bound to the caller's key by its
signature, as everything in it is: a keyed BLAKE2b. Gateways with the same secret take each other's. It is good for one
request, from a second before that instant to five seconds after. Whatever is wrong with one, it is as if none had been
shown; only the count of the reason tells. How many places may be held at all is the core's business.
"""

from __future__ import annotations

import binascii
import hmac
import os
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable
from enum import StrEnum
from hashlib import blake2b

from forebay.config.admission import Admission
from forebay.core.admission.retry_budget import EARLY_S, LATE_S
from forebay.core.instant import MILLISECOND

VERSION = 1
POOL_BYTES, PLACE_BYTES, NONCE_BYTES, MAC_BYTES = 4, 6, 9, 16
SIGNED_BYTES = 1 + POOL_BYTES + PLACE_BYTES + NONCE_BYTES
LENGTH = (SIGNED_BYTES + MAC_BYTES) * 4 // 3
"""Characters of a ticket: base64 of whole triples, so that no ticket can be spelt in two ways."""
EARLY_MS, LATE_MS = EARLY_S * 1000, LATE_S * 1000
WINDOW_MS = EARLY_MS + LATE_MS
USED_MAX = 65_536
"""Tickets that are remembered of one window. When more are shown, further ones hold nothing: none is taken twice."""
OLD_SECRET_MS = 130_000
"""After it was replaced, a secret still counts for so long: places are promised for at most two minutes ahead."""
_STANDARD = bytes.maketrans(b"-_", b"+/")


class Shown(StrEnum):
    """What became of tickets, as they are counted."""

    ISSUED = "issued"
    HELD = "held"
    EARLY = "early"
    LATE = "late"
    USED = "used"  # shown before
    FOREIGN = "foreign"  # of another key, pool or secret, or forged
    MALFORMED = "malformed"
    CROWDED = "crowded"  # more were shown at once than are remembered


def wall_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // MILLISECOND


class RetryTickets:
    """Issues tickets and looks at those that are shown. One per process; the table of used ones empties by itself."""

    def __init__(self, secret: str | None = None, clock: Callable[[], int] = wall_ms) -> None:
        """`secret`: shared by gateways that take each other's; None: one of this process. `clock`: ms since 1970."""
        self.counts: dict[str, int] = dict.fromkeys(Shown, 0)
        self._clock = clock
        self._secret = secret
        self._key = _key(secret)
        self._old_key = b""
        self._old_until = 0
        self._used: set[bytes] = set()
        self._used_before: set[bytes] = set()
        self._turns_at = 0  # when the older of the two is forgotten

    def change_secret(self, secret: str | None) -> None:
        """Sign with another secret from now on. What was signed with the one before still counts until it has ended."""
        if secret == self._secret:
            return
        self._old_key, self._old_until = self._key, self._clock() + OLD_SECRET_MS
        self._secret, self._key = secret, _key(secret)

    def issue(self, key: str, pool: str, wait_ns: int) -> bytes:
        """A ticket for the place that a caller with this key is promised, `wait_ns` from now."""
        self.counts[Shown.ISSUED] += 1
        place = self._clock() + wait_ns // MILLISECOND
        signed = b"%c%b%b%b" % (VERSION, pool_tag(pool), place.to_bytes(PLACE_BYTES, "big"), os.urandom(NONCE_BYTES))
        return urlsafe_b64encode(signed + _mac(self._key, signed, key))

    def shown(self, ticket: bytes, key: str, pool: str) -> bool:
        """Does whoever shows it, with this key, hold a place in this pool now? That uses it up."""
        found = self._judge(ticket, key, pool)
        self.counts[found] += 1
        return found is Shown.HELD

    def _judge(self, ticket: bytes, key: str, pool: str) -> Shown:
        if len(ticket) != LENGTH:
            return Shown.MALFORMED
        try:
            token = binascii.a2b_base64(ticket.translate(_STANDARD), strict_mode=True)
        except binascii.Error:
            return Shown.MALFORMED
        signed, mac = token[:SIGNED_BYTES], token[SIGNED_BYTES:]
        if token[0] != VERSION or signed[1 : 1 + POOL_BYTES] != pool_tag(pool) or not self._signed(signed, mac, key):
            return Shown.FOREIGN
        now = self._clock()
        place = int.from_bytes(signed[1 + POOL_BYTES : -NONCE_BYTES], "big")
        if now < place - EARLY_MS:
            return Shown.EARLY
        if now > place + LATE_MS:
            return Shown.LATE
        return self._use(signed[-NONCE_BYTES:], now)

    def _signed(self, signed: bytes, mac: bytes, key: str) -> bool:
        if hmac.compare_digest(mac, _mac(self._key, signed, key)):
            return True
        recent = self._clock() < self._old_until
        return recent and hmac.compare_digest(mac, _mac(self._old_key, signed, key))

    def _use(self, nonce: bytes, now: int) -> Shown:
        """Remember it for as long as its window may last."""
        if now >= self._turns_at:
            self._used_before = self._used if now < self._turns_at + WINDOW_MS else set()
            self._used = set()
            self._turns_at = now + WINDOW_MS
        if nonce in self._used or nonce in self._used_before:
            return Shown.USED
        if len(self._used) >= USED_MAX:
            return Shown.CROWDED
        self._used.add(nonce)
        return Shown.HELD


class ShownTicket:
    """The ticket of one request. It is looked at once, however often the request is judged."""

    __slots__ = ("_found", "_ticket")

    def __init__(self, ticket: bytes) -> None:
        self._ticket = ticket
        self._found: bool | None = None  # None: nobody has looked

    def holds(self, tickets: RetryTickets, key: str, pool: str) -> bool:
        """Does it hold a place in the pool that the request is for?"""
        if self._found is None:
            self._found = tickets.shown(self._ticket, key, pool)
        return self._found


def pool_tag(pool: str) -> bytes:
    """Tells the pools of gateways apart; what it stands in is signed."""
    return blake2b(pool.encode(), digest_size=POOL_BYTES, person=b"forebay pool").digest()


def configured(admission: Admission, before: RetryTickets | None) -> RetryTickets | None:
    """Those that the configuration asks for, `before` with another secret where there were any; None: none at all."""
    if not admission.retry_tickets:
        return None
    secret = None if admission.retry_ticket_secret is None else admission.retry_ticket_secret.value
    if before is None:
        return RetryTickets(secret)
    before.change_secret(secret)
    return before


def _key(secret: str | None) -> bytes:
    if secret is None:
        return os.urandom(32)
    return blake2b(secret.encode(), digest_size=32, person=b"forebay tickets").digest()


def _mac(key: bytes, signed: bytes, caller: str) -> bytes:
    return blake2b(signed + caller.encode(), digest_size=MAC_BYTES, key=key).digest()
