"""Admission by tokens beside admission by requests: how many fewer are refused at the same p99, and who they are.

``python -m benchmarks.admission`` (or ``make bench NAME=admission``) replays the shipped Azure and ServeGen traces
through the production pipeline in front of a simulated A100, sweeps the one setting of every policy, compares their
frontiers of refusals over p99, and writes ``benchmarks/results/admission-DATE.json``, the generated sections of
``docs/admission-study.md`` and its plot. About six minutes on two cores; ``--quick`` takes one load, half of each trace
and every second setting.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from benchmarks import environment, publish
from benchmarks.admission_frontier import Metric, Setting, compare
from benchmarks.admission_plot import draw
from benchmarks.admission_tables import SECTIONS
from benchmarks.admission_trials import (
    BLOCKS,
    LOADS,
    PAIRS,
    TRACES,
    VARIANT_LOAD,
    VARIANTS,
    Measured,
    Trial,
    load_of,
    measure,
    plan,
    speed_of,
)
from benchmarks.trials import run

PAGE: Final = publish.DOCS / "admission-study.md"
PLOT: Final = publish.DOCS / "results" / "admission-study.svg"
RESAMPLES: Final = 1000
TARGETS_MS: Final[dict[str, dict[Metric, tuple[float, ...]]]] = {
    "azure_llm_2023_code": {"ttft": (500.0, 1000.0, 2000.0), "latency": (4000.0, 8000.0, 16_000.0)},
    "azure_llm_2023_conv": {"ttft": (500.0, 1000.0, 2000.0), "latency": (10_000.0, 20_000.0, 30_000.0)},
    "servegen_mlarge_1h_synth": {"ttft": (500.0, 1000.0, 2000.0), "latency": (15_000.0, 30_000.0, 45_000.0)},
}
"""p99 of the first token and of the whole answer at which policies are compared."""

Case = tuple[str, float, str]
"""Trace, load, variant."""
Runs = dict[str, list[tuple[float, Measured]]]
"""By policy, in the order of their settings."""


def study(trials: Sequence[Trial], processes: int, resamples: int) -> list[dict[str, Any]]:
    """A case for each trace, load and variant: every run's figures, and the comparisons."""
    runs: dict[Case, Runs] = defaultdict(lambda: defaultdict(list))
    longest_first = sorted(trials, key=lambda one: one.trace, reverse=True)
    for trial, measured in run(measure, longest_first, processes):
        runs[trial.trace, trial.load, trial.variant][trial.policy].append((trial.setting, measured))
    cases = []
    for case in dict.fromkeys((trial.trace, trial.load, trial.variant) for trial in trials):
        click.echo(f"  resampling {' '.join(map(str, case))}", err=True)
        cases.append(_case(case, runs.pop(case), resamples))
    return cases


def _case(case: Case, runs: Runs, resamples: int) -> dict[str, Any]:
    trace, load, variant = case
    settings = {name: [Setting(*one) for one in sorted(found, key=lambda one: one[0])] for name, found in runs.items()}
    return {
        "trace": trace,
        "load": load,
        "variant": variant,
        "speed": speed_of(trace, load),
        "capacity_requests_per_s": load_of(trace).requests_per_minute / 60.0,
        "keys": max(1, len(load_of(trace).keys)),
        "policies": {name: [one.figures() for one in found] for name, found in settings.items()},
        "comparisons": [
            {"by_count": counted, "by_tokens": weighed, **asdict(comparison)}
            for counted, weighed in PAIRS
            if counted in settings and weighed in settings
            for comparison in compare(settings[counted], settings[weighed], TARGETS_MS[trace], resamples=resamples)
        ],
    }


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One load, half of each trace, every second setting: a look, no result.")
@publish.processes_option
@publish.json_option
@publish.dry_option
@publish.again_option
def main(quick: bool, processes: int, json_path: Path | None, dry: bool, again: Path | None) -> None:
    load_before, began = environment.load_average(), time.monotonic()
    if again is not None:
        result = json.loads(again.read_text())
    else:
        trials = plan(
            tuple(TRACES),
            (VARIANT_LOAD,) if quick else LOADS,
            share=0.5 if quick else 1.0,
            every=2 if quick else 1,
            variants=() if quick else tuple(VARIANTS),
        )
        click.echo(f"{len(trials)} runs", err=True)
        cases = study(trials, processes, 100 if quick else RESAMPLES)
        result = {
            "environment": environment.describe(load_before),
            "command": publish.command("admission", *(["--quick"] if quick else [])),
            "wall_s": round(time.monotonic() - began, 1),
            "quick": quick,
            "blocks": BLOCKS - 1,
            "runs": len(trials),
            "cases": cases,
        }
    if json_path is not None or not (dry or quick or again):
        publish.write_results("admission", result, json_path)
    sections = {name: make(result) for name, make in SECTIONS.items()}
    click.echo("\n".join(sections.values()))
    if dry or quick:
        return
    publish.write_sections(PAGE, sections)
    if not draw(result, PLOT):
        click.echo(f"{PLOT.name} is left as it is: drawing takes matplotlib (make venv installs it)", err=True)


if __name__ == "__main__":
    main()
