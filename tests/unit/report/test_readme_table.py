"""The tables of README.md, made from results."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.report.records import PhaseBounds, RequestRecord, RunHeader, RunRecords
from forebay.report.results import Environment, Results, summarise
from scripts.readme_table import demo_table, fill, peer_table

ROOT = Path(__file__).parents[3]
SECOND = 1_000_000_000


def run_in(mode: str, latency_ms: int) -> RunRecords:
    """One completed request in each of two phases."""
    phases = [PhaseBounds("below", 0, 10), PhaseBounds("overload", 10, 20)]
    records = [
        RequestRecord(
            index=index, phase=phase.name, key="", outcome="completed", intended_ns=at * SECOND, sent_ns=at * SECOND,
            first_token_ns=-1, done_ns=at * SECOND + latency_ms * 1_000_000, status=200, attempts=1,
        )
        for index, (phase, at) in enumerate(zip(phases, (1, 11), strict=True))
    ]  # fmt: skip
    return RunRecords(RunHeader(mode=mode, policy="p", workload="w", seed=1, phases=phases), records, [])


def test_the_table_has_a_line_for_each_mode_in_each_phase_and_the_whole() -> None:
    machine = Environment(commit="0123456789abcdef", machine="Some CPU", cpus=2, at="2026-01-01")
    table = demo_table(Results(machine, [summarise(run_in(mode, ms)) for mode, ms in (("strict", 87), ("held", 2500))]))
    origin, _, head, _, *rows = table.splitlines()
    assert "Some CPU, 2 cores, commit `0123456789ab`" in origin
    assert head.startswith("| load | mode | p50 | p99 |")
    assert [row.split(" | ")[:4] for row in rows] == [
        [f"| {load}", mode, latency, latency]
        for load in ("below", "overload", "whole")
        for mode, latency in (("strict", "87 ms"), ("held", "2.50 s"))
    ]


def test_only_the_section_changes() -> None:
    page = "a\n<!-- t:begin -->\nold\n<!-- t:end -->\nb\n"
    assert fill(page, "t", "new") == "a\n<!-- t:begin -->\nnew\n<!-- t:end -->\nb\n"
    with pytest.raises(SystemExit, match="no <!-- u:begin -->"):
        fill(page, "u", "new")


def test_the_peers_table_comes_with_where_it_was_measured() -> None:
    page = (
        "<!-- generated: proxy -->\n\nMeasured here.\n\n| proxy | CPU |\n|---|---:|\n| x | 1 |\n\nMore.\n\n| y | 2 |\n"
        "<!-- end: proxy -->\n| z | 3 |\n"
    )
    assert peer_table(page) == "Measured here.\n\n| proxy | CPU |\n|---|---:|\n| x | 1 |"


def test_the_readme_has_the_sections() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    for name in ("demo-table", "peer-table"):
        assert fill(page, name, "") != page
