"""`forebay demo` end to end on the simulated engine, and what it leaves behind when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.errors import EngineError
from forebay.load.child import Child

FOREBAY = [sys.executable, "-c", "from forebay.cli import main; main()"]
MODES = ["backpressure", "admission", "hybrid"]


def test_the_demo_compares_the_modes_and_writes_its_report(tmp_path: Path) -> None:
    command = [*FOREBAY, "demo", "--engine", "simulated", "--seconds-per-phase", "1", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    for text in ("Measured capacity", "below", "bursts", "overload", "whole", "The hybrid served"):
        assert text in done.stdout
    results = json.loads((tmp_path / "out" / "demo.json").read_bytes())
    runs = {run["mode"]: run for run in results["runs"]}
    assert list(runs) == MODES
    for run in runs.values():
        counts = run["counts"]
        ended = sum(counts[outcome] for outcome in ("completed", "shed", "evicted", "cancelled", "failed"))
        assert counts["offered"] == ended
        assert counts["failed"] == 0
        assert counts["completed"] > 0
        assert [phase["name"] for phase in run["phases"]] == ["below", "bursts", "overload"]
        assert 0 < run["utilization"]["busy"] <= 1
        assert 0 < run["utilization"]["batch"] <= 1
    # The same arrivals for all; only who may wait sheds nothing up front, and only then is the wait long.
    assert len({run["counts"]["offered"] for run in runs.values()}) == 1
    assert runs["backpressure"]["counts"]["shed"] == 0
    assert runs["admission"]["counts"]["shed"] > 0
    assert runs["admission"]["counts"]["evicted"] == 0
    waits = {mode: run["phases"][2]["queue_wait_ms"]["p50"] for mode, run in runs.items()}
    assert waits["backpressure"] > 5 * waits["hybrid"]
    page = (tmp_path / "out" / "demo.html").read_text()
    assert all(mode in page for mode in MODES)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_demo_leaves_no_process_behind(tmp_path: Path, stop: signal.Signals) -> None:
    command = [*FOREBAY, "demo", "--engine", "simulated", "--seconds-per-phase", "1", "--out", str(tmp_path)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        children = _await_children(demo.pid, count=2)
        demo.send_signal(stop)
        _, errors = demo.communicate(timeout=20)
    finally:
        demo.kill()
    assert demo.returncode == 130
    assert "Traceback" not in errors
    assert [pid for pid in children if _alive(pid)] == []


def _await_children(pid: int, count: int) -> list[int]:
    """The engine, then the gateway too."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        if len(children) >= count:
            return children
        time.sleep(0.1)
    pytest.fail("the demo did not start its engine and gateway")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_absurd_options_are_refused(tmp_path: Path) -> None:
    command = [*FOREBAY, "demo", "--seconds-per-phase", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--seconds-per-phase" in done.stderr


def test_a_child_that_cannot_start_says_why() -> None:
    with (
        Child("engine", ["engine", "simulated", "--profile", "no such GPU", "--port", "0"]) as child,
        pytest.raises(EngineError, match=r"the engine did not start: .*no such GPU"),
    ):
        child.wait_listening(20)
