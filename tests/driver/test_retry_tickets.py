"""Retry tickets on the data plane, bytes in and bytes out: whose head they stand in, and which pool they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import pytest

from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.ingress.http.retry_ticket import RetryTickets, Shown

from .test_gateway import Quiet
from .wire import Client, ScriptedEngine, WiredGateway, answer, post

TAKES_S = 20
COMPLETION = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}


class World:
    """Pools of one place each, in which nobody waits; an answer takes 20 s. Time is virtual, the wall clock too."""

    def __init__(self, *models: str) -> None:
        self.seen: list[dict[bytes, bytes]] = []
        pools = tuple(
            PoolConfig(
                f"pool {model}",
                (f"{model}/0",),
                (model,),
                Mode.ADMISSION,
                limit=FixedConfig(limit=1),
                retry_tickets=True,
            )
            for model in models
        )
        self.wired = WiredGateway(PipelineConfig(pools), Random(1), Quiet(), self._answers)
        self.tickets = RetryTickets("s" * 32, lambda: self.wired.loop.clock() // MILLISECOND)
        self.wired.site.retry_tickets = self.tickets

    def _answers(self, engine: ScriptedEngine, headers: dict[bytes, bytes], body: bytes) -> None:
        self.seen.append(headers)
        loop = self.wired.loop
        loop.happen_at(loop.clock() + TAKES_S * SECOND, partial(engine.send, answer(COMPLETION)))

    def send(self, data: bytes, *, client: Client | None = None, whole: bool = True) -> Client:
        """Send a request, and let what follows at once happen. Not `whole`: the body comes a while after the head."""
        client = client or self.wired.client()
        head, gap, body = data.partition(b"\r\n\r\n")
        client.transport.write(data if whole else head + gap)
        self.run_for(0.001)
        if not whole:
            client.transport.write(body)
            self.run_for(0.001)
        return client

    def run_for(self, seconds: float) -> None:
        self.wired.run_to(self.wired.loop.clock() / SECOND + seconds)

    def refused(self, model: str = "m") -> tuple[str, float]:
        """A ticket, and in how many seconds its place is."""
        client = self.send(chat(model))
        ticket, millis = client.header(b"x-forebay-ticket"), client.header(b"retry-after-ms")
        assert ticket is not None
        assert millis is not None
        return ticket.decode(), int(millis) / 1000

    def result(self, act: Callable[[], object]) -> str:
        """What became of the one ticket that is looked at meanwhile."""
        before = dict(self.tickets.counts)
        act()
        changed = [name for name in Shown if name != Shown.ISSUED and self.tickets.counts[name] != before[name]]
        (name,) = changed
        return name


def chat(model: str = "m", ticket: str = "") -> bytes:
    headers = [f"x-forebay-ticket: {ticket}"] if ticket else []
    return post({"model": model, "messages": [{"role": "user", "content": "hi"}]}, *headers)


@pytest.fixture
def made() -> Iterator[list[World]]:
    worlds: list[World] = []
    yield worlds
    for world in worlds:
        world.wired.close()


def world_of(made: list[World], *models: str) -> World:
    world = World(*models)
    made.append(world)
    for model in models:
        world.send(chat("other" if model == "*" else model))  # its place is taken
    return world


def test_a_head_with_a_ticket_is_not_known_again(made: list[World]) -> None:
    """Heads that a connection repeats are not parsed again; one that shows a ticket must be."""
    world = world_of(made, "*")
    ticket, wait_s = world.refused()
    world.run_for(wait_s)
    holder = world.wired.client()
    assert world.result(lambda: world.send(chat("m", ticket), client=holder)) == Shown.HELD
    assert world.wired.pipeline.queued == 1
    other = world.wired.client()
    for _ in range(3):
        other.got = b""
        assert world.result(lambda: world.send(chat("m", ticket), client=other)) == Shown.USED
        assert other.status == 503
    world.run_for(2 * TAKES_S)
    assert holder.status == 200
    assert all(b"x-forebay-ticket" not in headers for headers in world.seen), "no engine sees one"
    assert world.result(lambda: world.send(chat("m", ticket), client=holder)) == Shown.LATE


@pytest.mark.parametrize("whole", [True, False], ids=["in one piece", "body later"])
@pytest.mark.parametrize("models", [("m",), ("m", "*"), ("m", "n")], ids=" and ".join)
def test_a_holder_is_let_in_though_its_pool_is_known_by_its_body_only(
    made: list[World], models: tuple[str, ...], whole: bool
) -> None:
    world = world_of(made, *models)
    ticket, wait_s = world.refused()
    world.run_for(wait_s)
    assert world.result(lambda: world.send(chat("m", ticket), whole=whole)) == Shown.HELD
    assert world.wired.pipeline.queued == 1


@pytest.mark.parametrize("whole", [True, False], ids=["in one piece", "body later"])
def test_a_ticket_is_for_one_pool(made: list[World], whole: bool) -> None:
    world = world_of(made, "m", "*")
    ticket, wait_s = world.refused("other")
    world.run_for(wait_s)
    found: list[Client] = []
    assert world.result(lambda: found.append(world.send(chat("m", ticket), whole=whole))) == Shown.FOREIGN
    assert found[0].status == 503
    assert world.wired.pipeline.queued == 0


@pytest.mark.parametrize("whole", [True, False], ids=["in one piece", "body later"])
def test_a_pool_that_is_full_refuses_nobody_who_is_for_another(made: list[World], whole: bool) -> None:
    """Only the body says which pool it is for, unless there is but one; while it drains they all say the same."""
    world = World("m", "*")
    made.append(world)
    world.send(chat("other"))
    assert world.send(chat("other"), whole=whole).status == 503, "the catch-all is full"
    assert world.send(chat("m"), whole=whole).got == b"", "and this one is let in"
    world.run_for(TAKES_S + 1)
    assert len(world.seen) == 2
    world.wired.gateway.drain()
    assert world.send(chat("m"), whole=False).status == 503


def test_without_retry_tickets_the_header_is_dropped_unread(made: list[World]) -> None:
    world = world_of(made, "*")
    world.wired.site.retry_tickets = None
    world.run_for(TAKES_S + 1)
    assert world.send(chat("m", "A" * 48)).got == b""
    world.run_for(TAKES_S + 1)
    assert len(world.seen) == 2
    assert b"x-forebay-ticket" not in world.seen[1]
