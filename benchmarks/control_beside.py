"""What the live benchmarks share: the same requests in the simulator, what came of them, and the table of both."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from forebay.load.child import get
from forebay.load.target import Target
from forebay.report.records import RequestRecord
from forebay.report.statistics import percentile
from forebay.sim.run import Simulation
from forebay.sim.scenario import ClientSpec, EngineSpec, FaultSpec, Scenario, WorkloadSpec

SHOWN: Final = (
    ("served", "served %"), ("good", "good %"), ("ttft_p50", "TTFT p50 ms"), ("ttft_p99", "TTFT p99 ms"),
    ("tpot_p50", "TPOT p50 ms"), ("tpot_p99", "TPOT p99 ms"), ("queue_wait_p99", "wait p99 ms"),
)  # fmt: skip


class Objectives(NamedTuple):
    """What a good answer keeps to."""

    ttft_ms: float
    tpot_ms: float


def healthy(port: int, path: str) -> bool:
    """Does it answer 200 there?"""
    try:
        return get(Target.parse(f"http://127.0.0.1:{port}"), path)[0] == 200
    except OSError:
        return False


def simulated(
    folder: Path,
    config: str,
    profile: str,
    seen: Sequence[RequestRecord],
    asked: Sequence[int],
    seed: int,
    slowdowns: Sequence[FaultSpec] = (),
) -> list[RequestRecord]:
    """The same requests, with the sizes that were asked for, through this configuration before that profile."""
    trace = folder / "trace.csv"
    with trace.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("timestamp", "prompt_tokens", "output_tokens", "key_id"))
        for record, output in zip(seen, asked, strict=True):
            writer.writerow((f"{record.intended_ns / 1e9:.9f}", record.prompt_tokens, output, record.key))
    simulation = Simulation(
        Scenario(
            name="live",
            policy="guarded",
            config=config,
            engines=EngineSpec(profile=profile, faults=tuple(slowdowns)),
            workload=WorkloadSpec(trace=str(trace)),
            clients=ClientSpec(max_tokens="exact"),
            seed=seed,
        )
    )
    simulation.run()
    return list(simulation.records.records())


def figures(records: Sequence[RequestRecord], warm_up_s: float, objectives: Objectives) -> dict[str, float]:
    """Of requests that were sent after the warm-up. Shares are of those that were offered."""
    counted = [record for record in records if record.intended_ns >= warm_up_s * 1e9]
    done = [record for record in counted if record.outcome == "completed"]
    good = [record for record in done if _in_time(record, objectives)]
    ttft = sorted((record.first_token_ns - record.intended_ns) / 1e6 for record in done if record.first_token_ns >= 0)
    gaps = sorted(_gap_ms(record) for record in done if record.output_tokens > 1)
    waits = sorted(record.queue_wait_ms for record in done if record.queue_wait_ms is not None)
    return {
        "offered": len(counted),
        "served": 100.0 * len(done) / len(counted),
        "good": 100.0 * len(good) / len(counted),
        "good_tokens": 100.0 * sum(r.output_tokens for r in good) / max(1, sum(r.output_tokens for r in done)),
        "ttft_p50": percentile(ttft, 0.5) or 0.0,
        "ttft_p99": percentile(ttft, 0.99) or 0.0,
        "tpot_p50": percentile(gaps, 0.5) or 0.0,
        "tpot_p99": percentile(gaps, 0.99) or 0.0,
        "queue_wait_p99": percentile(waits, 0.99) or 0.0,
    }


def _gap_ms(record: RequestRecord) -> float:
    return (record.done_ns - record.first_token_ns) / 1e6 / (record.output_tokens - 1)


def _in_time(record: RequestRecord, objectives: Objectives) -> bool:
    if record.first_token_ns < 0 or (record.first_token_ns - record.intended_ns) / 1e6 > objectives.ttft_ms:
        return False
    return record.output_tokens < 2 or _gap_ms(record) <= objectives.tpot_ms


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each load; each cell: live / simulated."""
    lines = [
        "| load | requests | " + " | ".join(title for _, title in SHOWN) + " |",
        "|---|---:|" + "---:|" * len(SHOWN),
    ]
    for row in rows:
        live, made = row["live"], row["simulated"]
        cells = [f"{live[name]:.1f} / {made[name]:.1f}" for name, _ in SHOWN]
        lines.append(f"| {row['load']:g}x | {live['offered']} | " + " | ".join(cells) + " |")
    return lines
