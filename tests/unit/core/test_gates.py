"""Depth, retry ladder and warm-up clock: bounds and arithmetic."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from forebay.core.admission.depth import DepthConfig, DepthGate
from forebay.core.admission.retry_after import RetryConfig, RetryLadder
from forebay.core.admission.warmup import WARMUP_DEFAULT_NS, WarmupClock
from forebay.core.instant import SECOND
from forebay.core.model import Demand, Mode, Request
from forebay.core.outcome import ShedReason

# ---- depth ----------------------------------------------------------------------------------------------------

DEPTH = DepthConfig(depth_limit=3, held_limit=5, tokens_limit=100, bytes_limit=1_000)
FULL, NEVER = ShedReason.QUEUE_FULL, ShedReason.NEVER_FITS


@pytest.mark.parametrize(
    ("mode", "waiting", "tokens", "size", "asked_tokens", "asked_bytes", "reason", "limit"),
    [
        (Mode.HYBRID, 0, 0, 0, 100, 1_000, None, 0),
        (Mode.HYBRID, 2, 0, 0, 1, 1, None, 0),
        (Mode.HYBRID, 3, 0, 0, 1, 1, FULL, 3),
        (Mode.HYBRID, 4, 0, 0, 1, 1, FULL, 3),
        (Mode.BACKPRESSURE, 4, 0, 0, 1, 1, None, 0),
        (Mode.BACKPRESSURE, 5, 0, 0, 1, 1, FULL, 5),
        (Mode.ADMISSION, 0, 0, 0, 1, 1, FULL, 0),
        (Mode.HYBRID, 1, 60, 0, 40, 1, None, 0),
        (Mode.HYBRID, 1, 60, 0, 41, 1, FULL, 100),
        (Mode.HYBRID, 0, 0, 0, 101, 1, NEVER, 100),
        (Mode.HYBRID, 1, 0, 600, 1, 400, None, 0),
        (Mode.HYBRID, 1, 0, 600, 1, 401, FULL, 1_000),
        (Mode.HYBRID, 0, 0, 0, 1, 1_001, NEVER, 1_000),  # D-07
    ],
)
def test_depth(
    mode: Mode, waiting: int, tokens: int, size: int, asked_tokens: int, asked_bytes: int, reason: Any, limit: int
) -> None:
    refusal = DepthGate(DEPTH).check(
        Request(key="k", body_bytes=asked_bytes),
        Demand(asked_tokens, 0, 0),
        mode,
        waiting=waiting,
        tokens=tokens,
        size=size,
    )
    assert (refusal and refusal.reason) == reason
    if refusal is not None:
        assert refusal.limit == limit
        assert (refusal.retry_after_ns is None) == (reason is NEVER)


# ---- retry ladder ---------------------------------------------------------------------------------------------


def ladder(seed: int = 1, **config: Any) -> RetryLadder:
    return RetryLadder(RetryConfig(**config), Random(seed))


@pytest.mark.parametrize("rate", [0.0, 1e-9, 0.1, 5.0, 100.0, 1e6])
@pytest.mark.parametrize("obeys_s", [60, 120])
def test_promises_stay_within_what_the_library_obeys(rate: float, obeys_s: int) -> None:
    """C-03: from 1 to 55 seconds under any load, or a time at which no library retries by itself."""
    made = ladder()
    for number in range(2_000):
        wait = made.next_ns(rate, number * 1_000, obeys_ns=obeys_s * SECOND)
        assert SECOND <= wait <= (obeys_s - 5) * SECOND or wait > obeys_s * SECOND


def test_promises_are_spread_later_never_earlier() -> None:
    made = ladder()
    waits = [made.spread_ns(10 * SECOND) for _ in range(2_000)]
    assert min(waits) >= 10 * SECOND
    assert max(waits) <= 12.5 * SECOND
    assert len(set(waits)) > 1_900
    assert sum(waits) / len(waits) == pytest.approx(11.25 * SECOND, rel=0.01)


def test_the_more_are_refused_the_later_they_are_asked_back() -> None:
    made = ladder(spread=0.0)
    waits = [made.next_ns(100.0, 0, usual_rate=90.0) for _ in range(300)]
    assert waits == sorted(waits)
    assert waits[0] == SECOND
    assert waits[199] == pytest.approx(20 * SECOND), "two hundred rungs of a tenth of a second"


@pytest.mark.parametrize(
    ("rate", "usual", "free"), [(100.0, 90.0, 0.1), (1_000.0, 999.0, 0.02), (40.0, 0.0, 0.5), (40.0, 60.0, 0.02)]
)
def test_no_more_is_promised_than_the_usual_load_leaves_free(rate: float, usual: float, free: float) -> None:
    made = ladder()
    returns = sorted(made.next_ns(rate, 0, usual_rate=usual) for _ in range(int(rate * free * 30)))
    for start in range(5, 25, 5):
        within = sum(start * SECOND <= at < (start + 5) * SECOND for at in returns)
        assert within <= 5 * rate * free * 1.15 + 1


def test_who_gets_no_place_takes_none_and_is_told_not_to_retry() -> None:
    made = ladder(spread=0.0)
    waits = [made.next_ns(10.0, 0, usual_rate=5.0) for _ in range(10_000)]
    promised = [wait for wait in waits if wait <= 55 * SECOND]
    assert len(promised) == 55 * 5
    assert all(wait > 60 * SECOND for wait in waits[len(promised) :])
    assert made.next_ns(10.0, 20 * SECOND, usual_rate=5.0) <= 55 * SECOND, "as time passes there are places again"
    assert made.next_ns(10.0, 500 * SECOND, usual_rate=5.0) == SECOND


def test_a_flow_that_floods_delays_nobody_else() -> None:
    made = ladder(spread=0.0)
    for _ in range(10_000):
        made.next_ns(10.0, 0, flow="flood", part=0.5)
    assert made.next_ns(10.0, 0, flow="calm", part=0.5) == SECOND


def test_the_ladders_of_flows_are_bounded() -> None:
    made = ladder()
    for number in range(30_000):
        made.next_ns(1e6, 0, flow=f"f{number}")
    assert len(made._next) <= 10_000


@pytest.mark.parametrize("wait_ns", [1, 999, SECOND, 40 * SECOND, 300 * SECOND])
def test_an_exact_wait_is_never_early_and_hardly_late(wait_ns: int) -> None:
    made = ladder()
    for _ in range(200):
        assert wait_ns <= made.exact_ns(wait_ns) <= wait_ns + min(wait_ns // 20, SECOND // 2)


# ---- warm-up --------------------------------------------------------------------------------------------------


def test_warm_up_is_promised_from_what_was_seen() -> None:
    clock = WarmupClock()
    assert clock.eta_ns(0) == WARMUP_DEFAULT_NS
    clock.started(0)
    clock.started(5 * SECOND)  # repeats are ignored
    assert clock.eta_ns(10 * SECOND) == 20 * SECOND
    clock.ended(60 * SECOND)
    assert clock.eta_ns(100 * SECOND) == 60 * SECOND
    clock.started(100 * SECOND)
    assert clock.eta_ns(130 * SECOND) == 30 * SECOND


def test_an_overdue_warm_up_is_promised_in_tenths_and_never_below_a_second() -> None:
    clock = WarmupClock()
    clock.started(0)
    assert clock.eta_ns(300 * SECOND) == WARMUP_DEFAULT_NS // 10
    clock.ended(1)
    clock.started(2)
    assert clock.eta_ns(2 + 10 * SECOND) == SECOND


def test_readiness_without_a_warm_up_teaches_nothing() -> None:
    clock = WarmupClock()
    clock.ended(5 * SECOND)
    assert clock.eta_ns(6 * SECOND) == WARMUP_DEFAULT_NS
