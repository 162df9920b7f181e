"""A queue depth in shadow, tuned or set: may one more wait?"""

from __future__ import annotations

from forebay.core import verdicts
from forebay.core.dispatch.leases import Engine
from forebay.core.model import Mode, Refusal
from forebay.core.outcome import ShedReason
from forebay.core.pool import Pool
from forebay.core.shadows.shadow import Case, Kept, Said, Shadow, compared


class DepthShadow(Shadow):
    """The depth itself is found beside the acting one, by the pool's tuners; this holds the queue against it."""

    policy = "depth"
    concerns = frozenset({ShedReason.QUEUE_FULL, ShedReason.QUEUE_WAIT})

    def __init__(self, pool: Pool) -> None:
        super().__init__(Kept(pool.config.tuning.shadow, None))
        self._pool = pool

    def judge(self, case: Case) -> Said | None:
        """May so many wait, and one more?"""
        pool = self._pool
        tuning, waiting = pool.tuning.shadow, pool.queue.waiting
        if tuning is None or case.gives_way or case.mode is not Mode.HYBRID or isinstance(case.verdict, Engine):
            return None
        full = isinstance(case.verdict, Refusal) and case.verdict.reason is ShedReason.QUEUE_FULL
        would_be = waiting >= tuning.depth and not (waiting and self._makes_way(case))
        return compared("depth", full, would_be, tuning.depth, waiting, "requests waiting")

    def _makes_way(self, case: Case) -> bool:
        """Would the last in turn make way for it, were the queue full?"""
        pool, request = self._pool, case.request
        return verdicts.last_behind(pool, request, pool.band(request.priority), pool.turn(request)) is not None
