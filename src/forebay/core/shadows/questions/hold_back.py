"""Places held back, and floors, in shadow: must it leave what is free to the classes above it?"""

from __future__ import annotations

from forebay.core.dispatch.leases import Engine
from forebay.core.instant import Instant
from forebay.core.model import Ticket
from forebay.core.outcome import ShedReason
from forebay.core.pool import Pool
from forebay.core.queueing.floor import FloorShare
from forebay.core.shadows.questions.room import has_room
from forebay.core.shadows.shadow import Case, Kept, Said, Shadow
from forebay.core.shadows.shadow import compared as said


class HoldBackShadow(Shadow):
    """Saves up turns as the acting floors do; one that it would have let through takes the turn in the shadow."""

    policy = "hold_back"
    setting = "floors"
    concerns = frozenset({ShedReason.QUEUE_FULL, ShedReason.QUEUE_WAIT})

    def __init__(self, pool: Pool, kept: Kept, shares: dict[str, float]) -> None:
        super().__init__(kept)
        self._pool = pool
        self._floor: FloorShare = kept.state
        self._shares = shares

    def judge(self, case: Case) -> Said | None:
        """Of what has room, would it be held back?"""
        pool, request, now = self._pool, case.request, case.now
        share = self._shares.get(request.priority_class, request.hold_back)
        if case.gives_way or not (share or request.hold_back) or not has_room(pool, case):
            return None
        free = pool.free(now)
        kept_free = share * pool.places
        held, would_be = not isinstance(case.verdict, Engine), False
        if share and free <= kept_free:
            would_be = not self._floor.due(request.priority)
            if held and not would_be:
                self._floor.served(request.priority)
        return said("hold_back", held, would_be, kept_free, free, "free places")

    def admitted(self, ticket: Ticket, engine: Engine | None, now: Instant) -> None:  # noqa: ARG002
        """One that starts at once has a turn."""
        if engine is not None and self._pool.single:
            self._floor.served(ticket.request.priority)

    def waited(self, ticket: Ticket, now: Instant, *, expired: bool) -> None:  # noqa: ARG002
        """Its turn has come."""
        if not expired:
            self._floor.served(ticket.request.priority)
