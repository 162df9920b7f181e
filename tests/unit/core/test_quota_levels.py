"""Limits that keys share: every level is asked before any is charged, and streams are metered in all of them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from forebay.core.events import Failed, Finished
from forebay.core.instant import FOREVER, MINUTE, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Lease, Mode, Usage
from forebay.core.outcome import FailReason, Outcome, ShedReason
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.quota.budget import Quota
from forebay.core.quota.calendar import CalendarQuota
from forebay.core.quota.path import FRAME_EVENTS, SLOWEST_NS, UNMETERED
from forebay.core.quota.terms import DAY, KeyLimits, KeyTerms, OverBudget
from forebay.testing import check_empty, check_invariants

POOL = PoolConfig(name="p", engines=("e",), limit=FixedConfig(limit=2_000), mode=Mode.ADMISSION)
GROUPS = {
    "team:ops": KeyLimits(tokens_per_month=1_000, concurrency=4),
    "class:batch": KeyLimits(requests_per_minute=5),
    "all": KeyLimits(tokens_per_month=5_000, models={"big": KeyLimits(tokens_per_month=300)}),
}
OPS = KeyTerms(KeyLimits(tokens_per_month=800), ("team:ops", "all"))


def used(b: Any) -> dict[str, int]:
    """Tokens of the running month by level."""
    quota = b.pipeline.quota
    levels = {level.name: level for level in quota.groups()}
    levels |= {key: quota.budget(key).holder.level for key in (*quota._configured, *quota._set)}
    return {name: m.used for name, level in levels.items() for m in level.meters if isinstance(m, CalendarQuota)}


def test_a_refusal_names_the_level_and_the_figures_and_charges_nothing_anywhere(bench: Any, refusals: Any) -> None:
    b = bench(POOL, keys={"a": OPS, "b": OPS}, groups=GROUPS)
    b.offer("a", tokens=700)
    before = used(b)
    (own,) = refusals(b.offer("a", tokens=200))
    assert (own.reason, own.level, own.actual, own.limit) == (ShedReason.KEY_TOKENS, "this key", 900, 800)
    (team,) = refusals(b.offer("b", tokens=500))
    assert (team.level, team.actual, team.limit, team.unit) == ("team ops", 1_200, 1_000, "tokens/month")
    (model,) = refusals(b.offer("b", tokens=301, model="big"))
    assert (model.reason, model.level) == (ShedReason.NEVER_FITS, "all keys together for model big")
    assert used(b) == before == {
        "a": 700, "b": 0, "team ops": 700, "all keys together": 700, "all keys together for model big": 0,
    }  # fmt: skip
    b.offer("b", tokens=250, model="big")
    assert used(b) == {
        "a": 700, "b": 250, "team ops": 950, "all keys together": 950, "all keys together for model big": 250,
    }  # fmt: skip


def test_places_are_counted_at_every_level(bench: Any, leases: Any, refusals: Any) -> None:
    b = bench(POOL, keys={"a": OPS, "b": OPS}, groups=GROUPS)
    open_ones = [leases(b.offer(key, tokens=1))[0] for key in "abab"]
    (refused,) = refusals(b.offer("a", tokens=1))
    assert (refused.reason, refused.level, refused.actual, refused.limit) == (
        ShedReason.KEY_CONCURRENCY, "team ops", 5, 4,
    )  # fmt: skip
    for lease in open_ones:
        b.report(Finished(lease, Usage(1, 0)))
    check_empty(b.pipeline, b.clock.now)


def test_the_tightest_level_is_shown(bench: Any) -> None:
    b = bench(POOL, keys={"a": OPS, "b": OPS, "c": KeyTerms(groups=("class:batch", "all"))}, groups=GROUPS)
    b.offer("a", tokens=500)
    (tokens,) = b.pipeline.budget("b").path.headers(0)
    assert tokens[:3] == ("tokens", 1_000, 500), "the team has less left than the key"
    requests, tokens = b.pipeline.budget("c").path.headers(0)
    assert (requests[:3], tokens[:3]) == (("requests", 5, 5), ("tokens", 5_000, 4_500))
    (tokens,) = b.pipeline.budget("c").path_for("big").headers(0)[1:]
    assert tokens[:3] == ("tokens", 300, 300)


def test_a_key_that_nobody_knows_costs_no_memory_and_has_no_limits(bench: Any, leases: Any) -> None:
    b = bench(POOL, keys={"a": OPS}, groups=GROUPS)
    for number in range(100):
        assert leases(b.offer(f"stranger-{number}", tokens=10_000))[0].ticket.paid_output == UNMETERED
    assert b.pipeline.snapshot(0).keys == 0
    assert used(b)["all keys together"] == 0


def test_keys_come_change_and_go_while_their_requests_run(bench: Any, leases: Any, refusals: Any) -> None:
    b = bench(POOL, keys={"a": OPS}, groups=GROUPS)
    b.pipeline.quota.set_key("stored", KeyTerms(KeyLimits(tokens_per_month=100), ("team:ops",)), 0)
    (first,) = leases(b.offer("stored", tokens=90))
    assert refusals(b.offer("stored", tokens=20))
    b.pipeline.quota.set_key("stored", KeyTerms(KeyLimits(tokens_per_month=150), ("team:ops",)), 0)
    (second,) = leases(b.offer("stored", tokens=20))
    b.pipeline.reconfigure(PipelineConfig((POOL,), {"a": OPS}, GROUPS), 0)
    assert used(b) == {
        "a": 0, "stored": 110, "team ops": 110, "all keys together": 0, "all keys together for model big": 0,
    }, "a reload leaves stored keys alone, and refills nothing"  # fmt: skip
    b.pipeline.quota.remove_key("stored")
    check_invariants(b.pipeline, 0)
    b.report(Finished(first, Usage(50, 0)))
    b.report(Finished(second, None))
    assert used(b)["team ops"] == 50, "they end as they would have"
    check_empty(b.pipeline, 0)


def test_a_limit_that_is_new_gives_nothing_back_for_what_it_was_not_charged(bench: Any, leases: Any) -> None:
    b = bench(POOL, keys={"a": KeyTerms()})
    (lease,) = leases(b.offer("a", tokens=500))
    limited = {"a": KeyTerms(KeyLimits(tokens_per_month=1_000), ("all",))}
    b.pipeline.reconfigure(PipelineConfig((POOL,), limited, {"all": KeyLimits(tokens_per_month=2_000)}), 0)
    b.offer("a", tokens=300)
    b.report(Finished(lease, Usage(10, 0)))
    assert used(b) == {"all keys together": 300, "a": 300}


def test_what_was_used_before_the_start_counts_at_every_level(bench: Any, refusals: Any) -> None:
    limits = KeyLimits(tokens_per_day=100, tokens_per_month=1_000)
    b = bench(POOL, keys={"a": KeyTerms(limits, ("all",))}, groups={"all": KeyLimits(tokens_per_day=500)})
    b.pipeline.quota.set_wall(20_000 * DAY)
    b.pipeline.quota.restore_usage("a", 70, 950, 0)
    assert refusals(b.offer("a", tokens=31))[0].unit == "tokens/day"
    b.offer("a", tokens=30)
    assert used(b)["all keys together"] == 100
    b.pipeline.quota.set_wall(20_001 * DAY)
    assert refusals(b.offer("a", tokens=31))[0].unit == "tokens/month", "the day is new, the month is not"


def test_what_was_used_of_a_model_counts_in_the_limits_of_that_model(bench: Any, refusals: Any) -> None:
    """The totals are restored first; what of them was of one model touches that model's own limits alone."""
    limits = KeyLimits(tokens_per_day=1_000, models={"big": KeyLimits(tokens_per_day=100)})
    everybody = KeyLimits(tokens_per_day=5_000, models={"big": KeyLimits(tokens_per_month=400)})
    b = bench(POOL, keys={"a": KeyTerms(limits, ("all",))}, groups={"all": everybody})
    b.pipeline.quota.set_wall(20_000 * DAY)
    b.pipeline.quota.restore_usage("a", 300, 900, 0)
    b.pipeline.quota.restore_usage("a", 60, 350, 0, "big")
    b.pipeline.quota.restore_usage("a", 60, 350, 0, "no longer limited")
    assert used(b) == {"a": 300, "all keys together": 300, "all keys together for model big": 350}
    (own,) = refusals(b.offer("a", tokens=41, model="big"))
    assert (own.level, own.actual, own.limit) == ("this key for model big", 101, 100)
    b.offer("a", tokens=40, model="big")
    b.offer("a", tokens=500, model="small")
    assert used(b) == {"a": 840, "all keys together": 840, "all keys together for model big": 390}


