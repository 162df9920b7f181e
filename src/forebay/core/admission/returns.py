"""Who comes for the first time, who comes back, and who does not although told to.

Returns are promised places beside the usual load: what comes for the first time per second. A spike is no usual load,
so what comes in the first half minute of an overload is left out. Only callers who number their attempts, or
name them by an idempotency key, tell a return from a new request; from others every attempt counts as new, and fewer
places are promised. When some of those told to come back stay away, as many more can be promised.
"""

from __future__ import annotations

from forebay.core.admission.reserved import ReservedPlaces
from forebay.core.admission.retry_budget import RetryBudgetConfig, RetryBudgets
from forebay.core.instant import SECOND, Instant

STEP_NS = 5 * SECOND
SPIKE_STEPS = 6
"""An overload of up to so many steps is a spike; one that goes on is the load."""
STEPS_KEPT = 20
"""Over which rates and shares are averaged, older ones fade."""
OVERLOADED = 0.2
"""Share of the new requests that is refused in a step of overload."""
REFUSED_MIN = 4  # fewer may be chance
SHOWS_LEAST = 0.5  # nobody is promised more than twice what there is
TOLD_MIN = 20.0  # fewer say nothing of who comes back


class Returns:
    """Counts what comes to one pool, in steps of time."""

    def __init__(self, budget: RetryBudgetConfig | None = None, *, reserves: bool = False) -> None:
        self.budgets: RetryBudgets | None = None
        """What each key may retry unasked while the pool is overloaded; None: as much as it likes."""
        self.reserved: ReservedPlaces | None = None
        """The places that are kept for retry tickets; None: a promise is a place among all others."""
        self._budget: RetryBudgetConfig | None = None
        self.reconfigure(budget, reserves=reserves)
        self.usual_rate = 0.0
        """New requests per second, spikes left out; 0.0 in the first step."""
        self._steps = 0  # that it is the mean of
        self._overloaded = 0  # steps in a row
        self._step = -1
        self._ends: Instant = 0
        self._fresh = self._refused = self._returned = 0  # in this step
        self._due: dict[int, int] = {}  # promises to those whose return can be seen, by step
        self._told = self._came = 0.0

    def reconfigure(self, budget: RetryBudgetConfig | None, *, reserves: bool) -> None:
        """Keep budgets by other settings; every key begins anew when these differ. Reserve places, or no more."""
        if reserves != (self.reserved is not None):
            self.reserved = ReservedPlaces() if reserves else None
        if budget != self._budget:
            self._budget, self.budgets = budget, None if budget is None else RetryBudgets(budget)

    def admitted(self, retries: int | None, now: Instant) -> None:
        """A request may enter; `retries` is how often it was sent before, None when its library does not say."""
        if now >= self._ends:
            self._move(now)
        if retries:
            self._returned += 1
        else:
            self._fresh += 1

    def refused(self, retries: int | None, now: Instant) -> None:
        """One is refused for shared capacity."""
        if now >= self._ends:
            self._move(now)
        if retries:
            self._returned += 1
        else:
            self._fresh += 1
            self._refused += 1

    def promised(self, at: Instant) -> None:
        """A caller whose library numbers its attempts is told to come back at an instant."""
        step = at // STEP_NS
        self._due[step] = self._due.get(step, 0) + 1

    @property
    def overloaded(self) -> bool:
        """Is much refused of what comes for the first time?"""
        return self._refused > OVERLOADED * self._fresh and self._refused > REFUSED_MIN

    @property
    def strained(self) -> bool:
        """Is it overloaded now, or was it in the step before?"""
        return self._overloaded > 0 or self.overloaded

    @property
    def shows(self) -> float:
        """The share of those told to come back who do; 1.0 while too few were told to say."""
        if self._told < TOLD_MIN:
            return 1.0
        return min(1.0, max(SHOWS_LEAST, self._came / self._told))

    def _move(self, now: Instant) -> None:
        step = now // STEP_NS
        passed = step - self._step
        if self._step >= 0:
            self._count_usual(passed)
            faded = (1 - 1 / STEPS_KEPT) ** min(passed, 1000)
            due = sum(self._due.pop(number) for number in sorted(self._due) if number < step)
            self._told = faded * self._told + due
            self._came = faded * self._came + self._returned
        self._step, self._ends = step, (step + 1) * STEP_NS
        self._fresh = self._refused = self._returned = 0

    def _count_usual(self, passed: int) -> None:
        """Take in the step that is over, and those in which nothing came since."""
        if self.overloaded:
            self._overloaded += 1
            if self._overloaded <= SPIKE_STEPS and self._steps:
                return
        else:
            self._overloaded = 0
        steps = min(STEPS_KEPT, self._steps + passed)
        rate = self._fresh * SECOND / (passed * STEP_NS)
        self.usual_rate += min(1.0, passed / steps) * (rate - self.usual_rate)
        self._steps = steps
