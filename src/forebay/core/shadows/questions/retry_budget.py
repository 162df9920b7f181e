"""Retry budgets in shadow: has its key a promise or a budget for this retry?"""

from __future__ import annotations

from forebay.core import verdicts
from forebay.core.admission.retry_budget import RetryBudgets
from forebay.core.model import Mode, Refusal
from forebay.core.outcome import ShedReason
from forebay.core.pool import Pool
from forebay.core.shadows.shadow import Case, Kept, Said, Shadow, compared


class RetryBudgetShadow(Shadow):
    """Takes note of the promises that are made, as the acting budgets would, and pays for the retries that come."""

    policy = "retry_budget"
    setting = "retry_budget"
    moments = ("offer", "return")
    concerns = verdicts.LOOKED_AT | frozenset({ShedReason.RETRY_BUDGET})

    def __init__(self, pool: Pool, kept: Kept) -> None:
        super().__init__(kept)
        self._pool = pool
        self._budgets: RetryBudgets = kept.state

    def judge(self, case: Case) -> Said | None:
        """Would the retry be looked at? Takes note of what callers are told, too."""
        request, refusal, now = case.request, case.verdict, case.now
        if case.moment == "return":
            if request.retries is not None and refusal.retry_after_ns is not None:
                if not request.retries:
                    self._budgets.refused(request.key, now)
                if refusal.obeyed:
                    self._budgets.promised(request.key, now + refusal.retry_after_ns, now)
            return None
        if case.mode is Mode.BACKPRESSURE and request.holds_place:
            self._budgets.spend(request.key, now, free=True)
            return None
        if not request.retries or not self._pool.returns.strained:
            return None
        left = self._budgets.left(request.key, now)
        refuses = isinstance(refusal, Refusal) and refusal.reason is ShedReason.RETRY_BUDGET
        would = not self._budgets.allows(request.key, now)
        if not would:
            self._budgets.spend(request.key, now)
        return compared(self.policy, refuses, would, 1, left, "retries left, beside those that were promised")