def test_what_was_used_yesterday_does_not_count_for_a_key_that_first_calls_today(bench: Any, refusals: Any) -> None:
    b = bench(POOL, keys={"a": KeyTerms(KeyLimits(tokens_per_day=100, tokens_per_month=1_000))})
    b.pipeline.quota.set_wall(20_000 * DAY)
    b.pipeline.quota.restore_usage("a", 100, 930, 0)
    b.pipeline.quota.set_wall(20_001 * DAY)
    assert refusals(b.offer("a", tokens=71))[0].unit == "tokens/month"
    b.offer("a", tokens=70)
    assert used(b) == {"a": 1_000}
    b.pipeline.quota.set_key("gone", KeyTerms(KeyLimits(tokens_per_day=10)), 0)
    b.pipeline.quota.restore_usage("gone", 10, 10, 0)
    b.pipeline.quota.remove_key("gone")
    b.pipeline.quota.set_key("gone", KeyTerms(KeyLimits(tokens_per_day=10)), 0)
    b.offer("gone", tokens=10)
    assert used(b)["gone"] == 10, "another of the same name begins anew"


def test_usage_is_charged_for_what_came_and_nothing_for_a_failure_before_it(bench: Any, leases: Any) -> None:
    b = bench(POOL, keys={"a": OPS}, groups=GROUPS)
    one, two, three = (leases(b.offer("a", tokens=100, generates=True, max_output_tokens=50))[0] for _ in range(3))
    assert used(b)["a"] == 450
    b.report(Failed(one, FailReason.ENGINE_ERROR))
    b.report(Failed(two, FailReason.ENGINE_ERROR, Usage(100, 7, exact=False)))
    b.pipeline.cancel(three.ticket, 0, Usage(100, 3, exact=False))
    assert (used(b)["a"], used(b)["team ops"]) == (210, 210)
    assert three.ticket.outcome is Outcome.CANCELLED


