"""Figures over rounds, and the Markdown that shows them: a spread, a table, where it was measured."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds."""

    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of ``values``, or None when there are none."""
        kept = list(values)
        return cls(median(kept), min(kept), max(kept), len(kept)) if kept else None


def cell(spread: Mapping[str, Any] | None, digits: int) -> str:
    """A spread as it stands in a table: median, and the range when there is one."""
    if spread is None:
        return "–"
    low, high = f"{spread['min']:,.{digits}f}", f"{spread['max']:,.{digits}f}"
    middle = f"{spread['median']:,.{digits}f}"
    return middle if spread["n"] == 1 or low == high else f"{middle} ({low}–{high})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table: the first column text, the others figures."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def provenance(result: Mapping[str, Any]) -> list[str]:
    """Two lines that say when, where, from which commit and by which command the figures came."""
    env = result["environment"]
    dirty = " with changes not yet committed" if env["dirty"] else ""
    place = f"{env['machine']}, {env['cpus']} cores, {env['system']}, Python {env['python']}"
    return [
        f"Measured {env['at']} at commit `{env['commit']}`{dirty} on {place}, by `{result['command']}`.",
        f"{result['rounds_run']} rounds, interleaved; median (lowest–highest round).",
        f"Load average before the run: {env['load_before']:g}.",
    ]
