"""The depth tuners beside fixed depths: goodput, waits and what the depth did, over a load ladder and a change of mix.

``python -m benchmarks.tuning`` (or ``make bench NAME=tuning``) simulates each on the same engine and the very same
arrivals, five seeds each, and writes ``benchmarks/results/tuning-DATE.json`` and the generated section of
``docs/tuning.md``. In one family the depth is the only gate: the wait budget is so long that it refuses nobody. In the
other the predicted wait refuses too, as it does by default. ``--quick`` takes one seed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any, Final

import click

from benchmarks import environment, publish
from benchmarks.control_world import MIXES
from benchmarks.trials import rows_of
from forebay.core.instant import MILLISECOND, SECOND
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.profile import StepProfile
from forebay.report.records import RequestRecord
from forebay.sim.bounds import Size, limits_of, step_bound
from forebay.sim.run import Simulation
from forebay.sim.scenario import EngineSpec, Scenario, WorkloadSpec
from forebay.workload.sizes import Sizes

PAGE: Final = publish.DOCS / "tuning.md"
PROFILE: Final = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"
TTFT_MS, TPOT_MS = 1000.0, 50.0
SEEDS: Final = (1, 2, 3, 4, 5)
LOADS: Final = (0.8, 1.2, 2.0, 5.0)
LADDER_S, WARM_UP_S = 120.0, 45.0
PHASES: Final = ("chat", "rag", "chat again")
PHASE_S, SHIFT_LOAD = 90.0, 2.0
SETTLED_S: Final = 20.0
"""From the beginning of a phase until its figures count: requests of the phase before are still being served."""

ALONE: Final = "depth alone"
DEFAULT: Final = "beside the predicted wait"
POLICIES: Final[dict[str, str]] = {
    "derived": '[tuner]\nkind = "derived"',
    "stepwise": '[tuner]\nkind = "stepwise"',
    "fixed 1": "[queue]\ndepth_limit = 1",
    "fixed 2": "[queue]\ndepth_limit = 2",
    "fixed 4": "[queue]\ndepth_limit = 4",
    "fixed 16": "[queue]\ndepth_limit = 16",
    "fixed 256": "[queue]\ndepth_limit = 256",
}
FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    ALONE: tuple(POLICIES),
    DEFAULT: ("derived", "fixed 4", "fixed 256"),
}
ALONE_WAIT_MS = 250  # behind a full queue, where the depth alone keeps the objective: a quarter of it, for the tail


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. `load` is of the fluid bound of the mix; the shift has one load."""

    family: str
    policy: str
    case: str  # "chat", or "shift"
    load: float
    seed: int


def trials(seeds: Sequence[int]) -> list[Trial]:
    """Everything, the shortest first."""
    cases = [("chat", load) for load in LOADS] + [("shift", SHIFT_LOAD)]
    return [
        Trial(family, policy, case, load, seed)
        for seed in seeds
        for case, load in cases
        for family, policies in FAMILIES.items()
        for policy in policies
    ]


def config(family: str, policy: str) -> str:
    """The text of the gateway's configuration. Everything that is not the depth is at its default."""
    lines = ["[slo]", f"ttft_ms = {TTFT_MS:g}", f"tpot_ms = {TPOT_MS:g}"]
    tuner = POLICIES[policy]
    if family == ALONE:
        lines += ["[admission]", "wait_budget_ms = 20000"]
        tuner += f"\nwait_ms = {ALONE_WAIT_MS}" if policy == "derived" else ""
    return "\n".join([*lines, tuner, '[[engines]]\nname = "e"\nkind = "simulated"', ""])


@cache
def bound(mix: str) -> float:
    """Requests per second that no policy can exceed on this engine, for the mean sizes of the mix."""
    profile = profile_named(PROFILE)
    assert isinstance(profile, StepProfile)
    prompts, outputs = (Sizes.parse(text) for text in MIXES[mix])
    chance = Random(f"bound/{mix}")
    sizes = [Size(prompts.draw(chance), outputs.draw(chance)) for _ in range(4000)]
    limits = limits_of(profile, EngineSpec(profile=PROFILE))
    return step_bound(profile, limits, sizes, ttft_ms=TTFT_MS, tpot_ms=TPOT_MS).requests_per_s


def arrivals(trial: Trial) -> list[tuple[float, int, int]]:
    """(second, prompt tokens, output tokens), the same for every policy."""
    if trial.case == "chat":
        spans = [("chat", 0.0, LADDER_S)]
    else:
        spans = [(phase.split()[0], PHASE_S * n, PHASE_S * (n + 1)) for n, phase in enumerate(PHASES)]
    chance, rows = Random(f"{trial.seed}/{trial.case}/{trial.load}"), []
    for mix, start, end in spans:
        prompts, outputs = (Sizes.parse(text) for text in MIXES[mix])
        at, rate = start, trial.load * bound(mix)
        while (at := at + chance.expovariate(rate)) < end:
            rows.append((at, prompts.draw(chance), outputs.draw(chance)))
    return rows


