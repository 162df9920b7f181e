"""The question that a concurrency limit answers."""

from __future__ import annotations

from typing import Protocol

from forebay.core.instant import Instant


class Limit(Protocol):
    """How many requests, and how many expected tokens, may be in flight on one engine?"""

    requests: int
    tokens: int

    def released(self, held_ns: int, in_flight: int, now: Instant) -> None:
        """A lease ended after `held_ns`, leaving `in_flight` leases open."""
        ...
