"""The guarded window before a real vLLM: the same arrivals live and simulated, at several multiples of its capacity.

``python -m benchmarks.control_vllm`` (or ``make bench NAME=control_vllm``) starts vLLM on the CPU, calibrates the step
model on it by a probing run, and puts a gateway before it that knows an objective and nothing else. What came of the
requests is compared with the simulator's account of the same ones, on the profile that was just fitted: so engine,
sockets, event loops and the machine's other work are in the difference, and nothing is fitted to the loads themselves.

A machine that several share does not keep its speed, and what an engine does within an objective depends on it more
than in proportion. So each load is simulated three times more: with an engine that is as much slower or faster, four
seconds by four seconds, as vLLM's steps were seen to be under that load, and with one that is a tenth slower or faster
throughout, which says what the speed is worth.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import click
import msgspec

from benchmarks import environment, publish
from benchmarks.calibration_engines import ENGINES, VLLM_SEQS
from benchmarks.calibration_judge import STRETCH_NS, Kept, calibrate, pace_at
from benchmarks.control_beside import Objectives, figures, healthy, simulated, table
from benchmarks.process import Process, free_port
from forebay.engines.simulated.fitted import write_fitted
from forebay.engines.simulated.profile import StepProfile
from forebay.load.attack import Plan, attack
from forebay.load.observe import first_model
from forebay.load.probing import probe_engine
from forebay.load.target import Target
from forebay.load.workload import Key, Workload
from forebay.report.records import Objective, PhaseBounds, RequestRecord, RunHeader
from forebay.sim.bounds import Size as MixSize
from forebay.sim.bounds import limits_of, step_bound
from forebay.sim.calibrate import Calibration, fitted, usable
from forebay.sim.scenario import EngineSpec, FaultSpec, WorkloadSpec

PROMPT, OUTPUT = "~60/0.5", "~24/0.5"
LOADS: Final = (1.0, 2.0, 5.0)
KEYS: Final = ("a", "b", "c", "d")
PROBING_S: Final = 40.0
TTFT_MS: Final = 1000.0
PACE: Final = 1.5
"""The objective per token, in steps of a full batch: the engine's own bound on sequences is what binds."""
SPEEDS: Final = {"faster": 0.9, "slower": 1.1}
"""Times that a step takes as long as calibrated."""
STEPS: Final = (
    "by the speed of the simulated engine; what steps took is against the probing run, mean (least–most of 4 s)"
)
PAGE: Final = publish.DOCS / "control.md"


def _load(rate: float, duration_s: float) -> WorkloadSpec:
    return WorkloadSpec(rate=rate, duration_s=duration_s, prompt_tokens=PROMPT, output_tokens=OUTPUT)


def _settings(objectives: Objectives) -> str:
    """An objective, and nothing else."""
    return f"[slo]\nttft_ms = {objectives.ttft_ms:g}\ntpot_ms = {objectives.tpot_ms:.3f}\n"


def _capacity(profile: StepProfile, path: Path, objectives: Objectives) -> float:
    """Requests per second that the engine serves within the objective, by the fluid bound of this mix."""
    sizes = [MixSize(a.prompt_tokens or 1, a.output_tokens or 1) for a in _load(100.0, 20.0).draw(1)]
    limits = limits_of(profile, EngineSpec(profile=str(path)))
    bound = step_bound(profile, limits, sizes, ttft_ms=objectives.ttft_ms, tpot_ms=objectives.tpot_ms)
    return bound.requests_per_s


