"""Dynamic batching for engines that run one batch at a time.

A batch leaves when it is full (in requests or tokens) or when its oldest request has lingered long enough. With the
default linger of zero it leaves as soon as the engine is free: with one engine, waiting for more never raised the
load that keeps its objective, it only cost latency (the requests that arrive while a batch runs are the next batch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.core.instant import Instant


@dataclass(frozen=True, slots=True)
class DynamicConfig:
    """Bounds of a batch."""

    kind: Literal["dynamic"] = "dynamic"
    max_size: int = 32  # requests
    max_tokens: int = 1 << 62  # expected tokens; a single larger request still goes, alone
    linger_ns: int = 0  # longest that the oldest request waits for company


class Dynamic:
    """Full, or lingered long enough."""

    def __init__(self, config: DynamicConfig) -> None:
        self.max_size = config.max_size
        self.max_tokens = config.max_tokens
        self.linger_ns = config.linger_ns

    def ready_at(self, waiting: int, waiting_tokens: int, oldest: Instant, now: Instant) -> Instant:
        if waiting >= self.max_size or waiting_tokens >= self.max_tokens:
            return now
        return oldest + self.linger_ns
