"""What is measured in the calibration benchmark, and how the simulator is held against it."""

from __future__ import annotations

import csv
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import tables
from forebay.engines.simulated.fitted import FrontEnd, write_fitted
from forebay.engines.simulated.model import EngineLimits
from forebay.engines.simulated.profile import StepProfile
from forebay.report.records import RequestRecord
from forebay.report.statistics import percentile
from forebay.sim.calibrate import Calibration, fit, fitted, usable
from forebay.sim.features import offers_of
from forebay.sim.replay import Offer, replay
from forebay.sim.run import Simulation
from forebay.sim.scenario import EngineSpec, Scenario, WorkloadSpec
from forebay.workload.arrival import Arrival
from forebay.workload.pacer import Mmpp, Pacer, Phase, Poisson, schedule
from forebay.workload.sizes import Sizes

MOST_TTFT_P99_ERROR: Final = 0.15
MOST_RATE_ERROR: Final = 0.05
"""Of the mean time per output token, and of throughput."""
MOST_SECONDS: Final = 3600.0
SAME_SPEED: Final = 0.1
"""Probing runs that find the engine this near to each other in speed are taken together."""
STRETCH_NS: Final = 4_000_000_000
REPEATED: Final = " again"


class Config(msgspec.Struct, frozen=True):
    """A load: a part of capacity, sizes, an arrival process, a number of requests."""

    name: str
    load: float
    prompt_tokens: str
    output_tokens: str
    count: int
    bursty: bool = False
    seed: int = 1

    @property
    def base(self) -> str:
        """The name without the mark of a second measurement: the rate is then that of the first."""
        return self.name.removesuffix(REPEATED)

    def arrivals(self, rate: float) -> list[Arrival]:
        """The same for the same rate."""
        length_s = min(MOST_SECONDS, 20 * self.count / rate)
        pacer: Pacer = (
            Mmpp(rate, ratio=5.0, sojourn_s=5.0, duration_s=length_s) if self.bursty else Poisson(rate, length_s)
        )
        prompts, outputs = Sizes.parse(self.prompt_tokens), Sizes.parse(self.output_tokens)
        sizes = Random(f"{self.seed}/sizes")
        moments = itertools.islice(schedule([Phase("load", pacer)], self.seed), self.count)
        return [one._replace(prompt_tokens=prompts.draw(sizes), output_tokens=outputs.draw(sizes)) for one in moments]

    def shortened(self, scale: float) -> Config:
        """The same load for fewer requests."""
        return msgspec.structs.replace(self, count=max(5, int(self.count * scale)))


SHORT_E, LONG_E, TALK_E = ("16-48", "8-24"), ("64-160", "8-24"), ("8-24", "32-96")
SHORT_V, LONG_V, TALK_V = ("32-160", "16-48"), ("192-448", "8-32"), ("8-32", "64-160")
CONFIGS: Final = {
    "embedded": [
        Config("embedded, short, load 0.7", 0.7, *SHORT_E, 300, seed=11),
        Config("embedded, short, load 0.4", 0.4, *SHORT_E, 200, seed=12),
        Config("embedded, short, load 0.9", 0.9, *SHORT_E, 300, seed=13),
        Config("embedded, short, load 1.2", 1.2, *SHORT_E, 250, seed=14),
        Config("embedded, long prompts, load 0.7", 0.7, *LONG_E, 200, seed=15),
        Config("embedded, long answers, load 0.7", 0.7, *TALK_E, 200, seed=16),
        Config("embedded, short, bursts, load 0.6", 0.6, *SHORT_E, 250, bursty=True, seed=17),
        Config("embedded, short, load 0.7 again", 0.7, *SHORT_E, 300, seed=11),
    ],
    "vllm": [
        Config("vllm, short, load 0.7", 0.7, *SHORT_V, 300, seed=21),
        Config("vllm, short, load 0.4", 0.4, *SHORT_V, 250, seed=22),
        Config("vllm, short, load 0.9", 0.9, *SHORT_V, 350, seed=23),
        Config("vllm, short, load 1.2", 1.2, *SHORT_V, 350, seed=24),
        Config("vllm, long prompts, load 0.7", 0.7, *LONG_V, 200, seed=25),
        Config("vllm, long answers, load 0.7", 0.7, *TALK_V, 200, seed=26),
        Config("vllm, short, bursts, load 0.6", 0.6, *SHORT_V, 300, bursty=True, seed=27),
        Config("vllm, short, load 0.7 again", 0.7, *SHORT_V, 300, seed=21),
    ],
}