@contextmanager
def _gateway(folder: Path, engine: Target, objectives: Objectives) -> Iterator[Target]:
    port, admin_port = free_port(), free_port()
    keys = "".join(f'[[keys.static]]\nid = "{key}"\nsecret = "sk-{key}"\n' for key in KEYS)
    path = folder / "forebay.toml"
    path.write_text(
        f"[server]\nport = {port}\n[admin]\nport = {admin_port}\n{_settings(objectives)}"
        f'[[engines]]\nname = "vllm"\nurls = ["{engine.url}"]\n[keys]\nanonymous = false\n{keys}'
    )
    process = Process.start("gateway", [sys.executable, "-m", "forebay", "serve", "--config", str(path)], folder)
    try:
        process.wait_until(lambda: healthy(port, "/readyz"), 30.0)
        yield Target.parse(f"http://127.0.0.1:{port}")
    finally:
        process.stop()


def _measured(
    folder: Path, engine: Target, objectives: Objectives, rate: float, duration_s: float, seed: int
) -> list[RequestRecord]:
    header = RunHeader(
        mode="hybrid", policy="guarded", workload="vllm", seed=seed, phases=[PhaseBounds("load", 0.0, duration_s)],
        objective=Objective(ttft_ms=objectives.ttft_ms),
    )  # fmt: skip
    workload = Workload(
        route="completions", model=first_model(engine), keys=tuple(Key(key, f"sk-{key}") for key in KEYS)
    )
    arrivals = _load(rate, duration_s).draw(seed)
    with _gateway(folder, engine, objectives) as target:
        return attack(Plan(target, header, arrivals, workload), folder / "records.jsonl", lambda _: None).requests


def _slowdowns(paces: dict[int, float]) -> list[FaultSpec]:
    """The engine as fast as it was seen to be, stretch by stretch."""
    # Each ends just before the next begins: an end sets the speed back.
    return [
        FaultSpec(kind="slow", from_s=at / 1e9, to_s=(at + STRETCH_NS - 1000) / 1e9, factor=factor)
        for at, factor in paces.items()
    ]


def _at_engine(records: list[RequestRecord]) -> list[RequestRecord]:
    """What the engine was sent: without the time in the gateway's queue."""
    return [
        msgspec.structs.replace(record, sent_ns=record.sent_ns + round((record.queue_wait_ms or 0.0) * 1e6))
        for record in usable(records)
    ]


def _markdown(content: dict[str, Any]) -> str:
    where = content["environment"]
    rows = content["rows"]
    method = (
        f"Measured {where['at']} at commit `{where['commit']}` on {where['machine']}, {where['cpus']} cores, by "
        f"`{content['command']}`. vLLM 0.32 for CPU, a random Llama of 35 M weights, {VLLM_SEQS} sequences; objective "
        f"{content['ttft_ms']:g} ms to the first token and {content['tpot_ms']:.1f} ms per token; capacity by the "
        f"fluid bound of the profile that was fitted just before, {content['capacity_per_s']:.1f} requests/s; "
        f"{content['duration_s']:g} s each, the first {content['warm_up_s']:g} s not counted. Shares are of offered "
        "requests. Each cell: live / simulated."
    )
    lines = [method, "", *table(rows), "", f"Good requests, %, {STEPS}:", ""]
    lines += [
        "| load | seed | live | simulated as probed | as fast as seen | a tenth faster | a tenth slower | steps took |",
        "|---|" + "---:|" * 7,
    ]
    for row in rows:
        good = [row[name]["good"] for name in ("live", "simulated", "paced", *SPEEDS)]
        paces = row["paces"]
        spread = f"{fmean(paces):.2f} ({min(paces):.2f}–{max(paces):.2f})"
        cells = " | ".join(f"{share:.1f}" for share in good)
        lines.append(f"| {row['load']:g}x | {row['seed']} | {cells} | {spread} |")
    return "\n".join(lines) + "\n"


