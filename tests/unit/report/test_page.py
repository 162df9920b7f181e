"""The page and the tables: they hold their data, and ask nobody for anything."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from forebay.errors import UsageError
from forebay.report.live import LiveLine
from forebay.report.page import render_page
from forebay.report.publish import check_writable, publish
from forebay.report.records import EngineSample, Objective, PhaseBounds, RequestRecord, RunHeader, RunRecords
from forebay.report.results import Results, environment, summarise
from forebay.report.series import bin_width_s, series
from forebay.report.table import milliseconds, print_comparison

S = 1_000_000_000


def a_run(mode: str) -> RunRecords:
    phases = [PhaseBounds("below", 0, 2), PhaseBounds("overload", 2, 4)]
    requests = [
        RequestRecord(
            index=index,
            phase="below" if index < 20 else "overload",
            key="",
            outcome="shed" if index % 5 == 4 else "completed",
            intended_ns=index * S // 10,
            sent_ns=index * S // 10,
            first_token_ns=index * S // 10 + S // 50,
            done_ns=index * S // 10 + S // 4,
            status=200,
            attempts=1,
            reason="queue_wait" if index % 5 == 4 else "",
            output_tokens=9,
            queue_wait_ms=3.5,
        )
        for index in range(40)
    ]
    samples = [
        EngineSample(at_ns=index * S // 4, busy_s=index / 5, steps=index * 10, batch_seqs=index * 80, max_batch=16)
        for index in range(18)
    ]
    objective = Objective(latency_ms=300)
    header = RunHeader(mode=mode, policy="p", workload="w", seed=1, phases=phases, objective=objective)
    return RunRecords(header, requests, samples)


def two_runs() -> tuple[Results, list[RunRecords]]:
    runs = [a_run("admission"), a_run("hybrid </script><b>")]
    return Results(environment(), [summarise(run) for run in runs]), runs


@pytest.fixture(scope="module")
def page() -> str:
    results, runs = two_runs()
    return render_page("A <title> & more", ["Read & learn"], results, runs)


def test_the_page_holds_its_data(page: str) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data = json.loads(found.group(1))
    assert [run["mode"] for run in data["runs"]] == ["admission", "hybrid </script><b>"]
    assert data["objective_ms"] == 300
    assert data["results"]["runs"][0]["counts"]["shed"] == 8
    curves = data["runs"][0]["series"]
    assert all(len(curve) == len(curves["at_s"]) for name, curve in curves.items() if name != "bin_s")


def test_the_page_asks_nobody_for_anything(page: str) -> None:
    assert not re.search(r"https?://|//[a-z0-9-]+\.[a-z]{2,}|@import|url\(", page)
    assert not re.search(r"<(link|img|iframe|script)[^>]+(src|href)=", page)
    assert "default-src 'none'" in page


def test_text_is_escaped(page: str) -> None:
    assert "A &lt;title&gt; &amp; more" in page
    assert "Read &amp; learn" in page
    assert "<b>" not in re.sub(r"<li><b>", "", page)
    assert "{{" not in page


def test_the_licence_of_the_plots_travels_with_them(page: str) -> None:
    assert "Permission is hereby granted, free of charge" in page
    assert "uPlot=function" in page


def test_both_colour_schemes_are_drawn(page: str) -> None:
    assert "prefers-color-scheme: dark" in page


def test_series_worked_out_by_hand() -> None:
    curves = series(a_run("x"))
    assert curves.bin_s == 0.1
    # Ten requests a second, each a quarter of a second long: two and a half in flight.
    middle = curves.in_flight[10:30]
    assert all(value == pytest.approx(2.5) for value in middle)
    assert sum(curves.offered) * curves.bin_s == pytest.approx(40)
    assert sum(curves.completed) * curves.bin_s == pytest.approx(32)
    assert sum(curves.refused) * curves.bin_s == pytest.approx(8)
    assert curves.latency_p99[0] == pytest.approx(250)
    assert curves.ttft_p50[0] == pytest.approx(20)
    assert curves.latency_p50[4] is None
    assert {value for value in curves.busy if value is not None} == {0.8}
    assert curves.busy[0] == 0.8
    assert {value for value in curves.batch_size if value is not None} == {8.0}


@pytest.mark.parametrize(("duration_s", "width"), [(1, 0.1), (24, 0.1), (36, 0.25), (600, 5.0), (86_400, 900.0)])
def test_bins_are_few_enough_to_draw(duration_s: float, width: float) -> None:
    assert bin_width_s(duration_s) == width


def test_the_table_fits_eighty_columns_and_shows_every_stretch() -> None:
    results, _ = two_runs()
    results.runs[1].mode = "backpressure"
    out = io.StringIO()
    print_comparison(Console(file=out, width=80), results.runs)
    text = out.getvalue()
    assert "…" not in text
    for word in ("below", "overload", "whole", "admission", "backpressure", "250 ms", "20 %", "80 %", "50 %"):
        assert word in text
    assert "40 offered = 32 completed + 8 refused (queue_wait 8)" in text


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (0.44, "0.4 ms"), (87.3, "87 ms"), (1240.0, "1.24 s")])
def test_milliseconds(value: float | None, text: str) -> None:
    assert milliseconds(value) == text


def test_progress_is_silent_where_nobody_watches() -> None:
    out = io.StringIO()
    with LiveLine(Console(file=out), "x", 10.0) as line:
        line.update(5.0, 10, 3, {"completed": 7})
    assert out.getvalue() == ""


def test_progress_shows_counts_on_a_terminal() -> None:
    out = io.StringIO()
    with LiveLine(Console(file=out, force_terminal=True, width=120), "hybrid", 10.0) as line:
        line.update(5.0, 10, 3, {"completed": 6, "shed": 1, "failed": 1})
    assert "hybrid" in out.getvalue()
    assert "failed 1" in out.getvalue()


def test_files_are_written_or_the_reason_is_told(tmp_path) -> None:  # type: ignore[no-untyped-def]
    results, runs = two_runs()
    json_path, html_path = tmp_path / "deep" / "r.json", tmp_path / "deep" / "r.html"
    check_writable(json_path)
    publish(results, runs, title="t", json_path=json_path, html_path=html_path)
    assert json.loads(json_path.read_bytes())["runs"][0]["mode"] == "admission"
    assert html_path.read_text().startswith("<!doctype html>")
    with pytest.raises(UsageError, match="cannot be written"):
        check_writable(tmp_path)
    with pytest.raises(UsageError, match="cannot be written"):
        publish(results, runs, title="t", json_path=tmp_path)
