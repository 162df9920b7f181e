"""The core alone: what one decision takes, and one request from its offer to its end, without any I/O.

``python -m benchmarks.core`` (or ``make bench NAME=core``) drives the production pipeline on a manual clock, then real
gateways without sockets (core_http.py), and writes
``benchmarks/results/core-DATE.json`` and the generated section of ``docs/benchmarks.md``. Times are CPU time of the
thread, so that others on the machine add little but cold caches; what reading that clock takes is taken off.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import click

from benchmarks import core_http, environment, publish, tables
from benchmarks.core_cases import CASES, STATES, Situation
from forebay.report.statistics import percentile

PAGE: Final = publish.DOCS / "benchmarks.md"
TARGET_P99_US: Final = 20.0
LONG: Final = 6
"""So many times the fixed piece of Python takes about as long as a decision under load."""
SHARES: Final = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
Figures = dict[str, float]
"""In µs."""


def clock_ns() -> int:
    """What two readings of the clock with nothing between them differ by, at the median."""
    read = time.thread_time_ns
    gaps = []
    for _ in range(20_000):
        before = read()
        gaps.append(read() - before)
    return round(median(gaps))


def measure(situation: Situation, steps: int, overhead_ns: int) -> Figures:
    """So many steps: of one the offers are timed, of the next the whole."""
    read, pipeline = time.thread_time_ns, situation.pipeline
    offers: list[int] = []
    cycles: list[int] = []
    for number, requests in enumerate(situation.coming(steps)):
        now = situation.tick()
        if number % 2:
            before = read()
            for request in requests:
                situation.follow(pipeline.offer(request, now))
            situation.end(1)
            cycles.append((read() - before - overhead_ns) // len(requests))
            continue
        for request in requests:
            before = read()
            effects = pipeline.offer(request, now)
            offers.append(read() - before - overhead_ns)
            situation.follow(effects)
        situation.end(1)
    situation.check()
    return {f"offer_{name}_us": us for name, us in _figures(offers).items()} | {
        f"cycle_{name}_us": us for name, us in _figures(cycles).items()
    }


def reference(repeats: int, overhead_ns: int, times: int = 1) -> Figures:
    """The same figures of a fixed piece of Python, so many times: its p99 is the machine's, not ours.

    The longer a piece is, the more often it is interrupted: a short one says nothing of a long one.
    """
    read = time.thread_time_ns
    table = {number: number for number in range(64)}
    taken = []
    for _ in range(repeats):
        before = read()
        total = 0
        for _ in range(times):
            for number in range(64):
                total += table[number]
        taken.append(read() - before - overhead_ns)
    return _figures(taken)


def _figures(ns: Sequence[int]) -> Figures:
    ordered = sorted(max(0, one) for one in ns)
    shares = {name: (percentile(ordered, share) or 0.0) / 1000 for name, share in SHARES.items()}
    return {"mean": fmean(ordered) / 1000, **shares}


def run(rounds: int, steps: int) -> dict[str, Any]:
    """The figures of every case, a spread over the rounds; those of the reference; what reading the clock took."""
    situations = [Situation(case) for case in CASES]
    found: list[list[Figures]] = [[] for _ in CASES]
    overheads: list[int] = []
    references: list[Figures] = []
    long_references: list[Figures] = []
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # as the gateway does
    for number in range(rounds + 1):
        overhead = clock_ns()
        for situation, figures in zip(situations, found, strict=True):
            measured = measure(situation, steps if number else steps // 4, overhead)
            if number:  # the first round warms
                figures.append(measured)
        if number:
            overheads.append(overhead)
            references.append(reference(steps, overhead))
            long_references.append(reference(steps, overhead, LONG))
        click.echo(f"round {number}/{rounds}" if number else "warm", err=True)
    cases = [
        {"title": case.title, "state": case.state, "figures": _spreads(figures)}
        for case, figures in zip(CASES, found, strict=True)
    ]
    return {
        "clock_ns": overheads,
        "reference": _spreads(references),
        "long_reference": _spreads(long_references),
        "cases": cases,
    }


def _spreads(rounds: Sequence[Figures]) -> dict[str, Any]:
    spreads = {name: tables.Spread.of(one[name] for one in rounds) for name in rounds[0]}
    return {name: asdict(spread) for name, spread in spreads.items() if spread is not None}


COLUMNS: Final = {
    "offer, mean µs": "offer_mean_us",
    "p50": "offer_p50_us",
    "p99": "offer_p99_us",
    "p99.9": "offer_p999_us",
    "offer to end, mean µs": "cycle_mean_us",
    "p99 ": "cycle_p99_us",
}


def markdown(result: dict[str, Any]) -> str:
    """The generated section of ``docs/benchmarks.md``."""
    cases = result["cases"]
    lines = [*tables.provenance(result), ""]
    rows = [
        [
            f"{case['title']}: {STATES[case['state']]}",
            *(tables.cell(case["figures"][key], 1) for key in COLUMNS.values()),
        ]
        for case in cases
    ]
    lines += tables.table(["", *COLUMNS], rows)
    late = [case for case in cases if case["figures"]["offer_p99_us"]["median"] > TARGET_P99_US]
    overheads = result["clock_ns"]
    worst = max(case["figures"]["offer_p99_us"]["median"] for case in cases)
    said = f"of {len(cases)} situations, {len(cases) - len(late)} decide within {TARGET_P99_US:g} µs at p99"
    lines += [
        "",
        f"Wanted: a decision within {TARGET_P99_US:g} µs at p99. Reached: {said}; the slowest takes {worst:.1f}.",
    ]
    lines += [f"Reading the clock took {min(overheads)} to {max(overheads)} ns, and is taken off."]
    noise = [tables.cell(result["reference"][name], 1) for name in SHARES]
    lines += [
        f"A fixed piece of Python, timed alike, took {noise[0]} µs at p50, {noise[1]} at p99 and {noise[2]} at p99.9."
    ]
    if "long_reference" in result:
        long = [tables.cell(result["long_reference"][name], 1) for name in SHARES]
        took = f"{long[0]} µs at p50, {long[1]} at p99 and {long[2]} at p99.9"
        lines += [f"{LONG} times that, as long as a decision under load, took {took}: the difference is the machine's."]
    if "http" in result:
        lines += ["", *_http(result)]
    return "\n".join(lines) + "\n"


def _threads(ledger: list[dict[str, Any]]) -> list[str]:
    """What the threads of a ledger spend, of which the loop sees nothing."""
    idle, *rates = ledger
    spent = [
        f"{one:.1f} ms at {row['per_s']:,} requests per second {of} ({1000 * one / row['per_s']:.1f} µs each)"
        for row in rates
        for one, of in zip(row["ms"], ("of one key", f"of {core_http.ACTIVE:,} keys in turn"), strict=True)
    ]
    quiet = f"The ledger's threads spend {idle['ms'][0]:.1f} ms of CPU a second while nothing is asked"
    return [f"{quiet}, and more while something is: {', '.join(spent)}."]


def _http(result: dict[str, Any]) -> list[str]:
    rows = [[row["title"], *(tables.cell(row[key], 1) for key in ("us", "added_us"))] for row in result["http"]]
    claimed = next(row for row in result["http"] if row["name"] == core_http.CLAIMED)
    added, target = claimed["added_us"]["median"], core_http.TARGET_US
    memory = result["memory"]
    wanted = f"Wanted: at most {target:g} µs for estimator, limits and ledger with {core_http.KEYS:,} keys."
    reached = f"Reached: {added:.1f} µs on the loop with {core_http.ACTIVE:,} of them calling in turn."
    known, called = (f"{memory[name]:,.0f} bytes" for name in ("known_bytes", "called_bytes"))
    return [
        *tables.table(["a request, with", "CPU µs", "more than the first"], rows),
        "",
        f"{wanted} {reached}",
        *_threads(result["ledger"]),
        f"A key of the store takes {known} of memory, and {called} once it has called (mean over all keys).",
    ]


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--steps", type=click.IntRange(1000), default=20_000, show_default=True, help="Of each case and round.")
@click.option("--http/--no-http", default=True, show_default=True, help="Also the whole way of a request, with stores.")
@publish.json_option
@publish.dry_option
def main(rounds: int, steps: int, http: bool, json_path: Path | None, dry: bool) -> None:
    load_before = environment.load_average()
    found = run(rounds, steps)
    result: dict[str, Any] = {
        "environment": environment.describe(load_before),
        "command": publish.command("core", *sys.argv[1:]),
        "rounds_run": rounds,
        "steps": steps,
        **found,
    }
    if http:
        with tempfile.TemporaryDirectory() as folder:
            result["http"], result["ledger"] = core_http.measure(
                rounds, Path(folder), lambda text: click.echo(text, err=True)
            )
            result["memory"] = core_http.memory(Path(folder))
    if json_path is not None or not dry:
        publish.write_results("core", result, json_path)
    click.echo(markdown(result))
    if dry:
        return
    publish.write_sections(PAGE, {"core": markdown(result)})


if __name__ == "__main__":
    main()