def streaming(b: Any, leases: Any, generated: int) -> Lease:
    """A stream of "a" that has generated so many tokens, of 20 that were reserved beside its prompt of 10."""
    (lease,) = leases(b.offer("a", tokens=10, generates=True, max_output_tokens=20, stream=True))
    assert isinstance(lease, Lease)
    lease.generated = generated + FRAME_EVENTS
    return lease


@pytest.mark.parametrize(
    ("over_budget", "limits", "generated", "held_ns"),
    [
        (OverBudget.DEBT, {"tokens_per_minute": 60}, 20, 0),
        (OverBudget.DEBT, {"tokens_per_minute": 60}, 500, 0),
        (OverBudget.STOP, {"tokens_per_minute": 60}, 20, 0),
        (OverBudget.STOP, {"tokens_per_minute": 60}, 50, 0),  # to the last token
        (OverBudget.STOP, {"tokens_per_minute": 60}, 51, FOREVER),
        (OverBudget.STOP, {"tokens_per_month": 60}, 51, FOREVER),
        (OverBudget.SLOW, {"tokens_per_minute": 60}, 50, 0),
        (OverBudget.SLOW, {"tokens_per_minute": 60}, 53, 3 * SECOND),
        (OverBudget.SLOW, {"tokens_per_minute": 60}, 110, MINUTE),  # the debt is at most one burst
        (OverBudget.SLOW, {"tokens_per_minute": 60}, 150, MINUTE),
        (OverBudget.SLOW, {"tokens_per_month": 60}, 51, FOREVER),
    ],
)
def test_a_stream_beyond_what_its_key_can_pay(
    bench: Any, leases: Any, over_budget: OverBudget, limits: dict[str, int], generated: int, held_ns: int
) -> None:
    assert SLOWEST_NS == MINUTE
    b = bench(POOL, keys={"a": KeyTerms(KeyLimits(**limits))}, over_budget=over_budget)
    lease = streaming(b, leases, generated)
    assert b.pipeline.meter(lease, 0) == held_ns
    assert b.pipeline.budget("a").path.headers(0)[0][2] == max(0, 60 - 10 - max(20, generated)), (
        "it falls in mid-stream"
    )
    assert b.pipeline.meter(lease, held_ns % FOREVER) == 0, "nothing is debited twice"
    b.report(Finished(lease, Usage(10, generated)))
    assert b.pipeline.budget("a").path.headers(0)[0][2] == max(0, 60 - 10 - generated)


