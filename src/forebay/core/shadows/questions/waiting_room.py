"""A waiting room in shadow: may it wait for the first engine to be up?"""

from __future__ import annotations

from forebay.core import verdicts
from forebay.core.model import Mode, Refusal
from forebay.core.outcome import ShedReason
from forebay.core.pool import Pool
from forebay.core.shadows.shadow import Case, Kept, Said, Shadow, compared


class WaitingRoomShadow(Shadow):
    """Other bounds for it; there is nothing to learn."""

    policy = "waiting_room"
    setting = "waiting_room"
    concerns = frozenset({ShedReason.WARMING})

    def __init__(self, pool: Pool, kept: Kept) -> None:
        super().__init__(kept)
        self._pool = pool

    def judge(self, case: Case) -> Said | None:
        """Is there a place for it in a room of this size?"""
        pool, room = self._pool, self.kept.config
        if pool.up or not pool.warming or (case.request.mode or pool.mode) is Mode.BACKPRESSURE:
            return None
        away = isinstance(case.verdict, Refusal)
        would = verdicts.waits_for_warmup(pool, room, case.request, case.now)
        return compared("waiting_room", away, not would, room.places, pool.queue.waiting, "requests waiting")
