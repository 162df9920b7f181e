"""Retries: budgets beside callers that storm, cold starts, and retry tickets that hold a place.

``python -m benchmarks.retries`` (or ``make bench NAME=retries``) simulates every variant on the same engines and the
very same arrivals, five seeds of storms and ten of the rest, and writes ``benchmarks/results/retries-DATE.json`` and
the generated sections of ``docs/retries.md``, in five minutes of CPU time. ``--quick`` takes one seed and short runs.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

import click

from benchmarks import environment, publish, tables
from benchmarks.control_statistics import Estimate, paired
from benchmarks.retries_world import COLD_VARIANTS, SMALL_VARIANTS, STORMS, TICKET_VARIANTS, Trial, measure
from benchmarks.trials import rows_of

PAGE: Final = publish.DOCS / "retries.md"
SEEDS: Final = 10
STORM_SEEDS: Final = 5
SHARINGS: Final = {"unfair": "off", "fair": "on"}
SWITCHES: Final = ("without", "with")
COLD_LOADS: Final = ("0.5", "0.8")
COLD_NAMES: Final = {
    "at once": "everybody told the same time",
    "spread": "told times apart",
    "room": "waiting room of 1000",
}
BASES: Final = ("0.5", "0.7", "0.85")
SMALL_LOADS: Final = ("0.5", "0.7", "0.9", "1.5")
BASE_NAMES: Final = {"calendar": "calendar", "tickets": "and retry tickets", "half": "half of the callers send them"}


def plan(seeds: int, scale: float) -> list[Trial]:
    """Everything that is to be simulated, the long ones first."""
    storms = [
        Trial("budgets", f"{sharing} {switch}", load, seed, scale)
        for load in STORMS
        for sharing in SHARINGS
        for switch in SWITCHES
        for seed in range(1, min(STORM_SEEDS, seeds) + 1)
    ]
    wholes = [
        Trial(case, variant, load, seed, scale)
        for case, variants, loads in (
            ("tickets", TICKET_VARIANTS, BASES),
            ("cold", COLD_VARIANTS, COLD_LOADS),
            ("small", SMALL_VARIANTS, SMALL_LOADS),
        )
        for load in reversed(loads)
        for variant in variants
        for seed in range(1, seeds + 1)
    ]
    return storms + wholes


class Rows:
    """The figures of a case, by variant and load."""

    def __init__(self, result: dict[str, Any], case: str) -> None:
        self._rows = [row for row in result["rows"] if row["case"] == case]

    def cell(self, variant: str, load: str, name: str, *, share: bool = False, digits: int = 0, unit: str = "") -> str:
        """Mean and bounds of one figure over the seeds; a share of 1 in per cent."""
        factor, unit = (100, " %") if share else (1, unit)
        values = [r["figures"][name] for r in self._rows if (r["variant"], r["load"]) == (variant, load)]
        found = Estimate.of(None if value is None else factor * value for value in values)
        if found is None:
            return "–"
        return f"{found.mean:.{digits}f}{unit} ({found.low:.{digits}f}–{found.high:.{digits}f})"

    def change(self, load: str, name: str, *, factor: float = 1, digits: int = 1) -> str:
        """What retry tickets change in one figure when all callers send them, seed by seed: mean and bounds."""
        before, after = (
            [r["figures"][name] for r in self._rows if (r["variant"], r["load"]) == (variant, load)]
            for variant in ("calendar", "tickets")
        )
        found = paired(before, after, lambda one, other: factor * (other - one))
        assert found is not None
        return f"{found.mean:+.{digits}f} ({found.low:+.{digits}f} to {found.high:+.{digits}f})"


def budgets_section(result: dict[str, Any]) -> str:
    """Callers with an SDK beside callers that storm."""
    rows = Rows(result, "budgets")
    head = ["load", "fair share", "budgets", "SDK: served", "attempts", "storming: served", "attempts"]
    body = []
    for load in STORMS:
        for sharing, said in SHARINGS.items():
            for switch in SWITCHES:
                at = (f"{sharing} {switch}", load)
                cells = [
                    cell
                    for who in ("sdk", "storm")
                    for cell in (
                        rows.cell(*at, f"{who}_served", share=True),
                        rows.cell(*at, f"{who}_attempts", digits=1),
                    )
                ]
                body.append([load, said, switch, *cells])
    return "\n".join([where(result, min(STORM_SEEDS, result["seeds"])), "", *tables.table(head, body)])


def cold_section(result: dict[str, Any]) -> str:
    """What is told to those who meet an engine that warms up."""
    rows = Rows(result, "cold")
    head = ["load", "", "came while cold: served", "p50 s to the first token", "p90 s", "attempts",
            "came later: served", "at the first attempt"]  # fmt: skip
    body = [
        [
            load,
            COLD_NAMES[variant],
            rows.cell(variant, load, "early_served", share=True),
            rows.cell(variant, load, "early_wait_p50_s"),
            rows.cell(variant, load, "early_wait_p90_s"),
            rows.cell(variant, load, "early_attempts", digits=1),
            rows.cell(variant, load, "late_served", share=True),
            rows.cell(variant, load, "late_at_once", share=True),
        ]
        for load in COLD_LOADS
        for variant in COLD_VARIANTS
    ]
    return "\n".join([where(result, result["seeds"]), "", *tables.table(head, body)])


def tickets_section(result: dict[str, Any]) -> str:
    """The calendar alone, and with retry tickets."""
    rows = Rows(result, "tickets")
    at = [(base, variant) for base in BASES for variant in TICKET_VARIANTS]
    outcome = [
        "base load",
        "",
        "returns refused",
        "spike served",
        "recovery s",
        "new requests afterwards, good at once",
        "evicted",
        "holders' wait p99 ms",
    ]
    lottery = ["base load", "", "attempts", "their standard deviation", "came back, never served", "wait p10 s",
               "p50 s", "p90 s", "pairs in order"]  # fmt: skip
    first = [
        [
            base,
            BASE_NAMES[variant],
            rows.cell(variant, base, "returns_refused", share=True, digits=1),
            rows.cell(variant, base, "served", share=True, digits=1),
            rows.cell(variant, base, "recovery_s", digits=1),
            rows.cell(variant, base, "after", share=True, digits=1),
            rows.cell(variant, base, "late", share=True, digits=2),
            rows.cell(variant, base, "held_wait_p99_ms"),
        ]
        for base, variant in at
    ]
    second = [
        [
            base,
            BASE_NAMES[variant],
            rows.cell(variant, base, "attempts", digits=2),
            rows.cell(variant, base, "attempts_spread", digits=2),
            rows.cell(variant, base, "in_vain", share=True, digits=1),
            *(rows.cell(variant, base, f"wait_p{share}_s", digits=1) for share in (10, 50, 90)),
            rows.cell(variant, base, "in_order", share=True),
        ]
        for base, variant in at
    ]
    change = ["base load", "spike served, points", "recovery s", "new requests, points", "never served, points",
              "deviation of attempts", "wait p90 s", "pairs in order, points"]  # fmt: skip
    third = [
        [
            base,
            rows.change(base, "served", factor=100),
            rows.change(base, "recovery_s"),
            rows.change(base, "after", factor=100),
            rows.change(base, "in_vain", factor=100),
            rows.change(base, "attempts_spread", digits=2),
            rows.change(base, "wait_p90_s"),
            rows.change(base, "in_order", factor=100),
        ]
        for base in BASES
    ]
    said = "Callers of the spike: attempts of all, waits from the first attempt to the first token of those served."
    lines = [where(result, result["seeds"]), "", *tables.table(outcome, first), "", said, ""]
    lines += [*tables.table(lottery, second), "", "What they change when all callers send them, seed by seed:", ""]
    lines += [*tables.table(change, third), "", "Callers beside each other, when every other one sends them:", ""]
    return "\n".join(lines + _halves(rows))


def _halves(rows: Rows) -> list[str]:
    head = ["base load", "who send them: served", "came back, never served", "who do not: served",
            "came back, never served"]  # fmt: skip
    body = [
        [
            base,
            *(
                rows.cell("half", base, f"{who}_{name}", share=True, digits=1)
                for who in ("showing", "silent")
                for name in ("served", "in_vain")
            ),
        ]
        for base in BASES
    ]
    return tables.table(head, body)


def small_section(result: dict[str, Any]) -> str:
    """A pool with few places."""
    rows = Rows(result, "small")
    head = ["load", "", "served", "at the first attempt", "came back, never served", "attempts",
            "p90 s to the first token"]  # fmt: skip
    body = [
        [
            load,
            BASE_NAMES[variant],
            rows.cell(variant, load, "served", share=True, digits=1),
            rows.cell(variant, load, "at_once", share=True, digits=1),
            rows.cell(variant, load, "in_vain", share=True, digits=1),
            rows.cell(variant, load, "attempts", digits=2),
            rows.cell(variant, load, "wait_p90_s", digits=1),
        ]
        for load in SMALL_LOADS
        for variant in SMALL_VARIANTS
    ]
    return "\n".join([where(result, result["seeds"]), "", *tables.table(head, body)])


SECTIONS: Final = {
    "retries-budgets": budgets_section,
    "retries-cold": cold_section,
    "retries-tickets": tickets_section,
    "retries-small": small_section,
}


def where(result: dict[str, Any], seeds: int) -> str:
    """Where the figures come from."""
    env = result["environment"]
    dirty = " with changes not yet committed" if env["dirty"] else ""
    return (
        f"Simulated {env['at']} at commit `{env['commit']}`{dirty} by `{result['command']}`, {seeds} seeds; mean "
        "(bounds at 95 %, bootstrap over the seeds)."
    )


def simulated(seeds: int, processes: int, *, quick: bool) -> dict[str, Any]:
    """Every trial's figures, and where they come from."""
    load_before, began = environment.load_average(), time.monotonic()
    rows = rows_of(measure, plan(seeds, 0.5 if quick else 1.0), processes)
    return {
        "environment": environment.describe(load_before),
        "command": publish.command_of_seeds("retries", seeds, SEEDS),
        "seeds": seeds,
        "wall_s": round(time.monotonic() - began, 1),
        "quick": quick,
        "rows": rows,
    }


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One seed, short runs: a look, no result.")
@click.option("--seeds", type=click.IntRange(1, 50), default=SEEDS, show_default=True)
@publish.processes_option
@publish.json_option
@publish.dry_option
@publish.again_option
def main(quick: bool, seeds: int, processes: int, json_path: Path | None, dry: bool, again: Path | None) -> None:
    if again is not None:
        result = json.loads(again.read_text())
    else:
        result = simulated(1 if quick else seeds, processes, quick=quick)
    sections = {name: section(result) for name, section in SECTIONS.items()}
    click.echo("\n\n".join(sections.values()))
    if dry or result["quick"]:
        if json_path is not None:
            publish.write_results("retries", result, json_path)
        return
    if again is None:
        publish.write_results("retries", result, json_path)
    publish.write_sections(PAGE, sections)


if __name__ == "__main__":
    main()
