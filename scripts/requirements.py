"""Prints a dependency group of pyproject.toml, one requirement a line: pip before 25.1 knows no --group."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

GROUPS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["dependency-groups"]


def requirements(group: str) -> Iterator[str]:
    """Those of the group and of the groups that it includes."""
    for entry in GROUPS[group]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from requirements(entry["include-group"])


print("\n".join(requirements(sys.argv[1])))
