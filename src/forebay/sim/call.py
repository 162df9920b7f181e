"""One request of a caller on its way, and who it passes: a front (a gateway, or none), then an engine."""

from __future__ import annotations

from typing import Protocol

from forebay.core.instant import Instant
from forebay.core.model import Lease, Request, Ticket
from forebay.core.outcome import FailReason


class Call:
    """A request over all its attempts. `index` names it in the records; sizes are the real ones, in tokens.

    `lease`, `ticket`, `request` and what the engine notes belong to the attempt under way.
    """

    __slots__ = (
        "attempts", "done", "first_token", "front", "index", "joined", "key", "lease", "name", "output_tokens",
        "place", "prefix_tokens", "prompt_tokens", "request", "session", "text_bytes", "ticket",
    )  # fmt: skip

    def __init__(
        self, index: int, key: str, prompt_tokens: int, output_tokens: int, session: str, prefix_tokens: int
    ) -> None:
        self.index = index
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.session = session
        self.prefix_tokens = prefix_tokens
        self.text_bytes = 0
        self.attempts = 0
        self.done = False
        self.front: Front | None = None
        self.request: Request | None = None
        self.ticket: Ticket | None = None
        self.lease: Lease | None = None
        self.name = ""  # what the engine calls it
        self.place: Instant | None = None  # that the last refusal reserved for it
        self.joined = -1  # the engine's count of steps when its first token was there; -1 before
        self.first_token = 0

    def renew(self) -> None:
        """Forget the last attempt."""
        self.attempts += 1
        self.restart()
        self.request = self.ticket = None

    def forget(self) -> None:
        """It has ended. It and its request refer to each other: broken here, both are gone at once, which over
        millions of requests is faster than leaving them to the garbage collector."""
        self.front = self.request = self.ticket = self.lease = None

    def restart(self) -> None:
        """Forget what an engine made of it."""
        self.lease = None
        self.name = ""
        self.joined = -1
        self.first_token = 0


class Front(Protocol):
    """What stands between callers and engines, seen from both sides."""

    def offer(self, call: Call, request: Request) -> None:
        """A caller sends it."""
        ...

    def leave(self, call: Call) -> int:
        """Its caller has gone. Returns the tokens that were generated for it."""
        ...

    def first_token(self, call: Call) -> None:
        """Its engine has made the first token."""
        ...

    def finished(self, call: Call, input_tokens: int, output_tokens: int) -> None:
        """Its engine has made the last one, and reports this usage."""
        ...

    def failed(self, call: Call, reason: FailReason, made: int, *, blame: bool) -> None:
        """Its engine broke off after so many tokens, or refused it for a reason of its own (no `blame`)."""
        ...

    def unfit(self, call: Call) -> None:
        """Its engine refuses it for good: it is larger than can ever be served there."""
        ...

    def undelivered(self, call: Call) -> None:
        """Its engine takes no connection."""
        ...

    def stalled(self, call: Call, until: Instant) -> None:
        """Its engine makes no token before that instant."""
        ...
