"""Which engine gets the work: least, two choices, affinity and chance, with counters of their own, shared, and old.

``python -m benchmarks.balance`` (or ``make bench NAME=balance``) simulates every policy on the same engines and the
very same arrivals, five seeds each, and writes ``benchmarks/results/balance-DATE.json`` and the generated sections of
``docs/balance.md``. Nothing is refused and no window binds, so that nothing but the choice of the engine differs.
``--quick`` takes one seed and short runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from benchmarks import environment, publish
from benchmarks.balance_world import LOADS, Figures, Trial, capacity, measure
from benchmarks.control_statistics import Estimate
from benchmarks.trials import rows_of

PAGE: Final = publish.DOCS / "balance.md"
LOAD: Final = 0.9
SEEDS: Final = 5
DURATION_S: Final = 60.0

OURS: Final = ("own", "shared", "old")
ROWS: Final = {
    "mix": [
        *((policy, counters) for counters in OURS for policy in ("least", "p2c", "random")),
        ("least", "pages"),
        ("p2c", "pages"),
        ("least", "lopsided"),
        ("least", "lopsided-old"),
        ("p2c", "lopsided-old"),
    ],
    "talk": [(policy, counters) for counters in OURS for policy in ("least", "p2c", "affinity", "random")],
}
COUNTERS: Final = {
    "own": "one gateway, own counts",
    "shared": "8 gateways, own counts",
    "old": "8 gateways, own counts and pages 0.5 s old",
    "pages": "8 routers, pages 0.5 s old alone",
    "lopsided": "7 gateways and a router on two engines, own counts",
    "lopsided-old": "the same, own counts and pages 0.5 s old",
}


def benchmark(seeds: Sequence[int], duration_s: float, processes: int) -> list[dict[str, Any]]:
    """A row of figures per trial."""
    trials = [
        Trial(load_of, policy, counters, seed, LOAD, duration_s)
        for load_of, rows in ROWS.items()
        for policy, counters in rows
        for seed in seeds
    ]
    return rows_of(measure, trials, processes)


def section(load_of: str, result: dict[str, Any]) -> str:
    """The table of one load."""
    talk = load_of == "talk"
    more = " prompt tokens found in the cache |" if talk else ""
    lines = [
        environment_line(result),
        "",
        f"| counts | policy | served in time | p50 TTFT ms | p99 TTFT ms |{more}",
        f"|---|---|---:|---:|---:|{'---:|' if talk else ''}",
    ]
    for policy, counters in ROWS[load_of]:
        rows: list[Figures] = [
            row["figures"]
            for row in result["rows"]
            if (row["load_of"], row["policy"], row["counters"]) == (load_of, policy, counters)
        ]
        cells = [_cell(rows, "good", 100, 1, " %"), _cell(rows, "ttft_p50_ms"), _cell(rows, "ttft_p99_ms")]
        if talk:
            cells.append(_cell(rows, "cached", 100, 1, " %"))
        lines.append(f"| {COUNTERS[counters]} | {policy} | {' | '.join(cells)} |")
    rate = LOAD * capacity(load_of)
    lines += ["", f"{rate:.0f} requests per second, {LOAD} of the fluid bound with nothing cached."]
    return "\n".join(lines)


def _cell(rows: list[Figures], name: str, factor: float = 1, digits: int = 0, unit: str = "") -> str:
    found = Estimate.of(factor * row[name] for row in rows)
    assert found is not None
    return f"{found.mean:,.{digits}f}{unit} ({found.low:,.{digits}f}–{found.high:,.{digits}f})"


def environment_line(result: dict[str, Any]) -> str:
    """Where the figures come from."""
    where = result["environment"]
    return (
        f"Simulated {where['at']} at commit `{where['commit']}` on {where['machine']}, {where['cpus']} cores, by "
        f"`{result['command']}` in {result['wall_s']:.0f} s, {result['seeds']} seeds; mean (bounds at 95 %, bootstrap "
        "over the seeds)."
    )


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One seed, short runs: a look, no result.")
@click.option("--seeds", type=click.IntRange(1, 50), default=SEEDS, show_default=True)
@publish.processes_option
@publish.json_option
@publish.dry_option
def main(quick: bool, seeds: int, processes: int, json_path: Path | None, dry: bool) -> None:
    load_before, began = environment.load_average(), time.monotonic()
    seeds = 1 if quick else seeds
    rows = benchmark(range(1, seeds + 1), 40.0 if quick else DURATION_S, processes)
    result = {
        "environment": environment.describe(load_before),
        "command": publish.command_of_seeds("balance", seeds, SEEDS),
        "seeds": seeds,
        "wall_s": round(time.monotonic() - began, 1),
        "quick": quick,
        "rows": rows,
    }
    sections = {f"balance-{load_of}": section(load_of, result) for load_of in LOADS}
    click.echo("\n\n".join(sections.values()))
    if dry or quick:
        return
    publish.write_results("balance", result, json_path)
    publish.write_sections(PAGE, sections)


if __name__ == "__main__":
    main()
