"""What the core asks its driver to do. Effects are returned in the order in which they must be carried out."""

from __future__ import annotations

import msgspec

from forebay.core.model import Lease, Refusal, Request, Ticket


class Dispatch(msgspec.Struct, frozen=True):
    """Start these leases on their engine, as one batch."""

    leases: tuple[Lease, ...]


class Refuse(msgspec.Struct, frozen=True):
    """Answer the request with this refusal; `ticket` is None when it was shed before queueing."""

    request: Request
    refusal: Refusal
    ticket: Ticket | None = None


class Queued(msgspec.Struct, frozen=True):
    """The request waits; a later effect decides it."""

    ticket: Ticket


class Abort(msgspec.Struct, frozen=True):
    """Stop the engine's work on a lease that is already closed."""

    lease: Lease


Effect = Dispatch | Refuse | Queued | Abort
