"""`forebay sim` as a user runs it: a grid, its files, an interruption in the middle, and what is said of mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.rig.waiting import eventually

from .processes import FOREBAY, environment

H100 = "h100-80g/llama-3.1-8b/bf16/tp1/trtllm"
ENCODER = "a100-40gb/bert-large/fp16/seq128"
SMALL = ("--engine", ENCODER, "--joins", "--duration", "0.5", "--warm-up-s", "0.1")


def sim(*arguments: str, status: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*FOREBAY, "sim", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=cwd,
        env=environment(),
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


def results(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def test_a_grid_is_simulated_and_written(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    files = {name: tmp_path / f"r.{name}" for name in ("json", "parquet", "html")}
    done = sim(
        *(*SMALL, "--load", "0.5", "--load", "2", "--seed", "1", "--seed", "2", "--keep", str(tmp_path / "kept")),
        *("--processes", "1", *(text for name, path in files.items() for text in (f"--{name}", str(path)))),
    )
    found = results(files["json"])
    runs, beside = found["runs"], found["simulated"]
    assert [(run["policy"], run["seed"]) for run in runs[:4]] == [
        *(("backpressure", 1), ("backpressure", 2), ("admission", 1), ("admission", 2)),
    ]
    assert len(runs) == len(beside) == 2 * 4 * 2
    for run, one in zip(runs, beside, strict=True):
        counts = run["counts"]
        assert counts["offered"] == sum(count for name, count in counts.items() if name != "offered")
        assert run["goodput_per_s"] <= 1.05 * one["bound_per_s"]
        assert run["workload"].startswith("poisson arrivals")
    light, heavy = runs[4]["offered_load"], runs[12]["offered_load"]
    assert 0.3 < light < 0.7
    assert 1.6 < heavy < 2.4
    for word in ("hybrid", "none", "bound", "±", "at most 2529 requests/s"):
        assert word in done.stdout
    assert "uPlot" in files["html"].read_text("utf-8")
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(files["parquet"])
    assert {"outcome", "intended_ns", "policy", "seed"} <= set(rows.column_names)
    assert len(rows) >= sum(run["counts"]["offered"] for run in runs)


def test_processes_make_no_difference(tmp_path: Path) -> None:
    found = []
    for processes in ("1", "2"):
        path = tmp_path / f"{processes}.json"
        keep = tmp_path / f"kept-{processes}"
        sim(*SMALL, "--load", "1.5", "--processes", processes, "--keep", str(keep), "--json", str(path))
        found.append(results(path))
    one, two = found
    assert one["runs"] == two["runs"]
    assert one["simulated"] == two["simulated"]
    kept = [sorted(path.read_bytes() for path in (tmp_path / f"kept-{n}").glob("*.json")) for n in (1, 2)]
    assert kept[0] == kept[1]


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(tmp_path: Path) -> None:
    keep, path = tmp_path / "kept", tmp_path / "r.json"
    seeds = [text for seed in range(6) for text in ("--seed", str(seed))]
    load = ("--engine", ENCODER, "--joins", "--policy", "hybrid", "--load", "1", "--duration", "1", *seeds)
    arguments = (*load, "--processes", "2", "--keep", str(keep), "--json", str(path))
    process = subprocess.Popen(
        [*FOREBAY, "sim", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,  # a terminal's Ctrl-C goes to the whole group
    )
    eventually(lambda: list(keep.glob("*.json")), within=30, what="a finished simulation")

    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=20)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert f"kept in {keep}; the same command goes on from there" in told
    done = {kept.name: kept.stat().st_mtime_ns for kept in keep.glob("*.json")}
    assert 0 < len(done) < 6
    assert not list(keep.glob("*.tmp"))
    time.sleep(0.01)
    sim(*arguments)
    assert {name: (keep / name).stat().st_mtime_ns for name in done} == done, "simulated again what was kept"
    fresh = tmp_path / "fresh.json"
    sim(*load, "--processes", "1", "--keep", str(tmp_path / "other"), "--json", str(fresh))
    assert results(path)["runs"] == results(fresh)["runs"]


def test_json_goes_to_stdout_alone(tmp_path: Path) -> None:
    done = sim(*SMALL, "--rate", "300", "--policy", "hybrid", "--optimum", "--keep", str(tmp_path), "--json", "-")
    found = json.loads(done.stdout)
    assert found["simulated"][0]["optimum"]["exact"] >= found["runs"][0]["counts"]["completed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "5"), "say on what to simulate: --engine PROFILE"),
        (("--engine", H100), "say how much load: --trace NAME|FILE, --rate R, or --load X"),
        (("--engine", "h100-80g/llama-3.1-8", "--rate", "5"), "did you mean h100-80g/llama-3.1-8b"),
        (("--engine", H100, "--trace", "azure_llm_2023_conf"), "is azure_llm_2023_conv meant?"),
        (("--engine", H100, "--trace", "broken.csv"), "broken.csv, line 3, field `prompt_tokens`"),
        (("--engine", H100, "--trace", "broken.csv", "--rate", "5"), "--trace and --rate exclude each other"),
        (("--engine", H100, "--rate", "5", "--load", "2"), "say the same thing"),
        (("--engine", H100, "--rate", "5", "--thin", "0.5"), "belong to a trace"),
        (("--engine", H100, "--rate", "5", "--arrivals", "poison"), "poisson"),
        (("--engine", H100, "--rate", "5", "--prompt-tokens", "many"), "'many' is not a size"),
        (("--engine", H100, "--rate", "5", "--duration", "10", "--warm-up-s", "10"), "shorter than --duration"),
        (("--engine", H100, "--rate", "1e6", "--duration", "3600"), "are more than 20000000 requests"),
        (("--engine", H100, "--rate", "5", "--policy", "hybird"), "'hybird' is neither a policy"),
        (("--engine", H100, "--rate", "5", "--policy", "wrong.toml"), "[admission] mode"),
        (("--engine", H100, "--rate", "5", "--gateways", "2"), "2 gateways cannot each own one of 1 engines"),
        (("--engine", H100, "--rate", "5", "--max-num-seqs", "9000"), "max_num_batched_tokens"),
        (("--engine", H100, "--rate", "5", "--tpot-ms", "1"), "no request can be served within TPOT 1 ms"),
        (("--engine", H100, "--rate", "5", "--json", "broken.csv/r.json"), "cannot be written"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.csv").write_text("timestamp,prompt_tokens,output_tokens\n0,10,10\n1,ten,10\n")
    (tmp_path / "wrong.toml").write_text('[admission]\nmode = "hybird"\n')
    told = _told(arguments, tmp_path)
    assert message in told
    assert "\n" not in told.strip()


def _told(arguments: tuple[str, ...], folder: Path) -> str:
    """What the command says, in this process: starting one for each mistake takes longer than finding it."""
    from click.testing import CliRunner

    from forebay.cli.sim import command
    from forebay.errors import ForebayError

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = CliRunner().invoke(command, [*arguments, "--keep", str(folder / "kept"), "--processes", "1"])
    assert isinstance(result.exception, ForebayError), result.output
    assert result.exception.exit_code == 2
    return str(result.exception)


def test_profiles_and_traces_are_listed() -> None:
    assert H100 in sim("--list-profiles").stdout
    assert "azure_llm_2023_code" in sim("--list-traces").stdout


def test_a_worker_that_is_killed_is_no_hang_and_no_traceback(tmp_path: Path) -> None:
    """As when memory runs out."""
    import multiprocessing

    from forebay.errors import ForebayError
    from forebay.sim.policies import Sizing, config_text
    from forebay.sim.scenario import EngineSpec, Scenario, WorkloadSpec
    from forebay.sim.sweep import sweep

    scenarios = [
        Scenario(
            name=f"seed {seed}",
            policy="hybrid",
            config=config_text("hybrid", Sizing(64)),
            engines=EngineSpec(profile=ENCODER, joins=True),
            workload=WorkloadSpec(rate=1000.0, duration_s=1.0, prompt_tokens="128", output_tokens="1"),
            seed=seed,
        )
        for seed in range(6)
    ]

    def kill(*_: object) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(ForebayError, match=r"was killed: too little memory\?.*\(status -9\)"):
        sweep(scenarios, processes=2, resume_dir=tmp_path, progress=kill)
    assert 1 <= len(list(tmp_path.glob("*.json"))) < 6
