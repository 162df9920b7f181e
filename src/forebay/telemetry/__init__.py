"""What Forebay says about itself: metrics, the access log, and the log of the process."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.core.events import Observer
from forebay.core.model import Refusal, Request, Ticket


class Observers:
    """Several observers as one, told in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def closed(self, ticket: Ticket) -> None:
        for observer in self._observers:
            observer.closed(ticket)

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        for observer in self._observers:
            observer.shed(request, refusal, predicted_wait_ns)
