"""What a driver reports to the core, and what the core tells an observer."""

from __future__ import annotations

from typing import Protocol

import msgspec

from forebay.core.model import EngineSignal, Lease, Refusal, Request, Ticket, Usage
from forebay.core.outcome import FailReason


class FirstToken(msgspec.Struct, frozen=True):
    """The engine sent the first byte of an answer."""

    lease: Lease


class Finished(msgspec.Struct, frozen=True):
    """The engine's answer ended as it should.

    `usage` None means that nothing is to be charged (the engine refused the request itself). `healthy` is False
    when the answer speaks of an engine in trouble, though it was relayed whole.
    """

    lease: Lease
    usage: Usage | None
    healthy: bool = True


class Failed(msgspec.Struct, frozen=True):
    """The engine broke off, or never answered. `usage` is what the client got before that, None for nothing.

    `blame` is False when the failure says nothing about the engine's health (its own overload refusal).
    """

    lease: Lease
    reason: FailReason
    usage: Usage | None = None
    blame: bool = True


class Undelivered(msgspec.Struct, frozen=True):
    """The engine took no byte of the request: it may go to another engine, once.

    `away`: it refused the connection. Otherwise the connection was not made in time, which may be our own lateness.
    """

    lease: Lease
    away: bool = True


class EngineUp(msgspec.Struct, frozen=True):
    """A readiness probe succeeded."""

    engine: str


class EngineWarming(msgspec.Struct, frozen=True):
    """The engine answers, but says that it is not ready yet."""

    engine: str


class EngineDown(msgspec.Struct, frozen=True):
    """The engine cannot be reached."""

    engine: str


class Signalled(msgspec.Struct, frozen=True):
    """An engine told something of itself."""

    engine: str
    signal: EngineSignal


class MemoryRead(msgspec.Struct, frozen=True):
    """How full the GPUs of an engine are: the used share of the fullest one's memory, 0 to 1. None: not known."""

    engine: str
    share: float | None


Event = FirstToken | Finished | Failed | Undelivered | EngineUp | EngineWarming | EngineDown | Signalled | MemoryRead


class Observer(Protocol):
    """Told of every ticket's end and every refusal; the only source of numbers, live or simulated."""

    def closed(self, ticket: Ticket) -> None:
        """The ticket has its outcome and will not change any more."""
        ...

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        """The request was refused before it was queued."""
        ...
