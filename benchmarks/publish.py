"""What every benchmark is asked on the command line, and where its figures go: a results file, sections of a page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.peers import ROOT

DOCS: Final = ROOT / "docs"
RESULTS: Final = ROOT / "benchmarks" / "results"
_FILE: Final = click.Path(dir_okay=False, path_type=Path)

json_option = click.option("--json", "json_path", type=_FILE, help="Where results go.")
dry_option = click.option("--dry", is_flag=True, help="Print only: no results file, documentation left as it is.")
again_option = click.option(
    "--again", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Tables of these results."
)
processes_option = click.option("--processes", type=click.IntRange(1, 64), default=2, show_default=True)


def command(name: str, *words: object) -> str:
    """What gives these figures again."""
    return shlex.join(["python", "-m", f"benchmarks.{name}", *map(str, words)])


def command_of_seeds(name: str, seeds: int, usual: int, *words: object) -> str:
    """The same, of a benchmark that takes so many seeds; the usual number is not spelt out."""
    return command(name, *words, *(("--seeds", seeds) if seeds != usual else ()))


def write_results(name: str, result: Mapping[str, Any], path: Path | None = None) -> Path:
    """Write the figures to this file, or to the one of today under ``benchmarks/results``; which it was."""
    path = path or RESULTS / f"{name}-{datetime.now(UTC):%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return path


def write_sections(page: Path, sections: Mapping[str, str]) -> None:
    """Put each text between the markers of its name.

    Raises:
        ValueError: the page lacks the markers of one; it is left as it is.
    """
    text = page.read_text()
    for name, body in sections.items():
        text = with_section(text, name, body)
    page.write_text(text)


def with_section(text: str, name: str, body: str) -> str:
    """``text`` with what stands between the markers of ``name`` replaced by ``body``.

    Raises:
        ValueError: the markers are missing.
    """
    begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"the text holds no section between {begin.strip()!r} and {end!r}")
    return f"{before}{begin}\n{body}\n{end}{after}"
