"""`forebay config`: check a file, or show every setting."""

from __future__ import annotations

import json
import sys

import click

from forebay.config import Config, load
from forebay.config.render import default_file
from forebay.config.summary import derived, plain
from forebay.errors import ConfigError


@click.group()
def command() -> None:
    """Check a config file, or show the full default one."""


@command.command()
@click.argument("file", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def check(file: str, as_json: bool) -> None:
    """Validate FILE with the environment laid over it. Exit status 2 when it cannot be used."""
    try:
        config, warnings = load(file)
    except ConfigError as error:
        problems = str(error).splitlines()
        if as_json:
            click.echo(json.dumps({"ok": False, "errors": problems}, indent=2))
        else:
            for problem in problems:
                click.echo(problem, err=True)
        sys.exit(error.exit_code)
    figures = derived(config)
    if as_json:
        click.echo(json.dumps({"ok": True, "derived": figures, "warnings": warnings}, indent=2))
        return
    click.echo("OK")
    for name, value in figures.items():
        if name in ("engines", "classes"):
            continue
        click.echo(f"  {name} = {value}")
    for group in figures["classes"]:
        click.echo(
            f"  class {group['name']}: priority {group['priority']}, first token in {group['ttft_ms']:g} ms, "
            f"waits up to {group['wait_budget_ms']:g} ms, keeps {100 * group['floor_share']:g} % of the turns"
        )
    for engine in figures["engines"]:
        models = ", ".join(engine["models"])
        at = "at most" if engine["concurrency"] == "fixed" else f"at first ({engine['concurrency']})"
        click.echo(
            f"  engine {engine['name']} ({engine['kind']}): {len(engine['instances'])} instance(s), "
            f"{engine['concurrency_limit']} in flight {at}, models {models}"
        )
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print the defaults as JSON.")
def show(as_json: bool) -> None:
    """Print the full default config, every field with its reason and unit."""
    click.echo(json.dumps(plain(Config()), indent=2) if as_json else default_file(), nl=as_json)
