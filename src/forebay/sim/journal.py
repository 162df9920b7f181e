"""The decision log: one line for everything that a pipeline decided, in order, the same text live and simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.core.instant import Instant
from forebay.core.model import Lease, Refusal, Request, Ticket

Name = Callable[[Request], str]


class Journal:
    """Writes lines `INSTANT GATEWAY WHAT REQUEST …` to a list. Also a pipeline's observer: ends are decisions too."""

    def __init__(self, lines: list[str], gateway: int, now: Callable[[], Instant], name: Name) -> None:
        """`name` says what a request is called: it must be the same in every run."""
        self.lines = lines
        self._gateway, self._now, self._name = gateway, now, name

    def offered(self, request: Request) -> None:
        """A request is put to the pipeline."""
        self._note("offer", request, request.key, request.text_bytes, request.max_output_tokens)

    def dispatched(self, leases: Sequence[Lease]) -> None:
        """Leases were given."""
        for lease in leases:
            self._note("dispatch", lease.ticket.request, lease.engine.name)

    def queued(self, ticket: Ticket) -> None:
        """It waits."""
        self._note("queue", ticket.request, ticket.expires, ticket.predicted_wait_ns)

    def refused(self, request: Request, refusal: Refusal) -> None:
        """It was refused, before or after it waited."""
        figures = (refusal.reason.value, refusal.retry_after_ns, refusal.limit, refusal.actual)
        self._note("refuse", request, *figures)

    def aborted(self, lease: Lease) -> None:
        """The engine is to stop."""
        self._note("abort", lease.ticket.request)

    def closed(self, ticket: Ticket) -> None:
        """The pipeline's observer: a ticket has its outcome."""
        outcome = "" if ticket.outcome is None else ticket.outcome.value
        reason = "" if ticket.reason is None else ticket.reason.value
        self._note("close", ticket.request, outcome, reason, ticket.queue_wait_ns, ticket.first_token)

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        """The pipeline's observer: a request was refused before it was queued."""
        self._note("shed", request, refusal.reason.value, predicted_wait_ns)

    def _note(self, what: str, request: Request, *figures: object) -> None:
        rest = " ".join(map(str, figures))
        self.lines.append(f"{self._now()} {self._gateway} {what} {self._name(request)} {rest}".rstrip())


class Unobserved:
    """The observer of a run whose decisions are not written down: figures come from the callers' own records."""

    def closed(self, ticket: Ticket) -> None:
        """Nothing is kept."""

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        """Nothing is kept."""
