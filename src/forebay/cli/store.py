"""Options and outputs that the commands on a store share."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import click

from forebay.cli.options import together
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.ledger.database import Database
    from forebay.ledger.key import Known


DEFAULT_STORE = "sqlite:///forebay.db"


class Opened(NamedTuple):
    """A store, and the names of the configuration that was given with it."""

    database: Database
    known: Known | None


store_options = together(
    click.option("--store", metavar="URL", help=f"Database of the keys.  [default: the config's, {DEFAULT_STORE}]"),
    click.option(
        "--config", "config_file", type=click.Path(dir_okay=False), metavar="FILE",
        help="Take [keys] store, classes and routes from this configuration.",
    ),
)  # fmt: skip


@contextmanager
def opened(store: str | None, config_file: str | None, *, make: bool = False) -> Iterator[Opened]:
    """The store that the options mean; `make`: make it if there is none. Raises ForebayError."""
    from forebay.config import load
    from forebay.ledger.database import open_store
    from forebay.ledger.key import known

    config = load(config_file).config
    url = store or config.keys.store or DEFAULT_STORE
    path = url.removeprefix("sqlite:///")
    if path != url and not make and not os.path.exists(path):
        raise UsageError(f"there is no store at {url}; name it with --store or --config, or make a key: it makes one")
    database = open_store(url)
    try:
        yield Opened(database, None if config_file is None else known(config))
    finally:
        database.close()


def actor() -> str:
    """Who runs the command, for the trail."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    return f"cli:{name}"