def measure(trial: Trial) -> dict[str, float]:
    """The figures of one run."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "arrivals.csv"
        rows = [f"{at:.6f},{prompt},{output}" for at, prompt, output in arrivals(trial)]
        path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
        run = Simulation(
            Scenario(
                name=f"{trial.case} at {trial.load:g}x", policy=trial.policy, config=config(trial.family, trial.policy),
                engines=EngineSpec(profile=PROFILE), workload=WorkloadSpec(trace=str(path)), seed=trial.seed,
                ttft_ms=TTFT_MS, tpot_ms=TPOT_MS,
            )
        )  # fmt: skip
        run.run()
    records = list(run.records.records())
    tuning = run.pipelines[0].pools[0].tuning.acting
    moves = [change.new > change.old for change in tuning.log]
    figures = {
        "depth_at_end": float(run.pipelines[0].pools[0].depth.depth_limit),
        "changes": float(tuning.changes),
        "reversals": float(sum(one != other for one, other in pairwise(moves))),
    }
    if trial.case == "chat":
        return figures | _span(records, "", "chat", WARM_UP_S, LADDER_S)
    for number, phase in enumerate(PHASES):
        start = PHASE_S * number
        figures |= _span(records, f"{phase}/", phase.split()[0], start + SETTLED_S, start + PHASE_S)
    return figures


def _span(records: Sequence[RequestRecord], prefix: str, mix: str, from_s: float, to_s: float) -> dict[str, float]:
    """Goodput over the bound, wait p99 and share of served requests that missed the first-token objective."""
    came = [one for one in records if from_s * SECOND <= one.intended_ns < to_s * SECOND]
    served = [one for one in came if one.outcome == "completed"]
    good = [one for one in served if _kept(one)]
    waits = sorted(one.queue_wait_ms or 0.0 for one in served)
    return {
        f"{prefix}goodput": len(good) / (to_s - from_s) / bound(mix),
        f"{prefix}wait_p99_ms": waits[int(0.99 * (len(waits) - 1))] if waits else 0.0,
        f"{prefix}missed": 1 - len(good) / len(served) if served else 0.0,
    }


def _kept(one: RequestRecord) -> bool:
    """Were both objectives kept?"""
    in_time = one.first_token_ns - one.intended_ns <= TTFT_MS * MILLISECOND
    return in_time and one.done_ns - one.first_token_ns <= TPOT_MS * MILLISECOND * max(1, one.output_tokens - 1)


# ---- the page -----------------------------------------------------------------------------------------------------


def section(result: dict[str, Any]) -> str:
    """The generated section of docs/tuning.md."""
    lines = [
        (
            f"Simulated: one `{PROFILE}`, its limit guarded; Poisson arrivals of chat (553 prompt and 189 output "
            f"tokens on average) at a multiple of the fluid bound ({bound('chat'):.1f} requests/s); objectives "
            f"{TTFT_MS:g} ms to the first token and {TPOT_MS:g} ms per token. {result['seeds']} seeds, mean ± standard "
            f"deviation over them, the first {WARM_UP_S:g} of {LADDER_S:g} s not counted. `{result['command']}`, "
            f"commit `{result['environment']['commit'][:12]}`."
        ),
        "",
    ]
    for family, policies in FAMILIES.items():
        lines += [f"Goodput in % of the bound, **{family}**:", ""]
        lines += [f"| | {' | '.join(f'{load:g}x' for load in LOADS)} | p99 wait at 2x, ms | depth at the end, 2x |"]
        lines += ["|---|" + "---|" * (len(LOADS) + 2)]
        for policy in policies:
            cells = [_cell(result, family, policy, "chat", load, "goodput", 100) for load in LOADS]
            cells.append(_cell(result, family, policy, "chat", 2.0, "wait_p99_ms"))
            cells.append(_cell(result, family, policy, "chat", 2.0, "depth_at_end"))
            lines.append(f"| {policy} | {' | '.join(cells)} |")
        lines += [
            "",
            f"The same at {SHIFT_LOAD:g}x while the mix changes every {PHASE_S:g} s, {SETTLED_S:g} s after:",
            "",
        ]
        lines += [
            f"| | {' | '.join(PHASES)} | p99 wait of rag, ms | changes | turns |",
            "|---|---|---|---|---|---|---|",
        ]
        for policy in policies:
            row = [_cell(result, family, policy, "shift", SHIFT_LOAD, f"{phase}/goodput", 100) for phase in PHASES]
            row += [
                _cell(result, family, policy, "shift", SHIFT_LOAD, name)
                for name in ("rag/wait_p99_ms", "changes", "reversals")
            ]
            lines.append(f"| {policy} | {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(
    result: dict[str, Any], family: str, policy: str, case: str, load: float, name: str, scale: float = 1.0
) -> str:
    wanted = (family, policy, case, load)
    keys = ("family", "policy", "case", "load")
    rows = [row for row in result["rows"] if tuple(row[key] for key in keys) == wanted]
    values = [scale * row["figures"][name] for row in rows]
    digits = 0 if name.endswith("_ms") else 1
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One seed: a look, no result.")
@click.option("--seeds", type=click.IntRange(1, 50), default=len(SEEDS), show_default=True)
@publish.processes_option
@publish.json_option
@publish.dry_option
def main(quick: bool, seeds: int, processes: int, json_path: Path | None, dry: bool) -> None:
    load_before = environment.load_average()
    began = time.monotonic()
    count = 1 if quick else seeds
    rows = rows_of(measure, trials(range(1, count + 1)), processes)
    result = {
        "environment": environment.describe(load_before),
        "command": publish.command_of_seeds("tuning", count, len(SEEDS)),
        "seeds": count,
        "wall_s": round(time.monotonic() - began, 1),
        "rows": rows,
    }
    body = section(result)
    click.echo(body)
    if dry or quick:
        return
    publish.write_results("tuning", result, json_path)
    publish.write_sections(PAGE, {"tuning": body})


if __name__ == "__main__":
    main()
