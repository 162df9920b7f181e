"""How refusals look to a client library: the statuses and headers of the data port, as values instead of bytes.

The table of the wire is `ingress.status`, which stands above the simulator; a test holds the two together.
"""

from __future__ import annotations

from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.outcome import EvictReason, FailReason, ShedReason
from forebay.sim.fronts import ENGINE_REFUSED, UNREACHABLE
from forebay.workload.retry import CONNECTION_ERROR

SHARED_STATUS = 503
"""Status of refusals for shared capacity, which a configuration may map to another one."""

STATUS: dict[str, int] = {
    ShedReason.KEY_REQUESTS: 429,
    ShedReason.KEY_TOKENS: 429,
    ShedReason.KEY_CONCURRENCY: 429,
    ShedReason.KEY_CREDITS: 429,
    ShedReason.KEY_SHARE: 429,
    ShedReason.RETRY_BUDGET: 429,
    ShedReason.NEVER_FITS: 413,
    ShedReason.QUEUE_FULL: SHARED_STATUS,
    ShedReason.QUEUE_WAIT: SHARED_STATUS,
    ShedReason.WARMING: SHARED_STATUS,
    ShedReason.NO_ENGINE: SHARED_STATUS,
    ShedReason.DRAINING: SHARED_STATUS,
    EvictReason.EXPIRED: SHARED_STATUS,
    EvictReason.DISPLACED: SHARED_STATUS,
    FailReason.ENGINE_ERROR: 502,
    FailReason.ENGINE_TIMEOUT: 504,
    FailReason.OVER_BUDGET: 429,
    ENGINE_REFUSED: 400,
    UNREACHABLE: CONNECTION_ERROR,
}


def headers(retry_after_ns: int | None, obeyed: bool = True) -> dict[str, str]:
    """The headers of a refusal that speak of retries."""
    if retry_after_ns is None:
        return {"x-should-retry": "false"}
    seconds = max(1, -(-retry_after_ns // SECOND))
    return {
        "retry-after": str(seconds),
        "retry-after-ms": str(max(1, -(-retry_after_ns // MILLISECOND))),
        "x-should-retry": "true" if obeyed else "false",
    }
