"""The time to come back in shadow: would another calendar promise a place, and when?"""

from __future__ import annotations

from forebay.core.admission.pairs import ShadowedLadder
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.pool import Pool
from forebay.core.shadows.shadow import Case, Kept, Said, Shadow, Verdict


class RetryAfterShadow(Shadow):
    """Fills calendars of its own with all that the acting ones are asked for."""

    policy = "retry_after"
    setting = "retry"
    moments = ("return",)

    def __init__(self, pool: Pool, kept: Kept) -> None:
        super().__init__(kept)
        self._pool = pool
        self._ladder = pool.ladder = ShadowedLadder(pool.ladder, kept.state)

    def judge(self, case: Case) -> Said | None:
        """Which time would it have been told?"""
        last, self._ladder.last = self._ladder.last, None
        if last is None:
            return None  # its time to come back is not the calendar's
        acting_ns, shadow_ns = last
        obeys_ns = case.request.obeys_ns
        promised, would_be = acting_ns <= obeys_ns, shadow_ns <= obeys_ns
        verdict: Verdict = "same"
        if promised != would_be:
            verdict = "stricter" if promised else "looser"
        elif promised:
            second, other = (case.now + acting_ns) // SECOND, (case.now + shadow_ns) // SECOND
            verdict = "same" if second == other else "sooner" if other < second else "later"
        return Said(self.policy, verdict, shadow_ns / MILLISECOND, acting_ns / MILLISECOND, "ms until it may come back")

    def removed(self) -> None:
        """The acting calendars go on alone."""
        if isinstance(self._pool.ladder, ShadowedLadder):
            self._pool.ladder = self._pool.ladder.alone()