class Kept(msgspec.Struct):
    """What was measured of an engine, in order: a probing run, a load, a probing run, a load … a probing run."""

    engine: str
    limits: EngineLimits
    environment: dict[str, Any]
    probes: list[list[list[RequestRecord]]] = []
    loads: list[tuple[Config, list[RequestRecord]]] = []
    rates: dict[str, float] = {}
    others: list[float] = []
    """Cores that other programs kept busy during each load."""

    def save(self, folder: Path) -> None:
        (folder / f"{self.engine}.json").write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> Kept:
        return msgspec.json.decode(path.read_bytes(), type=cls)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. Milliseconds, and output tokens per second from the first arrival to the last token."""

    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    tpot_p50: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Measured and simulated, for one configuration; `speed` is the engine's by the probes just before it over the
    first ones', so that a machine that changed its own is seen."""

    config: Config
    requests: int
    rate: float
    measured: Figures
    simulated: Figures
    speed: float
    own: Figures
    """Simulated from the probes just before alone."""
    pace: list[float]
    """See `pace`."""
    others: float | None
    """Cores that other programs kept busy meanwhile; None where nobody looked."""

    def errors(self, simulated: Figures | None = None) -> dict[str, float]:
        """Simulated over measured, less one."""
        mine, real = asdict(simulated or self.simulated), asdict(self.measured)
        return {name: mine[name] / real[name] - 1.0 for name in real}

    @property
    def passed(self) -> bool:
        errors = self.errors()
        return abs(errors["ttft_p99"]) <= MOST_TTFT_P99_ERROR and all(
            abs(errors[name]) <= MOST_RATE_ERROR for name in ("tpot_mean", "tokens_per_s")
        )

    def as_row(self) -> dict[str, Any]:
        """For the results file."""
        return {
            "config": msgspec.to_builtins(self.config),
            "requests": self.requests,
            "rate": self.rate,
            "measured": asdict(self.measured),
            "simulated": asdict(self.simulated),
            "errors": self.errors(),
            "errors_from_last_probes": self.errors(self.own),
            "speed": self.speed,
            "pace": self.pace,
            "others": self.others,
            "passed": self.passed,
        }


def blank(engine: str, limits: EngineLimits) -> StepProfile:
    """A profile that has everything but coefficients."""
    return StepProfile(
        name=engine, gpu="cpu", gpus=1, model=engine, engine=engine, confidence="",
        c0=0.0, w=0.0, r=0.0, p=2.0, e=0.0, seq=0.0, kv=0.0, att=0.0,
        kv_tokens=limits.kv_tokens, max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens, decode_tokens_per_s={}, prefill_tokens_per_s={},
        max_mixed_tokens=limits.max_mixed_tokens,
    )  # fmt: skip


def calibrate(kept: Kept, probings: Sequence[Sequence[list[RequestRecord]]]) -> Calibration:
    """A fit of these probing runs."""
    runs = [records for probing in probings for records in probing]
    return fit(runs, kept.limits, blank(kept.engine, kept.limits))


def capacity(calibration: Calibration, limits: EngineLimits, config: Config) -> float:
    """Requests per second that the calibrated engine serves of this configuration, its queue never empty."""
    many = config.shortened(1.0).arrivals(1.0)
    offers = [Offer(0, one.prompt_tokens or 1, one.output_tokens or 1) for one in many]
    timings, _ = replay(calibration.profile, limits, FrontEnd(), offers)
    # The last ones leave the batch emptier than it ever is under load.
    ends = sorted(timing.done_ns for timing in timings)
    most = int(0.9 * len(ends))
    return most / (ends[most - 1] / 1e9)


def pace(calibration: Calibration, limits: EngineLimits, seen: Sequence[RequestRecord]) -> list[float]:
    """How much longer than calibrated the engine's steps took, stretch by stretch of the load.

    1 is as calibrated; a stretch far from it, among others that are not, is the machine's doing and not the model's.
    """
    return list(pace_at(calibration, limits, seen).values())