class _Bench:
    """A vLLM that has been probed, and what its loads are compared with."""

    def __init__(self, scratch: Path, engine: Target, duration_s: float, warm_up_s: float) -> None:
        self._engine, self._duration_s, self._warm_up_s = engine, duration_s, warm_up_s
        kind = ENGINES["vllm"]
        self._limits = kind.limits
        workload = Workload(route="completions", model=first_model(engine))
        kept = Kept(kind.name, kind.limits, {})
        click.echo(f"probing for {PROBING_S:g} s", err=True)
        kept.probes.append(probe_engine(engine, workload, kind.bounds, PROBING_S, seed=1))
        self.calibration: Calibration = calibrate(kept, kept.probes)
        self._path = scratch / "profile.json"
        write_fitted(self._path, fitted(self.calibration, kind.limits, "benchmark"))
        profile = self.calibration.profile
        full_ms = profile.step_ms(VLLM_SEQS, VLLM_SEQS, VLLM_SEQS * 75, VLLM_SEQS * 75)
        self.objectives = Objectives(TTFT_MS, PACE * full_ms)
        self.capacity = _capacity(profile, self._path, self.objectives)

    def row(self, load: float, seed: int) -> dict[str, Any]:
        """One load, live and in the simulator."""
        rate, objectives = load * self.capacity, self.objectives
        click.echo(f"{load:g}x: {rate:.1f} requests/s for {self._duration_s:g} s, seed {seed}", err=True)
        with tempfile.TemporaryDirectory(prefix="forebay-vllm-") as place:
            folder = Path(place)
            seen = _measured(folder, self._engine, objectives, rate, self._duration_s, seed)
            asked = [arrival.output_tokens or 1 for arrival in _load(rate, self._duration_s).draw(seed)]
            paces = pace_at(self.calibration, self._limits, _at_engine(seen))
            whole = {name: [FaultSpec(kind="slow", factor=factor)] for name, factor in SPEEDS.items()}
            runs = {"simulated": [], "paced": _slowdowns(paces), **whole}
            records = {
                name: simulated(folder, _settings(objectives), str(self._path), seen, asked, seed, slowdowns)
                for name, slowdowns in runs.items()
            }
        made = {name: figures(one, self._warm_up_s, objectives) for name, one in {"live": seen, **records}.items()}
        counted = [factor for at, factor in paces.items() if at >= self._warm_up_s * 1e9]
        return {"load": load, "seed": seed, "paces": counted, **made}


def _compare(scratch: Path, duration_s: float, warm_up_s: float, seeds: Sequence[int]) -> dict[str, Any]:
    process, engine = ENGINES["vllm"].start(scratch, lambda text: click.echo(text, err=True))
    try:
        bench = _Bench(scratch, engine, duration_s, warm_up_s)
        rows = [bench.row(load, seed) for load in LOADS for seed in seeds]
    finally:
        process.stop()
    calibration = bench.calibration
    return {
        "ttft_ms": bench.objectives.ttft_ms, "tpot_ms": bench.objectives.tpot_ms, "capacity_per_s": bench.capacity,
        "duration_s": duration_s, "warm_up_s": warm_up_s, "profile": asdict(calibration.profile),
        "front": asdict(calibration.front), "residuals": asdict(calibration.residuals), "rows": rows,
    }  # fmt: skip


@click.command(help=__doc__)
@click.option("--duration-s", type=float, default=75.0, show_default=True)
@click.option("--warm-up-s", type=float, default=15.0, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=2, show_default=True, help="Loads of each rate.")
@publish.dry_option
def main(duration_s: float, warm_up_s: float, seeds: int, dry: bool) -> None:
    load_before = environment.load_average()
    with tempfile.TemporaryDirectory(prefix="forebay-vllm-") as scratch:
        found = _compare(Path(scratch), duration_s, warm_up_s, range(1, seeds + 1))
    command = publish.command("control_vllm", *sys.argv[1:])
    content = {"environment": environment.describe(load_before), "command": command, **found}
    section = _markdown(content)
    click.echo(section)
    if not dry:
        publish.write_sections(PAGE, {"control-vllm": section})
        path = publish.write_results("control-vllm", content)
        click.echo(f"written: {PAGE}, {path}")


if __name__ == "__main__":
    main()
