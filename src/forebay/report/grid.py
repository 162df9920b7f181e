"""Runs of many loads, policies and seeds as one table: a row per load and policy, the seeds together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table

from forebay.report.results import RunResult
from forebay.report.table import milliseconds, percent, refused_share

LEGEND = (
    "TTFT and p99 are of completed requests, from their intended time. served and goodput: completed, and completed "
    "within the objective, per second. bound: goodput as a share of the most that the engines can serve of this mix "
    "within the objective (or of the load, where that is less). busy: share of time the engines computed. shed: "
    "refused before or in the queue. wasted: tokens made for requests late or abandoned. Of several seeds the mean is "
    "shown, and ± half the range."
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One run beside its fluid bound, in requests per second; None where nothing bounds it."""

    load: str
    policy: str
    result: RunResult
    bound_per_s: float | None = None


def share_of_bound(entry: Entry) -> float | None:
    """Goodput as a share of the most that could be good: the engines' bound, or the offered rate below it."""
    result = entry.result
    offered = result.counts.offered / result.duration_s if result.duration_s else 0.0
    most = min(offered, entry.bound_per_s) if entry.bound_per_s is not None else offered
    return result.goodput_per_s / most if most else None


def rows(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Entries that differ only in their seed together, in the order in which they first come."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.load, entry.policy), []).append(entry)
    return list(groups.values())


def _rate(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


Figure = Callable[[Entry], float | None]
COLUMNS: tuple[tuple[str, Figure, Callable[[float | None], str]], ...] = (
    ("TTFT p99", lambda entry: entry.result.ttft_ms.p99, milliseconds),
    ("p99", lambda entry: entry.result.latency_ms.p99, milliseconds),
    ("busy", lambda entry: entry.result.utilization.busy, percent),
    ("served", lambda entry: entry.result.served_per_s, _rate),
    ("goodput", lambda entry: entry.result.goodput_per_s, _rate),
    ("bound", share_of_bound, percent),
    ("shed", lambda entry: refused_share(entry.result), percent),
    ("wasted", lambda entry: entry.result.wasted_work_ratio, percent),
)


def print_grid(console: Console, entries: Sequence[Entry]) -> None:
    """The table and its legend. Columns that hold nothing (no streams: no TTFT) are left out."""
    grouped = rows(entries)
    shown = [column for column in COLUMNS if any(column[1](entry) is not None for entry in entries)]
    padding = (0, 1) if console.width >= 100 else 0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=padding)
    table.add_column("load", no_wrap=True)
    table.add_column("policy", style="bold", no_wrap=True)
    for name, _, _ in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for number, group in enumerate(grouped):
        first = number == 0 or grouped[number - 1][0].load != group[0].load
        last = number == len(grouped) - 1 or grouped[number + 1][0].load != group[0].load
        cells = [_cell(group, figure, show) for _, figure, show in shown]
        table.add_row(group[0].load if first else "", group[0].policy, *cells, end_section=last)
    console.print(table)
    console.print()
    console.print(LEGEND, style="dim", width=min(console.width, 110))


def _cell(group: Sequence[Entry], figure: Figure, show: Callable[[float | None], str]) -> str:
    values = [value for entry in group if (value := figure(entry)) is not None]
    if not values:
        return show(None)
    if len(values) == 1:
        return show(values[0])
    mean, _, unit = show(fmean(values)).partition(" ")
    # As many decimals as the mean shows, in its unit: `210±4 ms`, `1.24±0.03 s`.
    scale = 100 if show is percent else 1e-3 if unit == "s" else 1
    half = f"{scale * (max(values) - min(values)) / 2:.{len(mean.partition('.')[2])}f}"
    return f"{mean}±{half} {unit}".rstrip()