def pace_at(calibration: Calibration, limits: EngineLimits, seen: Sequence[RequestRecord]) -> dict[int, float]:
    """The same by the beginning of each stretch, in ns; `seen` are what was sent straight to the engine."""
    instants = [(record.first_token_ns, record.done_ns) for record in seen]
    _, steps = replay(calibration.profile, limits, calibration.front, offers_of(seen), instants)
    stretches: dict[int, list[float]] = {}
    for step in steps:
        real_and_due = stretches.setdefault(step.from_ns // STRETCH_NS * STRETCH_NS, [0.0, 0.0])
        real_and_due[0] += (step.to_ns - step.from_ns) / 1e6
        real_and_due[1] += calibration.profile.step_ms(step.tokens, step.sequences, step.context, step.pairs)
    return {at: real / due for at, (real, due) in stretches.items()}


def simulate(calibration: Calibration, limits: EngineLimits, seen: Sequence[RequestRecord], folder: Path) -> Figures:
    """The requests as they were sent, straight to one simulated engine; what comes before its scheduler is added."""
    profile_path, trace_path = folder / "profile.json", folder / "trace.csv"
    write_fitted(profile_path, fitted(calibration, limits, "benchmark"))
    queued = [(record.sent_ns + calibration.front.delay_ns(record.prompt_tokens), record) for record in seen]
    queued.sort(key=lambda pair: pair[0])
    zero = queued[0][0]
    with trace_path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("timestamp", "prompt_tokens", "output_tokens"))
        for at, record in queued:
            writer.writerow((f"{(at - zero) / 1e9:.9f}", record.prompt_tokens, record.output_tokens))
    simulation = Simulation(
        Scenario(
            name="calibration",
            policy="direct",
            engines=EngineSpec(profile=str(profile_path)),
            workload=WorkloadSpec(trace=str(trace_path)),
            gateway=False,
        )
    )
    simulation.run()
    made = [
        msgspec.structs.replace(
            one, sent_ns=record.sent_ns, first_token_ns=one.first_token_ns + zero, done_ns=one.done_ns + zero
        )
        for one, (_, record) in zip(simulation.records.records(), queued, strict=True)
    ]
    return figures(made)


def figures(records: Sequence[RequestRecord]) -> Figures:
    """Of completed streams."""
    first = sorted((record.first_token_ns - record.sent_ns) / 1e6 for record in records)
    gaps = sorted(
        (record.done_ns - record.first_token_ns) / 1e6 / (record.output_tokens - 1)
        for record in records
        if record.output_tokens > 1
    )
    span_s = (max(record.done_ns for record in records) - min(record.sent_ns for record in records)) / 1e9
    return Figures(
        ttft_p50=percentile(first, 0.5) or 0.0,
        ttft_p99=percentile(first, 0.99) or 0.0,
        tpot_mean=sum(gaps) / len(gaps),
        tpot_p50=percentile(gaps, 0.5) or 0.0,
        tokens_per_s=sum(record.output_tokens for record in records) / span_s,
    )


def judge(kept: Kept) -> list[Verdict]:
    """Every load against its simulation.

    Calibrated from the probes just before it, and those earlier ones that found the engine as fast; and, to compare,
    from those just before alone.
    """
    verdicts = []
    paces = [_yardstick_s(calibrate(kept, [probing]), kept.limits) for probing in kept.probes[: len(kept.loads)]]
    for number, (config, records) in enumerate(kept.loads):
        like_now = [
            probing
            for probing, took_s in zip(kept.probes, paces[: number + 1], strict=False)
            if abs(took_s / paces[number] - 1.0) <= SAME_SPEED
        ]
        calibration = calibrate(kept, like_now)
        own = calibrate(kept, kept.probes[number : number + 1])
        seen = usable(records)
        with tempfile.TemporaryDirectory(prefix="forebay-calibration-") as scratch:
            verdicts.append(
                Verdict(
                    config=config,
                    requests=len(seen),
                    rate=kept.rates[config.base],
                    measured=figures(seen),
                    simulated=simulate(calibration, kept.limits, seen, Path(scratch)),
                    speed=paces[0] / paces[number],
                    own=simulate(own, kept.limits, seen, Path(scratch)),
                    pace=pace(calibration, kept.limits, seen),
                    others=kept.others[number] if number < len(kept.others) else None,
                )
            )
    return verdicts


