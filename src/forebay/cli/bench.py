"""`forebay bench`: open-loop load against a gateway or an engine that the user names."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from forebay.cli.options import html_file, is_stdout, json_file, say_written, writable
from forebay.errors import UsageError
from forebay.load.attack import Plan, attack
from forebay.load.campaign import Load, plan_for
from forebay.load.child import end_in_order
from forebay.load.observe import first_model
from forebay.load.workload import Workload, parse_keys
from forebay.report.live import LiveLine
from forebay.report.publish import publish
from forebay.report.records import Objective, RunRecords
from forebay.report.results import Results, environment, summarise
from forebay.report.table import print_comparison
from forebay.workload.retry import CLIENTS
from forebay.workload.sizes import Sizes

ARRIVALS = ("poisson", "bursty", "gamma", "constant", "ramp", "trace")


@click.command("bench", short_help="Open-loop load against a gateway or engine, with a report.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    required=True,
    metavar="[NAME=]URL",
    help="Gateway or engine to load; give it several times to compare under the same arrivals.",
)
@click.option("--engine-metrics", metavar="URL", help="Engine whose /metrics tell the busy share and batch occupancy.")
@click.option("--arrivals", type=click.Choice(ARRIVALS), default="poisson", show_default=True)
@click.option("--rate", type=float, metavar="R", help="Requests per second (mean).")
@click.option("--load", "load_factor", type=float, metavar="X", help="Rate as a multiple of --capacity.")
@click.option("--capacity", type=float, metavar="C", help="Requests per second that the target can serve.")
@click.option("--duration", "duration_s", type=float, default=30.0, show_default=True, metavar="S", help="Seconds.")
@click.option("--warm-up-s", type=float, default=0.0, metavar="S", help="Seconds of load before it that do not count.")
@click.option("--cv", type=float, default=3.0, show_default=True, help="gamma: coefficient of variation of the gaps.")
@click.option("--clump", type=int, metavar="N", help="bursty: requests per clump; without it MMPP-2 with ratio 5.")
@click.option("--rate-to", type=float, metavar="R", help="ramp: rate at its end (default: 3 times --rate).")
@click.option(
    "--trace", metavar="NAME|FILE", help="trace: one that ships (docs/traces.md), or a CSV or JSONL log, plain or gzip."
)
@click.option("--speed", type=float, default=1.0, show_default=True, metavar="X", help="trace: how much faster.")
@click.option("--model", metavar="M", help="Model name in the requests (default: the first that the target lists).")
@click.option("--route", type=click.Choice(("chat", "completions", "embeddings")), default="chat", show_default=True)
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option("--prompt-tokens", default="32", show_default=True, metavar="N|A-B|~M/CV", help="Length of prompts.")
@click.option("--output-tokens", default="32", show_default=True, metavar="N|A-B|~M/CV", help="Length of answers.")
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="Ask for exactly the output length (vLLM's field).")
@click.option(
    "--key", "keys", multiple=True, metavar="[LABEL[*WEIGHT]=]SECRET", help="API key; repeat for more callers."
)
@click.option("--priority", metavar="P", help="Value of x-forebay-priority.")
@click.option("--deadline-ms", type=int, metavar="MS", help="Value of x-forebay-deadline-ms.")
@click.option(
    "--client",
    type=click.Choice(CLIENTS),
    default="none",
    show_default=True,
    help="What refused callers do: retry as the OpenAI SDK (with retry tickets sent back), at once (naive), or not.",
)
@click.option("--patience-s", type=float, metavar="S", help="Callers hang up after this long.")
@click.option("--ttft-ms", type=float, metavar="MS", help="Objective: first token within.")
@click.option("--latency-ms", type=float, metavar="MS", help="Objective: whole answer within.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--processes", type=int, default=1, show_default=True, help="Generator processes (one per 2,000 req/s).")
@json_file()
@html_file()
@click.option(
    "--records",
    "records_path",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep the record of every request, one JSON-lines file per target.",
)
def command(
    targets: tuple[str, ...],
    engine_metrics: str | None,
    prompt_tokens: str,
    output_tokens: str,
    route: str,
    model: str | None,
    stream: bool,
    ignore_eos: bool,
    keys: tuple[str, ...],
    priority: str | None,
    deadline_ms: int | None,
    client: str,
    patience_s: float | None,
    ttft_ms: float | None,
    latency_ms: float | None,
    seed: int,
    processes: int,
    json_path: Path | None,
    html_path: Path | None,
    records_path: Path | None,
    **load_options: object,
) -> None:
    """Sends requests at times fixed before the run, whatever the target does, and measures from those times.

    \b
    forebay bench --target http://127.0.0.1:8080 --model llama --rate 20 --html report.html
    forebay bench --target http://127.0.0.1:8080 --load 2 --capacity 12 --arrivals bursty --client sdk
    forebay bench --target direct=http://127.0.0.1:8000 --target gated=http://127.0.0.1:8080 --rate 20
    """
    load = Load(**load_options)  # type: ignore[arg-type]
    callers = parse_keys(keys)
    workload = Workload(
        route=route,  # type: ignore[arg-type]
        model=model or "",
        stream=stream,
        prompt_tokens=Sizes.parse(prompt_tokens),
        output_tokens=Sizes.parse(output_tokens),
        keys=callers,
        priority=priority,
        deadline_ms=deadline_ms,
        ignore_eos=ignore_eos,
    )
    plans = [
        plan_for(
            target,
            load,
            workload,
            engine_metrics=engine_metrics,
            client=client,
            patience_s=patience_s,
            objective=Objective(ttft_ms, latency_ms),
            seed=seed,
            processes=processes,
        )
        for target in targets
    ]
    if model is None:
        plans = [replace(plan, workload=replace(workload, model=_model_of(plan))) for plan in plans]
    to_stdout, written = is_stdout(json_path), writable(json_path, html_path)
    end_in_order()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as scratch:
        runs = _run_all(plans, records_path or Path(scratch), console, quiet=to_stdout)
    results = Results(environment(), [summarise(run) for run in runs])
    publish(
        results,
        runs,
        title=f"Load test of {', '.join(plan.header.mode for plan in plans)}",
        summary=[f"{plans[0].header.workload}."],
        json_path=None if to_stdout else json_path,
        html_path=html_path,
    )
    if to_stdout:
        click.echo(results.to_json().decode(), nl=False)
    else:
        print_comparison(Console(), results.runs)
        say_written(written)
    if all(run.counts.failed == run.counts.offered for run in results.runs):
        first = next((record.error for run in runs for record in run.requests if record.error), "no answer")
        raise UsageError(f"no request was answered: {first}")


def _model_of(plan: Plan) -> str:
    keys = plan.workload.keys
    return first_model(plan.target, keys[0].secret if keys else "")


def _run_all(plans: list[Plan], folder: Path, console: Console, *, quiet: bool) -> list[RunRecords]:
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for number, plan in enumerate(plans, start=1):
        duration_s = plan.header.phases[-1].to_s
        with LiveLine(console, plan.header.mode, duration_s, quiet=quiet) as line:
            path = folder / f"{number}.jsonl"
            runs.append(
                attack(plan, path, lambda now: line.update(now.elapsed_s, now.sent, now.in_flight, now.outcomes))
            )
    return runs
