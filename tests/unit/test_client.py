"""The callers' side: an answer's retry ticket goes out with the same request, at its time, and never with another."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from forebay.client import RETRY_TICKET, RetryTickets


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def request(body: bytes = b"{}", url: str = "http://gateway/v1/chat/completions") -> httpx2.Request:
    return httpx2.Request("POST", url, content=body)


def refusal(of: httpx2.Request, ticket: str = "t", wait_ms: str = "7000") -> httpx2.Response:
    return httpx2.Response(503, headers={RETRY_TICKET: ticket, "retry-after-ms": wait_ms}, request=of)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tickets(clock: Clock) -> RetryTickets:
    return RetryTickets(kept=3, clock=clock)


def sent(tickets: RetryTickets, one: httpx2.Request) -> str | None:
    tickets.send(one)
    found: str | None = one.headers.get(RETRY_TICKET)
    return found


def test_the_same_request_takes_its_ticket_along_once(tickets: RetryTickets, clock: Clock) -> None:
    tickets.answered(refusal(request()))
    clock.s += 7
    assert sent(tickets, request(b"another")) is None
    assert sent(tickets, request(url="http://gateway/v1/completions")) is None
    assert sent(tickets, request()) == "t"
    assert sent(tickets, request()) is None
    assert len(tickets) == 0


@pytest.mark.parametrize(("after_s", "ticket"), [(5.9, None), (6.0, "t"), (12.0, "t"), (12.1, None)])
def test_only_within_its_time(tickets: RetryTickets, clock: Clock, after_s: float, ticket: str | None) -> None:
    tickets.answered(refusal(request()))
    clock.s += after_s
    assert sent(tickets, request()) == ticket
    assert len(tickets) == (after_s < 6), "one that has ended is let go"


def test_of_several_alike_each_has_its_own(tickets: RetryTickets, clock: Clock) -> None:
    for ticket, wait_ms in (("late", "9000"), ("soon", "7000")):
        tickets.answered(refusal(request(), ticket, wait_ms))
    clock.s += 8
    assert [sent(tickets, request()) for _ in range(3)] == ["soon", "late", None]


def test_no_more_requests_are_remembered_than_may_be(tickets: RetryTickets, clock: Clock) -> None:
    for number in range(5):
        tickets.answered(refusal(request(b"%d" % number)))
    assert len(tickets) == 3
    clock.s += 7
    assert [sent(tickets, request(b"%d" % number)) for number in range(5)] == [None, None, "t", "t", "t"]


@pytest.mark.parametrize("wait_ms", ["", "soon"])
def test_a_ticket_without_a_time_is_not_kept(tickets: RetryTickets, wait_ms: str) -> None:
    tickets.answered(refusal(request(), wait_ms=wait_ms))
    assert len(tickets) == 0


def test_a_body_that_is_a_stream_is_let_through(tickets: RetryTickets) -> None:
    stream = httpx2.Request("POST", "http://gateway/", content=iter([b"a"]))
    tickets.answered(refusal(stream))
    assert len(tickets) == 0
    tickets.answered(refusal(request()))
    assert sent(tickets, httpx2.Request("POST", "http://gateway/", content=iter([b"a"]))) is None


def test_hooks_of_both_kinds_of_clients(clock: Clock) -> None:
    seen: list[str | None] = []

    def answer(one: httpx2.Request) -> httpx2.Response:
        seen.append(one.headers.get(RETRY_TICKET))
        return httpx2.Response(503, headers={RETRY_TICKET: f"t{len(seen)}", "retry-after-ms": "500"})

    async def ask(hooks: dict[str, list[Any]]) -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), event_hooks=hooks) as client:
            for _ in range(2):
                await client.post("http://gateway/", content=b"{}")

    tickets = RetryTickets(clock=clock)
    with httpx2.Client(transport=httpx2.MockTransport(answer), event_hooks=tickets.hooks()) as client:
        for _ in range(2):
            client.post("http://gateway/", content=b"{}")
    asyncio.run(ask(RetryTickets(clock=clock).async_hooks()))
    assert seen == [None, "t1", None, "t3"]
