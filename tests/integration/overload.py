"""Ten times what the engine can do, in hybrid mode: the scenario, for a test of seconds and for a soak."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forebay.load.attack import queue_wait_ms
from forebay.load.client import Call
from forebay.load.closed import measure_capacity
from forebay.load.target import Target
from forebay.load.workload import Workload
from forebay.workload.pacer import Phase, Poisson, schedule
from forebay.workload.sizes import Sizes
from tests.faults.rig.gateway import config_for, serving

from .processes import open_loop, simulated

SLOTS = 16
WAIT_BUDGET_MS = 150  # above the time of three slots, so that it is the budget in force
ENGINE = ("--max-num-seqs", str(SLOTS), "--time-scale", "0.5")
WORKLOAD = Workload(model="llama-3.1-8b", output_tokens=Sizes(24, 40))
SETTLED_S = 2.0  # the engine is full, and the drain rate is known


@dataclass
class Overload:
    """What was seen. Rates per second, times in milliseconds."""

    capacity: float
    offered: float
    goodput: float
    wait_budgets_ms: set[float]
    waits_ms: list[float]  # of admitted requests, ascending
    calls: list[Call]
    refused: list[Call]
    evicted_share: float  # of those that were let in once the drain rate was known
    metrics: dict[str, float]
    queue_left: tuple[int, int]

    @property
    def wait_p99_ms(self) -> float:
        return self.waits_ms[int(0.99 * len(self.waits_ms))]


def overload(folder: Path, seconds: float, times: float = 10.0) -> Overload:
    """Offer `times` what the engine does alone in a closed loop through the gateway for `seconds`."""
    with simulated(folder, *ENGINE) as engine:
        before = measure_capacity(engine.target, WORKLOAD, SLOTS, 2.5).requests_per_s
        config = config_for(engine.url, slots=SLOTS, wait_budget_ms=WAIT_BUDGET_MS)
        with serving(config, folder / "gateway") as gateway:
            budgets: set[float] = set()

            def look() -> None:
                budgets.add(gateway.snapshot()["pools"][0]["wait_budget_ns"] / 1e6)

            arrivals = schedule([Phase("overload", Poisson(times * before, seconds))], seed=7)
            calls = open_loop(Target.parse(gateway.url), WORKLOAD, arrivals, watch=look)
            gateway.settles()
            metrics = {
                outcome: gateway.metric("forebay_requests_total", outcome=outcome)
                for outcome in ("completed", "shed", "evicted", "cancelled", "failed")
            }
            left = gateway.gauges()
        # Whoever else uses this machine slows the engine too: it is asked twice what it can do, and the less counts.
        after = measure_capacity(engine.target, WORKLOAD, SLOTS, 2.5).requests_per_s
    began_ns = calls[0].intended_ns - calls[0].arrival.at_ns
    served = [call for call in calls if call.status == 200]
    window = [c for c in served if SETTLED_S <= (c.done_ns - began_ns) / 1e9 < seconds]
    refused = [call for call in calls if call.status != 200]
    # Before the first answers end nothing is known of the engine, and only the depth of the queue is bounded.
    late = sum(c.headers.get("x-forebay-reason") == "expired" and c.arrival.at_ns > SETTLED_S * 1e9 for c in refused)
    waits = [queue_wait_ms(call.headers["server-timing"]) for call in served]
    return Overload(
        capacity=min(before, after),
        offered=len(calls) / seconds,
        goodput=sum(c.complete for c in window) / (seconds - SETTLED_S),
        wait_budgets_ms=budgets,
        waits_ms=sorted(wait for wait in waits if wait is not None),
        calls=calls,
        refused=refused,
        evicted_share=late / (late + len(window)),
        metrics=metrics,
        queue_left=left,
    )


def check(seen: Overload) -> None:
    """What an operator was promised."""
    served = [call for call in seen.calls if call.status == 200]
    assert all(call.complete and call.output_tokens for call in served), "every admitted answer is whole"
    assert len(seen.waits_ms) == len(served), "every admitted answer says how long it waited"
    # The budget in force is the configured one, raised only while it is less than a few slots' time.
    assert min(seen.wait_budgets_ms) == WAIT_BUDGET_MS
    assert seen.wait_p99_ms <= max(seen.wait_budgets_ms), f"p99 queue wait {seen.wait_p99_ms} ms"
    assert seen.goodput >= 0.9 * seen.capacity, f"{seen.goodput:.1f}/s of {seen.capacity:.1f}/s"
    assert {call.status for call in seen.refused} == {503}
    for call in seen.refused:
        assert call.headers["x-forebay-reason"] in {"queue_wait", "queue_full", "expired"}
        seconds, millis = int(call.headers["retry-after"]), int(call.headers["retry-after-ms"])
        promised = call.headers["x-should-retry"] == "true"
        assert 1 <= seconds <= 55 if promised else 60 < seconds <= 121
        assert seconds - 1 < millis / 1000 <= seconds, "both headers say the same"
    assert seen.evicted_share <= 0.1, f"{seen.evicted_share:.0%} waited in vain"
    # Nothing is lost between the client's count and the gateway's own.
    assert seen.metrics["completed"] == len(served)
    assert seen.metrics["shed"] + seen.metrics["evicted"] == len(seen.refused)
    assert seen.metrics["cancelled"] == seen.metrics["failed"] == 0
    assert seen.queue_left == (0, 0)
