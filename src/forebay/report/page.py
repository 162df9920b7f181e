"""One self-contained HTML page of a comparison: tables and plots, no request to anywhere, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

import msgspec

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
    return fill(
        static_text("report.html"),
        {
            "TITLE": escape(title),
            "SUMMARY": "".join(f"<p>{escape(line)}</p>" for line in summary),
            "ENVIRONMENT": escape(_environment_line(results)),
            "TABLE": _table(results.runs),
            "LEGEND": escape(LEGEND),
            "OUTCOMES": _outcomes(results.runs),
            "PAGE_JS": static_text("report.js"),
            "DATA": inline_json(data),
            **plot_pieces(),
        },
    )


def plot_pieces() -> dict[str, str]:
    """What every page with plots is made of: the style and uPlot, with its licence."""
    return {
        "UPLOT_LICENSE": static_text("uplot/LICENSE"),
        "UPLOT_CSS": static_text("uplot/uPlot.min.css"),
        "UPLOT_JS": static_text("uplot/uPlot.iife.min.js").partition("\n")[2],
        "PAGE_CSS": static_text("report.css"),
    }


def inline_json(data: object) -> str:
    """Data for a script element. No `<` in it: a name from a config file cannot end the element."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


def fill(template: str, pieces: dict[str, str]) -> str:
    """The template with every `{{NAME}}` replaced, in one pass: a piece that holds a marker is not expanded again."""
    head, *rest = template.split("{{")
    page = [head]
    for part in rest:
        name, _, tail = part.partition("}}")
        page += [pieces[name], tail]
    return "".join(page)


def static_text(name: str) -> str:
    """A file of the shared static folder, by its path there."""
    return files("forebay.report").joinpath("static", *name.split("/")).read_text(encoding="utf-8")


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
