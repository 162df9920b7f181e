"""The guarded window live: simulated engines in real time, a real gateway over the loopback, real connections.

``python -m benchmarks.control_live`` (or ``make bench NAME=control_live``) sends the same arrivals to a gateway process
and to the simulator, at several multiples of what the engine can serve, and compares what came of them. The engine is
the calibrated model behind a port, in real time, so that everything that the simulation leaves out (sockets, parsing,
event loops, timers that are late, a machine that does other things) is in the difference.
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
from benchmarks.control_beside import Objectives, figures, healthy, simulated, table
from benchmarks.control_policies import FOREBAY, policy
from benchmarks.control_world import TPOT_MS, TTFT_MS
from benchmarks.process import Process, free_port
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.profile import StepProfile
from forebay.load.attack import Plan, attack
from forebay.load.target import Target
from forebay.load.workload import Key, Workload
from forebay.report.records import Objective, PhaseBounds, RequestRecord, RunHeader
from forebay.sim.bounds import Size as MixSize
from forebay.sim.bounds import limits_of, step_bound
from forebay.sim.scenario import EngineSpec, WorkloadSpec

PROFILE: Final = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"
PROMPT, OUTPUT = "~400/0.6", "~120/0.6"
LOADS: Final = (1.0, 2.0, 5.0)
KEYS: Final = ("a", "b", "c", "d")
PAGE: Final = publish.DOCS / "control.md"


OBJECTIVES: Final = Objectives(TTFT_MS, TPOT_MS)


def _load(rate: float, duration_s: float) -> WorkloadSpec:
    return WorkloadSpec(rate=rate, duration_s=duration_s, prompt_tokens=PROMPT, output_tokens=OUTPUT)


def _capacity() -> float:
    """Requests per second that the engine serves within the objective, by the fluid bound of this mix."""
    profile = profile_named(PROFILE)
    assert isinstance(profile, StepProfile)
    sizes = [MixSize(a.prompt_tokens or 1, a.output_tokens or 1) for a in _load(100.0, 20.0).draw(1)]
    limits = limits_of(profile, EngineSpec(profile=PROFILE))
    return step_bound(profile, limits, sizes, ttft_ms=TTFT_MS, tpot_ms=TPOT_MS).requests_per_s


@contextmanager
def _live(folder: Path) -> Iterator[Target]:
    """A simulated engine in real time, and a gateway before it."""
    forebay = [sys.executable, "-m", "forebay"]
    engine_port, port, admin_port = free_port(), free_port(), free_port()
    engine = Process.start(
        "engine",
        [*forebay, "engine", "simulated", "--profile", PROFILE, "--model-name", "sim", "--port", str(engine_port)],
        folder,
    )
    try:
        engine.wait_until(lambda: healthy(engine_port, "/health"), 30.0)
        text = str(policy(FOREBAY)).replace('kind = "simulated"', f'urls = ["http://127.0.0.1:{engine_port}"]')
        keys = "".join(f'[[keys.static]]\nid = "{key}"\nsecret = "sk-{key}"\n' for key in KEYS)
        path = folder / "forebay.toml"
        ports = f"[server]\nport = {port}\n[admin]\nport = {admin_port}\n"
        path.write_text(f"{ports}{text}[keys]\nanonymous = false\n{keys}")
        gateway = Process.start("gateway", [*forebay, "serve", "--config", str(path)], folder)
        try:
            gateway.wait_until(lambda: healthy(port, "/readyz"), 30.0)
            yield Target.parse(f"http://127.0.0.1:{port}")
        finally:
            gateway.stop()
    finally:
        engine.stop()


def _measured(folder: Path, rate: float, duration_s: float, seed: int) -> list[RequestRecord]:
    arrivals = _load(rate, duration_s).draw(seed)
    header = RunHeader(
        mode="hybrid", policy="guarded", workload="chat", seed=seed, phases=[PhaseBounds("load", 0.0, duration_s)],
        objective=Objective(ttft_ms=TTFT_MS),
    )  # fmt: skip
    workload = Workload(model="sim", keys=tuple(Key(key, f"sk-{key}") for key in KEYS))
    with _live(folder) as target:
        return attack(Plan(target, header, arrivals, workload), folder / "records.jsonl", lambda _: None).requests


def markdown(content: dict[str, Any]) -> str:
    """The section of the page."""
    where = content["environment"]
    seconds = f"{content['duration_s']:g} s each, the first {content['warm_up_s']:g} s not counted"
    method = (
        f"Measured {where['at']} at commit `{where['commit']}` on {where['machine']}, {where['cpus']} cores, by "
        f"`{content['command']}`. Engine `{PROFILE}` in real time; capacity by the fluid bound "
        f"{content['capacity_per_s']:.1f} requests/s; {seconds}. Shares are of offered requests. "
        "Each cell: live / simulated."
    )
    lines = [method, "", *table(content["rows"])]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--duration-s", type=float, default=90.0, show_default=True)
@click.option("--warm-up-s", type=float, default=20.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@publish.dry_option
def main(duration_s: float, warm_up_s: float, seed: int, dry: bool) -> None:
    """Measure and print."""
    load_before, capacity = environment.load_average(), _capacity()
    rows: list[dict[str, Any]] = []
    for load in LOADS:
        with tempfile.TemporaryDirectory(prefix="forebay-live-") as scratch:
            folder, rate = Path(scratch), load * capacity
            click.echo(f"{load:g}x: {rate:.1f} requests/s for {duration_s:g} s", err=True)
            seen = _measured(folder, rate, duration_s, seed)
            asked = [arrival.output_tokens or 1 for arrival in _load(rate, duration_s).draw(seed)]
            made = simulated(folder, str(policy(FOREBAY)), PROFILE, seen, asked, seed)
            rows.append(
                {
                    "load": load,
                    "live": figures(seen, warm_up_s, OBJECTIVES),
                    "simulated": figures(made, warm_up_s, OBJECTIVES),
                }
            )
    content = {
        "environment": environment.describe(load_before),
        "command": publish.command("control_live", *sys.argv[1:]),
        "capacity_per_s": capacity, "duration_s": duration_s, "warm_up_s": warm_up_s, "rows": rows,
    }  # fmt: skip
    section = markdown(content)
    click.echo(section)
    if not dry:
        publish.write_sections(PAGE, {"control-live": section})
        path = publish.write_results("control-live", content)
        click.echo(f"written: {PAGE}, {path}")


if __name__ == "__main__":
    main()
