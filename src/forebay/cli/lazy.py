"""Groups of commands that live in modules of their own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """Imports a command's module only when it is asked for, so that `--help` stays fast.

    `parts`: module and one line of help of each command, in the order of the help.
    """

    def __init__(self, *args: Any, parts: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._parts = parts

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self._parts)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self._parts:
            return None
        command: click.Command = import_module(self._parts[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._parts.items()])
