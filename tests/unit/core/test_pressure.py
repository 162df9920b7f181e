"""Memory pressure lowers the window, and gives it back slowly."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.dispatch.pressure import MemoryPressure, PressureConfig
from forebay.core.events import EngineUp, Finished, MemoryRead
from forebay.core.instant import SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.limits.guarded import Guarded, GuardedConfig
from forebay.core.limits.limit import View
from forebay.core.model import Mode
from forebay.core.pool import PoolConfig

shares = st.none() | st.floats(0, 1)


def test_down_in_steps_up_slowly_and_between_not_at_all() -> None:
    pressure = MemoryPressure(PressureConfig(high=0.9, relief=0.05, cut=0.8, up_per_s=0.1))
    pressure.read(0.95, 0)
    pressure.read(0.99, SECOND // 2)
    assert pressure.factor == 0.8, "one step per second, however often it is read"
    pressure.read(0.95, SECOND)
    assert pressure.factor == 0.8 * 0.8
    pressure.read(0.87, 2 * SECOND)
    assert pressure.factor == 0.8 * 0.8, "not full, not relieved"
    pressure.read(0.5, 3 * SECOND)
    assert abs(pressure.factor - 0.74) < 1e-9
    pressure.read(0.5, 60 * SECOND)
    assert abs(pressure.factor - 0.84) < 1e-9, "a long silence is no long relief"


def test_what_is_not_known_is_neither_full_nor_free() -> None:
    pressure = MemoryPressure(PressureConfig(up_per_s=0.1))
    for second in range(5):
        pressure.read(None, second * SECOND)
    assert pressure.factor == 1.0
    pressure.read(1.0, 5 * SECOND)
    pressure.read(None, 6 * SECOND)
    pressure.read(None, 7 * SECOND)
    assert abs(pressure.factor - 1.0) < 1e-9, "it goes on recovering"


@given(st.lists(st.tuples(st.integers(0, 10 * SECOND), shares), max_size=60))
def test_it_stays_within_bounds(readings: list[tuple[int, float | None]]) -> None:
    config, now = PressureConfig(), 0
    pressure = MemoryPressure(config)
    for after, share in readings:
        now += after
        before = pressure.factor
        pressure.read(share, now)
        assert config.least <= pressure.factor <= 1.0
        assert pressure.factor >= config.cut * before - 1e-12, "never more than a step"


def pool(limit: Any) -> PoolConfig:
    return PoolConfig(name="p", engines=("e",), mode=Mode.BACKPRESSURE, limit=limit)


def test_a_fixed_window_is_lowered_too_and_what_waits_goes_as_it_recovers(bench: Any, leases: Any) -> None:
    b = bench(pool(FixedConfig(limit=10)))
    b.report(MemoryRead("e", 0.99))
    assert len(leases([effect for _ in range(20) for effect in b.offer()])) == 8
    seen = 0
    for _ in range(10):
        b.advance(SECOND)
        seen += len(leases(b.report(MemoryRead("e", 0.5))))
    assert seen == 2
    assert not b.pipeline.pools[0].engines[0].restrained or b.pipeline.pools[0].engines[0].window(b.clock.now) == 10


def test_an_engine_keeps_at_least_one(bench: Any, leases: Any) -> None:
    b = bench(pool(FixedConfig(limit=1)))
    for _ in range(50):
        b.advance(SECOND)
        b.report(MemoryRead("e", 1.0))
    (lease,) = leases(b.offer())
    assert leases(b.offer()) == []
    assert len(leases(b.report(Finished(lease, None)))) == 1


def test_what_runs_beyond_it_runs_on(bench: Any, leases: Any) -> None:
    b = bench(pool(FixedConfig(limit=10)))
    running = leases([effect for _ in range(12) for effect in b.offer()])
    b.report(MemoryRead("e", 0.99))
    assert leases(b.report(Finished(running[0], None))) == [], "nine are more than eight"
    assert len(leases(b.report(Finished(running[1], None)) + b.report(Finished(running[2], None)))) == 1
    b.report(EngineUp("e"))
    assert b.pipeline.snapshot(b.clock.now).pools[0].engines[0].window == 8


def test_a_guarded_window_does_not_grow_against_it() -> None:
    """Requests wait because memory is short, not because the window is: it must not grow for them."""

    def after(*, restrained: bool) -> int:
        limit = Guarded(GuardedConfig(initial=10))
        for step in range(40):
            view = View(250_000_000, 4, 4, True, 1_000_000_000, 100, 0, 0, 0, 1000, 1000, restrained=restrained)
            limit.viewed(view, step * 250_000_000)
        return limit.requests

    assert after(restrained=True) == 10
    assert after(restrained=False) > 10
