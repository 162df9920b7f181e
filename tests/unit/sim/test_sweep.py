"""Sweeps in one process: order, what is kept and what is not taken for an answer."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from forebay.errors import UsageError
from forebay.sim import sweep as module
from forebay.sim.policies import Sizing, config_text
from forebay.sim.run import run
from forebay.sim.scenario import EngineSpec, Scenario, WorkloadSpec
from forebay.sim.sweep import SweepInterruptedError, fingerprint, rows_file, sweep

ENCODER = "a100-40gb/bert-large/fp16/seq128"


def scenario(seed: int, **changes: object) -> Scenario:
    made = Scenario(
        name=f"seed {seed}",
        policy="hybrid",
        config=config_text("hybrid", Sizing(1, 8), slo_ms=100.0),
        engines=EngineSpec(profile=ENCODER),
        workload=WorkloadSpec(rate=300.0, duration_s=0.2, prompt_tokens="128", output_tokens="1"),
        seed=seed,
        latency_ms=100.0,
    )
    return msgspec.structs.replace(made, **changes)


def test_outcomes_come_in_the_order_of_the_scenarios() -> None:
    seeds = (3, 1, 2, 1)
    outcomes = sweep([scenario(seed) for seed in seeds], processes=1)
    assert [outcome.result.seed for outcome in outcomes] == [3, 1, 2, 1]
    assert outcomes[1] == outcomes[3] == run(scenario(1))


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    scenarios = [scenario(seed) for seed in (1, 2, 3)]

    def interrupt(done: int, _total: int, _scenario: Scenario) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(SweepInterruptedError, match=r"2 of 3 simulations are done and kept in .*same command"):
        sweep(scenarios, processes=1, resume_dir=tmp_path, progress=interrupt)
    told: list[tuple[int, int, str]] = []
    outcomes = sweep(
        scenarios,
        processes=1,
        resume_dir=tmp_path,
        progress=lambda done, total, one: told.append((done, total, one.name)),
    )
    assert told == [(3, 3, "seed 3")]
    assert outcomes == [run(one) for one in scenarios]
    assert not list(tmp_path.glob("*.tmp"))


def test_without_a_directory_nothing_is_kept() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SweepInterruptedError, match="nothing was kept"):
        sweep([scenario(1)], processes=1, progress=interrupt)


def test_a_kept_file_that_is_broken_is_no_answer(tmp_path: Path) -> None:
    sweep([scenario(1)], processes=1, resume_dir=tmp_path)
    (kept,) = tmp_path.glob("*.json")
    kept.write_bytes(kept.read_bytes()[:100])
    assert sweep([scenario(1)], processes=1, resume_dir=tmp_path) == [run(scenario(1))]


def test_fresh_means_simulated_anew(tmp_path: Path) -> None:
    sweep([scenario(1)], processes=1, resume_dir=tmp_path)
    told: list[int] = []
    for fresh in (False, True):
        sweep([scenario(1)], processes=1, resume_dir=tmp_path, fresh=fresh, progress=lambda *_: told.append(1))
    assert len(told) == 1


def test_rows_are_kept_beside_the_outcome(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    sweep([scenario(1)], processes=1, resume_dir=tmp_path)
    (outcome,) = sweep([scenario(1)], processes=1, resume_dir=tmp_path, keep_rows=True)
    table = parquet.read_table(rows_file(tmp_path, scenario(1)))
    assert len(table) == outcome.result.counts.offered
    assert table.column("outcome").to_pylist().count("completed") == outcome.result.counts.completed


def test_a_trace_of_other_content_is_another_sweep(tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    workload = WorkloadSpec(trace=str(trace))
    names = set()
    for tokens in (10, 20):
        trace.write_text(f"timestamp,prompt_tokens,output_tokens\n0,{tokens},1\n1,{tokens},1\n")
        names.add(rows_file(tmp_path, scenario(1, workload=workload)).name)
    assert len(names) == 2


def test_other_code_is_another_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = rows_file(tmp_path, scenario(1))
    fingerprint.cache_clear()
    monkeypatch.setattr(module, "PARTS", ("core",))
    try:
        assert rows_file(tmp_path, scenario(1)) != before
    finally:
        fingerprint.cache_clear()


def test_what_cannot_run_is_said_in_one_line() -> None:
    broken = scenario(1, engines=EngineSpec(profile="a100-40gb/bert-huge"))
    with pytest.raises(UsageError, match="no profile 'a100-40gb/bert-huge'; did you mean"):
        sweep([broken], processes=1)


def test_a_directory_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="results cannot be kept here"):
        sweep([scenario(1)], processes=1, resume_dir=tmp_path / "file")


@pytest.mark.parametrize("processes", [-1, 5000])
def test_the_number_of_processes_is_bounded(processes: int) -> None:
    with pytest.raises(UsageError, match="number of processes"):
        sweep([scenario(1)], processes=processes)
