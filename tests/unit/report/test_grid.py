"""The table of a sweep: seeds together, shares of the bound, and units that fit."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from forebay.report.grid import Entry, print_grid, rows, share_of_bound
from forebay.report.records import Objective
from forebay.report.results import Counts, Quantiles, RunResult, Utilization


def result(**changes: object) -> RunResult:
    made = RunResult(
        duration_s=10.0,
        counts=Counts(200, 150, 50, 0, 0, 0),
        latency_ms=Quantiles(100.0, 210.0),
        ttft_ms=Quantiles(None, None),
        queue_wait_ms=Quantiles(1.0, 2.0),
        served_per_s=15.0,
        goodput_per_s=12.0,
        goodput_tokens_per_s=120.0,
        utilization=Utilization(0.5, 0.25),
        shed_by_reason={"queue_wait": 50},
        failed_by_error={},
        wasted_work_ratio=0.1,
        late_evicted_ratio=0.0,
        jain_index=None,
        attempts_per_request=1.0,
        mode="hybrid",
        policy="hybrid",
        workload="test",
        offered_load=1.0,
        seed=1,
        objective=Objective(),
        phases=[],
    )
    return msgspec.structs.replace(made, **changes)


def printed(entries: list[Entry]) -> str:
    out = io.StringIO()
    print_grid(Console(file=out, width=120), entries)
    return out.getvalue()


def test_runs_that_differ_in_their_seed_are_one_row() -> None:
    entries = [
        Entry("×1", "hybrid", result(latency_ms=Quantiles(1.0, 200.0))),
        Entry("×1", "none", result()),
        Entry("×1", "hybrid", result(latency_ms=Quantiles(1.0, 220.0), served_per_s=16.0)),
    ]
    assert [[entry.policy for entry in group] for group in rows(entries)] == [["hybrid", "hybrid"], ["none"]]
    text = printed(entries)
    assert "210±10 ms" in text
    assert "15.50±0.50" in text
    assert "25±0 %" in text


def test_a_half_range_has_the_unit_of_its_mean() -> None:
    text = printed([Entry("×1", "hybrid", result(latency_ms=Quantiles(1.0, p99))) for p99 in (1800.0, 2000.0)])
    assert "1.90±0.10 s" in text


def test_columns_without_a_figure_are_left_out() -> None:
    assert "TTFT p99" not in printed([Entry("×1", "hybrid", result())]).splitlines()[0]
    streamed = result(ttft_ms=Quantiles(10.0, 20.0))
    assert "TTFT p99" in printed([Entry("×1", "hybrid", streamed)]).splitlines()[0]


@pytest.mark.parametrize(("bound", "share"), [(10.0, 1.2), (16.0, 0.75), (100.0, 0.6), (None, 0.6)])
def test_goodput_is_measured_by_the_bound_or_by_the_load_below_it(bound: float | None, share: float) -> None:
    """20 per second were offered, 12 were good."""
    assert share_of_bound(Entry("×1", "hybrid", result(), bound)) == pytest.approx(share)


def test_nothing_offered_is_no_share() -> None:
    nothing = result(counts=Counts(0, 0, 0, 0, 0, 0), goodput_per_s=0.0)
    assert share_of_bound(Entry("×1", "hybrid", nothing, 10.0)) is None
