"""For callers: lets an SDK send the retry tickets of a gateway back with its own retries.

The official SDKs wait as they are told, but send no header of a refusal back. Their HTTP clients take event hooks,
which can. Nothing but the standard library is used here, so this file may be copied into a program without the rest:

    tickets = RetryTickets()
    client = openai.OpenAI(http_client=openai.DefaultHttpxClient(event_hooks=tickets.hooks()))
    client = openai.AsyncOpenAI(http_client=openai.DefaultAsyncHttpxClient(event_hooks=tickets.async_hooks()))

`anthropic` has clients of the same names, and loops of one's own with `httpx` take the same hooks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from hashlib import blake2b
from typing import Any, Protocol

RETRY_TICKET = "x-forebay-ticket"
EARLY_S, LATE_S = 1.0, 5.0
"""From how long before its instant to how long after it a ticket is good."""
KEPT = 1024


class Request(Protocol):
    """What a hook is given before a request is sent, as far as it is needed."""

    @property
    def method(self) -> str: ...
    @property
    def url(self) -> Any: ...
    @property
    def headers(self) -> MutableMapping[str, str]: ...
    @property
    def content(self) -> bytes:
        """Raises RuntimeError when the body is sent from a stream."""
        ...


class Response(Protocol):
    """What a hook is given when the head of an answer is there."""

    @property
    def request(self) -> Any: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


class RetryTickets:
    """Keeps the ticket of each refusal, until the same request is sent again at the time that was told.

    One for all clients of a program that send with the same API key, from any number of threads. A request is the same
    when method, URL and body are; which of several alike gets which ticket makes no difference.
    """

    def __init__(self, kept: int = KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        """At most `kept` different requests are remembered, the oldest go first. `clock` is in seconds."""
        self._kept = kept
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets: dict[bytes, list[tuple[float, str]]] = {}  # (when its place is, ticket), by request

    def __len__(self) -> int:
        """Tickets that are kept."""
        return sum(map(len, self._tickets.values()))

    def hooks(self) -> dict[str, list[Callable[[Any], None]]]:
        """`event_hooks` of a blocking client."""
        return {"request": [self.send], "response": [self.answered]}

    def async_hooks(self) -> dict[str, list[Callable[[Any], Awaitable[None]]]]:
        """`event_hooks` of an asynchronous client."""

        async def send(request: Request) -> None:
            self.send(request)

        async def answered(response: Response) -> None:
            self.answered(response)

        return {"request": [send], "response": [answered]}

    def send(self, request: Request) -> None:
        """A request is about to be sent: give it its ticket, if it has one for now."""
        if not self._tickets or (mark := _mark(request)) is None:
            return
        now = self._clock()
        with self._lock:
            kept = self._good(mark, now)
            due = min(kept, default=None)
            if due is None or now < due[0] - EARLY_S:
                return
            kept.remove(due)
            if not kept:
                del self._tickets[mark]
        request.headers[RETRY_TICKET] = due[1]

    def answered(self, response: Response) -> None:
        """An answer came: keep its ticket, if it brings one."""
        ticket = response.headers.get(RETRY_TICKET)
        if ticket is None or (mark := _mark(response.request)) is None:
            return
        try:
            wait_s = float(response.headers.get("retry-after-ms", "")) / 1000
        except ValueError:
            return
        now = self._clock()
        with self._lock:
            kept = self._good(mark, now)
            while not kept and len(self._tickets) >= self._kept:
                del self._tickets[next(iter(self._tickets))]
            kept.append((now + wait_s, ticket))
            self._tickets[mark] = kept

    def _good(self, mark: bytes, now: float) -> list[tuple[float, str]]:
        """The tickets of a request that have not ended; the others are let go."""
        good = [held for held in self._tickets.pop(mark, ()) if now <= held[0] + LATE_S]
        if good:
            self._tickets[mark] = good
        return good


def _mark(request: Request) -> bytes | None:
    """Names a request by what it asks; None for one whose body is not at hand."""
    try:
        body = request.content
    except RuntimeError:
        return None
    return blake2b(f"{request.method} {request.url}\n".encode() + body, digest_size=16).digest()
