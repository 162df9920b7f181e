"""From what a user asks for to a plan: sane bounds, one clear error for each way to be absurd."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.errors import UsageError
from forebay.load.attack import Plan
from forebay.load.target import Target
from forebay.load.workload import Workload
from forebay.report.records import Objective, PhaseBounds, RunHeader
from forebay.report.results import WARM_UP
from forebay.workload.arrival import Arrival
from forebay.workload.pacer import (
    Constant,
    Gamma,
    Pacer,
    Phase,
    Poisson,
    Ramp,
    bursty,
    phase_bounds_s,
    schedule,
)
from forebay.workload.trace import load_trace

MAX_RATE = 100_000.0
MAX_DURATION_S = 24 * 3600.0
MAX_REQUESTS = 20_000_000
MAX_PROCESSES = 256

ArrivalKind = Literal["poisson", "bursty", "gamma", "constant", "ramp", "trace"]


@dataclass(frozen=True, slots=True)
class Load:
    """The arrivals that a user asks for. Rates are requests per second; `load_factor` multiplies `capacity`."""

    arrivals: ArrivalKind = "poisson"
    rate: float | None = None
    load_factor: float | None = None
    capacity: float | None = None
    duration_s: float = 30.0
    warm_up_s: float = 0.0
    cv: float = 3.0
    clump: int | None = None
    rate_to: float | None = None
    trace: str | None = None  # a shipped trace's name, or a file
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.duration_s <= MAX_DURATION_S or not 0 <= self.warm_up_s <= MAX_DURATION_S:
            raise UsageError(f"--duration must lie within 0 and {MAX_DURATION_S:.0f} s, --warm-up-s too")
        if not 0.05 <= self.cv <= 50:
            raise UsageError("--cv must lie within 0.05 and 50")
        if not 0 < self.speed <= 10_000:
            raise UsageError("--speed must lie within 0 and 10000")
        if (self.trace is not None) != (self.arrivals == "trace"):
            raise UsageError("--arrivals trace and --trace NAME|FILE go together")
        if self.arrivals != "trace":
            self._check_rates()

    def _check_rates(self) -> None:
        if self.rate is None and (self.load_factor is None or self.capacity is None):
            raise UsageError("say how much load: --rate R, or --load X with --capacity C")
        if self.rate is not None and self.load_factor is not None:
            raise UsageError("--rate and --load say the same thing: give one")
        for rate in (self.mean_rate, self.end_rate):
            if not 0 < rate <= MAX_RATE:
                raise UsageError(f"a rate of {rate:g} requests per second is out of range: above 0, up to {MAX_RATE:g}")
        if max(self.mean_rate, self.end_rate) * (self.duration_s + self.warm_up_s) > MAX_REQUESTS:
            raise UsageError(f"this load is more than {MAX_REQUESTS} requests: lower the rate or the duration")

    @property
    def mean_rate(self) -> float:
        if self.rate is not None:
            return self.rate
        return (self.load_factor or 0.0) * (self.capacity or 0.0)

    @property
    def end_rate(self) -> float:
        """Where the rate ends: a ramp moves it."""
        if self.arrivals != "ramp":
            return self.mean_rate
        return 3.0 * self.mean_rate if self.rate_to is None else self.rate_to

    @property
    def offered_load(self) -> float | None:
        """Mean rate over capacity, where the capacity is known."""
        if self.load_factor is not None:
            return self.load_factor
        return self.mean_rate / self.capacity if self.capacity and self.rate is not None else None

    def describe(self) -> str:
        """One line for a person."""
        if self.arrivals == "trace":
            return f"Trace {Path(self.trace or '').name} at {self.speed:g} times its speed"
        if self.arrivals == "ramp":
            return f"Ramp from {self.mean_rate:g} to {self.end_rate:g} requests per second"
        return f"{self.arrivals.capitalize()} arrivals, {self.mean_rate:g} requests per second"

    def arrivals_and_phases(self, seed: int) -> tuple[list[Arrival], list[PhaseBounds]]:
        """All intended send times, and the stretches they fall in."""
        if self.arrivals == "trace":
            assert self.trace is not None
            arrivals = load_trace(self.trace, speed=self.speed, duration_s=self.duration_s)
            return arrivals, [PhaseBounds("trace", 0.0, self.duration_s)]
        phases = [Phase(WARM_UP, Poisson(self.mean_rate, self.warm_up_s))] if self.warm_up_s > 0 else []
        phases.append(Phase(self.arrivals, self._pacer()))
        return schedule(phases, seed), [PhaseBounds(*bounds) for bounds in phase_bounds_s(phases)]

    def _pacer(self) -> Pacer:
        rate, duration_s = self.mean_rate, self.duration_s
        match self.arrivals:
            case "bursty":
                return bursty(rate, duration_s, self.clump)
            case "gamma":
                return Gamma(rate, self.cv, duration_s)
            case "constant":
                return Constant(rate, duration_s)
            case "ramp":
                return Ramp(rate, self.end_rate, duration_s)
            case _:
                return Poisson(rate, duration_s)


def plan_for(
    target: str,
    load: Load,
    workload: Workload,
    *,
    engine_metrics: str | None = None,
    client: str = "none",
    patience_s: float | None = None,
    objective: Objective,
    seed: int = 1,
    processes: int = 1,
) -> Plan:
    """The plan of one target, given as `URL` or `NAME=URL`."""
    if not 1 <= processes <= MAX_PROCESSES:
        raise UsageError(f"--processes must lie within 1 and {MAX_PROCESSES}")
    bounds = {"--patience-s": patience_s, "--ttft-ms": objective.ttft_ms, "--latency-ms": objective.latency_ms}
    for option, value in bounds.items():
        if value is not None and not 0 < value < 1e9:
            raise UsageError(f"{option} must be above 0")
    name, separator, url = target.partition("=")
    if not separator or "://" in name:
        name, url = "", target
    parsed = Target.parse(url)
    arrivals, phases = load.arrivals_and_phases(seed)
    header = RunHeader(
        mode=name or parsed.url,
        policy=f"client {client}",
        workload=f"{workload}; {load.describe()}",
        seed=seed,
        phases=phases,
        offered_load=load.offered_load,
        objective=objective,
    )
    return Plan(
        target=parsed,
        header=header,
        arrivals=arrivals,
        workload=workload,
        client=client,
        patience_s=patience_s,
        drain_s=max(60.0, patience_s or 0.0),
        engine_metrics=Target.parse(engine_metrics, "--engine-metrics") if engine_metrics else None,
        processes=processes,
    )
