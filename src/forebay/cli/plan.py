"""`forebay plan`: the cheapest GPUs and the configuration that keep an objective, before anything is rented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.status import Status

from forebay.cli.options import html_file, is_stdout, json_file, say_written, writable
from forebay.engines.simulated.profile import EncoderProfile
from forebay.errors import UsageError
from forebay.plan.assemble import make_plan
from forebay.plan.candidates import Candidate, candidates
from forebay.plan.objective import Objective, objective
from forebay.plan.page import render_plan
from forebay.plan.planner import Question
from forebay.plan.prices import PriceBook, price_book
from forebay.plan.result import Plan
from forebay.plan.show import print_plan
from forebay.plan.traffic import Traffic, token_cost, workload_of
from forebay.plan.trials import PlanInterruptedError, Simulator, Trial, Trials, store_folder
from forebay.sim.scenario import Scenario
from forebay.sim.sweep import SweepInterruptedError

WINDOW_MIN_MOST = 24 * 60.0
GPUS_MOST = 100_000
PROCESSES_MOST = 1024


@click.command("plan", short_help="The cheapest GPUs and configuration that keep an objective.")
@click.option("--trace", metavar="NAME|FILE", help="Traffic: a shipped trace, or a CSV or JSONL file of your own.")
@click.option("--speed", type=float, default=1.0, show_default=True, metavar="X", help="With --trace: so much faster.")
@click.option("--rate", type=float, metavar="R", help="Traffic: requests per second, instead of a trace.")
@click.option("--prompt-tokens", metavar="N|A-B|~M/CV", help="With --rate: lengths of prompts.")
@click.option("--output-tokens", metavar="N|A-B|~M/CV", help="With --rate: lengths of answers.")
@click.option(
    "--arrivals",
    type=click.Choice(("poisson", "constant", "gamma", "bursty")),
    help="With --rate: how they come (default: poisson).",
)
@click.option("--cv", type=float, metavar="CV", help="With --arrivals gamma: variation of the gaps (default: 3).")
@click.option("--model", required=True, metavar="M", help="Model, such as llama-3.1-8b.")
@click.option("--dtype", metavar="D", help="Number format of its weights (default: the most exact that is calibrated).")
@click.option(
    "--gpu", "gpus", multiple=True, metavar="G", help="GPU to consider; repeat (default: all that are known)."
)
@click.option(
    "--prices", type=click.Path(path_type=Path), metavar="FILE", help="CSV of prices instead of the shipped one."
)
@click.option("--price", "given", multiple=True, metavar="GPU=USD", help="Price of a GPU per hour; repeat.")
@click.option("--provider", metavar="P", help="Use only the quotes of one provider.")
@click.option("--ttft-ms", type=float, metavar="MS", help="Objective: first token within.")
@click.option("--tpot-ms", type=float, metavar="MS", help="Objective: time per further token, at most.")
@click.option("--latency-ms", type=float, metavar="MS", help="Objective: whole answer within.")
@click.option(
    "--attainment", type=float, default=99.0, show_default=True, metavar="PCT", help="Admitted requests that keep it."
)
@click.option(
    "--max-shed", type=float, default=1.0, show_default=True, metavar="PCT", help="Requests that may be refused."
)
@click.option(
    "--window-min",
    type=float,
    default=10.0,
    show_default=True,
    metavar="MIN",
    help="Simulate the busiest stretch of this length; 0 takes all of a trace.",
)
@click.option("--max-gpus", type=int, default=1024, show_default=True, metavar="N", help="Most GPUs to consider.")
@click.option(
    "--client",
    "retry",
    type=click.Choice(("none", "sdk", "sdk-tickets", "sdk-2025", "naive")),
    default="none",
    show_default=True,
    help="What refused callers do: retry as the OpenAI SDK, at once (naive), or not.",
)
@click.option("--compare/--no-compare", default=True, help="Also what the other two modes would cost.")
@click.option("--vary/--no-vary", default=True, help="Also more and less traffic.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--processes", type=int, metavar="N", help="Simulations at once (default: one per core).")
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keeps finished simulations, so that an interrupted plan goes on (default: the user's cache).",
)
@click.option("--fresh", is_flag=True, help="Neither use nor keep finished simulations.")
@json_file("Write the plan as JSON; `-` prints it instead of the tables.")
@html_file()
@click.option(
    "--write-config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the configuration, ready but for the engines' addresses.",
)
def command(json_path: Path | None, html_path: Path | None, config_path: Path | None, **options: Any) -> None:
    """Simulates the gateway's own policy on calibrated GPUs to find the cheapest fleet that keeps an objective.

    \b
    forebay plan --trace azure_llm_2023_conv --model llama-3.1-8b --ttft-ms 1000 --tpot-ms 50
    forebay plan --rate 20 --prompt-tokens ~900/1 --output-tokens ~200/1.2 --model llama-3.1-8b --ttft-ms 800 \\
        --gpu h100 --price h100-80g=2.40 --html plan.html --write-config forebay.toml

    Exit status 2, with the nearest objective that can be met, when no fleet can keep it.
    """
    question, book, notes = _question(options)
    to_stdout, written = is_stdout(json_path), writable(json_path, html_path, config_path)
    plan = _planned(question, book, notes, options)
    try:
        if json_path is not None and not to_stdout:
            json_path.write_bytes(plan.to_json())
        if html_path is not None:
            html_path.write_text(render_plan(plan), encoding="utf-8")
        if config_path is not None:
            config_path.write_text(plan.config, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be written: {error.strerror or error}") from None
    if to_stdout:
        click.echo(plan.to_json().decode(), nl=False)
        return
    print_plan(Console(), plan)
    say_written(written)


def _question(options: dict[str, Any]) -> tuple[Question, PriceBook, list[str]]:
    """What is asked, checked. Raises UsageError that names the flag."""
    _check_numbers(options)
    aim: Objective = objective(
        ttft_ms=options["ttft_ms"],
        tpot_ms=options["tpot_ms"],
        latency_ms=options["latency_ms"],
        attainment_percent=options["attainment"],
        max_shed_percent=options["max_shed"],
    )
    book = price_book(options["prices"], options["given"], options["provider"])
    found, notes = candidates(book, model=options["model"], dtype=options["dtype"], gpus=options["gpus"])
    notes += _idle_prices(book, found)
    if isinstance(found[0].profile, EncoderProfile) and aim.tpot_ms is not None:
        raise UsageError(f"--tpot-ms: {options['model']} answers at once, without further tokens; use --latency-ms")
    window_s = 60 * options["window_min"]
    workload, name = workload_of(
        trace=options["trace"],
        rate=options["rate"],
        speed=options["speed"],
        prompt_tokens=options["prompt_tokens"],
        output_tokens=options["output_tokens"],
        arrivals=options["arrivals"],
        cv=options["cv"],
        window_s=window_s,
    )
    traffic = Traffic(workload, name=name, seed=options["seed"], window_s=window_s, cost=token_cost(found[0].profile))
    question = Question(
        candidates=found,
        traffic=traffic,
        objective=aim,
        most_gpus=options["max_gpus"],
        compare=options["compare"],
        vary=options["vary"],
        retry=options["retry"],
        seed=options["seed"],
    )
    return question, book, notes


def _check_numbers(options: dict[str, Any]) -> None:
    if options["fresh"] and options["state"] is not None:
        raise UsageError("--fresh keeps nothing, and --state says where to keep it: give one of the two")
    if not 1 <= options["max_gpus"] <= GPUS_MOST:
        raise UsageError(f"--max-gpus {options['max_gpus']}: a number within 1 and {GPUS_MOST} is asked")
    if options["processes"] is not None and not 1 <= options["processes"] <= PROCESSES_MOST:
        raise UsageError(f"--processes {options['processes']}: a number within 1 and {PROCESSES_MOST} is asked")
    if not 0 <= options["window_min"] <= WINDOW_MIN_MOST:
        raise UsageError(f"--window-min {options['window_min']:g}: minutes from 0 to {WINDOW_MIN_MOST:.0f} are asked")
    if options["window_min"] == 0 and options["rate"] is not None:
        raise UsageError("--window-min 0 means all of a trace; with --rate say how many minutes")


def _idle_prices(book: PriceBook, found: list[Candidate]) -> list[str]:
    """Prices that were given and have no effect, which is more likely a slip than a wish."""
    used = {book.given_for(candidate.gpu) for candidate in found}
    return [f"--price {gpu} has no effect: it is not among the candidates." for gpu in book.given if gpu not in used]


def _planned(question: Question, book: PriceBook, notes: list[str], options: dict[str, Any]) -> Plan:
    traffic, aim = question.traffic.figures, question.objective
    parts = [traffic.name, traffic.content, options["model"], repr(aim), str(question.seed), question.retry]
    store = None if options["fresh"] else store_folder(options["state"], parts)
    console = Console(stderr=True)
    with console.status("planning") as status:
        line = _Line(status)
        trials = Trials(Simulator(options["processes"], store), line.answered)
        try:
            return make_plan(question, trials, book, notes=notes, say=line.say)
        except (KeyboardInterrupt, SweepInterruptedError):
            kept = (
                "nothing is kept" if store is None else f"they are kept in {store}: the same command goes on from there"
            )
            raise PlanInterruptedError(f"interrupted after {trials.ran + trials.reused} simulations; {kept}") from None


class _Line:
    """The progress line: what is looked at, how many simulations are done, the last one's figures."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._what = ""
        self._count = 0

    def say(self, what: str) -> None:
        self._what = what
        self._status.update(f"{what}: {self._count} simulations")

    def answered(self, scenario: Scenario, trial: Trial) -> None:
        self._count += 1
        last = (
            f"{scenario.engines.count} engines {100 * trial.attainment:.1f} % in time, {100 * trial.shed:.1f} % refused"
        )
        self._status.update(f"{self._what}: {self._count} simulations; {last}")
