"""What each setting in shadow costs a request, on the core alone.

``python -m benchmarks.shadow_cost`` drives the situations of ``benchmarks.core`` with one shadow at a time and with
none, in turns, and prints the CPU time of a request from its offer to its end: the median of the rounds and, of what a
shadow adds, the smallest and the largest. It writes nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, Final

import click

from benchmarks.core_cases import Case, Situation, State
from forebay.core.admission.fair_share import FairShareConfig
from forebay.core.admission.retry_after import RetryConfig
from forebay.core.admission.retry_budget import RetryBudgetConfig
from forebay.core.admission.waiting_room import WaitingRoomConfig
from forebay.core.dispatch.balance import AffinityConfig, P2cConfig
from forebay.core.limits.guarded import GuardedConfig
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.queueing.ordering import OrderConfig
from forebay.core.shadows.shadow import ShadowConfig
from forebay.core.tuning.derived import DerivedConfig
from forebay.core.tuning.fixed import FixedConfig
from forebay.core.tuning.stepwise import StepwiseConfig

Change = Callable[[PoolConfig], PoolConfig]


def _tried(**settings: Any) -> Change:
    return lambda pool: replace(pool, shadow=ShadowConfig(**settings))


def _tuning(**settings: Any) -> Change:
    return lambda pool: replace(pool, tuning=replace(pool.tuning, **settings))


SHADOWS: Final[dict[str, Change]] = {
    "a guarded window": lambda pool: replace(pool, limit_shadow=GuardedConfig(initial=64, least=64, most=64)),
    "a tuned depth (derived)": _tuning(shadow=DerivedConfig()),
    "a tuned depth (stepwise)": _tuning(shadow=StepwiseConfig()),
    "a set depth": _tuning(shadow=FixedConfig(), shadow_depth=64),
    "a forecast, or a wait budget": lambda pool: replace(
        pool, shadow=ShadowConfig(forecast=replace(pool.forecast, tail_z=2.0))
    ),
    "fair shares": _tried(fair=FairShareConfig()),
    "places held back": _tried(hold_backs=(("default", 0.1),)),
    "a floor": _tried(floors=((0, 0.1),)),
    "a waiting room": _tried(waiting_room=WaitingRoomConfig(places=9)),
    "retry budgets": _tried(retry_budget=RetryBudgetConfig()),
    "a calendar of returns": _tried(retry=RetryConfig(headroom=0.2)),
    "p2c": _tried(balance=P2cConfig()),
    "affinity": _tried(balance=AffinityConfig()),
    "another order": _tried(order=OrderConfig(adaptive=True)),
}
STATES: Final[tuple[State, ...]] = ("room", "waits", "overload")


def situation(state: State, change: Change | None) -> Situation:
    """One of the states, on two engines, with a shadow or without."""
    made = Situation(Case("", state, engines=2))
    if change is not None:
        pools = tuple(change(pool.config) for pool in made.pipeline.pools)
        made.pipeline.reconfigure(PipelineConfig(pools, dict.fromkeys(made.names, made.case.terms)), made.now)
    return made


def request_us(made: Situation, steps: int) -> float:
    """CPU time of a request, over so many steps."""
    coming = made.coming(steps)
    began = time.thread_time_ns()
    for requests in coming:
        now = made.tick()
        for request in requests:
            made.follow(made.pipeline.offer(request, now))
        made.end(1)
    return (time.thread_time_ns() - began) / 1000 / sum(map(len, coming))


@click.command(help=__doc__)
@click.option("--rounds", default=9, show_default=True)
@click.option("--steps", default=3000, show_default=True)
def main(rounds: int, steps: int) -> None:
    """Measure and print."""
    gc.collect()
    gc.freeze()
    for state in STATES:
        alone = situation(state, None)
        beside = {name: situation(state, change) for name, change in SHADOWS.items()}
        bare: list[float] = []
        more: dict[str, list[float]] = {name: [] for name in SHADOWS}
        for number in range(rounds + 1):
            for name, made in beside.items():
                without, with_it = request_us(alone, steps), request_us(made, steps)
                if number:  # the first round warms
                    bare.append(without)
                    more[name].append(with_it - without)
        click.echo(f"{state}: {median(bare):.1f} µs without ({min(bare):.1f} to {max(bare):.1f})")
        for name, found in more.items():
            click.echo(f"  {name:30} {median(found):+.1f} µs ({min(found):+.1f} to {max(found):+.1f})")


if __name__ == "__main__":
    main()
