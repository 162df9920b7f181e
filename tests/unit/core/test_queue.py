"""The fair queue: turns by tokens, priorities, expiry, removal, bounded leftovers."""

from __future__ import annotations

from random import Random

import pytest

from forebay.core.instant import SECOND
from forebay.core.model import Demand, Mode, Request, Ticket, TicketState
from forebay.core.queueing import fairness
from forebay.core.queueing.bounded import FairQueue
from forebay.core.queueing.fairness import VirtualClock


class Line:
    """A queue fed by hand."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.count = 0

    def push(self, key: str = "a", tokens: int = 10, priority: int = 0, expires: int = SECOND, size: int = 1) -> Ticket:
        self.count += 1
        request = Request(key=key, priority=priority, body_bytes=size)
        ticket = Ticket(request, Demand(tokens, 0, 0), None, self.count, self.count, Mode.HYBRID, expires=expires)
        ticket.band = priority
        self.queue.push(ticket)
        return ticket

    def pop(self) -> Ticket:
        assert self.queue.head() is not None
        ticket = self.queue.pop(0)
        ticket.state = TicketState.IN_FLIGHT
        return ticket

    def remove(self, ticket: Ticket) -> None:
        self.queue.remove(ticket)
        ticket.state = TicketState.CLOSED

    def served(self, count: int) -> dict[str, int]:
        """Tokens that each key gets of the next `count` turns."""
        got: dict[str, int] = {}
        for _ in range(count):
            ticket = self.pop()
            got[ticket.request.key] = got.get(ticket.request.key, 0) + ticket.demand.tokens
        return got


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.mark.parametrize(("small", "large"), [(10, 10), (10, 100), (7, 1_000), (1, 50)])
def test_backlogged_flows_share_by_tokens(line: Line, small: int, large: int) -> None:
    for _ in range(60):
        line.push("large", large)
    for _ in range(60 * large // small):
        line.push("small", small)
    got = {"large": 0, "small": 0}
    for _ in range(30 + 30 * large // small):
        ticket = line.pop()
        got[ticket.request.key] += ticket.demand.tokens
        assert abs(got["large"] - got["small"]) <= large + small, "the bound of start-time fair queueing"


def test_a_late_small_key_does_not_wait_behind_a_flood(line: Line) -> None:
    """D-09: a hundred of A wait; B's one is next but at most one."""
    for _ in range(100):
        line.push("A")
    line.served(5)
    line.push("B")
    assert "B" in line.served(2)


def test_an_idle_flow_saves_no_credit(line: Line) -> None:
    for _ in range(50):
        line.push("busy", 10)
    line.served(40)
    for _ in range(30):
        line.push("idle", 10)
    got = line.served(10)
    assert got["busy"] == pytest.approx(got["idle"], abs=10)


def test_one_flow_is_first_come_first_served(line: Line) -> None:
    tickets = [line.push(tokens=Random(index).randrange(1, 99)) for index in range(40)]
    assert [line.pop() for _ in tickets] == tickets


def test_higher_priority_goes_first_and_is_fair_within(line: Line) -> None:
    for _ in range(4):
        line.push("a")
    for _ in range(4):
        line.push("a", priority=1)
        line.push("b", priority=1)
    first = [line.pop() for _ in range(8)]
    assert all(ticket.request.priority == 1 for ticket in first)
    assert [ticket.request.key for ticket in first] == ["a", "b"] * 4, "what waits below is no debt above"
    assert line.pop().request.priority == 0


@pytest.mark.parametrize("leave", ["remove", "pop"])
def test_sums_follow_every_change(line: Line, leave: str) -> None:
    chance = Random(4)
    waiting: list[Ticket] = []
    for _ in range(600):
        if not waiting or chance.random() < 0.55:
            waiting.append(line.push(chance.choice("abc"), chance.randrange(100), size=chance.randrange(1_000)))
        elif leave == "remove" or chance.random() < 0.5:
            line.remove(waiting.pop(chance.randrange(len(waiting))))
        else:
            waiting.remove(line.pop())
        assert len(line.queue) == len(waiting)
        assert line.queue.tokens == sum(t.demand.tokens for t in waiting)
        assert line.queue.bytes == sum(t.request.body_bytes for t in waiting)
        if waiting:
            assert line.queue.oldest() == min(t.arrived for t in waiting)
            assert line.queue.next_expiry() == SECOND


def test_expiry_finds_the_earliest_whatever_the_turn(line: Line) -> None:
    late, soon, sooner = line.push("a", expires=30), line.push("b", expires=20), line.push("c", expires=10)
    assert line.queue.expired(9) is None
    assert line.queue.expired(10) is sooner
    line.remove(sooner)
    assert line.queue.next_expiry() == 20
    assert line.pop() is late, "turns between keys are no matter of time"
    assert line.queue.expired(100) is soon
    line.remove(soon)
    assert line.queue.expired(100) is None
    assert line.queue.next_expiry() is None
    assert line.queue.head() is None


def test_a_removed_request_is_not_paid_for_by_its_flow(line: Line) -> None:
    line.push("other", 10)
    gone = line.push("leaver", 10_000)
    line.remove(gone)
    line.push("leaver", 10)
    line.push("other", 10)
    assert [line.pop().request.key for _ in range(3)] == ["other", "leaver", "other"]


def test_a_returned_ticket_goes_first_also_after_the_queue_ran_empty(line: Line) -> None:
    """Its tag is of a busy period that has ended; the newcomers of the next one start from zero."""
    for _ in range(20):
        line.push("a", 100)
    returned = [line.pop() for _ in range(20)][-1]
    for _ in range(3):
        line.push("b", 100)
    returned.state = TicketState.QUEUED
    line.queue.push_back(returned)
    assert line.pop() is returned


def test_requests_without_tokens_take_turns_too(line: Line) -> None:
    """A flow whose requests are priced at nothing must not be served for ever before the others."""
    for _ in range(50):
        line.push("free", 0)
        line.push("paid", 1)
    assert line.served(20)["paid"] >= 9


@pytest.mark.parametrize("priority", [0, -1])
@pytest.mark.parametrize("leave", ["expire", "cancel"])
def test_leftovers_stay_bounded(line: Line, priority: int, leave: str) -> None:
    """A low class that always expires behind a high one that never ends leaves nothing behind."""
    for _ in range(3):
        line.push("high", priority=5, expires=1 << 60)
    line.push("old", priority=-9, expires=1 << 60)
    for now in range(5_000):
        ticket = line.push("low", priority=priority, expires=now)
        line.push("high", priority=5, expires=now + 3)
        if leave == "expire":
            while (gone := line.queue.expired(now)) is not None:
                line.remove(gone)
        else:
            line.remove(ticket)
        line.pop()
        line.queue.next_expiry()
        queue = line.queue
        most = max(len(queue._expiries), len(queue._arrivals))
        assert most < 400 + 5 * len(queue)


def test_flows_are_forgotten_when_they_have_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "FLOWS_MAX", 10)
    clock = VirtualClock()
    for number in range(1_000):
        clock.served(clock.start_tag(f"f{number}", 5))
    assert len(clock._finish) <= 10
    clock.idle()
    assert not clock._finish
