"""`forebay sim`: replay traffic through the production policies on simulated GPUs, and compare."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forebay.cli.lazy import LazyGroup
from forebay.cli.options import html_file, is_stdout, json_file, say_written, together, writable
from forebay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from forebay.sim.grid import Grid
    from forebay.sim.scenario import Scenario
    from forebay.sim.sweep import Progress

POSITIVE = click.FloatRange(min=0, min_open=True)
COUNT = click.IntRange(1)
OUT = click.Path(path_type=Path, dir_okay=False)

WIDTH = 120
"""Of the table where no terminal has one."""

load_options = together(
    click.option("--trace", metavar="NAME|FILE", help="A shipped trace, or a CSV or JSONL file of yours."),
    click.option("--rate", "rates", type=POSITIVE, multiple=True, metavar="R", help="Requests per second; repeat it."),
    click.option(
        "--load",
        "loads",
        type=POSITIVE,
        multiple=True,
        metavar="X",
        help="Trace: times its own speed. Otherwise: times what the engines can serve. Repeat it to compare loads.",
    ),
    click.option("--duration", "duration_s", type=POSITIVE, metavar="S", help="Seconds of load.  [generated: 60]"),
    click.option("--start", "start_s", type=click.FloatRange(0), default=0.0, metavar="S", help="Trace: begin there."),
    click.option("--thin", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Trace: keep this share."),
    click.option("--jitter-s", type=click.FloatRange(0), default=0.0, help="Trace: move each arrival up to so much."),
    click.option(
        "--arrivals", default="poisson", show_default=True, metavar="SPEC",
        help="Generated: poisson, constant, gamma, bursty, diurnal, spike:factor=4 … (docs/simulator.md).",
    ),
    click.option("--cv", type=POSITIVE, default=3.0, show_default=True, help="gamma: coefficient of variation."),
    click.option("--prompt-tokens", default="512", show_default=True, metavar="N|A-B|~M/CV", help="Prompt lengths."),
    click.option("--output-tokens", default="128", show_default=True, metavar="N|A-B|~M/CV", help="Answer lengths."),
    click.option("--sizes-from", metavar="NAME|FILE", help="Draw the lengths from this trace instead."),
    click.option("--keys", type=COUNT, default=1, show_default=True, help="Callers, where the trace names none."),
    click.option("--key-skew", type=click.FloatRange(0, 10), default=0.0, help="Zipf exponent of their shares."),
    click.option("--warm-up-s", type=click.FloatRange(0), default=0.0, help="Seconds at the start that do not count."),
    click.option("--seed", "seeds", type=int, multiple=True, default=(1,), show_default=True, help="Repeat it."),
)  # fmt: skip

engine_options = together(
    click.option("--engine", "profile", metavar="PROFILE", help="A calibrated GPU and model; see --list-profiles."),
    click.option("--engines", "count", type=COUNT, default=1, show_default=True, help="How many."),
    click.option("--max-num-seqs", type=COUNT, help="Sequences that one runs, or an encoder's batch."),
    click.option("--max-num-batched-tokens", type=COUNT, help="Tokens of one step."),
    click.option("--kv-tokens", type=COUNT, help="Tokens of its KV cache."),
    click.option("--reserve-output", is_flag=True, help="Admit only what will surely fit its KV cache."),
    click.option("--prefix-cache", is_flag=True, help="Conversations find their last turn computed."),
    click.option("--joins", is_flag=True, help="Encoders: batch what waits by themselves, as TEI and Triton do."),
    click.option("--noise", type=click.FloatRange(0, 1), default=0.0, help="Relative deviation of step times."),
)

policy_options = together(
    click.option(
        "--policy",
        "policies",
        multiple=True,
        metavar="NAME|FILE",
        help="backpressure, admission, hybrid, guarded (hybrid whose limit finds itself), none (no gateway), or a "
        "config file. Repeat it.  [default: all that fit]",
    ),
    click.option("--in-flight", type=COUNT, help="Built-in policies: in flight per engine.  [default: by objective]"),
    click.option("--gateways", type=COUNT, default=1, show_default=True, help="Gateways; engines are dealt out."),
    click.option("--share-engines", "engines_shared", is_flag=True, help="Every gateway sends to all engines."),
    click.option(
        "--client", "retry", type=click.Choice(("none", "sdk", "sdk-tickets", "sdk-2025", "naive")), default="none",
        show_default=True, help="What refused callers do.",
    ),
    click.option("--patience-s", type=POSITIVE, help="Callers leave after this long."),
    click.option("--deadline-ms", type=COUNT, help="Callers say that they wait so long."),
    click.option("--ttft-ms", type=POSITIVE, help="Objective: first token within.  [default: 1000, encoders: none]"),
    click.option("--tpot-ms", type=POSITIVE, help="Objective: mean time per further token.  [default: 50]"),
    click.option("--latency-ms", type=POSITIVE, help="Objective: whole answer within.  [encoders: 100]"),
)  # fmt: skip

output_options = together(
    click.option("--processes", type=COUNT, help="Simulations at once.  [default: as many as there are cores]"),
    click.option("--backend", type=click.Choice(("processes", "ray")), default="processes", show_default=True),
    click.option(
        "--keep", "keep_dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
        help="Finished simulations are kept here and used again.  [default: in the user's cache]",
    ),
    click.option("--fresh", is_flag=True, help="Simulate all of it anew."),
    click.option("--optimum", is_flag=True, help="Small loads: what perfect foresight could serve."),
    json_file(),
    click.option("--parquet", "parquet_path", type=OUT, metavar="FILE", help="Write a row per request (extra `sim`)."),
    html_file("Write a page with plots of the last load."),
)  # fmt: skip


PARTS = {
    "calibrate": ("forebay.cli.calibrate", "Fit the step model to an engine of your own."),
    "article": ("forebay.cli.article", "The article's experiment: its three approaches on the GPU that they imply."),
}


@click.group(
    name="sim",
    cls=LazyGroup,
    parts=PARTS,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND]",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@load_options
@engine_options
@policy_options
@output_options
@click.option("--list-profiles", is_flag=True, help="Print the calibrated engines and exit.")
@click.option("--list-traces", is_flag=True, help="Print the shipped traces and exit.")
@click.pass_context
def command(ctx: click.Context, /, list_profiles: bool, list_traces: bool, **given: Any) -> None:
    """Replays traffic through the production policies on simulated GPUs.

    \b
    forebay sim --trace azure_llm_2023_code --duration 600 --engine h100-80g/llama-3.1-8b/bf16/tp1/trtllm
    forebay sim --rate 10 --rate 20 --engine h100-80g/llama-3.1-8b/bf16/tp1/trtllm --policy hybrid --policy my.toml
    """
    if ctx.invoked_subcommand is not None:
        return
    if list_profiles:
        _print_profiles()
    elif list_traces:
        _print_traces()
    else:
        _sweep(given)


def _sweep(given: dict[str, Any]) -> None:
    from rich.console import Console

    from forebay.report.grid import print_grid
    from forebay.sim.grid import Asked, Grid
    from forebay.sim.sweep import sweep

    json_path, parquet_path, html_path = given["json_path"], given["parquet_path"], given["html_path"]
    to_stdout, written = is_stdout(json_path), writable(json_path, parquet_path, html_path)
    if parquet_path is not None:
        from forebay.sim.export import require_pyarrow

        require_pyarrow()
    grid = Grid.of(Asked(**{name: given[name] for name in Asked.__dataclass_fields__}))
    console = Console(stderr=True)
    keep = keep_dir(given["keep_dir"])
    with progress_line(console, quiet=to_stdout) as progress:
        grid.outcomes = sweep(
            grid.scenarios,
            processes=given["processes"],
            progress=progress,
            resume_dir=keep,
            backend=given["backend"],
            keep_rows=parquet_path is not None,
            fresh=given["fresh"],
        )
    if given["optimum"]:
        grid.find_optima()
    results = grid.results()
    if parquet_path is not None:
        _write_parquet(grid, keep, parquet_path)
    if html_path is not None:
        _write_page(grid, html_path)
    if to_stdout:
        click.echo(results.to_json().decode(), nl=False)
        return
    out = Console() if console.is_terminal else Console(width=WIDTH)
    print_grid(out, grid.entries())
    for line in grid.notes():
        out.print(line, highlight=False, markup=False)
    if json_path is not None:
        write(json_path, results.to_json())
    say_written(written)


def keep_dir(chosen: Path | None) -> Path:
    """Where finished simulations are kept: `$XDG_CACHE_HOME/forebay/simulations/` unless the user says otherwise."""
    if chosen is not None:
        return chosen
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "forebay" / "simulations"


@contextmanager
def progress_line(console: Console, *, quiet: bool) -> Iterator[Progress | None]:
    """One line: how many are done, and the last of them. Nothing where nobody watches."""
    if quiet or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=None)

        def show(done: int, total: int, scenario: Scenario) -> None:
            bar.update(task, completed=done, total=total, description=scenario.name)

        yield show


def _write_parquet(grid: Grid, keep: Path, path: Path) -> None:
    from forebay.sim.export import write_parquet
    from forebay.sim.sweep import rows_file

    write_parquet(path, [(scenario, rows_file(keep, scenario)) for scenario in grid.scenarios])


def _write_page(grid: Grid, path: Path) -> None:
    from forebay.report.page import render_page
    from forebay.report.results import Results, environment

    shown, runs = grid.page_runs()
    page = render_page(f"Simulation: {shown[0].workload}", grid.notes(), Results(environment(), shown), runs)
    write(path, page.encode())


def write(path: Path, data: bytes) -> None:
    """Writes a file. Raises UsageError when it cannot."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None


def _print_profiles() -> None:
    from forebay.engines.simulated.catalog import profiles

    for name in profiles():
        click.echo(name)


def _print_traces() -> None:
    from forebay.workload.trace import shipped

    for info in shipped().values():
        rate = "no times" if info.rate is None else f"{info.rate:.2f} requests/s"
        click.echo(f"{info.name:<32} {info.requests:>8} requests, {rate}: {info.title}")
