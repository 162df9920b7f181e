"""Puts settings in shadow in and takes them out, and lets them act, with what they learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from forebay.core.admission.fair_share import FairShare
from forebay.core.admission.forecast import WaitForecast
from forebay.core.admission.pairs import forked, forked_ladder
from forebay.core.admission.retry_after import RetryLadder
from forebay.core.admission.retry_budget import RetryBudgets
from forebay.core.dispatch.balance import build as build_balancer
from forebay.core.instant import Even, Instant, Scattered
from forebay.core.pool import Pool, PoolConfig
from forebay.core.queueing.floor import FloorShare
from forebay.core.queueing.ordering import Standing, standing
from forebay.core.shadows.questions.balance import BalanceShadow
from forebay.core.shadows.questions.depth import DepthShadow
from forebay.core.shadows.questions.fair_share import FairShareShadow
from forebay.core.shadows.questions.hold_back import HoldBackShadow
from forebay.core.shadows.questions.order import OrderShadow
from forebay.core.shadows.questions.retry_after import RetryAfterShadow
from forebay.core.shadows.questions.retry_budget import RetryBudgetShadow
from forebay.core.shadows.questions.wait import WaitShadow
from forebay.core.shadows.questions.waiting_room import WaitingRoomShadow
from forebay.core.shadows.questions.window import WindowShadow
from forebay.core.shadows.shadow import Kept, Shadow, Shadows


def reconfigure(pool: Pool, config: PoolConfig, now: Instant) -> None:
    """Give a pool other settings. One that was in shadow acts with what it learned, and one that acted may go on in the
    shadow; limits and the depth's tuner see to that themselves."""
    acting, old = kept(pool), pool.config
    tried = {} if pool.shadows is None else pool.shadows.kept()
    pool.reconfigure(config, now)
    for name, one in tried.items():
        if name in acting and one.config == getattr(config, name) != getattr(old, name):
            _PROMOTE[name](pool, one.state)
    pool.shadows = build(pool, acting)


def kept(pool: Pool) -> dict[str, Kept]:
    """What the acting settings of a pool have learned: those that may change places with one in shadow."""
    config = pool.config
    return {
        "forecast": Kept(config.forecast, pool.forecast),
        "retry": Kept(config.retry, pool.ladder),
        "retry_budget": Kept(config.retry_budget, pool.returns.budgets),
        "fair": Kept(config.fair, pool.fair_shares),
        "floors": Kept(config.floors, pool.floor),
        "order": Kept(config.order, pool.queue.standing),
    }


def _forecast(pool: Pool, state: WaitForecast) -> None:
    pool.forecast = state


def _retry(pool: Pool, state: RetryLadder) -> None:
    state.chance = pool.ladder.chance
    pool.ladder = state


def _retry_budget(pool: Pool, state: RetryBudgets) -> None:
    pool.returns.budgets = state


def _fair(pool: Pool, state: dict[int, FairShare]) -> None:
    pool.fair_shares = state


def _floors(pool: Pool, state: FloorShare) -> None:
    pool.floor = state


def _order(pool: Pool, state: Standing | None) -> None:
    pool.queue.standing = state


_PROMOTE: dict[str, Callable[[Pool, Any], None]] = {
    "forecast": _forecast,
    "retry": _retry,
    "retry_budget": _retry_budget,
    "fair": _fair,
    "floors": _floors,
    "order": _order,
}


def build(pool: Pool, acting: dict[str, Kept] | None = None) -> Shadows | None:
    """The shadows that a pool's settings ask for; None while they ask for none.

    `acting`: what the settings that were in force before a reload had learned. One that goes into the shadow keeps it,
    as does one that stays there.
    """
    before, config, now = pool.shadows, pool.config, kept(pool)
    wanted = (config.shadow, config.limit_shadow, config.tuning.shadow, config.floors)
    if before is not None and acting is not None and before.wanted == wanted:
        promoted = any(now[name].state is not kept.state for name, kept in acting.items())
        if not promoted:
            return before
    for shadow in () if before is None else before.shadows:
        shadow.removed()
    known = {} if before is None else before.kept()
    found = tuple(_asked_for(pool, _Heirs(kept(pool), known, acting or {})))
    return Shadows(found, {} if before is None else before.counts, wanted) if found else None


class _Heirs:
    """Finds for each setting in shadow what it goes on from. `now`: what acts; the others were, in shadow or acting."""

    def __init__(self, now: dict[str, Kept], tried: dict[str, Kept], acted: dict[str, Kept]) -> None:
        self._now, self._tried, self._acted = now, tried, acted

    def of(
        self, setting: str, config: Any, fresh: Callable[[], Any], fork: Callable[[Any], Any] = lambda state: state
    ) -> Kept:
        """What was learned by the same settings, unless that acts now; else a fresh state. `fork`: makes one of its own
        of a state that goes on to act by other settings."""
        acts, tried, acted = self._now.get(setting), self._tried.get(setting), self._acted.get(setting)
        if tried is not None and tried.config == config and (acts is None or tried.state is not acts.state):
            return tried
        if acted is not None and acted.config == config and acts is not None and acts.config != config:
            return Kept(config, fork(acted.state))
        return Kept(config, fresh())


def _asked_for(pool: Pool, heirs: _Heirs) -> Iterator[Shadow]:
    config, shadow = pool.config, pool.config.shadow
    if config.limit_shadow is not None:
        yield WindowShadow(pool)
    if pool.tuning.shadow is not None:
        yield DepthShadow(pool)
    if (forecast := shadow.forecast) is not None:
        kept = heirs.of(
            "forecast", forecast, lambda: forked(pool.forecast, forecast), lambda acted: forked(acted, forecast)
        )
        yield WaitShadow(pool, kept)
    if (fair := shadow.fair) is not None:
        yield FairShareShadow(pool, heirs.of("fair", fair, dict))
    if shadow.hold_backs or shadow.floors is not None:
        floors = config.floors if shadow.floors is None else shadow.floors
        kept = heirs.of("floors", floors, lambda: FloorShare(dict(floors)))
        yield HoldBackShadow(pool, kept, dict(shadow.hold_backs))
    if (room := shadow.waiting_room) is not None:
        yield WaitingRoomShadow(pool, Kept(room, None))
    if (budget := shadow.retry_budget) is not None:
        yield RetryBudgetShadow(pool, heirs.of("retry_budget", budget, lambda: RetryBudgets(budget)))
    if (retry := shadow.retry) is not None:
        kept = heirs.of("retry", retry, lambda: RetryLadder(retry, Even()), lambda acted: forked_ladder(acted, retry))
        yield RetryAfterShadow(pool, kept)
    if (balance := shadow.balance) is not None:
        yield BalanceShadow(pool, heirs.of("balance", balance, lambda: build_balancer(balance, Scattered())))
    if (order := shadow.order) is not None:
        yield OrderShadow(pool, heirs.of("order", order, lambda: standing(order)))
