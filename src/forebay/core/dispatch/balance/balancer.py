"""The question that a balancer answers: which engine gets the work?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forebay.core.dispatch.leases import Engine
from forebay.core.instant import Instant
from forebay.core.model import Request


class Balancer(Protocol):
    """Chooses among the engines of a pool. It changes nothing but its own stream of chance."""

    prefix_bytes: int  # of a body, whose hash it wants to know of every request; 0: none

    def choose(
        self, engines: Sequence[Engine], request: Request, tokens: int, now: Instant, prompt: int | None = None
    ) -> Engine | None:
        """One that has room for so many expected tokens, or None when none has. `prompt`: how many of them have to
        be read; None does not ask the streams."""
        ...
