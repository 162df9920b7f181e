"""Priorities with a floor, and waits judged by what prompts are still to be read, in the pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.core.events import Finished
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.limits.guarded import GuardedConfig
from forebay.core.model import Mode, Usage
from forebay.core.outcome import ShedReason
from forebay.core.pool import PoolConfig


def test_a_class_under_constant_pressure_from_above_gets_its_floor(bench: Any, leases: Any) -> None:
    b = bench(
        PoolConfig(
            name="p", engines=("e",), limit=FixedConfig(limit=1), mode=Mode.BACKPRESSURE, floors=((0, 0.1),),
            hold_ns=1000 * SECOND,
        )
    )  # fmt: skip
    (running,) = leases(b.offer("high", priority=5))
    for _ in range(30):
        b.offer("low", priority=0)
    served: list[int] = []
    for _ in range(110):
        b.offer("high", priority=5)
        b.offer("high", priority=5)
        b.clock.advance(10 * MILLISECOND)
        (running,) = leases(b.report(Finished(running, None)))
        served.append(running.ticket.request.priority)
    assert served.count(0) == 0, "those that came before anything was saved stand where they stood"
    for _ in range(40):
        b.offer("low", priority=0)
        b.clock.advance(10 * MILLISECOND)
        (running,) = leases(b.report(Finished(running, None)))
        served.append(running.ticket.request.priority)
    assert 3 <= served.count(0) <= 8, "a tenth of the turns, and what was saved"


def trained(b: Any, leases: Any) -> None:
    """Guarded, and its prefill rate known: prompts of 1,000 tokens took 100 ms to their first token."""
    from forebay.core.events import FirstToken

    for _ in range(12):
        (lease,) = leases(b.offer(tokens=1000, stream=True, generates=True, max_output_tokens=20))
        b.advance(100 * MILLISECOND)
        b.report(FirstToken(lease))
        lease.generated = 20
        b.advance(200 * MILLISECOND)
        b.report(Finished(lease, Usage(1000, 20)))


def test_patience_is_held_against_the_prompts_ahead_and_its_own(bench: Any, leases: Any, refusals: Any) -> None:
    b = bench(PoolConfig(name="p", engines=("e",), limit=GuardedConfig(initial=2, most=2), mode=Mode.BACKPRESSURE))
    trained(b, leases)
    assert b.pipeline.pools[0].prefill_ns(1000) == pytest.approx(100 * MILLISECOND, rel=0.1)
    stream: dict[str, Any] = {"stream": True, "generates": True, "max_output_tokens": 20}
    assert leases(b.offer(tokens=5000, **stream))
    assert b.pipeline.pools[0].prefill_ns(1000) == pytest.approx(600 * MILLISECOND, rel=0.1)
    patient = b.clock.now + 20 * SECOND
    assert type(b.offer(tokens=1000, patience=patient, **stream)[0]).__name__ == "Queued"
    hasty = b.clock.now + 400 * MILLISECOND
    (refusal,) = refusals(b.offer(tokens=1000, patience=hasty, **stream))
    assert refusal.reason is ShedReason.QUEUE_WAIT
