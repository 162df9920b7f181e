"""The HTML page of a comparison: a table, what became of the requests, and plots over time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import msgspec

from forebay.report.frame import fill, framed, static
from forebay.report.records import RunRecords
from forebay.report.results import Results, RunResult
from forebay.report.series import Series, last_event_s, series
from forebay.report.table import COLUMNS, LEGEND, cells, stretches


class _PagePhase(msgspec.Struct):
    name: str
    from_s: float
    to_s: float


class _PageRun(msgspec.Struct):
    mode: str
    series: Series


class _PageData(msgspec.Struct):
    runs: list[_PageRun]
    phases: list[_PagePhase]
    objective_ms: float | None
    results: Results


def render_page(title: str, summary: Sequence[str], results: Results, runs: Sequence[RunRecords]) -> str:
    """The page as text. `results.runs` and `runs` are the same runs in the same order; `summary` is plain text."""
    until_s = max(last_event_s(run) for run in runs)
    header = runs[0].header
    data = _PageData(
        runs=[_PageRun(run.header.mode, series(run, until_s)) for run in runs],
        phases=[_PagePhase(phase.name, phase.from_s, phase.to_s) for phase in header.phases],
        objective_ms=header.objective.latency_ms,
        results=results,
    )
    main = fill(
        static("report", "report.html"),
        {"TABLE": _table(results.runs), "LEGEND": escape(LEGEND), "OUTCOMES": _outcomes(results.runs)},
    )
    return framed(
        main,
        title=title,
        summary=summary,
        environment=_environment_line(results),
        data=data,
        script=static("report", "report.js"),
    )


def _environment_line(results: Results) -> str:
    environment = results.environment
    seeds = ", ".join(sorted({str(run.seed) for run in results.runs}))
    parts = [environment.machine, f"{environment.cpus} CPUs", f"commit {environment.commit}", environment.at]
    return " · ".join([*parts, f"seed {seeds}"])


def _table(runs: Sequence[RunResult]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    rows = []
    for name, figures in stretches(runs):
        group = []
        for index, (run, one) in enumerate(zip(runs, figures, strict=True)):
            first = f'<th class="stretch" rowspan="{len(runs)}">{escape(name)}</th>' if index == 0 else ""
            swatch = f'<i class="swatch run{index % 6}"></i>'
            values = "".join(f"<td>{escape(cell)}</td>" for cell in cells(one))
            group.append(f'<tr>{first}<th class="mode">{swatch}{escape(run.mode)}</th>{values}</tr>')
        rows.append(f"<tbody>{''.join(group)}</tbody>")
    return f"<table><thead><tr><th>load</th><th>mode</th>{head}</tr></thead>{''.join(rows)}</table>"


def _outcomes(runs: Sequence[RunResult]) -> str:
    lines = []
    for run in runs:
        counts = run.counts
        refused = ", ".join(f"{reason} {number}" for reason, number in run.shed_by_reason.items()) or "none"
        ended = f"{counts.completed} completed + {counts.shed} shed + {counts.evicted} evicted"
        lost = f"{counts.cancelled} cancelled + {counts.failed} failed"
        aside = f"refusals: {refused}; {run.policy}"
        lines.append(
            f"<li><b>{escape(run.mode)}</b>: {counts.offered} offered = {ended} + {lost} "
            f"<span>({escape(aside)})</span></li>"
        )
    return "".join(lines)
