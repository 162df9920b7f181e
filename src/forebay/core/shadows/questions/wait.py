"""Another forecast, or wait budget, in shadow: is the predicted wait worth it?"""

from __future__ import annotations

from forebay.core import verdicts
from forebay.core.admission.forecast import Outlook, WaitForecast
from forebay.core.admission.pairs import ShadowedForecast
from forebay.core.dispatch.leases import Engine
from forebay.core.instant import MILLISECOND, Instant
from forebay.core.model import Mode, Refusal, Ticket, Usage
from forebay.core.outcome import ShedReason
from forebay.core.pool import Pool
from forebay.core.shadows.shadow import Case, Kept, Said, Shadow, compared


class WaitShadow(Shadow):
    """Learns from the same releases as the acting forecast, and from the waits of those that it would have let in."""

    policy = "wait_budget"
    setting = "forecast"
    concerns = frozenset({ShedReason.QUEUE_WAIT})

    def __init__(self, pool: Pool, kept: Kept) -> None:
        super().__init__(kept)
        self._pool = pool
        self._forecast: WaitForecast = kept.state
        self._said: dict[int, tuple[int, int]] = {}  # predicted wait and budget, by ticket: those that it let in
        self._ahead: Outlook | None = None  # what it said last; None: it would have refused
        pool.forecast = ShadowedForecast(pool.forecast, self._forecast)

    def judge(self, case: Case) -> Said | None:
        """Is the wait that it predicts within its budget, and all else that the acting forecast is held against?"""
        if isinstance(case.verdict, Engine) or case.gives_way:
            return None
        pool = self._pool
        found = verdicts.wait_verdict(pool, self._forecast, case.request, case.demand, case.mode, case.now)
        refuses, unit = isinstance(case.verdict, Refusal), "ms of predicted wait"
        if isinstance(found, Refusal):
            self._ahead = None
            return compared("wait_budget", refuses, True, found.limit, found.actual, unit)
        self._ahead = found
        limit_ns = found.budget_ns if case.mode is Mode.HYBRID else pool.config.hold_ns
        return compared("wait_budget", refuses, False, limit_ns / MILLISECOND, found.predicted_ns / MILLISECOND, unit)

    def admitted(self, ticket: Ticket, engine: Engine | None, now: Instant) -> None:
        """Note what it says of one that it would have let wait too."""
        pool, ahead = self._pool, self._ahead
        if ticket.mode is not Mode.HYBRID or ticket.request.holds_place or ticket.gives_way or not pool.up:
            return
        if engine is not None:
            if pool.single:
                return
            ahead = verdicts.outlook(pool, self._forecast, ticket.request, ticket.mode, pool.queue.waiting + 1, now)
        if ahead is not None and ahead.predicted_ns:
            self._said[ticket.sequence] = ahead.predicted_ns, ahead.budget_ns + pool.batcher.linger_ns

    def waited(self, ticket: Ticket, now: Instant, *, expired: bool) -> None:
        """Learn from that."""
        said = self._said.pop(ticket.sequence, None)
        if said is not None:
            predicted_ns, budget_ns = said
            # Nobody waits longer than the acting budget allows: by a longer one it may have been in time, or not.
            waited_ns = max(now - ticket.arrived, budget_ns + 1) if expired else now - ticket.arrived
            self._forecast.observe(waited_ns, predicted_ns, budget_ns, now)

    def ended(self, ticket: Ticket, usage: Usage | None, now: Instant) -> None:  # noqa: ARG002
        """Forget one that left."""
        self._said.pop(ticket.sequence, None)

    def removed(self) -> None:
        """The acting forecast goes on alone."""
        if isinstance(self._pool.forecast, ShadowedForecast):
            self._pool.forecast = self._pool.forecast.alone()
