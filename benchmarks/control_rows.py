"""The figures of the control benchmark by policy and load, a value per seed, and how they are shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.control_statistics import Estimate

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one policy under one load, a value per seed."""

    policy: str
    load: float
    profile: str
    mix: str
    values: Mapping[str, Sequence[float | None]]

    def cell(self, figure: str, digits: int = 1, *, percent: bool = True) -> str:
        """Mean and bounds, in percent or as they are."""
        text = shown(Estimate.of(self.values.get(figure, ())), digits, percent=percent)
        lacking = self.lacking(figure)
        return f"{text}, never in {lacking} of {len(self.values[figure])}" if lacking and text != NOTHING else text

    def lacking(self, figure: str) -> int:
        """Seeds for which there is no such figure: what it tells of never happened."""
        return sum(value is None for value in self.values.get(figure, ()))

    def mean(self, figure: str) -> float | None:
        """Over the seeds."""
        estimate = Estimate.of(self.values.get(figure, ()))
        return None if estimate is None else estimate.mean


def shown(estimate: Estimate | None, digits: int = 1, *, percent: bool = True) -> str:
    """As it stands in a table: the mean, and its bounds in brackets where several seeds differ."""
    if estimate is None:
        return NOTHING
    factor = 100.0 if percent else 1.0
    mean, low, high = (f"{factor * value:,.{digits}f}" for value in (estimate.mean, estimate.low, estimate.high))
    return mean if low == high else f"{mean} ({low}–{high})"


def rows(result: Mapping[str, Any], case: str) -> list[Row]:
    """All of a case, in the order in which they were planned."""
    grouped: dict[tuple[str, float, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for one in result["rows"]:
        if one["case"] == case:
            grouped[one["policy"], one["load"], one["profile"], one["mix"]].append(one)
    found = []
    for key, members in grouped.items():
        members.sort(key=lambda one: one["seed"])
        names = dict.fromkeys(name for one in members for name in one["figures"])
        found.append(Row(*key, {name: [one["figures"].get(name) for one in members] for name in names}))
    return found


def select(found: Iterable[Row], **wanted: object) -> list[Row]:
    return [row for row in found if all(getattr(row, name) == value for name, value in wanted.items())]
