"""What streams can spare: who keeps a prompt out, for how long, and what is left for others."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.dispatch.health import HealthConfig, Readiness
from forebay.core.dispatch.leases import Engine
from forebay.core.dispatch.slack import HOPELESS, LOOK_MOST_NS, LOOK_NS, Slack
from forebay.core.events import FirstToken
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.guarded import Guarded, GuardedConfig
from forebay.core.limits.limit import SlackConfig
from forebay.core.model import Demand, Lease, Request, Ticket
from forebay.core.pool import PoolConfig

MS = MILLISECOND
T = SECOND
OBJECTIVE = SlackConfig(objective_ns=50 * MS, poor_share=0.2, prompt_share=1.0)


def stream(first: int, generated: int) -> Lease:
    ticket = Ticket(Request("k", stream=True), Demand(100, 100, 100), None, 1, 0, None)  # type: ignore[arg-type]
    ticket.first_token = first
    lease = Lease(ticket, None, 200, 0)
    lease.generated = generated
    return lease


def ahead(ms: int, now: int, generated: int = 101) -> Lease:
    """A stream that is so much ahead of its objective."""
    return stream(now + ms * MS - 50 * MS * (generated - 1), generated)


def test_streams_let_in_what_they_can_spare() -> None:
    now, slack = SECOND, Slack(OBJECTIVE)
    streams = [ahead(100, now), ahead(200, now), ahead(300, now), ahead(400, now)]
    assert slack.spares(200 * MS, 0, 0, streams, now)
    assert not slack.spares(201 * MS, 0, 0, streams, now)
    assert slack.spares(150 * MS, 50 * MS, 0, streams, now), "and are ahead by so much more after it"
    assert not slack.spares(150 * MS, 51 * MS, 0, streams, now)


def test_an_engine_without_streams_has_nobody_to_hold_up() -> None:
    assert Slack(OBJECTIVE).spares(10 * SECOND, 0, 0, [], SECOND)
    reading = stream(0, 0)
    assert Slack(OBJECTIVE).spares(10 * SECOND, 0, 0, [reading], SECOND), "its own prompt is still to be read"


def test_a_few_that_have_just_begun_keep_nobody_out() -> None:
    now, slack = SECOND, Slack(OBJECTIVE)
    assert slack.spares(100 * MS, 0, 0, [stream(now, 1), ahead(500, now)], now), "one of two"
    slack.changed()
    assert not slack.spares(100 * MS, 0, 0, [stream(now, 1)], now), "there is no other one"
    slack.changed()
    assert slack.spares(100 * MS, 0, 0, [stream(now, 1)] * 2 + [ahead(500, now)] * 3, now), "one, and a fifth of five"
    slack.changed()
    assert not slack.spares(100 * MS, 0, 0, [stream(now, 1)] * 2 + [ahead(500, now)] * 2, now)


def test_a_stream_that_is_lost_or_not_read_keeps_nobody_out() -> None:
    """F-10: one caller who stops reading may not shut the door for everybody."""
    now = 100 * SECOND
    assert Slack(OBJECTIVE).spares(MS, 0, 0, [ahead(-50 * HOPELESS, now)], now)
    assert not Slack(OBJECTIVE).spares(MS, 0, 0, [ahead(-50 * HOPELESS + 1, now)], now)


def test_they_are_looked_at_again_when_they_may_have_made_it_up() -> None:
    now, slack = SECOND, Slack(OBJECTIVE)
    lease = ahead(0, now)
    assert not slack.spares(60 * MS, 0, 0, [lease], now)
    assert slack.short
    assert slack.look_at == now + 15 * MS, "nobody gets ahead by 60 ms in less"
    lease.generated += 2
    assert not slack.spares(60 * MS, 0, 0, [lease], now + 14 * MS), "not looked at"
    assert slack.spares(60 * MS, 0, 0, [lease], now + 15 * MS)
    assert not slack.short
    slack.changed()
    assert not slack.spares(3600 * SECOND, 0, 0, [lease], now)
    assert slack.look_at == now + LOOK_MOST_NS


def test_who_is_owed_more_is_looked_at_sooner_than_who_takes_what_is_left() -> None:
    now, slack = SECOND, Slack(OBJECTIVE)
    streams = [ahead(10, now)]
    assert not slack.spares(20 * MS, 400 * MS, 0, streams, now)
    assert slack.look_at == now + LOOK_MOST_NS
    assert not slack.take_kept_out(), "that says nothing of places"
    assert not slack.spares(20 * MS, 0, 0, streams, now)
    assert slack.look_at == now + LOOK_NS
    assert slack.take_kept_out()
    assert not slack.take_kept_out()


@given(
    st.lists(st.tuples(st.integers(1500, 3000), st.integers(1, 200)), max_size=30),
    st.integers(0, 400),
    st.integers(0, 50),
)
def test_what_was_seen_earlier_never_lets_in_more_than_what_is_there_now(
    streams: list[tuple[int, int]], prompt_ms: int, later_ms: int
) -> None:
    """Streams only get further: an old look errs to the safe side."""
    now = 3 * SECOND
    leases = [stream(begun * MS, generated) for begun, generated in streams]
    old, new = Slack(OBJECTIVE), Slack(OBJECTIVE)
    old.look(leases, now)
    old.look_at = now + SECOND
    for number, lease in enumerate(leases):
        lease.generated += number % 3
    at = now + later_ms * MS
    if old.spares(prompt_ms * MS, 0, 0, leases, at):
        assert new.spares(prompt_ms * MS, 0, 0, leases, at)


# ---- on an engine ----------------------------------------------------------------------------------------------------


def engine(**settings: Any) -> Engine:
    made = Engine("e", Guarded(GuardedConfig(initial=100, **settings)), HealthConfig())
    made.health.readiness = Readiness.UP
    made.limit.prefill_rate, made.limit.gap_ns = 1000 / SECOND, 50.0 * MS  # a prompt of 1,000 tokens in a second
    return made


def opened(e: Engine, now: int, *, prompt: int = 100, first: bool = True) -> Lease:
    ticket = Ticket(Request("k", stream=True), Demand(prompt, 100, 100), None, 1, now, None)  # type: ignore[arg-type]
    lease = e.open(ticket, None, now)
    if first:
        e.began(lease, now)
        lease.generated = 1
    return lease


def test_prompts_that_are_being_read_count_with_the_new_one() -> None:
    e = engine(prompt_share=1.0)
    leases = [opened(e, T, prompt=400) for _ in range(4)]
    for lease in leases:
        lease.generated = 13  # 600 ms ahead of 50 ms each, at once
    assert e.has_room(100, T, prompt=600)
    assert not e.has_room(100, T + LOOK_NS, prompt=601)
    opened(e, T + LOOK_NS, prompt=200, first=False)
    assert e.has_room(100, T + LOOK_NS, prompt=390)
    assert not e.has_room(100, T + LOOK_NS, prompt=401)
    assert e.has_room(100, T + LOOK_NS), "who does not ask the streams"


def test_an_engine_with_next_to_nothing_to_do_takes_what_comes() -> None:
    """An objective that it can never keep leaves it `least` requests at a time."""
    e = engine(least=3)
    for _ in range(3):
        assert e.has_room(100, T, prompt=5000)
        opened(e, T)
    assert not e.has_room(100, T, prompt=5000)


def test_what_is_left_over_is_counted_in_average_answers() -> None:
    e = engine(prompt_share=1.0)
    e.output_tokens = 100.0  # 5 s at the objective
    for lease in [opened(e, T) for _ in range(4)]:
        lease.generated = 13
    assert e.leaves(0.1, 100, 0, T)
    assert not e.leaves(0.1, 101, 0, T)


# ---- in the pipeline -------------------------------------------------------------------------------------------------


def test_a_request_waits_until_the_streams_have_made_it_up(bench: Any, leases: Any) -> None:
    b = bench(PoolConfig("p", ("p/0",), limit=GuardedConfig(initial=100, prompt_share=1.0)))
    b.advance(SECOND)
    held = [leases(b.offer(stream=True, tokens=100, max_output_tokens=50, generates=True))[0] for _ in range(4)]
    limit = b.pipeline.pools[0].engines[0].limit
    limit.prefill_rate, limit.gap_ns = 1000 / SECOND, 50.0 * MS
    for lease in held:
        b.report(FirstToken(lease))
        lease.generated = 1
    effects = b.offer(stream=True, tokens=100, max_output_tokens=50, generates=True)
    assert not leases(effects), "100 ms of reading, and nobody has any to spare"
    wake = b.pipeline.next_wakeup(b.clock.now)
    assert b.clock.now < wake <= b.clock.now + 50 * MS
    b.advance(wake - b.clock.now)
    assert b.pipeline.next_wakeup(b.clock.now) > b.clock.now, "no stream has moved: looked at once, and not in circles"
    for lease in held:
        lease.generated += 5
    assert len(leases(b.advance(b.pipeline.next_wakeup(b.clock.now) - b.clock.now))) == 1


def test_streams_of_lower_classes_keep_nobody_out() -> None:
    now, slack = SECOND, Slack(OBJECTIVE)
    streams = [ahead(0, now) for _ in range(4)]
    assert not slack.spares(100 * MS, 0, 0, streams, now)
    assert slack.spares(100 * MS, 0, 1, streams, now)
    streams[0].ticket.request.priority = 1
    slack.changed()
    assert slack.spares(100 * MS, 0, 1, streams, now), "most are held up without being asked, and make it up"
    streams[1].ticket.request.priority = 2
    slack.changed()
    assert not slack.spares(100 * MS, 0, 1, streams, now), "half of them are its own, or above"
    assert slack.spares(100 * MS, 0, 2, streams, now)


def test_streams_that_go_much_faster_than_they_must_are_not_asked() -> None:
    """F-09: what a burst takes from them on an engine that is not full, they make up."""
    slack = Slack(OBJECTIVE)
    assert not slack.asked(34 * MS, 100)
    assert slack.asked(35 * MS, 100)
    assert not slack.asked(35 * MS, 1)
    e = engine()
    for _ in range(3):
        opened(e, T)
    assert not e.has_room(100, T, prompt=5000)
    e.limit.gap_ns = 20.0 * MS
    assert e.has_room(100, T, prompt=5000)


def test_the_longest_prompts_are_asked_as_long_ones() -> None:
    """F-10: were they asked as they are, short ones would always get in before them."""
    slack = Slack(OBJECTIVE)
    assert slack.fair_size(50_000) == 50_000, "nothing is known of others"
    for _ in range(300):
        slack.opened(500)
    assert slack.fair_size(900) == 900
    assert slack.fair_size(50_000) == 1000
    for _ in range(300):
        slack.opened(4000)
    assert slack.fair_size(7000) == 7000