def test_a_slowed_stream_gets_what_its_key_earns(bench: Any, leases: Any) -> None:
    """600 a minute are ten a second: a stream that is held as told takes ten seconds for a hundred beyond the burst."""
    b = bench(POOL, keys={"a": KeyTerms(KeyLimits(tokens_per_minute=600))}, over_budget=OverBudget.SLOW)
    lease = streaming(b, leases, 0)
    now = 0
    while lease.generated - FRAME_EVENTS < 590 + 100:
        lease.generated += 5
        now += b.pipeline.meter(lease, now)
    assert 9 * SECOND <= now <= 11 * SECOND


def test_keys_without_token_limits_are_never_metered(bench: Any, leases: Any) -> None:
    b = bench(POOL, keys={"a": KeyTerms(KeyLimits(requests_per_minute=5, concurrency=3))})
    lease = streaming(b, leases, 10**9)
    assert lease.ticket.paid_output == UNMETERED
    assert b.pipeline.meter(lease, 0) == 0


@pytest.mark.parametrize("seed", range(50))
def test_a_thousand_clients_released_at_once_overshoot_nothing(bench: Any, leases: Any, seed: int) -> None:
    """The books of two keys and their team balance to the token, whatever ends when and how."""
    chance = Random(seed)
    budget = chance.randrange(500, 20_000)
    limits = {"a": KeyLimits(tokens_per_month=budget), "b": KeyLimits(tokens_per_month=budget // 2)}
    keys = {key: KeyTerms(own, ("team:t",)) for key, own in limits.items()}
    b = bench(POOL, keys=keys, groups={"team:t": KeyLimits(tokens_per_month=budget)})
    pipeline, spent = b.pipeline, dict.fromkeys(keys, 0)
    running: list[Lease] = []
    for now in range(1_000):
        offered = b.request(chance.choice("ab"), chance.randrange(1, 200), cap=chance.randrange(1, 300))
        running += leases(pipeline.offer(offered, now))
        if running and chance.random() < 0.3:
            lease = running.pop(chance.randrange(len(running)))
            spent[lease.ticket.request.key] += _end(pipeline, lease, chance, now)
        books = dict(spent)
        for lease in running:
            books[lease.ticket.request.key] += lease.ticket.demand.reserved
        assert used(b) == {"team t": sum(books.values()), **books}
        assert sum(books.values()) <= budget
    for lease in running:
        pipeline.cancel(lease.ticket, 1_000)
    assert used(b) == {"team t": sum(spent.values()), **spent}
    check_empty(pipeline, MINUTE)


def _end(pipeline: Pipeline, lease: Lease, chance: Random, now: int) -> int:
    """End it in some way, with any usage up to what was reserved; returns the tokens that are charged."""
    demand = lease.ticket.demand
    usage = Usage(demand.input_tokens, chance.randrange(demand.output_reserved + 1))
    end = chance.choice(("finish", "fail", "break", "cancel"))
    if end == "finish":
        pipeline.report(Finished(lease, usage), now)
    elif end == "cancel":
        pipeline.cancel(lease.ticket, now, usage)
    else:
        pipeline.report(Failed(lease, FailReason.ENGINE_ERROR, usage if end == "break" else None), now)
    return 0 if end == "fail" else usage.tokens


def test_no_budget_is_made_for_a_key_whose_days_nobody_counts() -> None:
    """A start with a hundred thousand keys restores what matters, and holds no more keys in memory than have called."""
    quota = Quota({"plain": KeyTerms(KeyLimits(concurrency=1)), "member": KeyTerms(KeyLimits(), ("team:t",))},
                  {"team:t": KeyLimits(tokens_per_day=100)})  # fmt: skip
    for key in ("plain", "nobody"):
        quota.restore_usage(key, 10, 10, 0)
    quota.restore_usage("member", 30, 30, 0)
    assert quota.budgets == {}
    (row,) = quota.budget("member").path.headers(0)
    assert row[:3] == ("tokens", 100, 70)
