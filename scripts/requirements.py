"""Prints a dependency group of pyproject.toml, one requirement a line: pip before 25.1 knows no --group."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
print("\n".join(project["dependency-groups"][sys.argv[1]]))
