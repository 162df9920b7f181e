"""`forebay advise`: questions or flags in; a mode, a preset, the reasons, and a commented config out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forebay.advise.answers import CLIENTS, ENGINES, Answers
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.advise.recommend import Recommendation
    from forebay.advise.trial import Trial

POSITIVE = click.FloatRange(min=0, min_open=True)

QUESTIONS: dict[str, tuple[str, Any]] = {
    "clients": (
        "Who calls? (internal services, the public, customers who pay, offline jobs, people who wait)",
        CLIENTS,
    ),
    "engine": ("Which engine?", ENGINES),
    "bounded": ("Is the number of senders known, and do they wait when they are made to?", bool),
    "may_drop": ("May a request be refused, and be sent again later?", bool),
    "ttft_ms": ("Time to the first token that callers expect, in ms", float),
    "costs_vary": ("Do requests differ in cost by ten times and more?", bool),
    "bursty": ("Do requests come in bursts far above their mean rate?", bool),
    "gpu": ("GPU (such as h100 or l4; empty if not listed)", str),
    "rate_per_s": ("Requests per second at the peak (empty if not known)", float),
}
"""What is asked in the terminal, in order; anything else is a flag."""


@click.command(name="advise", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--clients", type=click.Choice(CLIENTS), help="Who calls. Asked for in a terminal when left out.")
@click.option("--bounded/--not-bounded", default=None, help="Are the senders known in number, and do they wait?")
@click.option("--ttft-ms", type=POSITIVE, help="Time to first token (encoders: to the answer) that callers expect.")
@click.option("--tpot-ms", type=POSITIVE, help="Time per output token that callers expect.")
@click.option("--may-drop/--never-drop", default=None, help="May a request be refused, and be sent again later?")
@click.option("--costs-vary/--costs-alike", default=None, help="Do requests differ in cost by ten times and more?")
@click.option("--sells/--sells-not", default=None, help="Is the capacity sold, with an allowance for each customer?")
@click.option("--bursty/--even", "bursty", default=None, help="Do requests come in bursts far above their mean?")
@click.option("--engine", type=click.Choice(ENGINES), help="What serves the model.  [default: vllm]")
@click.option("--upstream", "upstreams", multiple=True, metavar="URL", help="Base URL of an engine; may be repeated.")
@click.option("--replicas", type=click.IntRange(1, 1000), default=1, show_default=True, help="Engines, without URLs.")
@click.option(
    "--gpu", metavar="NAME", help="Part of a calibrated GPU's name (forebay engine simulated --list-profiles)."
)
@click.option("--model", metavar="NAME", help="Part of a calibrated model's name.")
@click.option("--rate", "rate_per_s", type=POSITIVE, help="Requests per second at the peak.")
@click.option("--prompt-tokens", type=click.IntRange(1, 1_000_000), help="Tokens of a prompt, on average.")
@click.option("--output-tokens", type=click.IntRange(1, 1_000_000), help="Tokens of an answer, on average.")
@click.option("--customers", type=click.IntRange(1), help="Keys among which the capacity is shared.")
@click.option("--simulate", is_flag=True, help="Try the choice beside the others on the nearest trace, simulated.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the simulation.")
@click.option("--write", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write the config here.")
@click.option("--force", is_flag=True, help="Write over a file that exists.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, and ask nothing.")
def command(path: Path | None, force: bool, as_json: bool, simulate: bool, seed: int, **given: Any) -> None:
    """Recommend a mode, a preset and a config for a service, with the reasons.

    With no --clients, and in a terminal, it asks.

    \b
    forebay advise --clients realtime --gpu h100 --model 8b --rate 30 --ttft-ms 500 --write forebay.toml
    forebay advise --clients internal --engine encoder --gpu a100 --model bert-large --simulate
    """
    from forebay.advise.document import config_file
    from forebay.advise.recommend import recommend
    from forebay.config.load import loads

    answers = _answers(given, may_ask=not as_json)
    advice = recommend(answers)
    text = config_file(answers, advice)
    warnings = loads(text, name=str(path or "the config"), environment={}).warnings
    trial = _trial(answers, seed, quiet=as_json) if simulate else None
    if path is not None:
        _write(path, text, force=force)
    if as_json:
        click.echo(json.dumps(_plain(advice, text, warnings, trial), indent=2))
        return
    _print(advice, trial)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    if path is None:
        click.echo(f"\n{text}", nl=False)
    else:
        click.echo(f"\nwritten: {path}\ncheck it: forebay config check {path}\nrun it: forebay serve --config {path}")


def _answers(given: dict[str, Any], *, may_ask: bool) -> Answers:
    """From flags; and from the person at the terminal, when the first question is not answered by a flag."""
    said = {name: value for name, value in given.items() if value is not None}
    if "clients" not in said:
        if not (may_ask and in_terminal()):
            raise UsageError(f"say who calls: --clients {'|'.join(CLIENTS)} (in a terminal, without --json, I ask)")
        for name, (question, kind) in QUESTIONS.items():
            if name not in said:
                said[name] = _ask(question, kind)
    return Answers(**{name: value for name, value in said.items() if value is not None})


def in_terminal() -> bool:
    """Is there somebody who can be asked?"""
    return sys.stdin.isatty()


def _ask(question: str, kind: Any) -> Any:
    """The answer, or None for an empty one."""
    if isinstance(kind, tuple):
        return click.prompt(question, type=click.Choice(kind), default=None if kind is CLIENTS else kind[0])
    if kind is bool:
        answer = click.prompt(question, type=click.Choice(["yes", "no", "unknown"]), default="unknown")
        return {"yes": True, "no": False}.get(answer)
    while True:
        text = click.prompt(question, default="", show_default=False).strip()
        if kind is str or not text:
            return text or None
        try:
            return POSITIVE(text)
        except click.BadParameter as error:
            click.echo(f"{error.message} Give a number, or nothing.")


def _trial(answers: Answers, seed: int, *, quiet: bool) -> Trial:
    from forebay.advise.trial import try_out

    return try_out(
        answers, seed=seed, progress=lambda name: None if quiet else click.echo(f"simulating {name} …", err=True)
    )


def _write(path: Path, text: str, *, force: bool) -> None:
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists: name another file, or add --force to write over it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def _plain(advice: Recommendation, text: str, warnings: tuple[str, ...], trial: Trial | None) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = {**advice.plain(), "config": text, "warnings": list(warnings)}
    if trial is not None:
        plain["simulation"] = {
            "load": trial.load,
            "runs": msgspec.to_builtins(trial.runs),
            "verdict": trial.verdict,
        }
    return plain


def _print(advice: Recommendation, trial: Trial | None) -> None:
    from rich.console import Console

    from forebay.report.table import print_comparison

    console = Console(highlight=False)
    width = min(console.width, 110)
    console.print(f"[bold]Begin with {advice.mode.value}[/bold] (preset {advice.preset}).", width=width)
    for title, lines in (
        ("Why", advice.reasons),
        ("Mind", advice.cautions),
        ("Assumed", advice.assumed),
        ("Add later", [f"{one.what}, {one.when} ({one.setting})" for one in advice.later if one.available]),
        ("Not in this version yet", [f"{one.what}, {one.when}" for one in advice.later if not one.available]),
    ):
        if lines:
            console.print(f"\n[bold]{title}[/bold]")
        for line in lines:
            console.print(f"- {line}", width=width, markup=False)
    if trial is not None:
        console.print(f"\n[bold]Simulated[/bold]: {trial.load}\n", width=width)
        print_comparison(console, trial.runs)
        console.print(f"\n{trial.verdict}", width=width, markup=False)
