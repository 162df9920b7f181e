"""The production pipeline in the simulator's world, for cases that would take minutes live."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from forebay.core.instant import SECOND
from forebay.sim.run import Simulation
from forebay.sim.scenario import ClientSpec, EngineSpec, FaultSpec, Scenario, WorkloadSpec
from forebay.sim.world import TIMER

GPU = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"

Span = tuple[float, float, float]
"""From, to (seconds), arrivals per second."""


def trace(
    path: Path, spans: Iterable[Span], *, seed: int = 1, prompt: int = 256, output: int = 32, keys: Sequence[str] = ()
) -> str:
    """A trace file of Poisson arrivals at a rate for each span, which may overlap; returns its path. `keys`: whose
    requests those of each span are."""
    chance = Random(f"{seed}/arrivals")
    moments = []
    for number, (start, end, rate) in enumerate(spans):
        at = start
        while (at := at + chance.expovariate(rate)) < end:
            moments.append((at, keys[number] if keys else ""))
    rows = [f"{at:.6f},{prompt},{output},{key}" for at, key in sorted(moments)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,key_id", *rows]))
    return str(path)


def simulation(arrivals: str, **fields: Any) -> Simulation:
    """A trace file against simulated engines behind the pipeline of a normal configuration; not run yet."""
    return Simulation(_scenario(WorkloadSpec(trace=arrivals), **fields))


def _scenario(
    workload: WorkloadSpec,
    *,
    concurrency: str,
    sections: str = "",
    seats: int = 8,
    engines: int = 1,
    faults: Sequence[FaultSpec] = (),
    clients: ClientSpec | None = None,
    **fields: Any,
) -> Scenario:
    return Scenario(
        name="field-fault",
        policy="as configured",
        config=f'{sections}\n[[engines]]\nname = "e"\nkind = "simulated"\n[engines.concurrency]\n{concurrency}\n',
        engines=EngineSpec(profile=GPU, count=engines, max_num_seqs=seats, faults=tuple(faults)),
        workload=workload,
        clients=clients or ClientSpec(),
        **fields,
    )


@cache
def capacity(concurrency: str, seats: int = 8) -> float:
    """Requests per second, of the size of `trace`, that the same engine completes when far more are offered."""
    offered = WorkloadSpec(rate=400.0, duration_s=20.0, prompt_tokens="256", output_tokens="32")
    long = Simulation(_scenario(offered, concurrency=concurrency, seats=seats, warm_up_s=5.0))
    long.run()
    return long.outcome().result.served_per_s


def watched(run: Simulation, every_s: float) -> list[list[int]]:
    """Run it; the concurrency limits of every gateway's engines, every so many seconds of the load."""
    series: list[list[int]] = []
    step = int(every_s * SECOND)

    def look() -> None:
        series.append([engine.limit.requests for p in run.pipelines for pool in p.pools for engine in pool.engines])
        if run.world.now + step <= run.parts.end_ns:
            run.world.at(run.world.now + step, look, TIMER)

    run.world.at(step, look, TIMER)
    run.run()
    return series
