"""The guarded window before a real vLLM: the same arrivals live and simulated, at several multiples of its capacity.

``python -m benchmarks.control_vllm`` (or ``make bench NAME=control_vllm``) starts vLLM on the CPU, calibrates the step
model on it by a probing run, and puts a gateway before it that knows an objective and nothing else. What came of the
requests is compared with the simulator's account of the same ones, on the profile that was just fitted: so engine,
sockets, event loops and the machine's other work are in the difference, and nothing is fitted to the loads themselves.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from benchmarks import environment, publish
from benchmarks.calibration_engines import ENGINES, VLLM_SEQS
from benchmarks.calibration_judge import Kept, calibrate
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
from forebay.sim.calibrate import fitted
from forebay.sim.scenario import EngineSpec, WorkloadSpec

PROMPT, OUTPUT = "~60/0.5", "~24/0.5"
LOADS: Final = (1.0, 2.0, 5.0)
KEYS: Final = ("a", "b", "c", "d")
PROBING_S: Final = 40.0
TTFT_MS: Final = 1000.0
PACE: Final = 1.5
"""The objective per token, in steps of a full batch: the engine's own bound on sequences is what binds."""
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


def _markdown(content: dict[str, Any]) -> str:
    where = content["environment"]
    method = (
        f"Measured {where['at']} at commit `{where['commit']}` on {where['machine']}, {where['cpus']} cores, by "
        f"`{content['command']}`. vLLM 0.32 for CPU, a random Llama of 35 M weights, {VLLM_SEQS} sequences; objective "
        f"{content['ttft_ms']:g} ms to the first token and {content['tpot_ms']:.1f} ms per token; capacity by the "
        f"fluid bound of the profile that was fitted just before, {content['capacity_per_s']:.1f} requests/s; "
        f"{content['duration_s']:g} s each, the first {content['warm_up_s']:g} s not counted. Shares are of offered "
        "requests. Each cell: live / simulated."
    )
    lines = [method, "", *table(content["rows"])]
    return "\n".join(lines) + "\n"


def _compare(scratch: Path, duration_s: float, warm_up_s: float, seed: int) -> dict[str, Any]:
    kind = ENGINES["vllm"]
    process, engine = kind.start(scratch, lambda text: click.echo(text, err=True))
    try:
        workload = Workload(route="completions", model=first_model(engine))
        kept = Kept(kind.name, kind.limits, environment.describe(environment.load_average()))
        click.echo(f"probing for {PROBING_S:g} s", err=True)
        kept.probes.append(probe_engine(engine, workload, kind.bounds, PROBING_S, seed=seed))
        calibration = calibrate(kept, kept.probes)
        path = scratch / "profile.json"
        write_fitted(path, fitted(calibration, kind.limits, "benchmark"))
        profile = calibration.profile
        full_ms = profile.step_ms(VLLM_SEQS, VLLM_SEQS, VLLM_SEQS * 75, VLLM_SEQS * 75)
        objectives = Objectives(TTFT_MS, PACE * full_ms)
        capacity = _capacity(profile, path, objectives)
        rows = []
        for load in LOADS:
            with tempfile.TemporaryDirectory(prefix="forebay-vllm-") as place:
                folder, rate = Path(place), load * capacity
                click.echo(f"{load:g}x: {rate:.1f} requests/s for {duration_s:g} s", err=True)
                seen = _measured(folder, engine, objectives, rate, duration_s, seed)
                asked = [arrival.output_tokens or 1 for arrival in _load(rate, duration_s).draw(seed)]
                made = simulated(folder, _settings(objectives), str(path), seen, asked, seed)
                live, beside = (figures(one, warm_up_s, objectives) for one in (seen, made))
                rows.append({"load": load, "live": live, "simulated": beside})
    finally:
        process.stop()
    return {
        "ttft_ms": objectives.ttft_ms, "tpot_ms": objectives.tpot_ms, "capacity_per_s": capacity,
        "duration_s": duration_s, "warm_up_s": warm_up_s, "rows": rows,
    }  # fmt: skip


@click.command(help=__doc__)
@click.option("--duration-s", type=float, default=75.0, show_default=True)
@click.option("--warm-up-s", type=float, default=25.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@publish.dry_option
def main(duration_s: float, warm_up_s: float, seed: int, dry: bool) -> None:
    load_before = environment.load_average()
    with tempfile.TemporaryDirectory(prefix="forebay-vllm-") as scratch:
        found = _compare(Path(scratch), duration_s, warm_up_s, seed)
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
