"""An engine's concurrency limit in shadow: is there a place?"""

from __future__ import annotations

from forebay.core.dispatch.leases import Engine
from forebay.core.limits.limit import Limit
from forebay.core.limits.pair import Shadowed
from forebay.core.outcome import ShedReason
from forebay.core.pool import Pool
from forebay.core.shadows.shadow import Case, Kept, Said, Shadow, compared


class WindowShadow(Shadow):
    """The limits themselves are beside the acting ones, on the engines; this asks them."""

    policy = "window"
    concerns = frozenset({ShedReason.QUEUE_FULL, ShedReason.QUEUE_WAIT, ShedReason.KEY_SHARE})

    def __init__(self, pool: Pool) -> None:
        super().__init__(Kept(pool.config.limit_shadow, None))
        self._pool = pool

    def judge(self, case: Case) -> Said | None:
        """Is there a place on any engine?"""
        full = would_be = True
        places = used = 0
        for engine in self._pool.engines:
            both = engine.limit
            if isinstance(both, Shadowed) and engine.health.available(case.now):
                full = full and not _has_room(engine, both.acting, case.demand.tokens)
                would_be = would_be and not _has_room(engine, both.shadow, case.demand.tokens)
                places += both.shadow.requests
                used += engine.places
        return compared("window", full, would_be, places, used, "requests in flight")


def _has_room(engine: Engine, limit: Limit, tokens: int) -> bool:
    if engine.places >= limit.requests:
        return False
    within = engine.tokens + tokens <= limit.tokens and engine.prefill_tokens < limit.prefill_tokens
    return within or not engine.places