@cache
def _yardstick() -> tuple[Offer, ...]:
    rng = Random("yardstick")
    return tuple(Offer(0, rng.randint(16, 128), rng.randint(8, 48)) for _ in range(200))


def _yardstick_s(calibration: Calibration, limits: EngineLimits) -> float:
    """How long the calibrated engine takes for a fixed amount of work."""
    timings, _steps = replay(calibration.profile, limits, FrontEnd(), _yardstick())
    return max(timing.done_ns for timing in timings) / 1e9


HEAD: Final = (
    "configuration",
    "requests",
    "per s",
    "speed",
    "pace",
    "others",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "TPOT ms",
    "tokens/s",
    "",
)


def cells(one: Verdict) -> list[str]:
    """A verdict's row of the table: simulated / measured (error)."""
    mine, real, errors = asdict(one.simulated), asdict(one.measured), one.errors()
    pairs = [
        f"{mine[name]:.{digits}f} / {real[name]:.{digits}f} ({errors[name]:+.1%})"
        for name, digits in (("ttft_p50", 0), ("ttft_p99", 0), ("tpot_mean", 1), ("tokens_per_s", 1))
    ]
    verdict = "pass" if one.passed else "miss"
    return [
        one.config.name,
        f"{one.requests}",
        f"{one.rate:.2f}",
        f"{one.speed:.3f}",
        f"{min(one.pace):.2f}–{max(one.pace):.2f}",
        "–" if one.others is None else f"{one.others:.2f}",
        *pairs,
        verdict,
    ]


def repeated(verdicts: Sequence[Verdict]) -> list[str]:
    """How far an engine is from itself, for what was measured twice."""
    by_name = {one.config.name: one for one in verdicts}
    lines = []
    for name, one in by_name.items():
        again = by_name.get(name + REPEATED)
        if again is not None:
            first, second = asdict(one.measured), asdict(again.measured)
            apart = {key: f"{second[key] / first[key] - 1.0:+.1%}" for key in first}
            lines.append(
                f"{name}, measured again: TTFT p50 {apart['ttft_p50']}, p99 {apart['ttft_p99']}, "
                f"TPOT {apart['tpot_mean']}, tokens/s {apart['tokens_per_s']}."
            )
    return lines


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """For people."""
    table = Table(*HEAD)
    for one in verdicts:
        table.add_row(*cells(one))
    console = Console(width=170)
    console.print(table)
    for line in repeated(verdicts):
        console.print(line)


def markdown(content: dict[str, Any], verdicts: Sequence[Verdict]) -> str:
    """The generated section of `docs/calibration.md`."""
    env = content["environment"]
    dirty = " with changes not yet committed" if env["dirty"] else ""
    passed = sum(one.passed for one in verdicts)
    worst = {name: max(abs(one.errors()[name]) for one in verdicts) for name in verdicts[0].errors()}
    place = f"{env['machine']}, {env['cpus']} cores, {env['system']}, Python {env['python']}"
    where = (
        f"Measured {env['at']} at commit `{env['commit']}`{dirty} on {place}, by `{content['command']}`. "
        f"Load average before: {env['load_before']:g}."
    )
    outcome = (
        f"{passed} of {len(verdicts)} within the goal. Largest errors: TTFT p99 {worst['ttft_p99']:.1%}, "
        f"TTFT p50 {worst['ttft_p50']:.1%}, TPOT {worst['tpot_mean']:.1%}, throughput {worst['tokens_per_s']:.1%}. "
        "`speed` is the engine's by the probes just before, over its first ones: 1 on a machine that keeps its own. "
        "`pace` is the least and most that the steps of four seconds of the load took, over what they should have."
    )
    lines = [
        where,
        "",
        outcome,
        "",
        *tables.table(HEAD, map(cells, verdicts)),
        "",
        *(f"- {line}" for line in repeated(verdicts)),
    ]
    return "\n".join(lines)
