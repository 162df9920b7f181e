"""Writes the files of a finished comparison, with a plain error when a path cannot be written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forebay.errors import UsageError
from forebay.report.page import render_page
from forebay.report.records import RunRecords
from forebay.report.results import Results


def check_writable(path: Path) -> None:
    """Raises UsageError before a long run, not after it, when `path` cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None


def publish(
    results: Results,
    runs: Sequence[RunRecords],
    *,
    title: str,
    summary: Sequence[str] = (),
    json_path: Path | None = None,
    html_path: Path | None = None,
) -> None:
    """Writes the results as JSON, the page, or both."""
    try:
        if json_path is not None:
            json_path.write_bytes(results.to_json())
        if html_path is not None:
            html_path.write_text(render_page(title, summary, results, runs), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be written: {error.strerror or error}") from None
