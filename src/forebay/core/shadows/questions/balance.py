"""A balancer in shadow: which engine would have got the work?"""

from __future__ import annotations

from forebay.core.dispatch.balance import Balancer
from forebay.core.dispatch.leases import Engine
from forebay.core.pool import Pool
from forebay.core.shadows.shadow import Case, Kept, Said, Shadow, Verdict


class BalanceShadow(Shadow):
    """Chooses among the same engines, as the acting balancer's choices have filled them."""

    policy = "balance"
    setting = "balance"
    moments = ("offer", "turn")

    def __init__(self, pool: Pool, kept: Kept) -> None:
        super().__init__(kept)
        self._pool = pool
        self._balancer: Balancer = kept.state
        self.prefix_bytes = self._balancer.prefix_bytes

    def judge(self, case: Case) -> Said | None:
        """Which engine would it have chosen?"""
        pool, engine = self._pool, case.verdict
        at_once = case.moment == "turn" or pool.single  # else it joins a batch, whose engine is chosen later
        if not isinstance(engine, Engine) or not at_once:
            return None
        tokens = case.demand.tokens + (pool.queue.tokens if case.moment == "offer" else 0)
        other = self._balancer.choose(pool.engines, case.request, tokens, case.now)
        if other is None:
            return None
        verdict: Verdict = "same" if other is engine else "other"
        unit = f"tokens before it, where {engine.name} was chosen"
        return Said(self.policy, verdict, other.load(case.now), engine.load(case.now), unit, other.name)
