"""The production pipeline in the simulator's world, for cases that would take minutes live."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def simulation(
    arrivals: str,
    *,
    concurrency: str,
    sections: str = "",
    seats: int = 8,
    engines: int = 1,
    faults: Sequence[FaultSpec] = (),
    clients: ClientSpec | None = None,
    **fields: Any,
) -> Simulation:
    """A trace file against simulated engines behind the pipeline of a normal configuration; not run yet."""
    config = f'{sections}\n[[engines]]\nname = "e"\nkind = "simulated"\n[engines.concurrency]\n{concurrency}\n'
    return Simulation(
        Scenario(
            name="field-fault",
            policy="as configured",
            config=config,
            engines=EngineSpec(profile=GPU, count=engines, max_num_seqs=seats, faults=tuple(faults)),
            workload=WorkloadSpec(trace=arrivals),
            clients=clients or ClientSpec(),
            **fields,
        )
    )


def capacity(path: Path, *, concurrency: str, seats: int = 8, prompt: int = 256, output: int = 32) -> float:
    """Requests per second that the same engine completes when far more are offered."""
    long = simulation(
        trace(path, [(0, 30, 400)], prompt=prompt, output=output), concurrency=concurrency, seats=seats, warm_up_s=5.0
    )
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
