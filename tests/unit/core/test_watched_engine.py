"""What an engine shows to a limit that learns."""

from __future__ import annotations

from typing import Any

from forebay.core.dispatch.health import HealthConfig, Readiness
from forebay.core.dispatch.leases import Engine
from forebay.core.dispatch.peak import peak_tokens
from forebay.core.events import Failed, Finished, FirstToken
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.guarded import GuardedConfig
from forebay.core.limits.limit import UNBOUNDED, Answer, View
from forebay.core.model import Demand, Lease, Request, Ticket, Usage
from forebay.core.outcome import FailReason
from forebay.core.pool import PoolConfig
from forebay.testing import check_empty

MS = MILLISECOND


class Recorder:
    """A limit that notes what it is told."""

    learns = True
    gap_ns = 0.0
    slack = None
    interval_ns = 100 * MS

    def __init__(self) -> None:
        self.requests = 100
        self.tokens = self.prefill_tokens = UNBOUNDED
        self.answers: list[Answer] = []
        self.views: list[View] = []
        self.failures = 0

    def answered(self, answer: Answer, now: int) -> None:
        self.answers.append(answer)

    def failed(self, now: int) -> None:
        self.failures += 1

    def viewed(self, view: View, now: int) -> None:
        self.views.append(view)


def engine() -> tuple[Engine, Recorder]:
    limit = Recorder()
    made = Engine("e", limit, HealthConfig())
    made.health.readiness = Readiness.UP
    return made, limit


def ticket(prompt: int, output: int, *, stream: bool = True) -> Ticket:
    return Ticket(Request("k", stream=stream), Demand(prompt, output, output), None, 1, 0, None)  # type: ignore[arg-type]


def test_streams_are_counted_from_their_first_token() -> None:
    e, limit = engine()
    one, two = e.open(ticket(500, 100), None, 0), e.open(ticket(300, 50), None, 0)
    assert (e.prefill_tokens, e.view_at) == (800, 100 * MS)
    e.began(one, 40 * MS)
    one.generated = 7  # six gaps in 60 ms
    e.show(True, 100 * MS)
    view = limit.views[-1]
    assert (view.decoding_ns, view.generated) == (60 * MS, 6)
    assert (view.prefilled, view.prefilling) == (500, 300)
    assert (view.in_flight, view.in_flight_most, view.waiting) == (2, 2, True)
    e.began(two, 150 * MS)
    one.generated, two.generated = 17, 5
    e.close(two, 190 * MS)
    e.show(False, 200 * MS)
    view = limit.views[-1]
    assert (view.decoding_ns, view.generated) == (140 * MS, 14), "what ended since counts for as long as it ran"
    assert (view.prefilled, view.prefilling, view.in_flight, view.in_flight_most) == (300, 0, 1, 2)


def test_an_idle_engine_asks_for_no_view() -> None:
    e, _ = engine()
    lease = e.open(ticket(10, 10), None, 0)
    e.close(lease, 30 * MS)
    assert (e.view_at, e.prefill_tokens) == (0, 0)
    e.open(ticket(10, 10), None, SECOND)
    assert e.view_at == SECOND + 100 * MS


def test_the_peak_is_that_of_leases_that_end_one_after_the_other() -> None:
    e, limit = engine()
    first, second = e.open(ticket(1000, 10), None, 0), e.open(ticket(100, 500), None, 0)
    e.show(False, 1)
    # Both grow until the first has its 10: 1010 + 110. Alone the second only reaches 600.
    assert limit.views[-1].peak_tokens == 1120
    assert limit.views[-1].expected_tokens == 1610
    second.generated = 480
    e.began(second, 2)
    e.show(False, 3)
    # 1000 and 580 now; the second is expected to go on for a quarter of what it has: 120.
    assert limit.views[-1].peak_tokens == max(580 + 120, 1580 + 2 * 10)
    e.close(first, 4)
    e.close(second, 4)
    assert peak_tokens(e.leases) == 0


def test_prompts_ahead_bound_the_next_one() -> None:
    e, limit = engine()
    limit.prefill_tokens = 600
    lease = e.open(ticket(500, 1), None, 0)
    assert e.has_room(10, 0)
    e.open(ticket(500, 1), None, 0)
    assert not e.has_room(10, 0)
    e.began(lease, 1)
    assert e.has_room(10, 1)


def test_answers_and_failures_are_told_apart(bench: Any, leases: Any) -> None:
    b = bench(PoolConfig(name="p", engines=("e",), limit=GuardedConfig(initial=4)))
    limit = Recorder()
    b.pipeline.pools[0].engines[0].relimit(limit, b.clock.now)
    (good,) = leases(b.offer(stream=True, generates=True, max_output_tokens=20))
    (bad,) = leases(b.offer())
    (gone,) = leases(b.offer())
    b.clock.advance(50 * MS)
    b.report(FirstToken(good))
    b.clock.advance(50 * MS)
    b.report(Failed(bad, FailReason.ENGINE_ERROR))
    b.cancel(gone.ticket)
    b.report(Finished(good, Usage(10, 20)))
    assert limit.failures == 1
    assert limit.answers == [Answer(100 * MS, 50 * MS, 20, 1)]


def test_views_come_by_the_one_timer(bench: Any, leases: Any) -> None:
    b = bench(PoolConfig(name="p", engines=("e",), limit=GuardedConfig(initial=4)))
    (lease,) = leases(b.offer())
    assert b.pipeline.next_wakeup(b.clock.now) == b.clock.now + 250 * MS
    b.advance(SECOND)
    assert b.pipeline.next_wakeup(b.clock.now) == b.clock.now + 250 * MS
    b.report(Finished(lease, None))
    check_empty(b.pipeline, b.clock.now)


def test_a_lower_limit_takes_nothing_back(bench: Any, leases: Any) -> None:
    """L-07."""
    b = bench(PoolConfig(name="p", engines=("e",), limit=GuardedConfig(initial=4)))
    running: list[Lease] = leases([effect for _ in range(4) for effect in b.offer()])
    (engine,) = b.pipeline.pools[0].engines
    engine.limit.requests = 2
    engine.recount()
    assert leases(b.offer()) == []
    for lease in running[:2]:
        assert leases(b.report(Finished(lease, None))) == [], "still as many as the new limit"
    assert len(leases(b.report(Finished(running[2], None)))) == 1


def test_prefill_time_counts_only_while_a_prompt_waits_for_its_first_token() -> None:
    e, limit = engine()
    first = e.open(ticket(400, 9), None, 10 * MS)
    e.open(ticket(100, 9, stream=False), None, 10 * MS)
    second = e.open(ticket(200, 9), None, 20 * MS)
    e.began(first, 30 * MS)
    e.began(second, 45 * MS)
    third = e.open(ticket(300, 9), None, 90 * MS)
    e.show(False, 110 * MS)
    view = limit.views[-1]
    assert (view.prefilled, view.prefilling, view.prefilling_ns) == (600, 300, 35 * MS + 20 * MS)
    e.close(third, 130 * MS)  # its client left
    e.show(False, 210 * MS)
    view = limit.views[-1]
    assert (view.prefilled, view.prefilling, view.prefilling_ns) == (0, 0, 20 * MS)
