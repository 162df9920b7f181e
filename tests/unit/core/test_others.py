"""Work that reached an engine past this gateway."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.dispatch.others import FORGOTTEN_NS, TRUSTED_NS, Others
from forebay.core.events import EngineDown, EngineUp, Finished, Signalled
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import EngineSignal, Mode
from forebay.core.pool import PoolConfig


def test_what_a_page_counts_beyond_ours_is_carried_along_until_it_is_old() -> None:
    others = Others()
    assert others.found(0) is None
    others.read(30, 10, 0)
    assert others.requests(0) == others.requests(TRUSTED_NS) == 20
    halfway = (TRUSTED_NS + FORGOTTEN_NS) // 2
    assert others.requests(halfway) == 10
    assert others.requests(FORGOTTEN_NS) == 0
    assert others.found(FORGOTTEN_NS) is None


def test_silence_is_what_is_usual_neither_load_nor_the_lack_of_it() -> None:
    others = Others()
    others.usual = 8.0
    assert others.requests(0) == 8.0, "nothing was ever heard of it"
    others.read(40, 0, 0)
    assert others.requests(FORGOTTEN_NS) == 8.0


@pytest.mark.parametrize(
    ("total", "own", "found"), [(10, 10, 0), (12, 10, 0), (13, 10, 3), (109, 100, 0), (111, 100, 11), (0, 50, 0)]
)
def test_pages_and_counters_are_not_read_at_the_same_instant(total: int, own: int, found: int) -> None:
    others = Others()
    others.read(total, own, 0)
    assert others.requests(0) == found


def test_what_moves_from_second_to_second_is_averaged_and_what_lasts_is_seen() -> None:
    others = Others()
    others.read(0, 0, 0)
    others.read(40, 0, SECOND)
    assert others.requests(SECOND) == 4, "a tenth of it in a second"
    for second in range(2, 41):
        others.read(40, 0, second * SECOND)
    assert others.requests(40 * SECOND) > 39
    others.read(7, 0, 50 * SECOND)
    assert others.requests(50 * SECOND) == 7, "after a silence there is nothing to average with"


@given(st.integers(0, 1 << 40), st.integers(0, 10_000), st.integers(0, 10 * SECOND), st.floats(0, 1e6))
def test_it_lies_between_what_was_found_and_what_is_usual(total: int, own: int, age: int, usual: float) -> None:
    others = Others()
    others.read(total, own, 0)
    others.usual = usual
    found = others.found(0) or 0
    assert min(found, usual) - 1e-6 <= others.requests(age) <= max(found, usual) + 1e-6


def pool() -> PoolConfig:
    return PoolConfig(name="p", engines=("a", "b"), mode=Mode.BACKPRESSURE, limit=FixedConfig(limit=64))


def test_an_engine_that_others_use_gets_less_of_ours(bench: Any, leases: Any) -> None:
    b = bench(pool())
    leases(b.offer(tokens=100) + b.offer(tokens=100))
    b.report(Signalled("a", EngineSignal(running=6, waiting=0)))
    b.report(Signalled("b", EngineSignal(running=1, waiting=0)))
    ours = [lease.engine.name for lease in leases([e for _ in range(6) for e in b.offer(tokens=100)])]
    assert ours == ["b"] * 5 + ["a"], "five of others' are on a, of a hundred tokens each"
    snapshot = b.pipeline.snapshot(b.clock.now).pools[0]
    assert [e.others for e in snapshot.engines] == [5, 0]


def test_own_counts_go_on_between_two_pages(bench: Any, leases: Any) -> None:
    """F-03: a page from before our own requests ended is not taken for their still being there."""
    b = bench(pool())
    mine = leases([e for _ in range(20) for e in b.offer(tokens=100)])
    for name in ("a", "b"):
        b.report(Signalled(name, EngineSignal(running=10, waiting=0)))
    for lease in mine:
        if lease.engine.name == "a":
            b.report(Finished(lease, None))
    b.clock.advance(300 * MILLISECOND)
    ours = [lease.engine.name for lease in leases([e for _ in range(10) for e in b.offer(tokens=100)])]
    assert ours == ["a"] * 10


def test_another_process_holds_nothing_of_others(bench: Any) -> None:
    b = bench(pool())
    b.report(Signalled("a", EngineSignal(running=50, waiting=0)))
    b.report(EngineDown("a"))
    b.report(EngineUp("a"))
    assert b.pipeline.pools[0].engines[0].others.found(b.clock.now) is None


def test_one_that_does_not_say_what_runs_is_not_known(bench: Any) -> None:
    b = bench(pool())
    b.report(Signalled("a", EngineSignal(kv_share=0.5)))
    assert b.pipeline.pools[0].engines[0].others.found(b.clock.now) is None
