"""The queue-depth gate: how much may wait, in requests, tokens and bytes, by mode."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.core.model import BACKPRESSURE, HYBRID, Demand, Mode, Refusal, Request
from forebay.core.outcome import QUEUE_FULL, ShedReason


@dataclass(frozen=True, slots=True)
class DepthConfig:
    """Most that may wait in one pool's queue."""

    depth_limit: int = 256  # requests in hybrid mode; the wait gate usually bites first
    held_limit: int = 10_000  # requests in backpressure mode: a bound on memory, not on waiting
    tokens_limit: int = 4_000_000  # expected tokens, in and out
    bytes_limit: int = 256 * 1024 * 1024  # request bodies


class DepthGate:
    """Refuses what the queue has no room for."""

    def __init__(self, config: DepthConfig) -> None:
        self.config = config
        self.depth_limit = config.depth_limit  # in force: a tuner may move it

    def limit(self, mode: Mode) -> int:
        """Most requests that may wait in this mode. Admission mode has no waiting room."""
        if mode is HYBRID:
            return self.depth_limit
        return self.config.held_limit if mode is BACKPRESSURE else 0

    def check(
        self, request: Request, demand: Demand, mode: Mode, *, waiting: int, tokens: int, size: int
    ) -> Refusal | None:
        """The bound that refuses, given what waits (requests, tokens, bytes), or None.

        The refusal carries no time to come back yet: the ladder gives one to those that are really refused.
        """
        limit = self.limit(mode)
        if waiting >= limit:
            return Refusal(QUEUE_FULL, 0, limit, waiting, "requests waiting")
        config = self.config
        tokens += demand.tokens
        if tokens > config.tokens_limit:
            if demand.tokens > config.tokens_limit:
                return Refusal(ShedReason.NEVER_FITS, None, config.tokens_limit, demand.tokens, "queue tokens")
            return Refusal(QUEUE_FULL, 0, config.tokens_limit, tokens, "tokens waiting")
        size += request.body_bytes
        if size > config.bytes_limit:
            if request.body_bytes > config.bytes_limit:
                return Refusal(ShedReason.NEVER_FITS, None, config.bytes_limit, request.body_bytes, "queue bytes")
            return Refusal(QUEUE_FULL, 0, config.bytes_limit, size, "bytes waiting")
        return None
