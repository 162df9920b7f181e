"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forebay.report.results import Figures, RunResult

COLUMNS = (
    "p50",
    "p99",
    "busy",
    "batch",
    "served/s",
    "goodput",
    "shed",
    "wasted",
)


def milliseconds(value: float | None) -> str:
    """`87 ms`, `1.24 s`, or a dash."""
    if value is None:
        return "–"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def refused_share(figures: Figures) -> float:
    """Shed and evicted requests of those offered."""
    counts = figures.counts
    return (counts.shed + counts.evicted) / counts.offered if counts.offered else 0.0


def cells(figures: Figures) -> list[str]:
    """The comparison's columns for one stretch of a run, in the order of COLUMNS."""
    return [
        milliseconds(figures.latency_ms.p50),
        milliseconds(figures.latency_ms.p99),
        percent(figures.utilization.busy),
        percent(figures.utilization.batch),
        f"{figures.served_per_s:.2f}",
        f"{figures.goodput_per_s:.2f}",
        percent(refused_share(figures)),
        percent(figures.wasted_work_ratio),
    ]


def stretches(runs: Sequence[RunResult]) -> list[tuple[str, list[Figures]]]:
    """What a comparison shows, in order: each phase (when several) and the whole, with every run's figures."""
    parts: list[tuple[str, list[Figures]]] = []
    if len(runs[0].phases) > 1:
        for index, phase in enumerate(runs[0].phases):
            parts.append((phase.name, [run.phases[index] for run in runs]))
    parts.append(("whole", list(runs)))
    return parts


def comparison(runs: Sequence[RunResult], width: int = 80) -> Table:
    """Every phase and the whole, each with one line per run, so that the runs stand under one another."""
    # Eighty columns hold it with single spaces; a wider terminal gives room.
    padding = (0, 1) if width >= 100 else 0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=padding)
    table.add_column("load", no_wrap=True)
    table.add_column("mode", style="bold", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for name, figures in stretches(runs):
        for index, (run, one) in enumerate(zip(runs, figures, strict=True)):
            table.add_row(name if index == 0 else "", run.mode, *cells(one), end_section=index == len(runs) - 1)
    return table


LEGEND = (
    "p50/p99: latency of completed requests from their intended send time. busy: share of time the engine computed. "
    "batch: filled share of its batch while it did. goodput: completed within the objective, per second. "
    "shed: refused before or in the queue. wasted: tokens made for requests that were late or abandoned."
)


def print_comparison(console: Console, runs: Sequence[RunResult]) -> None:
    """The table, its legend, and what else happened that a reader must know."""
    console.print(comparison(runs, console.width))
    console.print()
    console.print(LEGEND, style="dim", width=min(console.width, 110))
    for run in runs:
        note = _outcome_note(run)
        if note:
            console.print(note)


def _outcome_note(run: RunResult) -> str:
    counts = run.counts
    refused = ", ".join(f"{reason} {number}" for reason, number in run.shed_by_reason.items())
    parts = [f"{counts.offered} offered = {counts.completed} completed"]
    parts += [f"{counts.shed + counts.evicted} refused ({refused})"] if refused else []
    parts += [f"{counts.cancelled} abandoned by the client"] if counts.cancelled else []
    if counts.failed:
        error = escape(next(iter(run.failed_by_error), "unknown"))
        parts.append(f"[red]{counts.failed} failed[/red] (mostly: {error})")
    return f"[bold]{run.mode}[/bold]: {' + '.join(parts)}"
