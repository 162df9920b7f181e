"""The HTML page of a plan: its tables, assumptions and configuration, and what other numbers of GPUs would do."""

from __future__ import annotations

from html import escape

import msgspec

from forebay.plan.result import Plan
from forebay.plan.show import candidate_rows, headline, mode_rows, sensitivity_rows
from forebay.report.frame import fill, framed, static


class _Count(msgspec.Struct):
    gpus: int
    per_month: float
    attainment: float
    meets: bool
    answer: bool


class _Counts(msgspec.Struct):
    name: str
    points: list[_Count]


class _Load(msgspec.Struct):
    factor: float
    attainment: float
    shed: float
    meets: bool


class _Loads(msgspec.Struct):
    mode: str
    points: list[_Load]


class _Data(msgspec.Struct):
    attainment: float
    max_shed: float
    counts: list[_Counts]
    traffic: list[_Loads]


def render_plan(plan: Plan) -> str:
    """The page as text."""
    first, *rest = headline(plan)
    environment = plan.environment
    aside = f"{environment.machine} · {environment.cpus} CPUs · commit {environment.commit} · {environment.at}"
    main = fill(
        static("plan", "plan.html"),
        {
            "TABLES": _tables(plan),
            "ASSUMPTIONS": "".join(f"<li>{escape(line)}</li>" for line in plan.assumptions),
            "CONFIG": escape(plan.config),
        },
    )
    return framed(
        main,
        title=first,
        summary=rest,
        environment=f"{aside} · seed {plan.seed} · {plan.simulations} simulations",
        data=_data(plan),
        script=static("plan", "plan.js"),
        style=static("plan", "plan.css"),
    )


def _data(plan: Plan) -> _Data:
    objective, answer = plan.objective, plan.answer
    counts = [
        _Counts(
            _name(curve.profile, plan),
            [
                _Count(
                    point.gpus,
                    point.per_month,
                    point.attainment,
                    point.meets,
                    curve.profile == answer.profile and point.engines == answer.engines,
                )
                for point in curve.points
            ],
        )
        for curve in plan.count_curves
    ]
    loads = [
        _Loads(
            curve.mode,
            [
                _Load(
                    point.factor,
                    point.attainment,
                    point.shed,
                    point.attainment >= objective.attainment and point.shed <= objective.max_shed,
                )
                for point in curve.points
            ],
        )
        for curve in plan.traffic_curves
    ]
    return _Data(objective.attainment, objective.max_shed, counts, loads)


def _name(profile: str, plan: Plan) -> str:
    """The GPU alone where that says which candidate it is, else the profile."""
    gpu = profile.partition("/")[0]
    alike = [curve for curve in plan.count_curves if curve.profile.startswith(f"{gpu}/")]
    return gpu if len(alike) == 1 else profile


def _tables(plan: Plan) -> str:
    head, rows = candidate_rows(plan)
    marked = [one.profile == plan.answer.profile for one in plan.candidates]
    parts = [_table("Candidates (hybrid mode)", head, rows, marked)]
    if plan.comparisons:
        head, rows = mode_rows(plan)
        marked = [one.mode == plan.answer.setup.mode for one in plan.comparisons]
        parts.append(_table("The three modes at this objective", head, rows, marked))
    if plan.verdict is not None:
        parts.append(f'<p class="verdict">{escape(plan.verdict.text)}</p>')
    if plan.sensitivity:
        head, rows = sensitivity_rows(plan)
        parts.append(_table("This fleet under more and less traffic", head, rows, [False] * len(rows)))
    return "".join(parts)


def _table(title: str, head: list[str], rows: list[list[str]], marked: list[bool]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" if name else '<th class="words"></th>' for name in head)
    body = []
    for row, answer in zip(rows, marked, strict=True):
        cells = "".join(
            f'<td class="words">{escape(cell)}</td>' if not name else f"<td>{escape(cell)}</td>"
            for name, cell in zip(head, row, strict=True)
        )
        body.append(f"<tr{' class=answer' if answer else ''}>{cells}</tr>")
    return (
        f'<section><h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{names}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></section>"
    )
