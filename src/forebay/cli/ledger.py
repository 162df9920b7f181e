"""`forebay ledger`: the credits of a store, as they are kept, exported and proved."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from forebay.cli.options import json_flag
from forebay.cli.store import opened, store_options


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Credits: balances, history, export, and the proof that they add up.

    \b
    forebay ledger verify
    forebay ledger export --format csv > ledger.csv
    """


@command.command()
@store_options
@json_flag
def verify(store: str | None, config_file: str | None, as_json: bool) -> None:
    """Add everything up again. Exit status 1, with what does not add up, when the ledger is not clean."""
    from forebay.ledger.verify import verify as discrepancies

    with opened(store, config_file) as (database, _):
        found = discrepancies(database)
    if as_json:
        _print_json({"clean": not found, "discrepancies": found})
    elif not found:
        click.echo("the ledger adds up")
    for each in () if as_json else found:
        click.echo(f"{each.where}: {each.text}", err=True)
    if found:
        sys.exit(1)


@command.command()
@click.argument("key", required=False)
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most to show at once.")
@click.option("--before", type=click.IntRange(1), metavar="ID", help="Go on after a list that was cut.")
@store_options
@json_flag
def history(
    key: str | None, limit: int, before: int | None, store: str | None, config_file: str | None, as_json: bool
) -> None:
    """Transfers, the newest first: of one key (by id or name), or of all."""
    from forebay.ledger import statement

    with opened(store, config_file) as (database, _):
        found = statement.history(database, key=_id(database, key), before=before, limit=limit)
    if as_json:
        _print_json(found)
        return
    for each in found:
        at = datetime.fromtimestamp(each.at_ms / 1000, UTC)
        note = f"  {each.note}" if each.note else ""
        click.echo(
            f"{each.id:>8}  {at:%Y-%m-%d %H:%M:%S}  {each.key}  {each.kind:<8}{each.amount:>14}  {each.actor}{note}"
        )
    if len(found) == limit:
        click.echo(f"there may be more: forebay ledger history --before {found[-1].id}", err=True)


@command.command()
@click.option("--limit", type=click.IntRange(1, 1000), default=1000, show_default=True, help="Most to show at once.")
@click.option("--after", default="", metavar="ID", help="Go on after a list that was cut.")
@store_options
@json_flag
def balances(limit: int, after: str, store: str | None, config_file: str | None, as_json: bool) -> None:
    """The credit of every key that ever had some, in tokens."""
    from rich.console import Console
    from rich.table import Table

    from forebay.ledger import statement

    with opened(store, config_file) as (database, _):
        found = statement.balances(database, after=after, limit=limit)
    if as_json:
        _print_json(found)
        return
    table = Table(box=None, pad_edge=False)
    for title in ("KEY", "TOPPED UP", "AVAILABLE", "HELD", "SPENT", "DEBT"):
        table.add_column(title, justify="left" if title == "KEY" else "right", no_wrap=True)
    for each in found:
        table.add_row(each.key, *(str(n) for n in (each.topped_up, each.available, each.held, each.spent, each.debt)))
    Console(markup=False, highlight=False).print(table)
    if len(found) == limit:
        click.echo(f"there may be more: forebay ledger balances --after {found[-1].key}", err=True)


@command.command()
@click.argument("key", required=False)
@click.option("--format", "form", type=click.Choice(["csv", "json"]), default="json", show_default=True)
@store_options
def export(key: str | None, form: Any, store: str | None, config_file: str | None) -> None:
    """Every transfer with its entries, the oldest first, to stdout: of one key, or of all."""
    from forebay.ledger import statement

    with opened(store, config_file) as (database, _):
        for piece in statement.export(database, form, key=_id(database, key)):
            click.echo(piece, nl=False)


def _id(database: Any, key: str | None) -> str | None:
    """The id of the key that is meant. A key that is gone is still in the ledger, by its id."""
    from forebay.ledger.key import NotFoundError
    from forebay.ledger.keys import KeyStore
    from forebay.ledger.statement import history as transfers

    if key is None:
        return None
    try:
        return KeyStore(database).show(key).id
    except NotFoundError:
        if transfers(database, key=key, limit=1):
            return key
        raise


def _print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
