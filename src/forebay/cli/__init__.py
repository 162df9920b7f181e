"""The command line: a thin click group; every command lives in its own file and is imported only when it is run."""

from __future__ import annotations

import sys

import click

from forebay.cli.lazy import LazyGroup
from forebay.errors import ForebayError

COMMANDS = {
    "serve": ("forebay.cli.serve", "Run the gateway."),
    "demo": ("forebay.cli.demo", "Drive a real model past capacity in all three modes and compare."),
    "bench": ("forebay.cli.bench", "Open-loop load against a gateway or engine, with a report."),
    "advise": ("forebay.cli.advise", "Recommend a mode, a preset and a config, with the reasons."),
    "plan": ("forebay.cli.plan", "The cheapest GPUs and configuration that keep an objective."),
    "sim": ("forebay.cli.sim", "Replay traffic through the policies on simulated GPUs."),
    "keys": ("forebay.cli.keys", "API keys: make, list, limit, credit and revoke them."),
    "ledger": ("forebay.cli.ledger", "Credits: balances, history, export, and the proof that they add up."),
    "engine": ("forebay.cli.engine", "Run a stand-alone OpenAI-style engine: embedded or simulated."),
    "config": ("forebay.cli.config", "Check a config file, or show the full default one."),
}


@click.group(cls=LazyGroup, parts=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="forebay", prog_name="forebay")
def group() -> None:
    """Forebay: overload control for GPU inference."""


def main() -> None:
    """Entry point: a user's mistake ends as one line on stderr and a non-zero exit, never a traceback."""
    try:
        group(prog_name="forebay", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ForebayError as error:
        click.echo(f"forebay: {error}", err=True)
        sys.exit(error.exit_code)
