"""Arrivals from a recorded trace: a CSV file, plain or gzip, one line per request.

Columns, by header name: a time (`timestamp`), prompt tokens (`prompt_tokens`) and output tokens (`output_tokens`);
the names of the Azure and BurstGPT traces are understood too. A time is seconds or an ISO date and time.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TextIO

from forebay.errors import UsageError
from forebay.workload.arrival import NS_PER_S, Arrival

TIME_COLUMNS = ("timestamp", "time", "arrival_s", "arrived_at")
PROMPT_COLUMNS = ("prompt_tokens", "contexttokens", "request tokens", "request_tokens", "input_tokens", "input_length")
OUTPUT_COLUMNS = ("output_tokens", "generatedtokens", "response tokens", "response_tokens", "output_length")


def read_trace(path: Path, speed: float = 1.0, duration_s: float | None = None) -> list[Arrival]:
    """Arrivals of the trace in time order, the first at 0, `speed` times as fast as recorded.

    Raises UsageError with file, line and reason when the file cannot be used.
    """
    rows = list(_rows(path))
    if not rows:
        raise UsageError(f"{path}: the trace holds no request")
    rows.sort(key=lambda row: row[0])
    first = rows[0][0]
    arrivals = [Arrival(int((at - first) / speed * NS_PER_S), "trace", prompt, output) for at, prompt, output in rows]
    if duration_s is not None:
        arrivals = [arrival for arrival in arrivals if arrival.at_ns < duration_s * NS_PER_S]
    return arrivals


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open("r", encoding="utf-8-sig", newline="")


def _rows(path: Path) -> Iterator[tuple[float, int, int]]:
    line = 1
    try:
        with _open(path) as file:
            reader = csv.reader(file)
            header = next(reader, [])
            columns = _columns(path, header)
            for line, row in enumerate(reader, start=2):  # noqa: B007 - an error below names it
                if row:
                    yield _row(row, columns)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read as a trace: {error.strerror or error}") from None
    except (ValueError, IndexError, EOFError, csv.Error) as error:
        raise UsageError(f"{path}, line {line}: {error}") from None


def _columns(path: Path, header: list[str]) -> tuple[int, int, int]:
    names = [name.strip().lower() for name in header]
    found = []
    for wanted in (TIME_COLUMNS, PROMPT_COLUMNS, OUTPUT_COLUMNS):
        index = next((names.index(name) for name in wanted if name in names), None)
        if index is None:
            shown = ", ".join(header) or "nothing"
            raise UsageError(f"{path}, line 1: no column `{wanted[0]}` (found: {shown})")
        found.append(index)
    return found[0], found[1], found[2]


def _row(row: list[str], columns: tuple[int, int, int]) -> tuple[float, int, int]:
    at, prompt, output = (row[index].strip() for index in columns)
    # A trace may carry requests that produced nothing; the load asks for at least one token of each.
    return _seconds(at), max(1, int(float(prompt))), max(1, int(float(output)))


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ValueError(f"the time {text!r} is neither seconds nor an ISO date") from None
