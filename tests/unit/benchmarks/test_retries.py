"""The parts of the retries benchmark that simulate nothing: what is counted, and what its tables say."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.retries import Rows, plan
from benchmarks.retries_world import HalfShowing, Together, Trial, _in_order, measure
from forebay.core.dispatch.health import Readiness
from forebay.core.instant import SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.pool import Pool, PoolConfig
from forebay.sim.records import Columns
from forebay.workload.arrival import Arrival


@pytest.mark.parametrize(
    ("firsts_s", "share"), [([1, 2, 3], 1.0), ([3, 2, 1], 0.0), ([2, 1, 3], 2 / 3), ([1], None), ([2, None, 3], 1.0)]
)
def test_pairs_in_order(firsts_s: list[int | None], share: float | None) -> None:
    columns = Columns()
    for number, first_s in enumerate(firsts_s):
        row = columns.add(Arrival(number, "load", 1, 1, "k"), "k")
        if first_s is None:
            columns.end(row, "shed", "queue_full", SECOND)
        else:
            columns.first_token_ns[row] = first_s * SECOND
            columns.end(row, "completed", "", first_s * SECOND)
    assert _in_order(columns, range(len(columns))) == share


def test_while_it_warms_up_everybody_is_told_the_same_time() -> None:
    pool = Pool(PoolConfig("p", ("e",), limit=FixedConfig(limit=1)), Random(0))
    ladder = Together(pool, Random(0))
    (engine,) = pool.engines
    engine.health.readiness = Readiness.WARMING
    told = [ladder.next_ns(1.0, 0, least_ns=10 * SECOND) for _ in range(50)]
    assert 10 * SECOND <= min(told) <= max(told) <= 13 * SECOND
    engine.health.readiness = Readiness.UP
    told = [ladder.next_ns(1.0, 0, least_ns=10 * SECOND) for _ in range(30)]
    assert max(told) - min(told) > 20 * SECOND, "one per second"


def test_a_change_is_taken_seed_by_seed() -> None:
    rows = [
        {"case": "tickets", "variant": variant, "load": "0.5", "seed": seed, "figures": {"served": base + more}}
        for variant, more in (("calendar", 0.0), ("tickets", 0.02))
        for seed, base in ((1, 0.1), (2, 0.9))
    ]
    found = Rows({"rows": rows}, "tickets")
    assert found.change("0.5", "served", factor=100) == "+2.0 (+2.0 to +2.0)", "seeds differ, the change does not"
    assert found.cell("calendar", "0.5", "served", share=True) == "50 % (10–90)"


def test_every_variant_meets_the_same_seeds() -> None:
    trials = plan(5, 1.0)
    assert len(set(trials)) == len(trials)
    seeds: dict[tuple[str, str, str], set[int]] = {}
    for trial in trials:
        seeds.setdefault((trial.case, trial.variant, trial.load), set()).add(trial.seed)
    assert all(found == {1, 2, 3, 4, 5} for found in seeds.values())


def test_what_is_measured_is_the_product_and_every_second_caller_is_every_second() -> None:
    calendar, tickets = (measure(Trial("small", variant, "0.9", 1, 0.2)) for variant in ("calendar", "tickets"))
    assert tickets["in_vain"] == 0.0, "who shows a ticket is served"
    assert calendar != tickets
    assert [HalfShowing.shows(None, index) for index in range(4)] == [True, False, True, False]  # type: ignore[arg-type]
