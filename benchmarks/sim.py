"""The simulator: events per second of one process, and how long an hour, a day and a fleet take.

``python -m benchmarks.sim`` (or ``make bench NAME=sim``) runs every case in a process of its own, writes
``benchmarks/results/sim-DATE.json`` and the generated section of ``docs/benchmarks.md``. The fleet takes minutes.

Two things are counted, and shown apart: *events*, the actions taken from the event heap (an arrival, a wake-up, the end
of a stretch of engine steps), and *engine steps*, the forward passes that were simulated. Equal decode steps are leapt
over in closed form, so a step costs much less than an event. Both are per second of the process's CPU time, which
covers the whole run: reading the trace, simulating, and summing up.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from benchmarks import environment, publish, tables
from benchmarks.peers import ROOT
from forebay.sim.run import run
from forebay.sim.scenario import ClientSpec, EngineSpec, Scenario, WorkloadSpec

PAGE: Final = publish.DOCS / "benchmarks.md"
GPU: Final = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"
FLEET_ENGINES, FLEET_GATEWAYS, FLEET_S = 1000, 50, 600.0
FLEET_RATE = 5.5  # requests per second and engine: the mean of the Azure conversation hour, near what it can bear


def _hour() -> Scenario:
    workload = WorkloadSpec(trace="azure_llm_2023_conv")
    return Scenario(name="hour", policy="hybrid", engines=EngineSpec(profile=GPU), workload=workload)


def _overload() -> Scenario:
    workload = WorkloadSpec(trace="azure_llm_2023_conv", speed=4.0, keys=100)
    clients = ClientSpec(retry="sdk", patience_s=30.0)
    engines = EngineSpec(profile=GPU)
    return Scenario(name="overload", policy="hybrid", engines=engines, workload=workload, clients=clients)


def _day() -> Scenario:
    workload = WorkloadSpec(trace="servegen_mlarge_24h_synth")
    return Scenario(name="day", policy="hybrid", engines=EngineSpec(profile=GPU), workload=workload)


def _fleet() -> Scenario:
    workload = WorkloadSpec(
        rate=FLEET_RATE * FLEET_ENGINES,
        duration_s=FLEET_S,
        keys=1000,
        prompt_tokens="~1155/0.96",
        output_tokens="~211/0.77",
    )
    engines = EngineSpec(profile=GPU, count=FLEET_ENGINES)
    return Scenario(name="fleet", policy="hybrid", engines=engines, workload=workload, gateways=FLEET_GATEWAYS)


CASES: Final[dict[str, tuple[str, Callable[[], Scenario]]]] = {
    "hour": ("Azure conversation hour, one A100, one gateway", _hour),
    "overload": ("the same four times as fast, SDK retries, 100 keys", _overload),
    "day": ("ServeGen day, one A100, one gateway", _day),
    "fleet": (f"{FLEET_ENGINES:,} A100, {FLEET_GATEWAYS} gateways, {FLEET_S / 60:.0f} minutes of peak", _fleet),
}


def measure(case: str) -> dict[str, Any]:
    """One case in this process: time of building, running and summing up, and the peak of memory."""
    scenario = CASES[case][1]()
    wall, cpu = time.perf_counter(), time.process_time()
    outcome = run(scenario)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    speed, counts = outcome.speed, outcome.result.counts
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "requests": speed.requests,
        "events": speed.events,
        "engine_steps": speed.engine_steps,
        "leaps": speed.leaps,
        "events_per_s": speed.events / cpu_s,
        "events_and_steps_per_s": (speed.events + speed.engine_steps) / cpu_s,
        "simulated_s": speed.simulated_s,
        "completed": counts.completed,
        "shed": counts.shed + counts.evicted,
        "busy": outcome.result.utilization.busy,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _in_a_process(case: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sim", "--child", case], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def markdown(result: dict[str, Any]) -> str:
    """The generated section of ``docs/benchmarks.md``: medians over the rounds."""
    lines = [*tables.provenance(result), ""]
    rows = []
    for case, (title, _) in CASES.items():
        rounds = result["cases"].get(case, [])
        if not rounds:
            continue
        spread = {name: tables.Spread.of(one[name] for one in rounds) for name in rounds[0]}
        rows.append(
            [
                title,
                f"{rounds[0]['requests']:,}",
                *(tables.cell(_plain(spread[name]), digits) for name, digits in _FIGURES),
            ]
        )
    titles = ["case", "requests", "wall s", "CPU s", "events/s", "events and engine steps/s", "memory MiB"]
    return "\n".join([*lines, *tables.table(titles, rows)]) + "\n"


_FIGURES = (("wall_s", 1), ("cpu_s", 1), ("events_per_s", 0), ("events_and_steps_per_s", 0), ("rss_mib", 0))


def _plain(spread: tables.Spread | None) -> dict[str, Any] | None:
    return None if spread is None else {"median": spread.median, "min": spread.min, "max": spread.max, "n": spread.n}


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Of the short cases.")
@click.option("--only", multiple=True, type=click.Choice(list(CASES)), help="Leave the others out.")
@publish.json_option
@publish.dry_option
@click.option("--child", type=click.Choice(list(CASES)), hidden=True)
def main(rounds: int, only: tuple[str, ...], json_path: Path | None, dry: bool, child: str | None) -> None:
    if child is not None:
        click.echo(json.dumps(measure(child)))
        return
    load_before = environment.load_average()
    cases: dict[str, list[dict[str, Any]]] = {name: [] for name in only or CASES}
    for number in range(rounds):
        for name, found in cases.items():
            if name == "fleet" and number:
                continue
            found.append(_in_a_process(name))
            click.echo(f"round {number + 1}/{rounds}, {name}: {found[-1]['wall_s']:.1f} s", err=True)
    result: dict[str, Any] = {
        "environment": environment.describe(load_before),
        "command": publish.command("sim", *sys.argv[1:]),
        "rounds_run": rounds,
        "cases": cases,
    }
    click.echo(markdown(result))
    if dry:
        return
    publish.write_results("sim", result, json_path)
    publish.write_sections(PAGE, {"sim": markdown(result)})


if __name__ == "__main__":
    main()
