"""An engine that comes back, cold, among others that are busy: what it is given in its first second."""

from __future__ import annotations

from itertools import pairwise

import pytest

from forebay.core.instant import MILLISECOND, SECOND
from forebay.sim.run import Simulation
from forebay.sim.scenario import EngineSpec, FaultSpec, Scenario, WorkloadSpec
from forebay.sim.world import TIMER

GPU = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"
BACK_S = 20.0


def held_after_return(slow_start_s: float, kind: str) -> list[int]:
    """Requests in flight on the engine that came back, 100, 200 … ms after its probe found it."""
    faults = (FaultSpec(kind=kind, from_s=5.0, to_s=BACK_S, engines=(2,)),)  # type: ignore[arg-type]
    simulation = Simulation(
        Scenario(
            name="return",
            policy="least",
            config=(
                '[admission]\nmode = "backpressure"\n[[engines]]\nname = "e"\nkind = "simulated"\n'
                f'slow_start_s = {slow_start_s}\nconcurrency = {{ kind = "fixed", limit = 64 }}\n'
            ),
            engines=EngineSpec(profile=GPU, count=3, faults=faults),
            workload=WorkloadSpec(rate=30.0, duration_s=40.0, prompt_tokens="~900/0.7", output_tokens="~250/0.7"),
            seed=3,
        )
    )
    (pipeline,) = simulation.pipelines
    engine, seen = pipeline.pools[0].engines[2], []

    def sample() -> None:
        seen.append(engine.in_flight)

    for step in range(1, 150):
        simulation.world.at(int(BACK_S * SECOND) + SECOND + step * 100 * MILLISECOND, sample, TIMER)
    simulation.run()
    begun = next(number for number, held in enumerate(seen) if held)
    return seen[begun:]


@pytest.mark.parametrize("kind", ["crashed", "cold"])
def test_a_returned_engine_gets_no_flood(kind: str) -> None:
    flooded, slow = held_after_return(0, kind), held_after_return(10, kind)
    assert flooded[0] >= 50, "what waited meanwhile goes there at once"
    assert slow[0] <= 12, "an eighth of its limit, and one more for each answer that began"
    growth = [later - earlier for earlier, later in pairwise(slow)]
    assert max(growth) <= 16, "it never jumps"
    assert max(slow[:100]) >= 40, "and has its share within the ten seconds"
