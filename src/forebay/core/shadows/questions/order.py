"""Another order in shadow: whose turn would it have been, within its flow?"""

from __future__ import annotations

from forebay.core.instant import MILLISECOND
from forebay.core.pool import Pool
from forebay.core.queueing.ordering import Standing
from forebay.core.shadows.shadow import Case, Kept, Said, Shadow


class OrderShadow(Shadow):
    """Sees the queue as the acting order leaves it."""

    policy = "order"
    setting = "order"
    moments = ("turn",)

    def __init__(self, pool: Pool, kept: Kept) -> None:
        super().__init__(kept)
        self._pool = pool
        self._standing: Standing | None = kept.state
        self._acts = _now(pool.queue.standing)  # what the acting order went by since the last turn

    def judge(self, case: Case) -> Said | None:
        """Whose turn would it have been?"""
        queue, standing, ticket, now = self._pool.queue, self._standing, case.ticket, case.now
        assert ticket is not None
        if ticket.gives_way:
            return None  # it waited in another line
        newest, acted, self._acts = _now(standing), self._acts, _now(queue.standing)
        other = ticket if newest == acted else queue.instead_of(ticket, newest=newest)
        oldest = queue.first_arrived() if queue.waiting else ticket
        waited_ns, hold_ns = now - oldest.arrived, oldest.expires - oldest.arrived
        if standing is not None:
            standing.seen(waited_ns, hold_ns, now)
        limit = self.kept.config.target_share * hold_ns / MILLISECOND
        return Said(
            self.policy, "same" if other is ticket else "other", limit, waited_ns / MILLISECOND,
            "ms that the oldest has waited", "newest first" if newest else "in order",
        )  # fmt: skip


def _now(standing: Standing | None) -> bool:
    """Do the newest go first?"""
    return standing is not None and standing.now
