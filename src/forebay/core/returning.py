"""Returns give way: who comes back after a refusal waits for what new requests leave, in a line of its own.

It came when it was told to, so it may wait for seconds where a new request is refused within a moment; and a new
request can still have its first token in time, where a return is late already. So the places that are promised to
returns cost new ones little, however they clump. The holder of a reserved place does not give way.
"""

from __future__ import annotations

from forebay.core.admission.forecast import Outlook
from forebay.core.dispatch.leases import Engine
from forebay.core.instant import Instant
from forebay.core.model import BACKPRESSURE, HYBRID, Demand, Mode, Refusal, Request
from forebay.core.pool import Pool


def gives_way(pool: Pool, request: Request, mode: Mode, now: Instant) -> bool:
    """Does a return wait for what new requests leave? Where nobody may wait, engines work in batches, or its caller
    does not wait for so long, it is like any other."""
    if mode is not HYBRID or not pool.single or pool.returning.waiting >= pool.places:
        return False
    ends = [end for end in (request.deadline, request.patience) if end is not None]
    needs_ns = pool.config.retry.hold_ns + pool.forecast.service_ns
    return pool.up and (not ends or now + needs_ns <= min(ends))


def verdict(pool: Pool, request: Request, demand: Demand, now: Instant) -> Refusal | Engine | Outlook:
    """The engine that it may have at once, or its place in the line, or why there is none."""
    queue, line = pool.queue, pool.returning
    if not line.waiting and (engine := spare(pool, request, demand, now)) is not None:
        return engine
    tokens, size = queue.tokens + line.tokens, queue.bytes + line.bytes
    refusal = pool.depth.check(request, demand, HYBRID, waiting=line.waiting, tokens=tokens, size=size)
    return refusal or Outlook(BACKPRESSURE, 0, pool.config.retry.hold_ns, gives_way=True)


def spare(pool: Pool, request: Request, demand: Demand, now: Instant) -> Engine | None:
    """The engine that would take a return now: nobody waits, and places and slack are left for new requests."""
    retry = pool.config.retry
    if pool.queue.waiting or pool.held_back(request, now) or pool.free(now) <= retry.spare_places * pool.places:
        return None
    prompt = demand.input_tokens
    engine = pool.room(request, demand.tokens, prompt, now)
    if engine is None or not engine.leaves(retry.spare_slack, prompt, request.priority, now):
        return None
    return engine
