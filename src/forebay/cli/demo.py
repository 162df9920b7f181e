"""`forebay demo`: a real model on this machine, driven past its capacity in all three modes, and the comparison."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from forebay.cli.options import is_stdout, json_file
from forebay.errors import UsageError
from forebay.load import demonstration as demo
from forebay.load.child import Child, end_in_order
from forebay.report.live import LiveLine
from forebay.report.publish import check_writable, publish
from forebay.report.records import RunRecords
from forebay.report.results import Results, environment, summarise
from forebay.report.table import milliseconds, print_comparison

if TYPE_CHECKING:
    from forebay.load.demonstration import EngineKind, Scene

MAX_SECONDS_PER_PHASE = 600.0


@click.command("demo", short_help="Drive a real model past capacity in all three modes and compare.")
@click.option(
    "--seconds-per-phase",
    type=float,
    default=11.0,
    show_default=True,
    metavar="S",
    help="Length of each of the three phases.",
)
@click.option("--engine", "kind", type=click.Choice(("embedded", "simulated")), default="embedded", show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of arrivals and lengths.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("out"),
    show_default=True,
    metavar="DIR",
    help="Folder of the results and the report.",
)
@json_file("Where the results go as JSON (default: DIR/demo.json); `-` prints them instead of the tables.")
def command(seconds_per_phase: float, kind: EngineKind, seed: int, out: Path, json_path: Path | None) -> None:
    """Drives one engine with the same arrivals under backpressure, admission and the hybrid, then compares.

    Nothing leaves this machine but the download of the model's weights, once.
    """
    if not 1 <= seconds_per_phase <= MAX_SECONDS_PER_PHASE:
        raise UsageError(f"--seconds-per-phase must lie within 1 and {MAX_SECONDS_PER_PHASE:.0f}")
    as_json = is_stdout(json_path)
    file_path = out / "demo.json" if json_path is None or as_json else json_path
    html_path = out / "demo.html"
    for path in (file_path, html_path):
        check_writable(path)
    console = Console(stderr=as_json, highlight=False)
    end_in_order()
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="forebay-demo-") as folder:
            scene, records = _perform(console, kind, seconds_per_phase, seed, Path(folder), quiet=as_json)
    except KeyboardInterrupt:
        raise click.Abort from None
    results = Results(environment(), [summarise(run) for run in records])
    lines = demo.reading(results.runs, records)
    summary = [*lines, _setting(scene)]
    publish(results, records, title=_title(kind), summary=summary, json_path=file_path, html_path=html_path)
    if as_json:
        click.echo(results.to_json().decode(), nl=False)
        return
    console.print()
    print_comparison(console, results.runs)
    console.print()
    for line in lines:
        console.print(line)
    console.print(f"\nThat took {time.monotonic() - began:.0f} s.")
    click.echo(f"Report with plots: {html_path}")
    click.echo(f"Figures: {file_path}")


def _title(kind: EngineKind) -> str:
    return "Three ways to meet overload, " + ("on a real model" if kind == "embedded" else "on a simulated GPU")


def _setting(scene: Scene) -> str:
    capacity = scene.capacity
    return (
        f"Measured capacity: {capacity.requests_per_s:.1f} requests/s ({capacity.output_tokens_per_s:.0f} tokens/s) "
        f"with {capacity.callers} in flight, {milliseconds(capacity.latency_p50_ms)} each. From that: objective "
        f"{milliseconds(scene.objective_ms)} per answer ({demo.OBJECTIVE_SHARE:g} x), wait budget of the hybrid "
        f"{milliseconds(scene.wait_budget_ms)} ({demo.WAIT_BUDGET_SHARE:g} x), backpressure holds up to "
        f"{scene.deadline_s:.1f} s. Every mode has the same {demo.SEATS} places in flight and the same arrivals."
    )


def _perform(
    console: Console, kind: EngineKind, seconds_per_phase: float, seed: int, folder: Path, *, quiet: bool
) -> tuple[Scene, list[RunRecords]]:
    if kind == "embedded":
        from forebay.engines.embedded import weights

        weights.fetch(lambda line: console.print(line, style="dim"))
    with demo.start_engine(kind) as engine:
        model = _introduce(console, engine, kind)
        console.print("\nMeasuring what the engine can do with a full batch …")
        scene = demo.set_scene(engine.target, kind, model, seconds_per_phase, seed)
        console.print(_setting(scene), width=min(console.width, 110))
        loads = ", ".join(f"{name} {load:g} x" for name, load in demo.LOADS.items())
        console.print(f"\nLoad, open loop, {seconds_per_phase:g} s each: {loads} the capacity.\n")
        with demo.Comparison(scene, folder) as comparison:
            for turn in comparison.turns():
                _take_turn(console, comparison, turn, quiet=quiet)
            return scene, comparison.records()


def _introduce(console: Console, engine: Child, kind: EngineKind) -> str:
    """Starts the engine, shows what it is, and returns its model's name."""
    began = time.monotonic()
    engine.wait_listening()
    engine.wait_answer("/health")
    model = demo.model_name(engine.target)
    took_s = time.monotonic() - began
    if kind == "simulated":
        console.print(f"A simulated GPU serves [bold]{model}[/bold] at {engine.url} (started in {took_s:.1f} s).")
        return model
    console.print(
        f"[bold]{model}[/bold], a small real model of 135 million parameters, runs on this machine's CPU "
        f"(started in {took_s:.1f} s)."
    )
    for question in demo.QUESTIONS:
        answer = demo.ask(engine.target, model, question)
        console.print(f"  you:   {question}", markup=False)
        console.print(f"  model: {' '.join(answer.split())}", markup=False, style="bold")
    return model


def _take_turn(console: Console, comparison: demo.Comparison, turn: demo.Turn, *, quiet: bool) -> None:
    name, pacer = turn.phase
    with LiveLine(console, f"{name} {turn.mode}", pacer.duration_s, quiet=quiet) as line:
        part = comparison.run(turn, lambda now: line.update(now.elapsed_s, now.sent, now.in_flight, now.outcomes))
    ended = Counter(record.outcome for record in part.requests)
    refused = ended["shed"] + ended["evicted"]
    figures = f"{len(part.requests):4} offered {ended['completed']:4} completed {refused:4} refused"
    console.print(f"  {name:<9} {turn.mode:<13} {figures}")
