"""The clock-jumping loop itself."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

from forebay.core.instant import SECOND
from forebay.testing.loop import JumpLoop, NothingLeftError


@pytest.fixture
def loop() -> Iterator[JumpLoop]:
    made = JumpLoop()
    yield made
    made.close()


def test_an_hour_passes_at_once_and_exactly(loop: JumpLoop) -> None:
    began = time.monotonic()
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.now_ns == 3600 * SECOND
    assert loop.time() == 3600.0
    assert time.monotonic() - began < 1


def test_timers_fire_at_their_nanosecond_and_stay_apart(loop: JumpLoop) -> None:
    fired: list[tuple[str, int]] = []
    base = 1_000 * SECOND

    def note(delay: str) -> None:
        fired.append((delay, loop.clock() - base))

    loop.run_to(base)
    for delay_ns in (7, 1, 2, 123_456_789):
        loop.call_later(delay_ns / SECOND, note, str(delay_ns))
    loop.run_to(base + SECOND)
    assert fired == [("1", 1), ("2", 2), ("7", 7), ("123456789", 123_456_789)]
    assert loop.clock() == base + SECOND


def test_a_timer_between_two_nanoseconds_fires_at_the_next(loop: JumpLoop) -> None:
    fired: list[int] = []
    loop.call_later(1 / 3, lambda: fired.append(loop.clock()))
    loop.run_to(SECOND)
    assert fired == [333_333_334]


def test_what_comes_from_outside_goes_before_timers_of_the_same_instant(loop: JumpLoop) -> None:
    order: list[str] = []
    loop.call_at(2.0, order.append, "timer")
    loop.happen_at(2 * SECOND, lambda: order.append("arrival"), 1)
    loop.happen_at(2 * SECOND, lambda: order.append("second completion"), 0)
    loop.happen_at(2 * SECOND, lambda: order.append("third completion"), 0)
    loop.happen_at(SECOND, lambda: order.append("earlier"), 5)
    loop.run_to(2 * SECOND)
    assert order == ["earlier", "second completion", "third completion", "arrival", "timer"]


def test_work_that_is_ready_stops_the_clock(loop: JumpLoop) -> None:
    seen: list[int] = []

    async def work() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
            seen.append(loop.clock())

    loop.happen_at(1, lambda: seen.append(-1))
    loop.run_until_complete(work())
    assert set(seen) == {0}


def test_ready_sockets_go_before_a_jump(loop: JumpLoop) -> None:
    ours, theirs = socket.socketpair()

    async def converse() -> tuple[bytes, int]:
        reader, writer = await asyncio.open_connection(sock=ours)
        loop.call_later(60, theirs.close)
        theirs.sendall(b"now")
        try:
            return await reader.read(), loop.now_ns
        finally:
            writer.close()

    assert loop.run_until_complete(converse()) == (b"now", 60 * SECOND)


def test_waiting_for_what_never_comes_is_an_error(loop: JumpLoop) -> None:
    never = loop.create_future()
    with pytest.raises(NothingLeftError):
        loop.run_until_complete(never)
    never.cancel()


def test_cancelled_timers_are_not_armed_and_time_does_not_stop_at_them(loop: JumpLoop) -> None:
    loop.call_at(1.0, lambda: None).cancel()
    loop.call_at(3.0, lambda: None)
    assert loop.armed == [3.0]
    loop.run_until_complete(asyncio.sleep(2))
    assert loop.now_ns == 2 * SECOND


def test_errors_in_callbacks_end_the_run(loop: JumpLoop) -> None:
    def fail() -> None:
        raise ValueError("in a callback")

    loop.happen_at(5, fail)
    loop.happen_at(6, lambda: pytest.fail("it went on"))
    with pytest.raises(ValueError, match="in a callback"):
        loop.run_to(10)
    with pytest.raises(ValueError, match="cannot happen at 4"):
        loop.happen_at(4, fail)
