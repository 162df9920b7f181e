"""Could it start at once?"""

from __future__ import annotations

from forebay.core.dispatch.leases import Engine
from forebay.core.pool import Pool
from forebay.core.shadows.shadow import Case


def has_room(pool: Pool, case: Case) -> bool:
    """Has an engine room for a request that was offered, be it held back or not? No balancer is asked: it may draw."""
    if isinstance(case.verdict, Engine):
        return True
    queue, batcher, tokens = pool.queue, pool.batcher, pool.queue.tokens + case.demand.tokens
    forms = queue.waiting < batcher.max_size and (not queue.waiting or tokens <= batcher.max_tokens)
    return forms and any(engine.has_room(tokens, case.now) for engine in pool.engines)
