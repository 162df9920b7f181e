"""Who is ahead of a newcomer and who is last behind it, against a walk over all that wait."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.model import Demand, Mode, Request, Ticket, TicketState
from forebay.core.queueing.bounded import FairQueue
from forebay.core.queueing.ordering import OrderConfig

KEYS, PRIORITIES, BANDS = "abc", (0, 1), (0, 1, 5)
TAGS = st.one_of(st.none(), st.sampled_from([0.0, 10.0, 20.0, 35.5]))
Step = tuple[str, int, int, int, float | None, int]
STEPS = st.tuples(
    st.sampled_from(["push", "push", "push", "pop", "remove", "return"]),
    st.sampled_from(range(len(KEYS))),
    st.sampled_from(PRIORITIES),
    st.sampled_from(BANDS),
    TAGS,
    st.integers(0, 30),
)


def flow(request: Request) -> tuple[str, int]:
    return request.key, request.priority


def follow(queue: FairQueue, waiting: list[Ticket], step: Step, number: int) -> None:
    what, key, priority, band, tag, which = step
    if what == "push":
        request = Request(key=KEYS[key], priority=priority)
        ticket = Ticket(request, Demand(which, 0, 0), None, number, number, Mode.HYBRID, expires=100 - which, band=band)
        queue.push(ticket, tag)
        waiting.append(ticket)
    elif waiting and what == "remove":
        gone = waiting.pop(which % len(waiting))
        queue.remove(gone)
        gone.state = TicketState.CLOSED
    elif waiting:
        head = queue.head()
        assert head is not None
        waiting.remove(queue.pop(number))
        head.state = TicketState.IN_FLIGHT
        if what == "return":
            head.state = TicketState.QUEUED
            queue.push_back(head)
            waiting.append(head)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=40), st.booleans())
def test_the_turns_say_what_a_walk_would(steps: list[Step], adaptive: bool) -> None:
    queue, waiting = FairQueue(OrderConfig(adaptive=adaptive)), list[Ticket]()
    for number, step in enumerate(steps):
        follow(queue, waiting, step, number)
        newcomer = Request(key=KEYS[step[1]], priority=step[2])
        mine = (-step[3], queue._clock.tag_now(flow(newcomer)) if step[4] is None else step[4])
        others = [ticket for ticket in waiting if flow(ticket.request) != flow(newcomer)]
        behind = [ticket for ticket in others if (-ticket.band, ticket.start_tag) > mine]
        last = max(others, key=lambda t: (-t.band, t.start_tag, t.turn), default=None)
        assert queue.ahead_of(newcomer, step[3], step[4]) == len(waiting) - len(behind)
        assert queue.last_behind(newcomer, step[3], step[4]) is (last if behind else None)
        assert list(queue) == sorted(waiting, key=lambda t: (-t.band, t.start_tag, t.turn))
        assert queue.waiting == len(waiting)
