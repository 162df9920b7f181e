"""How a body begins, as a number: equal beginnings, which an engine may have in its cache, have equal numbers."""

from __future__ import annotations

from hashlib import blake2b

from forebay.core.pipeline import Pipeline


def prefix_of(pipeline: Pipeline, model: str, body: bytes) -> int:
    """64 bits of the first bytes of a body, as many as the balancer of the model's pool asks for, or one in its shadow.

    0 when it asks for none, or the body is shorter: then all of it may still change, and there is little to keep.
    The hash is no secret's and has no salt, so that all gateways agree; it is a strong one, so that no caller can aim.
    """
    pool = pipeline.pool_for(model)
    size = 0 if pool is None else pool.prefix_bytes
    if not size or len(body) < size:
        return 0
    return int.from_bytes(blake2b(body[:size], digest_size=8).digest(), "big")
