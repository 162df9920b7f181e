"""What every connection of the data port shares: the gateway, routes, keys, limits, time-outs and counters."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol

from forebay.config.build import KeyEntry
from forebay.engines.deadlines import Deadlines
from forebay.engines.openai import OpenAIEngine
from forebay.ingress.http.cors import Cors
from forebay.ingress.http.peek import Peek, peek
from forebay.ingress.http.retry_ticket import RetryTickets
from forebay.ingress.http.routes import Routes
from forebay.ingress.repeats import Repeats
from forebay.live.gateway import Gateway

if TYPE_CHECKING:
    from forebay.ingress.http.head import Head
    from forebay.ingress.http.relay import Relay
    from forebay.ingress.http.server import ServerConnection
    from forebay.ledger.desk import Desk
    from forebay.ledger.keyring import Keyring

KEYS_CACHED = 20_000


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of the data port. Sizes in bytes, times in seconds."""

    body_bytes: int = 32 * 1024 * 1024
    buffered_bytes: int = 256 * 1024 * 1024  # bodies in memory, uploads in progress included
    header_bytes: int = 64 * 1024
    headers: int = 128
    connections: int = 20_000
    header_s: float = 10.0  # for a whole request head
    body_grace_s: float = 30.0  # beyond what the least body rate allows
    body_bytes_per_s: int = 1024
    keep_alive_s: float = 75.0  # above the 60 s that load balancers keep connections for
    stalled_reader_s: float = 120.0  # a client that reads nothing of its answer
    hold_status_s: float = 0.075  # longest that a 200 waits for its first event
    linger_s: float = 2.0  # for the rest of a body that was refused unread


class Audit(Protocol):
    """Told of requests that never reach the pipeline."""

    def rejected(self, status: int, reason: str, request_id: str, detail: str) -> None:
        """The protocol layer refused one."""
        ...

    def passed(self, route: str) -> None:
        """A control request was passed on."""
        ...


@dataclass(slots=True)
class Site:
    """Shared by all connections; lives as long as the server."""

    loop: asyncio.AbstractEventLoop
    gateway: Gateway
    engines: Mapping[str, OpenAIEngine]
    routes: Routes
    keys: Mapping[bytes, KeyEntry]  # by sha256 of the secret
    anonymous: KeyEntry | None  # None: a key is required
    limits: HttpLimits
    audit: Audit
    overload_status: int = 503
    desk: Desk | None = None  # the ledger's, when there is a store
    stored: Keyring | None = None  # keys of the store
    retry_tickets: RetryTickets | None = None  # None: none are issued, and those that are shown are not looked at
    cors: Cors | None = None  # None: pages of other origins are the engine's business
    clock: Callable[[], int] = field(init=False)
    ready: Callable[[], bool] = lambda: True
    read: Callable[..., Peek] = peek  # or with a real tokenizer
    heads: dict[bytes, Head] = field(default_factory=dict)  # read and judged; by their bytes less the length
    repeats: Repeats = field(default_factory=Repeats)
    buffered_bytes: int = 0
    draining: bool = False
    connections: set[ServerConnection] = field(default_factory=set)
    held: deque[ServerConnection] = field(default_factory=deque)  # senders that wait for buffer room
    keep_alive: Deadlines[ServerConnection] = field(init=False)
    header: Deadlines[ServerConnection] = field(init=False)
    body: Deadlines[ServerConnection] = field(init=False)
    linger: Deadlines[ServerConnection] = field(init=False)
    stalled: Deadlines[ServerConnection] = field(init=False)
    hold: Deadlines[Relay] = field(init=False)
    _cached: dict[bytes, KeyEntry] = field(default_factory=dict)
    _request_ids: count[int] = field(default_factory=lambda: count(1))
    _id_prefix: bytes = field(default_factory=lambda: b"fb-" + os.urandom(5).hex().encode() + b"-")

    def __post_init__(self) -> None:
        from forebay.ingress.http.relay import Relay
        from forebay.ingress.http.server import ServerConnection

        limits, loop = self.limits, self.loop
        self.clock = self.gateway.clock
        self.keep_alive = Deadlines(loop, limits.keep_alive_s, ServerConnection.idle_for_too_long)
        self.header = Deadlines(loop, limits.header_s, ServerConnection.head_too_slow)
        self.body = Deadlines(loop, limits.body_grace_s, ServerConnection.body_too_slow)
        self.linger = Deadlines(loop, limits.linger_s, ServerConnection.lingered)
        self.stalled = Deadlines(loop, limits.stalled_reader_s, ServerConnection.reader_stalled)
        self.hold = Deadlines(loop, limits.hold_status_s, Relay.held_long_enough)

    def request_id(self) -> bytes:
        """A fresh id, unique to this process and its runs."""
        return self._id_prefix + b"%x" % next(self._request_ids)

    def engine_that_is_up(self) -> OpenAIEngine | None:
        """Any that serves now; for requests that are passed on without a ticket."""
        engines = (e for pool in self.gateway.pipeline.pools for e in pool.engines if e.health.readiness == "up")
        return next((self.engines[engine.name] for engine in engines), None)

    def key(self, secret: bytes) -> KeyEntry | None:
        """Whose secret this is. Only secrets that were right are remembered, so wrong ones leave no state."""
        entry = self._cached.get(secret)
        if entry is None:
            entry = self.keys.get(hashlib.sha256(secret).digest())
            if entry is None and self.stored is not None:
                entry = self.stored.find(secret)
            if entry is not None:
                if len(self._cached) >= KEYS_CACHED:
                    self._cached.clear()
                self._cached[secret] = entry
        return entry

    @property
    def keyed(self) -> bool:
        """Are there keys, so that one that is sent has to be one of them?"""
        return bool(self.keys) or self.stored is not None or self.anonymous is None

    def why_not(self, secret: bytes) -> str:
        """Why a key opens nothing, for whoever sent it."""
        why = self.stored.why_not(secret) if self.stored is not None else None
        return f"this key {why or 'is not known here'}"

    def forget(self, key_ids: Collection[str]) -> None:
        """Keys have changed: what was remembered of them is asked for anew."""
        for secret in [secret for secret, entry in self._cached.items() if entry.id in key_ids]:
            del self._cached[secret]
        for head in [head for head, known in self.heads.items() if known.key is not None and known.key.id in key_ids]:
            del self.heads[head]

    def reload(self, keys: Mapping[bytes, KeyEntry], anonymous: KeyEntry | None, overload_status: int) -> None:
        """Take other keys. Requests that are under way keep what they were told."""
        self.keys, self.anonymous, self.overload_status = keys, anonymous, overload_status
        self._cached.clear()
        self.heads.clear()  # they were judged by the keys of then

    def release_bytes(self, size: int) -> None:
        """Bodies left memory: senders that were held for want of room go on."""
        self.buffered_bytes -= size
        if self.held:
            self.make_way()

    def make_way(self) -> None:
        """Let held senders go on: all for whom there is room; one beyond it when all the memory is their own.

        Were all held that have sent a part, none would ever be whole and make room for the others.
        """
        held = self.held
        while held and self.buffered_bytes < self.limits.buffered_bytes:
            held.popleft().release_sender()
        if held and self.buffered_bytes <= sum(connection.partial_bytes for connection in held):
            held.popleft().release_sender(beyond=True)

    def stop(self) -> None:
        for deadlines in (self.keep_alive, self.header, self.body, self.linger, self.stalled, self.hold):
            deadlines.stop()
