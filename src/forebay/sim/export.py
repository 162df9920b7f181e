"""Every request of a simulation, outside of it: as rows of Parquet, or as the records that the report's page draws."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.report.records import NEVER, OUTCOMES, EngineSample, Objective, PhaseBounds, RunHeader, RunRecords
from forebay.sim.engines import Work
from forebay.sim.records import REASONS, Columns
from forebay.sim.run import Simulation
from forebay.sim.scenario import Scenario
from forebay.sim.world import TIMER

NS_PER_S = 1_000_000_000
SAMPLES = 480
"""Readings of the engines' counters over a run, for the curves of a page."""

TIMES = ("intended_ns", "first_token_ns", "done_ns", "queue_wait_ns")
NUMBERS = ("prompt_tokens", "asked_tokens", "output_tokens", "status", "attempts")


def require_pyarrow() -> Any:
    """The library. Raises UsageError that names the extra when it is missing."""
    try:
        import pyarrow as pa
    except ImportError:
        raise UsageError("Parquet files need the extra `sim`: pip install 'forebay[sim]'") from None
    return pa


def encode_rows(columns: Columns) -> bytes:
    """The columns as a Parquet file: times in ns (null: it did not happen), outcome and reason by name."""
    pa = require_pyarrow()
    from pyarrow import compute, parquet

    def by_name(codes: Any, names: Sequence[str]) -> Any:
        index = pa.array(memoryview(codes), type=pa.int32())
        return pa.DictionaryArray.from_arrays(index, pa.array(list(names), type=pa.string()))

    table = {"request": pa.array(range(len(columns)), type=pa.int64())}
    table |= {"key": by_name(columns.key, columns.keys), "phase": by_name(columns.phase, columns.phases)}
    table |= {"outcome": by_name(columns.outcome, OUTCOMES), "reason": by_name(columns.reason, REASONS)}
    for name in TIMES:
        values = pa.array(memoryview(getattr(columns, name)))
        table[name] = compute.if_else(compute.equal(values, NEVER), None, values)
    for name in NUMBERS:
        table[name] = pa.array(memoryview(getattr(columns, name)))
    out = io.BytesIO()
    parquet.write_table(pa.table(table), out, compression="zstd")
    return out.getvalue()


def write_parquet(path: Path, runs: Sequence[tuple[Scenario, Path]]) -> None:
    """One file of all runs, each with the scenario's name, policy, seed and digest beside every request.

    Raises UsageError when a file of a run is gone, or `path` cannot be written.
    """
    pa = require_pyarrow()
    from pyarrow import parquet

    writer = None
    try:
        for scenario, rows in runs:
            table = parquet.read_table(rows)
            marks = {"run": scenario.name, "policy": scenario.policy, "scenario": scenario.digest()}
            for name, text in marks.items():
                values = pa.array([text] * len(table), type=pa.string()).dictionary_encode()
                table = table.append_column(name, values)
            table = table.append_column("seed", pa.array([scenario.seed] * len(table), type=pa.int64()))
            if writer is None:
                writer = parquet.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error}") from None
    finally:
        if writer is not None:
            writer.close()


def run_records(scenario: Scenario) -> RunRecords:
    """Simulates it, and gives what a measured run would have recorded."""
    simulation = Simulation(scenario)
    end_ns = simulation.parts.end_ns
    samples: list[EngineSample] = []

    def sample(at_ns: int) -> None:
        works = [engine.work() for engine in simulation.engines]
        work = Work()
        for one in works:
            work = work.plus(one)
        engines = len(works)
        samples.append(
            EngineSample(
                at_ns=at_ns,
                # A page shows one engine: the mean of all.
                busy_s=work.busy_ns / engines / NS_PER_S,
                steps=work.steps,
                batch_seqs=work.batch_seqs,
                max_batch=simulation.parts.seats,
                generated_tokens=work.output_tokens,
            )
        )

    for number in range(SAMPLES + 1):
        at_ns = end_ns * number // SAMPLES
        simulation.world.at(at_ns, partial(sample, at_ns), TIMER)
    simulation.run()
    header = RunHeader(
        mode=scenario.policy,
        policy=scenario.policy,
        workload=scenario.name,
        seed=scenario.seed,
        phases=[PhaseBounds(name, 0.0, end_ns / NS_PER_S) for name in simulation.records.phases[:1]],
        objective=Objective(scenario.ttft_ms, scenario.latency_ms),
    )
    return RunRecords(header, list(simulation.records.records()), samples)
