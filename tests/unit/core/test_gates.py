"""Depth and warm-up clock: bounds and arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.core.admission.depth import DepthConfig, DepthGate
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
