"""`forebay bench` as a user runs it, against a simulated engine in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.load.child import Child
from tests.faults.rig.waiting import eventually

FOREBAY = [sys.executable, "-c", "from forebay.cli import main; main()"]


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with Child("simulated engine", ["engine", "simulated", "--port", "0", "--max-num-seqs", "8"]) as child:
        child.wait_listening()
        child.wait_answer("/health")
        yield child.url


def bench(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*FOREBAY, "bench", *arguments], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_a_load_is_measured_and_reported(engine: str, tmp_path: Path) -> None:
    json_path, html_path = tmp_path / "r.json", tmp_path / "r.html"
    done = bench(
        *("--target", f"engine={engine}", "--engine-metrics", engine, "--rate", "40", "--duration", "2"),
        *("--warm-up-s", "0.5", "--output-tokens", "5-10", "--latency-ms", "1000", "--seed", "7"),
        *("--json", str(json_path), "--html", str(html_path), "--records", str(tmp_path / "records")),
    )
    assert "p99" in done.stdout
    assert f"written: {html_path}" in done.stdout
    (run,) = json.loads(json_path.read_bytes())["runs"]
    counts = run["counts"]
    assert counts["offered"] == counts["completed"] > 50
    assert (run["mode"], run["seed"], run["duration_s"]) == ("engine", 7, 2.0)
    assert run["served_per_s"] == pytest.approx(counts["offered"] / 2, rel=0.15)
    assert 0 < run["ttft_ms"]["p50"] < run["latency_ms"]["p50"]
    assert 0 < run["utilization"]["busy"] <= 1
    assert 0 < run["utilization"]["batch"] <= 1
    lines = (tmp_path / "records" / "1.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines if '"type":"request"' in line]
    assert len(requests) > counts["offered"]  # the warm-up is recorded, and left out of the figures
    assert html_path.read_text().startswith("<!doctype html>")


def test_the_same_seed_sends_the_same_requests(engine: str, tmp_path: Path) -> None:
    sent = []
    for name in ("a", "b"):
        bench(
            *("--target", engine, "--rate", "30", "--duration", "1", "--arrivals", "bursty", "--clump", "4"),
            *("--prompt-tokens", "5-50", "--output-tokens", "2-5", "--records", str(tmp_path / name)),
        )
        lines = (tmp_path / name / "1.jsonl").read_text().splitlines()
        records = sorted((json.loads(line) for line in lines[1:]), key=lambda record: record["index"])
        sent.append([(record["intended_ns"], record["prompt_tokens"], record["output_tokens"]) for record in records])
    assert sent[0] == sent[1]
    assert len(sent[0]) > 10


def test_several_processes_share_one_load(engine: str, tmp_path: Path) -> None:
    done = bench(
        *("--target", engine, "--rate", "60", "--duration", "2", "--output-tokens", "2", "--processes", "2"),
        *("--json", "-", "--records", str(tmp_path)),
    )
    (run,) = json.loads(done.stdout)["runs"]
    assert run["counts"]["offered"] == run["counts"]["completed"] > 80
    indices = [json.loads(line)["index"] for line in (tmp_path / "1.jsonl").read_text().splitlines()[1:]]
    assert sorted(indices) == list(range(run["counts"]["offered"]))
    assert os.listdir(tmp_path) == ["1.jsonl"]


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "constant", "ramp"])
def test_arrivals_and_routes(engine: str, arrivals: str) -> None:
    done = bench(
        *("--target", engine, "--arrivals", arrivals, "--rate", "20", "--duration", "1", "--json", "-"),
        *("--route", "completions", "--no-stream", "--output-tokens", "2"),
    )
    (run,) = json.loads(done.stdout)["runs"]
    assert run["counts"]["completed"] == run["counts"]["offered"] > 0
    assert run["ttft_ms"]["p50"] is None
    assert run["goodput_tokens_per_s"] > 0


def test_a_trace_is_replayed(engine: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("timestamp,prompt_tokens,output_tokens\n" + "".join(f"{n * 2},20,{n + 1}\n" for n in range(10)))
    done = bench(
        "--target",
        engine,
        "--arrivals",
        "trace",
        "--trace",
        str(trace),
        "--speed",
        "20",
        "--duration",
        "2",
        "--json",
        "-",
    )
    (run,) = json.loads(done.stdout)["runs"]
    assert run["counts"]["completed"] == 10
    assert run["goodput_tokens_per_s"] == pytest.approx(sum(range(1, 11)) / 2)


def test_impatient_callers_hang_up(engine: str) -> None:
    done = bench(
        *("--target", engine, "--rate", "10", "--duration", "1", "--output-tokens", "500", "--patience-s", "0.3"),
        *("--json", "-"),
    )
    (run,) = json.loads(done.stdout)["runs"]
    assert run["counts"]["cancelled"] == run["counts"]["offered"] > 0
    assert run["wasted_work_ratio"] == 1.0


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_load_ends_at_once_with_all_its_processes(engine: str, processes: str, stop: signal.Signals) -> None:
    command = [*FOREBAY, "bench", "--target", engine, "--rate", "20", "--duration", "60", "--processes", processes]
    before = _finished(engine)
    load = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        eventually(lambda: _finished(engine) > before, within=30, what="the load runs")
        # As a terminal does: Ctrl-C goes to the whole group.
        os.killpg(load.pid, stop) if stop == signal.SIGINT else load.send_signal(stop)
        _, errors = load.communicate(timeout=30)
    finally:
        load.kill()
    assert load.returncode == 130
    assert "Traceback" not in errors
    deadline = time.monotonic() + 3
    while (left := _of_group(load.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def _finished(engine: str) -> float:
    """Requests that the engine has answered."""
    with urllib.request.urlopen(f"{engine}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total{"))


def _of_group(group: int) -> list[int]:
    """Processes of a group that run; the dead that nobody collected do not count."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of_group) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "ftp://x", "--rate", "1"], "is not an http or https URL"),
        (["--target", "http://127.0.0.1:9"], "say how much load"),
        (["--target", "http://127.0.0.1:9", "--rate", "1e9", "--model", "m"], "out of range"),
        (["--target", "http://127.0.0.1:9", "--rate", "1", "--prompt-tokens", "no"], "'no' is not a size"),
        (["--target", "http://127.0.0.1:9", "--rate", "1", "--arrivals", "trace"], "go together"),
        (["--target", "http://127.0.0.1:9", "--rate", "1", "--json", "/proc/none/x"], "cannot be written"),
        (["--target", "http://127.0.0.1:9", "--rate", "1", "--processes", "0"], "--processes"),
    ],
)
def test_a_users_mistake_is_one_line(arguments: list[str], message: str) -> None:
    done = bench(*arguments, "--model", "m", status=2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_nobody_listening_is_one_line() -> None:
    done = bench("--target", "http://127.0.0.1:9", "--rate", "5", "--duration", "1", status=1)
    assert "cannot be reached" in done.stderr
    done = bench("--target", "http://127.0.0.1:9", "--rate", "5", "--duration", "1", "--model", "m", status=2)
    assert "no request was answered: no connection to 127.0.0.1:9" in done.stderr
