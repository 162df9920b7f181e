"""Arrivals from a recorded trace: one that ships with Forebay, or a file of the user's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Literal

import msgspec

from forebay.errors import UsageError
from forebay.workload.arrival import NS_PER_S, Arrival
from forebay.workload.tracefile import Row, read_rows

SPAN_MAX_S = 1000 * 86_400.0
"""A trace that spans more is one whose times are not what they seem."""

SPEED_LEAST, SPEED_MOST = 1e-4, 1e4


class TraceInfo(msgspec.Struct, frozen=True):
    """A trace that ships: what it is, and what it offers on average.

    `keys` and `sessions` tell whether requests name their caller and their conversation. `grid_s`: its times are
    multiples of so many seconds; replay it with as much jitter. `duration_s` is None for one that has sizes only.
    """

    name: str
    title: str
    licence: str
    requests: int
    duration_s: float | None
    keys: bool
    sessions: bool
    grid_s: float
    prompt_tokens_mean: float
    output_tokens_mean: float

    @property
    def rate(self) -> float | None:
        """Requests per second on average."""
        return None if self.duration_s is None else self.requests / self.duration_s

    @property
    def path(self) -> Path:
        return shipped_folder() / f"{self.name}.csv.gz"


def shipped_folder() -> Path:
    """Where the shipped traces and tables lie."""
    return Path(str(files("forebay"))) / "data" / "traces"


@cache
def shipped() -> Mapping[str, TraceInfo]:
    """The traces that ship, by name."""
    entries = msgspec.json.decode((shipped_folder() / "index.json").read_bytes(), type=list[TraceInfo])
    return MappingProxyType({entry.name: entry for entry in entries})


def find_trace(name_or_path: str | Path) -> Path:
    """The file of a shipped trace, by name, or the path itself. Raises UsageError when there is neither."""
    name = str(name_or_path)
    if name in shipped():
        return shipped()[name].path
    path = Path(name_or_path)
    if not path.exists():
        close = get_close_matches(name, shipped(), 1)
        advice = f"is {close[0]} meant?" if close else f"shipped are {', '.join(shipped())}"
        raise UsageError(f"{name}: no such file, and no shipped trace of that name: {advice}")
    return path


def load_trace(
    name_or_path: str | Path,
    *,
    speed: float = 1.0,
    start_s: float = 0.0,
    duration_s: float | None = None,
    thin: float = 1.0,
    thin_by: Literal["request", "key"] = "request",
    jitter_s: float = 0.0,
    seed: int = 0,
) -> list[Arrival]:
    """Arrivals of a shipped trace or a file, in time order. Rows may come in any order: logs are written at the end.

    `start_s` skips seconds of the recording; time 0 is there, or at the first request. `thin` keeps each request, or
    each key with all its requests, with that probability. `jitter_s` moves each request by up to so many seconds of the
    recording, for times that lie on a grid. Then `speed` divides all times, and `duration_s` bounds the replay.
    Raises UsageError when the file cannot be used, a number makes no sense, or no request is left.
    """
    _check(speed, start_s, duration_s, thin, jitter_s)
    path = find_trace(name_or_path)
    rows = _timed(read_rows(path), path)
    zero = min(row.at for row in rows) + start_s
    if jitter_s:
        chance = Random(f"{seed}/trace/jitter")
        rows = [row._replace(at=row.at + chance.random() * jitter_s) for row in rows]
    rows.sort(key=_at)
    if thin < 1.0:
        rows = _thinned(rows, thin, thin_by, seed)
    scale = NS_PER_S / speed
    end_ns = math.inf if duration_s is None else duration_s * NS_PER_S
    arrivals = [
        Arrival(at_ns, "trace", row.prompt_tokens, row.output_tokens, row.key, row.session, row.prefix_tokens)
        for row in rows
        if 0 <= (at_ns := round((row.at - zero) * scale)) < end_ns
    ]
    if not arrivals:
        raise UsageError(
            f"{path}: no request is left of {len(rows)}: it spans {rows[-1].at - rows[0].at:g} s; "
            "ask for an earlier start, a longer stretch, or less thinning"
            if rows
            else f"{path}: thinning by {thin:g} leaves no request"
        )
    return arrivals


def sizes_of(name_or_path: str | Path) -> list[tuple[int, int]]:
    """`(prompt, output)` tokens of every request of a trace, for drawing from; times are not needed."""
    return [(row.prompt_tokens, row.output_tokens) for row in read_rows(find_trace(name_or_path))]


def _at(row: Row) -> float:
    return row.at


def _check(speed: float, start_s: float, duration_s: float | None, thin: float, jitter_s: float) -> None:
    if not SPEED_LEAST <= speed <= SPEED_MOST:
        raise UsageError(f"a trace cannot be replayed {speed:g} times as fast: {SPEED_LEAST:g} to {SPEED_MOST:g}")
    if not 0 < thin <= 1:
        raise UsageError(f"thinning keeps a share of the requests, above 0 and up to 1, not {thin:g}")
    for name, value in (("start", start_s), ("jitter", jitter_s), ("duration", duration_s or 0.0)):
        if not 0 <= value <= SPAN_MAX_S or (name == "duration" and duration_s is not None and value == 0):
            raise UsageError(f"a {name} of {value:g} s makes no sense")


def _timed(rows: list[Row], path: Path) -> list[Row]:
    if any(math.isnan(row.at) for row in rows):
        raise UsageError(f"{path}: it has sizes but no times: give a rate, and draw sizes from it")
    first, last = min(rows, key=_at), max(rows, key=_at)
    if last.at - first.at > SPAN_MAX_S:
        raise UsageError(
            f"{path}: line {last.line} is {(last.at - first.at) / 86_400:.0f} days after line {first.line}: "
            "are the times in one unit, and seconds or ms?"
        )
    return rows


def _thinned(rows: list[Row], thin: float, by: Literal["request", "key"], seed: int) -> list[Row]:
    if by == "request":
        chance = Random(f"{seed}/trace/thin").random
        return [row for row in rows if chance() < thin]
    kept = {key: Random(f"{seed}/trace/thin/{key}").random() < thin for key in {row.key for row in rows}}
    return [row for row in rows if kept[row.key]]
