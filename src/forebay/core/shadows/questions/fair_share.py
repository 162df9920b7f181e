"""Fair shares in shadow: is its flow ahead of the others?"""

from __future__ import annotations

from forebay.core.admission.fair_share import FairShare
from forebay.core.dispatch.leases import Engine
from forebay.core.instant import MILLISECOND, Instant
from forebay.core.model import Mode, Refusal, Request, Ticket, Usage
from forebay.core.outcome import ShedReason
from forebay.core.pool import Pool
from forebay.core.shadows.questions.room import has_room
from forebay.core.shadows.shadow import Case, Kept, Said, Shadow, compared


class FairShareShadow(Shadow):
    """Keeps the shares of what is admitted, by priority, as the acting ones would be kept."""

    policy = "fair_share"
    setting = "fair"
    concerns = frozenset({
        ShedReason.KEY_SHARE, ShedReason.NEVER_FITS, ShedReason.QUEUE_FULL, ShedReason.QUEUE_WAIT, ShedReason.WARMING,
        ShedReason.NO_ENGINE,
    })  # fmt: skip

    def __init__(self, pool: Pool, kept: Kept) -> None:
        super().__init__(kept)
        self._pool = pool
        self._shares: dict[int, FairShare] = kept.state

    def judge(self, case: Case) -> Said | None:
        """Is the flow ahead of its share, and no spare place there for it?"""
        if case.mode is Mode.BACKPRESSURE:
            return None
        pool, request, now = self._pool, case.request, case.now
        fair = self._share(request)
        excess_ns = fair.excess_ns(_flow(request), request.weight, now)
        spare = excess_ns and has_room(pool, case) and not pool.queue.waiting
        would = excess_ns > 0 and not (spare and pool.free(now) > fair.reserve(pool.places))
        refuses = isinstance(case.verdict, Refusal) and case.verdict.reason is ShedReason.KEY_SHARE
        return compared("fair_share", refuses, would, 0, excess_ns / MILLISECOND, "ms ahead of its share")

    def admitted(self, ticket: Ticket, engine: Engine | None, now: Instant) -> None:  # noqa: ARG002
        """Charge the flow."""
        request = ticket.request
        self._share(request).admitted(_flow(request), request.weight, ticket.demand.work, now)

    def ended(self, ticket: Ticket, usage: Usage | None, now: Instant) -> None:
        """Settle with the flow."""
        done = 0 if usage is None else usage.work
        self._share(ticket.request).ended(_flow(ticket.request), ticket.demand.work, done, now)

    def _share(self, request: Request) -> FairShare:
        share = self._shares.get(request.priority)
        if share is None:
            share = self._shares[request.priority] = FairShare(self.kept.config)
        return share


def _flow(request: Request) -> str:
    return request.flow or request.key
