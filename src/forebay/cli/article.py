"""`forebay sim article`: the article's table on the GPU that its figures imply, beside what is measured there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forebay.cli.options import html_file, is_stdout, json_file, say_written, writable

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.sim.article import Experiment, Fit, Row, Table
    from forebay.sim.run import Outcome
    from forebay.sim.scenario import Scenario

LEGEND = (
    "article → here; ± is half the range over the seeds. misfit: the factor by which a row's worst figure of three "
    "differs. busy: share of time the GPU computed. of peak: completed per second over the 2,480 measured at batch "
    "128. in time: completed within 500 ms."
)


@click.command(name="article", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--search", is_flag=True, help="First look for the nearest load and settings again (a quarter of an hour)."
)
@click.option("--seed", "seeds", type=int, multiple=True, metavar="N", help="Repeat it.  [default: 1 to 5]")
@click.option("--processes", type=click.IntRange(1), help="Simulations at once.  [default: as many as there are cores]")
@click.option("--backend", type=click.Choice(("processes", "ray")), default="processes", show_default=True)
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="As of forebay sim.")
@click.option("--fresh", is_flag=True, help="Simulate all of it anew.")
@json_file("Write the results as JSON; `-` prints them instead of the tables.")
@html_file()
def command(
    search: bool,
    seeds: tuple[int, ...],
    processes: int | None,
    backend: str,
    keep: Path | None,
    fresh: bool,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """The three approaches of the article on a simulated A100 with BERT-large, and Forebay's own defaults.

    The article tells no load and no settings; those that come nearest to its figures were searched for.
    """
    from rich.console import Console

    from forebay.cli.sim import keep_dir, progress_line, write
    from forebay.sim import article

    to_stdout, written = is_stdout(json_path), writable(json_path, html_path)
    console = Console(stderr=True)
    with progress_line(console, quiet=to_stdout) as progress:
        runner = partial(
            _run,
            {
                "processes": processes,
                "backend": backend,
                "resume_dir": keep_dir(keep),
                "fresh": fresh,
                "progress": progress,
            },
        )
        fits = [*article.search(runner), *article.search(runner, shared=False)] if search else []
        found = article.experiment(runner, seeds=seeds or article.SEEDS)
    if to_stdout:
        click.echo(found.to_json().decode(), nl=False)
        return
    out = Console() if console.is_terminal else Console(width=140)
    if fits:
        _print_fits(out, fits)
    print_tables(out, found)
    if json_path is not None:
        write(json_path, found.to_json())
    if html_path is not None:
        write(html_path, article.page(found).encode())
    say_written(written)


def _run(settings: dict[str, Any], scenarios: Sequence[Scenario]) -> Sequence[Outcome]:
    from forebay.sim.sweep import sweep

    return sweep(scenarios, **settings)


def _print_fits(console: Console, fits: Sequence[Fit]) -> None:
    for fit in fits:
        who = "all three" if len(fit.gates) > 1 else next(iter(fit.gates))
        console.print(
            f"{who}, served: {fit.served}, utilization: {fit.utilization}: worst factor {fit.worst:.2f} at {fit.load}",
            highlight=False,
        )
        for name, gate in fit.gates.items():
            console.print(f"    {name}: {gate}", highlight=False)


def print_tables(console: Console, found: Experiment) -> None:
    """Each table, and a legend beneath."""
    for table in found.tables:
        console.print(f"[bold]{table.title}[/bold]", highlight=False)
        console.print(_table(table))
    console.print(LEGEND, style="dim", width=min(console.width, 120))


def _table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as Grid

    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in (
        "approach",
        "p99 ms",
        "busy",
        "of peak",
        "served/s",
        "in time/s",
        "shed",
        "misfit",
        "load and settings",
    ):
        grid.add_column(name, justify="left" if name in {"approach", "load and settings"} else "right")
    for row in table.rows:
        grid.add_row(row.name, *_cells(table, row), f"{row.load}; {row.settings}")
    return grid


def _cells(table: Table, row: Row) -> list[str]:
    now, half, claim = row.measured, row.half_range, row.claim
    busy_claimed = table.utilization == "busy"
    served_claimed = table.served == "completed"

    def cell(value: float, spread: float, claimed: float | None, scale: float = 1.0) -> str:
        told = f"{value * scale:.0f}±{spread * scale:.0f}"
        return told if claimed is None else f"{claimed * scale:.0f} → {told}"

    used = None if claim is None else claim.utilization
    served = None if claim is None else claim.served_per_s
    return [
        cell(now.p99_ms, half.p99_ms, None if claim is None else claim.p99_ms),
        cell(now.busy, half.busy, used if busy_claimed else None, 100.0),
        cell(now.share_of_peak, half.share_of_peak, None if busy_claimed else used, 100.0),
        cell(now.served_per_s, half.served_per_s, served if served_claimed else None),
        cell(now.goodput_per_s, half.goodput_per_s, None if served_claimed else served),
        cell(now.shed, half.shed, None, 100.0),
        "–" if row.misfit is None else f"{row.misfit:.2f}",
    ]
