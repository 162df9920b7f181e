"""Options that several commands have, and how options are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]

_FILE = click.Path(path_type=Path, dir_okay=False)
_FILE_OR_STDOUT = click.Path(path_type=Path, dir_okay=False, allow_dash=True)


def together(*decorators: Decorate) -> Decorate:
    """One decorator in place of several; help shows the options in this order."""

    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorate in reversed(decorators):
            function = decorate(function)
        return function

    return apply


def json_file(written: str = "Write the results as JSON; `-` prints them instead of the table.") -> Decorate:
    """--json FILE, as `json_path`."""
    return click.option("--json", "json_path", type=_FILE_OR_STDOUT, metavar="FILE", help=written)


def html_file(written: str = "Write one self-contained page with plots.") -> Decorate:
    """--html FILE, as `html_path`."""
    return click.option("--html", "html_path", type=_FILE, metavar="FILE", help=written)


json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def is_stdout(path: Path | None) -> bool:
    """Was `-` given, so that nothing else may be printed there?"""
    return path is not None and str(path) == "-"


def writable(*paths: Path | None) -> list[Path]:
    """The files among what `--json` and its like were given, checked before hours of work end in them.

    Raises UsageError for one that cannot be written.
    """
    from forebay.report.publish import check_writable

    files = [path for path in paths if path is not None and not is_stdout(path)]
    for path in files:
        check_writable(path)
    return files


def say_written(files: Iterable[Path]) -> None:
    """A line for each."""
    for path in files:
        click.echo(f"written: {path}")
