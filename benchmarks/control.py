"""The control brain beside its rivals: goodput, waits, recovery, fairness, changes of mix, classes, wasted work.

``python -m benchmarks.control`` (or ``make bench NAME=control``) simulates every policy on the same engines and the
very same arrivals, five seeds each, and writes ``benchmarks/results/control-DATE.json`` and the generated sections of
``docs/control.md``. Hand-set windows and the rivals' signals are chosen first, on seeds of their own, so that each is
at its best. ``--quick`` takes one seed and short runs; ``--only`` takes some of the cases; ``--keep`` keeps finished
runs of the same code, so that an interrupted benchmark goes on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from benchmarks import environment, publish
from benchmarks.control_bounds import bounds
from benchmarks.control_cases import A100, CASES, H100, Figures, Trial, measure
from benchmarks.control_plan import PILOT_SEEDS, pilot, plan
from benchmarks.control_tables import SECTIONS, brief, section
from benchmarks.peers import ROOT
from benchmarks.trials import run
from forebay.sim.sweep import fingerprint

SEEDS: Final = (1, 2, 3, 4, 5)
PAGE: Final = publish.DOCS / "control.md"
SOURCES: Final = ("cases", "policies", "rivals", "statistics", "world")


def _code() -> str:
    """Of everything that a run's figures depend on."""
    digest = hashlib.sha256(fingerprint().encode())
    for name in SOURCES:
        digest.update((ROOT / "benchmarks" / f"control_{name}.py").read_bytes())
    return digest.hexdigest()[:16]


class Runner:
    """Runs trials in processes of their own, and tells how far it is."""

    def __init__(self, processes: int, keep: Path | None) -> None:
        self._processes, self._keep, self._code = processes, keep, _code()
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)

    def __call__(self, trials: Sequence[Trial]) -> dict[Trial, Figures]:
        """The figures of each, in the order of the trials."""
        found = {trial: kept for trial in trials if (kept := self._kept(trial)) is not None}
        missing = [trial for trial in dict.fromkeys(trials) if trial not in found]
        # Seed by seed, so that what an interrupted run keeps is whole; of each the long ones first.
        ordered = sorted(missing, key=lambda trial: (trial.seed, trial.case != "shift", -trial.load))
        for trial, figures in run(measure, ordered, self._processes):
            found[trial] = figures
            if self._keep is not None:
                self._file(trial).write_text(json.dumps(figures))
        return {trial: found[trial] for trial in trials}

    def _file(self, trial: Trial) -> Path:
        assert self._keep is not None
        name = hashlib.sha256(f"{self._code}/{trial}".encode()).hexdigest()[:32]
        return self._keep / f"{name}.json"

    def _kept(self, trial: Trial) -> Figures | None:
        if self._keep is None or not self._file(trial).is_file():
            return None
        kept: Figures = json.loads(self._file(trial).read_text())
        return kept


def benchmark(
    measured: Runner, cases: Sequence[str], seeds: Sequence[int], scale: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Everything: what was chosen beforehand, the bounds, and a row of figures per trial."""
    say("choosing windows and signals")
    chosen = pilot(measured, scale, PILOT_SEEDS[: len(seeds)])
    trials = plan(cases, seeds, scale, chosen)
    say(f"{len(trials)} runs")
    found = measured(trials)
    return {
        "chosen": chosen.as_json(),
        "bounds": bounds((A100, H100)),
        "rows": [{**asdict(trial), "figures": figures} for trial, figures in found.items()],
    }


def _command(*, quick: bool, only: Sequence[str], seeds: int) -> str:
    """What gives the same figures; where they are kept, and on how many processes, makes no difference."""
    words = [*(["--quick"] if quick else []), *(word for name in only for word in ("--only", name))]
    return publish.command_of_seeds("control", seeds, len(SEEDS), *words)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One seed, runs of 60 % of their length: a look, no result.")
@click.option("--only", multiple=True, type=click.Choice(tuple(CASES)), help="Some of the cases.")
@click.option("--seeds", type=click.IntRange(1, 50), default=len(SEEDS), show_default=True)
@publish.processes_option
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep finished runs here.")
@publish.json_option
@publish.dry_option
@publish.again_option
def main(
    quick: bool,
    only: tuple[str, ...],
    seeds: int,
    processes: int,
    keep: Path | None,
    json_path: Path | None,
    dry: bool,
    again: Path | None,
) -> None:
    load_before = environment.load_average()
    cases = only or tuple(CASES)
    if again is not None:
        result = json.loads(again.read_text())
    else:
        began = time.monotonic()
        result = benchmark(
            Runner(processes, keep),
            cases,
            tuple(range(1, 2 if quick else seeds + 1)),
            0.6 if quick else 1.0,
            lambda text: click.echo(text, err=True),
        )
        result = {
            "environment": environment.describe(load_before),
            "command": _command(quick=quick, only=only, seeds=seeds),
            "rounds_run": 1 if quick else seeds,
            "wall_s": round(time.monotonic() - began, 1),
            "quick": quick,
            **result,
        }
    sections = {name: section(name, result) for name in SECTIONS}
    click.echo("\n".join(text for text in sections.values() if text))
    if dry or quick or (again is not None and not PAGE.is_file()):
        if json_path is not None:
            publish.write_results("control", result, json_path)
        return
    publish.write_results("control", result, json_path)
    publish.write_sections(PAGE, {name: body for name, body in sections.items() if body})
    if found := brief(result):
        publish.write_sections(ROOT / "README.md", {"control": found})


if __name__ == "__main__":
    main()
