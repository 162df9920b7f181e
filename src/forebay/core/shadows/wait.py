"""Another forecast, or wait budget, in shadow: is the predicted wait worth it?"""

from __future__ import annotations

from forebay.core import verdicts
from forebay.core.admission.forecast import WaitForecast
from forebay.core.admission.shadow import ShadowedForecast
from forebay.core.dispatch.leases import Engine
from forebay.core.instant import MILLISECOND, Instant
from forebay.core.model import Mode, Refusal, Ticket, Usage
from forebay.core.outcome import ShedReason
from forebay.core.pool import Pool
from forebay.core.shadow import Case, Kept, Said, Shadow, compared


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
        pool.forecast = ShadowedForecast(pool.forecast, self._forecast)

    def judge(self, case: Case) -> Said | None:
        """Is the wait that it predicts within its budget, and all else that the acting forecast is held against?"""
        if isinstance(case.verdict, Engine):
            return None
        pool, forecast = self._pool, self._forecast
        found = verdicts.wait_verdict(pool, forecast, case.request, case.demand, case.mode, case.now)
        rate = forecast.drain_rate(pool.in_flight, case.now)
        limit_ns = forecast.budget_ns(rate, case.request.wait_budget_ns)
        predicted_ns = forecast.predict_ns(pool.queue.waiting + 1, rate)
        return compared(
            "wait_budget", isinstance(case.verdict, Refusal), isinstance(found, Refusal),
            found.limit if isinstance(found, Refusal) else limit_ns / MILLISECOND, predicted_ns / MILLISECOND,
            "ms of predicted wait",
        )  # fmt: skip

    def admitted(self, ticket: Ticket, engine: Engine | None, now: Instant) -> None:
        """Note what it says of one that it would have let wait too."""
        pool, forecast = self._pool, self._forecast
        if ticket.mode is not Mode.HYBRID or ticket.request.holds_place or not pool.up:
            return
        if engine is not None and pool.single:
            return
        rate = forecast.drain_rate(pool.in_flight, now)
        predicted_ns = forecast.predict_ns(pool.queue.waiting + 1, rate)
        stricter = any(said.policy == self.policy and said.verdict == "stricter" for said in ticket.request.shadow)
        if predicted_ns and not stricter:
            budget_ns = forecast.budget_ns(rate, ticket.request.wait_budget_ns) + pool.batcher.linger_ns
            self._said[ticket.sequence] = predicted_ns, budget_ns

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
