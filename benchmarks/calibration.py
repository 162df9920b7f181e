"""The simulator against real engines: calibrate, load, simulate the same arrivals, compare.

``python -m benchmarks.calibration`` (or ``make bench NAME=calibration``) drives the embedded engine and vLLM on the
CPU, about twenty-five minutes in all. Before each configuration the engine is calibrated anew by a short probing run;
then an open-loop load is sent straight to it, and the simulator is given the very same arrivals and sizes and the
profile fitted from the probes so far, nothing from the load itself. ``--keep`` writes what was measured, ``--again``
judges it anew without an engine. One configuration per engine is measured twice: how far the engine is from itself is
as near as any model of it can come.
"""

from __future__ import annotations

import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from benchmarks import environment, publish
from benchmarks.calibration_engines import ENGINES, Engine
from benchmarks.calibration_judge import (
    CONFIGS,
    Config,
    Kept,
    Verdict,
    calibrate,
    capacity,
    judge,
    markdown,
    print_verdicts,
)
from benchmarks.process import Process
from forebay.load.attack import Plan, attack
from forebay.load.observe import first_model
from forebay.load.probing import probe_engine
from forebay.load.target import Target
from forebay.load.workload import Workload
from forebay.report.records import PhaseBounds, RequestRecord, RunHeader
from forebay.sim.calibrate import Calibration

FIRST_PROBING_S: Final = 40.0
PROBING_S: Final = 18.0
DRAIN_S: Final = 120.0
PAGE: Final = publish.DOCS / "calibration.md"


def _say(text: str) -> None:
    click.echo(f"{datetime.now(UTC):%H:%M:%S} {text}", err=True)


class Others:
    """Cores that programs other than the engine and this one kept busy since it was made, stolen time included."""

    def __init__(self, engine: Process) -> None:
        self._engine = engine
        self._from = self._now()

    def cores(self) -> float:
        (busy, ours, at), (busy_now, ours_now, now) = self._from, self._now()
        return (busy_now - busy - (ours_now - ours)) / (now - at)

    def _now(self) -> tuple[float, float, float]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _, _, irq, softirq, steal = ticks
        busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy_s, self._engine.cpu_us() / 1e6 + time.process_time(), time.monotonic()


class Session:
    """An engine that runs, and what was measured of it so far."""

    def __init__(self, engine: Engine, process: Process, target: Target, folder: Path, load_before: float) -> None:
        self._engine, self._process, self._target, self._folder = engine, process, target, folder
        self._workload = Workload(route="completions", model=first_model(target))
        self._seed = 1
        self.kept = Kept(engine.name, engine.limits, environment.describe(load_before))

    def calibrate(self, seconds: float) -> None:
        """A probing run; its probes join those before."""
        self._seed += 1
        runs = probe_engine(self._target, self._workload, self._engine.bounds, seconds, seed=self._seed)
        self.kept.probes.append(runs)

    def load(self, config: Config, rate: float) -> list[RequestRecord]:
        """The configuration's arrivals, sent open loop."""
        arrivals = config.arrivals(rate)
        end_s = arrivals[-1].at_ns / 1e9 + 1e-3
        header = RunHeader(
            mode=self._engine.name,
            policy="direct",
            workload=config.name,
            seed=config.seed,
            phases=[PhaseBounds("load", 0.0, end_s)],
        )
        plan = Plan(self._target, header, arrivals, self._workload, drain_s=DRAIN_S)
        others = Others(self._process)
        records = attack(plan, self._folder / "records.jsonl", lambda _: None).requests
        self.kept.others.append(others.cores())
        return records


def _measure(engine: Engine, configs: list[Config], scale: float, keep: Path | None) -> Kept:
    load_before = environment.load_average()
    with tempfile.TemporaryDirectory(prefix="forebay-calibration-") as scratch:
        process, target = engine.start(Path(scratch), _say)
        try:
            session = Session(engine, process, target, Path(scratch), load_before)
            kept = session.kept
            first: Calibration | None = None
            for number, config in enumerate(configs):
                _say(f"{engine.name}: probing")
                session.calibrate(scale * (PROBING_S if number else FIRST_PROBING_S))
                first = first or calibrate(kept, kept.probes)
                rate = kept.rates.get(config.base)
                if rate is None:
                    rate = kept.rates[config.base] = config.load * capacity(first, kept.limits, config)
                _say(f"{config.name}: {config.count} requests at {rate:.2f} per second")
                kept.loads.append((config, session.load(config.shortened(scale), rate)))
                if keep is not None:
                    kept.save(keep)
            session.calibrate(scale * PROBING_S)
            if keep is not None:
                kept.save(keep)
            return kept
        finally:
            process.stop()


@click.command()
@click.option("--engine", "names", type=click.Choice(tuple(ENGINES)), multiple=True, help="Only these.")
@click.option("--only", multiple=True, help="Only the configurations whose name holds this.")
@click.option("--scale", type=click.FloatRange(0.01, 1), default=1.0, help="Shorter loads and probes, to look.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Write what was measured here.")
@click.option("--again", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Judge what is kept here.")
@click.option(
    "--publish", "anyway", is_flag=True, help="Write results and page of a run that was not a whole one, too."
)
@publish.json_option
def main(
    names: tuple[str, ...],
    only: tuple[str, ...],
    scale: float,
    keep: Path | None,
    again: Path | None,
    anyway: bool,
    json_path: Path | None,
) -> None:
    """Simulated against measured, on real engines."""
    verdicts: list[Verdict] = []
    measured: dict[str, Any] = {}
    for name in names or tuple(ENGINES):
        if again is not None:
            kept = Kept.read(again / f"{name}.json")
        else:
            configs = [one for one in CONFIGS[name] if not only or any(part in one.name for part in only)]
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
            kept = _measure(ENGINES[name], configs, scale, keep)
        measured = measured or kept.environment
        found = judge(kept)
        print_verdicts(found)
        verdicts += found
    content: dict[str, Any] = {
        "environment": measured,
        "command": "python -m benchmarks.calibration" + (" --keep DIR, then --again DIR" if again is not None else ""),
        "verdicts": [verdict.as_row() for verdict in verdicts],
    }
    if anyway or (scale == 1.0 and not names and not only and again is None):
        publish.write_sections(PAGE, {"calibration": markdown(content, verdicts)})
        path = publish.write_results("calibration", content, json_path)
        click.echo(f"written: {PAGE}, {path}")
    elif json_path is not None:
        publish.write_results("calibration", content, json_path)
        click.echo(f"written: {json_path}")


if __name__ == "__main__":
    main()
