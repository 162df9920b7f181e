"""The question that a batching policy answers."""

from __future__ import annotations

from typing import Protocol

from forebay.core.instant import Instant


class Batcher(Protocol):
    """When may a batch leave, and how large may it be? Asked only while an engine has room."""

    max_size: int  # requests in one batch
    max_tokens: int  # expected tokens in one batch
    linger_ns: int  # longest that it may keep a request waiting beside a free engine

    def ready_at(self, waiting: int, waiting_tokens: int, oldest: Instant, now: Instant) -> Instant:
        """When the waiting requests may leave as a batch: `now` or earlier means at once.

        `waiting` >= 1 requests with `waiting_tokens` expected tokens, the oldest of them queued at `oldest`.
        """
        ...
