"""Many deadlines on one timer: each expires once, on time, whatever the others do. Time is stepped by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, cast

import pytest

from forebay.engines.deadlines import GRAIN_LEAST_S, GRAIN_SHARE, Deadlines


class Timer:
    def __init__(self, at: float, callback: Callable[[], Any]) -> None:
        self.at, self.callback, self.cancelled = at, callback, False

    def cancel(self) -> None:
        self.cancelled = True


class SteppedLoop:
    """The part of an event loop that deadlines use, with time that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, callback: Callable[[], Any]) -> Timer:
        self.timers.append(Timer(at, callback))
        return self.timers[-1]

    def step(self, until: float) -> None:
        """Run what is due up to an instant, in order."""
        while True:
            due = [t for t in self.timers if t.at <= until and not t.cancelled]
            if not due:
                break
            first = min(due, key=lambda t: t.at)
            self.timers.remove(first)
            self.now = max(self.now, first.at)
            first.callback()
        self.now = until

    @property
    def armed(self) -> int:
        return sum(not t.cancelled for t in self.timers)


class Thing:
    def __init__(self, alive_at: float) -> None:
        self.alive_at = alive_at
        self.expired_at: list[float] = []


@pytest.fixture
def loop() -> SteppedLoop:
    return SteppedLoop()


def deadlines(loop: SteppedLoop, seconds: float) -> Deadlines[Thing]:
    def expired(thing: Thing) -> None:
        thing.expired_at.append(loop.now)

    return Deadlines(cast("asyncio.AbstractEventLoop", loop), seconds, expired)


def test_it_expires_once_and_is_watched_no_more(loop: SteppedLoop) -> None:
    watch, thing = deadlines(loop, 10), Thing(100)
    watch.watch(thing)
    loop.step(109.9)
    assert not thing.expired_at
    assert thing in watch
    loop.step(200)
    assert thing.expired_at == [110]
    assert thing not in watch
    assert loop.armed == 0, "an idle watch costs nothing"


def test_a_sign_of_life_moves_the_deadline(loop: SteppedLoop) -> None:
    watch, thing = deadlines(loop, 10), Thing(100)
    watch.watch(thing)
    for now in range(105, 200, 5):
        loop.step(now)
        thing.alive_at = now
    assert not thing.expired_at
    loop.step(300)
    assert thing.expired_at == [205]


def test_released_things_do_not_expire(loop: SteppedLoop) -> None:
    watch, thing, other = deadlines(loop, 10), Thing(100), Thing(100)
    watch.watch(thing)
    watch.watch(other)
    watch.release(thing)
    watch.release(thing)
    loop.step(200)
    assert (thing.expired_at, other.expired_at) == ([], [110])


def test_one_timer_serves_all(loop: SteppedLoop) -> None:
    watch = deadlines(loop, 10)
    for i in range(1000):
        watch.watch(Thing(100 + i / 1000))
    assert loop.armed == 1


def test_who_is_far_ahead_does_not_delay_the_others(loop: SteppedLoop) -> None:
    """An upload that ran ahead of the least rate is due in an hour; who trickles beside it is due now."""
    watch, ahead = deadlines(loop, 10), Thing(100)
    watch.watch(ahead)
    ahead.alive_at = 5000
    loop.step(111)
    slow = Thing(111)
    watch.watch(slow)
    loop.step(140)
    assert slow.expired_at == [pytest.approx(121, abs=10 * GRAIN_SHARE)]
    assert not ahead.expired_at


def test_expiry_may_release_others(loop: SteppedLoop) -> None:
    first, second = Thing(100), Thing(100)
    ends: list[Thing] = []

    def expired(thing: Thing) -> None:
        ends.append(thing)
        watch.release(second if thing is first else first)

    watch = Deadlines[Thing](cast("asyncio.AbstractEventLoop", loop), 1, expired)
    watch.watch(first)
    watch.watch(second)
    loop.step(200)
    assert ends == [first]


def test_expiry_may_watch_again(loop: SteppedLoop) -> None:
    thing = Thing(100)

    def expired(thing: Thing) -> None:
        thing.expired_at.append(loop.now)
        if len(thing.expired_at) < 3:
            thing.alive_at = loop.now
            watch.watch(thing)

    watch = Deadlines[Thing](cast("asyncio.AbstractEventLoop", loop), 1, expired)
    watch.watch(thing)
    loop.step(200)
    assert thing.expired_at == [101, 102, 103]


def test_stop_forgets_all(loop: SteppedLoop) -> None:
    watch, thing = deadlines(loop, 10), Thing(100)
    watch.watch(thing)
    watch.stop()
    loop.step(200)
    assert not thing.expired_at
    assert loop.armed == 0


@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_early_and_nobody_is_late(seed: int, loop: SteppedLoop) -> None:
    chance = Random(seed)
    seconds = chance.choice([0.05, 1.0, 30.0])
    watch, things = deadlines(loop, seconds), [Thing(100) for _ in range(30)]
    dead = set()
    for thing in things:
        watch.watch(thing)
    for _ in range(300):
        loop.step(loop.now + seconds * chance.random() / 3)
        thing = chance.choice(things)
        if thing in watch:
            if chance.random() < 0.1:
                watch.release(thing)
                dead.add(thing)
            else:
                thing.alive_at = loop.now + (seconds * 20 if chance.random() < 0.1 else 0)
    loop.step(loop.now + 30 * seconds)
    slack = max(GRAIN_LEAST_S, seconds * GRAIN_SHARE) + 1e-6
    for thing in things:
        assert len(thing.expired_at) == (thing not in dead)
        assert all(0 <= at - (thing.alive_at + seconds) + 1e-6 <= slack + 1e-6 for at in thing.expired_at)
