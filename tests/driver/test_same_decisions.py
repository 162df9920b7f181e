"""The live driver decides as the simulation does: same trace, same decisions, same instants, to the nanosecond."""

from __future__ import annotations

from collections import Counter

import pytest

from forebay.core.model import Mode
from forebay.core.outcome import Outcome
from forebay.testing import check_empty

from .trace import OVER, Live, Simulated, make_trace

SEEDS = range(24)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("seed", SEEDS)
def test_live_and_simulated_decide_alike(seed: int, mode: Mode) -> None:
    trace = make_trace(seed, mode)
    simulated, live = Simulated(trace), Live(trace)
    simulated.run(OVER)
    live.run(OVER)
    for number, (ours, theirs) in enumerate(zip(live.decisions.lines, simulated.decisions.lines, strict=False)):
        assert ours == theirs, f"decision {number} differs: live {ours}, simulated {theirs}"
    assert len(live.decisions.lines) == len(simulated.decisions.lines)
    assert live.pipeline.snapshot(OVER) == simulated.pipeline.snapshot(OVER)
    check_empty(live.pipeline, OVER)
    assert live.pipeline.offered == len(trace.callers), "every request has one outcome"
    assert live.timers_most == 1


def test_the_traces_hold_what_they_are_meant_to_hold() -> None:
    """Together they take every way out, by many reasons, at instants that coincide."""
    outcomes: Counter[Outcome] = Counter()
    refusals: Counter[str] = Counter()
    together = 0
    for seed in SEEDS:
        world = Simulated(make_trace(seed, Mode.HYBRID))
        world.run(OVER)
        outcomes.update(world.pipeline.outcomes)
        refusals.update(line[3][0] for line in world.decisions.of("refused"))  # type: ignore[index]
        ended = {line[0] for line in world.decisions.of("closed")}
        together += len(ended & {caller.arrives for caller in make_trace(seed, Mode.HYBRID).callers})
    assert min(outcomes.values()) > 50, outcomes
    assert {"queue_wait", "expired", "no_engine", "draining", "key_requests", "key_concurrency"} <= set(refusals)
    assert together > 200, "completions and arrivals at one instant"
