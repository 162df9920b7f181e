"""Whose turn it is within a flow, and the floor under the priorities."""

from __future__ import annotations

from random import Random

import pytest

from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.model import Demand, Mode, Request, Ticket, TicketState
from forebay.core.queueing.bounded import FairQueue
from forebay.core.queueing.floor import SAVED_MOST, FloorShare
from forebay.core.queueing.ordering import OrderConfig, Standing


def waits(queue: FairQueue, number: int, expires: int, key: str = "a", arrived: int = 0) -> Ticket:
    ticket = Ticket(Request(key=key), Demand(10, 0, 0), None, number, arrived, Mode.HYBRID, expires=expires)
    queue.push(ticket)
    return ticket


def turn(queue: FairQueue, now: int = 0) -> Ticket:
    head = queue.head()
    ticket = queue.pop(now)
    assert ticket is head
    ticket.state = TicketState.IN_FLIGHT
    return ticket


def test_within_a_key_the_earliest_end_goes_first() -> None:
    queue = FairQueue()
    ends = [50, 20, 40, 10, 30]
    for number, end in enumerate(ends):
        waits(queue, number, end)
    assert [turn(queue).expires for _ in ends] == sorted(ends)


def test_patience_takes_no_turn_from_another_key() -> None:
    queue = FairQueue()
    for number in range(4):
        waits(queue, number, 100 - number, "a")
        waits(queue, 10 + number, 200, "b")
    order = [turn(queue) for _ in range(8)]
    assert [ticket.request.key for ticket in order] == ["a", "b"] * 4
    assert [ticket.expires for ticket in order if ticket.request.key == "a"] == [97, 98, 99, 100]


@pytest.mark.parametrize("seed", range(5))
def test_every_ticket_has_one_turn_whatever_leaves_meanwhile(seed: int) -> None:
    chance, queue = Random(seed), FairQueue(OrderConfig(adaptive=bool(seed % 2)))
    waiting: list[Ticket] = []
    for number in range(800):
        now = number * MILLISECOND
        if not waiting or chance.random() < 0.52:
            waiting.append(waits(queue, number, now + chance.randrange(1, 900), chance.choice("abc"), now))
        elif chance.random() < 0.3:
            gone = waiting.pop(chance.randrange(len(waiting)))
            queue.remove(gone)
            gone.state = TicketState.CLOSED
        else:
            waiting.remove(turn(queue, now))  # raises if it had left, or had a turn before
        assert len(queue) == len(waiting)


def test_a_queue_stands_when_its_oldest_is_old_for_an_interval() -> None:
    standing = Standing(OrderConfig(adaptive=True))
    old, young, hold = 300 * MILLISECOND, 200 * MILLISECOND, SECOND
    standing.seen(old, hold, 0)
    standing.seen(young, hold, 50 * MILLISECOND)
    standing.seen(old, hold, 60 * MILLISECOND)
    standing.seen(old, hold, 159 * MILLISECOND)
    assert not standing.now, "a burst that passes is no standing queue"
    standing.seen(old, hold, 160 * MILLISECOND)
    assert standing.now
    for at in range(200, 300, 10):
        standing.seen(young, hold, at * MILLISECOND)
    assert standing.now
    standing.seen(young, hold, 300 * MILLISECOND)
    assert not standing.now


def test_while_it_stands_the_newest_of_a_key_goes_first() -> None:
    queue = FairQueue(OrderConfig(adaptive=True))
    for number in range(40):
        waits(queue, number, SECOND, "ab"[number % 2])
    served = [turn(queue, (300 + 10 * number) * MILLISECOND) for number in range(30)]
    numbers = [ticket.sequence for ticket in served]
    assert numbers[:10] == list(range(10)), "in order at first"
    standing = numbers[11:]
    assert sorted(standing) == list(range(40 - len(standing), 40)), "then the newest"
    assert [number for number in standing if number % 2] == sorted((n for n in standing if n % 2), reverse=True)
    keys = [ticket.request.key for ticket in served]
    assert abs(keys.count("a") - keys.count("b")) <= 1


def test_turns_of_a_key_that_stands_alone_in_order_when_not_adaptive() -> None:
    queue = FairQueue()
    for number in range(40):
        waits(queue, number, SECOND)
    assert [turn(queue, number * 20 * MILLISECOND).sequence for number in range(40)] == list(range(40))


def test_a_floor_saves_a_turn_out_of_every_fifty_above_it() -> None:
    floor = FloorShare({1: 0.02})
    floor.above(5)
    turns = {1: 0, 5: 0}
    for _ in range(1020):
        priority = 1 if floor.due(1) else 5
        turns[priority] += 1
        floor.served(priority)
    assert turns[1] == pytest.approx(20, abs=1)
    assert floor.top == 6


def test_a_floor_saves_no_more_than_a_few_turns_and_none_from_below() -> None:
    floor = FloorShare({1: 0.02, 3: 0.05})
    for _ in range(10_000):
        floor.served(2)
    assert floor.due(1)
    assert not floor.due(3), "what is below takes nothing from it"
    assert not floor.due(0), "the lowest has none"
    spent = 0
    while floor.due(1):
        floor.served(1)
        spent += 1
    assert spent == SAVED_MOST
