"""What the control brain was to reach, beside what it reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.control_cases import A100, PHASES
from benchmarks.control_plan import HOLD_BACK, LOADS
from benchmarks.control_policies import FOREBAY
from benchmarks.control_rows import NOTHING, Row, rows, select, shown
from benchmarks.control_statistics import Estimate, paired
from benchmarks.tables import table

UNFAIR, CLASSES = f"{FOREBAY}, unfair", f"{FOREBAY} + {HOLD_BACK}"


def _verdict(value: float, wanted: float, *, least: bool, unit: float) -> str:
    missed = wanted - value if least else value - wanted
    return "met" if missed <= 0 else f"**missed** by {unit * missed:.2g}"


def _line(
    title: str,
    row: Row | None,
    figure: str,
    wanted: float,
    *,
    least: bool = True,
    unit: float = 100.0,
    digits: int = 1,
    name: str = "%",
) -> list[list[str]]:
    """A line of the table; none when it was not measured."""
    if row is None or not row.values.get(figure):
        return []
    values, lacking = row.values[figure], row.lacking(figure)
    lines = _judged(title, Estimate.of(values), wanted, least=least, unit=unit, digits=digits, name=name)
    if lacking:  # what is to happen soon, and never does
        shown_as = lines[0][2] if lines else NOTHING
        bound = f"{'≥' if least else '≤'} {unit * wanted:g} {name}"
        return [[title, bound, shown_as, f"**missed**: never in {lacking} of {len(values)} seeds"]]
    return lines


def _judged(
    title: str, estimate: Estimate | None, wanted: float, *, least: bool, unit: float, digits: int, name: str
) -> list[list[str]]:
    if estimate is None:
        return []
    bound = f"{'≥' if least else '≤'} {unit * wanted:g} {name}"
    verdict = _verdict(estimate.mean, wanted, least=least, unit=unit)
    return [[title, bound, shown(estimate, digits, percent=unit == 100.0), verdict]]


def _one(found: Iterable[Row], **wanted: object) -> Row | None:
    return next(iter(select(found, **wanted)), None)


def _paid(title: str, ours: Row | None, without: Row | None) -> list[list[str]]:
    """Weighted goodput that a guarantee costs, paired by seed."""
    if ours is None or without is None:
        return []
    with_it, without_it = ([value or 0.0 for value in row.values["weighted"]] for row in (ours, without))
    cost = paired(with_it, without_it, lambda one, other: 1.0 - one / other)
    return _judged(title, cost, 0.02, least=False, unit=100.0, digits=1, name="%")


def _goodput(result: Mapping[str, Any]) -> list[list[str]]:
    found = select(rows(result, "goodput"), profile=A100, mix="chat", policy=FOREBAY)
    lines: list[list[str]] = []
    for load in LOADS:
        row = _one(found, load=load)
        lines += _line(f"goodput at {load:g}x, requests, of the fluid bound", row, "requests", 0.97)
        lines += _line(f"goodput at {load:g}x, weighted tokens", row, "weighted", 0.97)
    for row in sorted(found, key=lambda one: one.load):
        at = f"at {row.load:g}x"
        lines += _line(f"p99 queue wait {at}", row, "wait_p99_ms", 50.0, least=False, unit=1.0, name="ms")
        lines += _line(f"p99 queue wait {at}, of the budget in force", row, "wait_p99_of_budget", 1.0, least=False,
                       digits=0)  # fmt: skip
        lines += _line(f"late evictions {at}", row, "late", 0.01, least=False, digits=2)
    return lines


def _spike(result: Mapping[str, Any]) -> list[list[str]]:
    found = select(rows(result, "spike"), policy=FOREBAY)
    lines: list[list[str]] = []
    for row in found:
        share = f"{100 * row.load:g} % base"
        if row.load < 0.9:
            lines += _line(f"recovery, {share}", row, "recovery_s", 1.0, least=False, unit=1.0, name="s")
            lines += _line(f"spike served within 120 s, {share}", row, "spike_served", 0.6)
        lines += _line(f"recovers, {share}, of the seeds", row, "recovered", 1.0, digits=0)
    return lines


def _flood(result: Mapping[str, Any]) -> list[list[str]]:
    found = rows(result, "flood")
    ours = select(found, policy=FOREBAY)
    return [
        *_line("Jain, flood at 40x, all others at 2", _one(ours, load=2.0), "jain", 0.99, unit=1.0, digits=4, name=""),
        *_line("well-behaved keys served, at 0.9", _one(ours, load=0.9), "others_served", 0.98),
        *_paid("goodput paid for fairness, at 0.9", _one(ours, load=0.9), _one(found, policy=UNFAIR, load=0.9)),
        *_paid("goodput paid for fairness, at 2", _one(ours, load=2.0), _one(found, policy=UNFAIR, load=2.0)),
    ]


def _shift(result: Mapping[str, Any]) -> list[list[str]]:
    row = _one(rows(result, "shift"), policy=FOREBAY)
    lines: list[list[str]] = []
    for number, mix in enumerate(PHASES):
        name = f"{number + 1} {mix}"
        lines += _line(f"phase {name}: good work from 5 s on", row, f"{name}: from 5 s on", 0.95)
        lines += _line(f"phase {name}: settled", row, f"{name}: settled after s", 5.0, least=False, unit=1.0, name="s")
    return lines


def _critical(result: Mapping[str, Any]) -> list[list[str]]:
    found = rows(result, "critical")
    told = _one(found, policy=CLASSES)
    return [
        *_line("critical class served, the rest at 10x", told, "critical_served", 0.999, digits=2),
        *_paid("goodput paid for it", told, _one(found, policy=FOREBAY)),
    ]


def _hang_ups(result: Mapping[str, Any]) -> list[list[str]]:
    lines: list[list[str]] = []
    for row in rows(result, "hang-ups"):
        lines += _line(f"wasted work at {row.load:g}x", row, "made_late", 0.01, least=False, digits=2)
        lines += _line("abort reaches the engine", row, "abort_ms", 100.0, least=False, unit=1.0, name="ms")
    return lines


PARTS: Sequence[Callable[[Mapping[str, Any]], list[list[str]]]] = (
    *(_goodput, _spike, _flood, _shift, _critical, _hang_ups),
)


def targets(result: Mapping[str, Any]) -> list[str]:
    """Every target that was measured."""
    body = [line for part in PARTS for line in part(result)]
    return table(["Forebay", "wanted", "measured", ""], body) if body else []
