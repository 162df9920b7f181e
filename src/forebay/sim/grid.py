"""Policies x loads x seeds: from what a user asks for to scenarios, from their outcomes to figures beside bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.profile import EncoderProfile
from forebay.errors import UsageError
from forebay.report.grid import Entry
from forebay.report.records import RunRecords
from forebay.report.results import Results, RunResult, environment
from forebay.sim.bounds import FluidBound, fluid_bound
from forebay.sim.clairvoyant import Optimum, clairvoyant
from forebay.sim.export import run_records
from forebay.sim.figures import Extras, SizeClass
from forebay.sim.policies import BUILT_IN, GUARDED, TPOT_SHARE, Policy, Sizing, policy, sizing
from forebay.sim.run import Outcome
from forebay.sim.scenario import ClientSpec, EngineSpec, Scenario, WorkloadSpec

DEFAULT_DURATION_S = 60.0
MAX_REQUESTS = 20_000_000
TTFT_MS, TPOT_MS, ENCODER_MS = 1000.0, 50.0, 100.0
"""Objectives where the user names none."""
ENGINE_FIELDS = (
    *("count", "max_num_seqs", "max_num_batched_tokens", "kv_tokens", "reserve_output", "prefix_cache"),
    *("joins", "noise"),
)
SAMPLE_RATE, SAMPLE_S = 100.0, 100.0
"""Requests from which the mean lengths of generated load are taken, before its rate is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a user asks for; names and meanings are those of the flags of `forebay sim`."""

    profile: str | None
    trace: str | None = None
    rates: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()
    duration_s: float | None = None
    start_s: float = 0.0
    thin: float = 1.0
    jitter_s: float = 0.0
    arrivals: str = "poisson"
    cv: float = 3.0
    prompt_tokens: str = "512"
    output_tokens: str = "128"
    sizes_from: str | None = None
    keys: int = 1
    key_skew: float = 0.0
    warm_up_s: float = 0.0
    seeds: tuple[int, ...] = (1,)
    count: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_tokens: int | None = None
    reserve_output: bool = False
    prefix_cache: bool = False
    joins: bool = False
    noise: float = 0.0
    policies: tuple[str, ...] = ()
    in_flight: int | None = None
    gateways: int = 1
    engines_shared: bool = False
    retry: Literal["none", "sdk", "sdk-tickets", "sdk-2025", "naive"] = "none"
    patience_s: float | None = None
    deadline_ms: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None

    def __post_init__(self) -> None:
        if self.profile is None:
            raise UsageError("say on what to simulate: --engine PROFILE (see --list-profiles)")
        if self.trace is None and not self.rates and not self.loads:
            raise UsageError("say how much load: --trace NAME|FILE, --rate R, or --load X times what engines can serve")
        if self.trace is not None and self.rates:
            raise UsageError("--trace and --rate exclude each other: a trace has a rate, which --load X multiplies")
        if self.rates and self.loads:
            raise UsageError("--rate and --load say the same thing: give one")
        if self.trace is None and (self.start_s or self.thin != 1.0 or self.jitter_s):
            raise UsageError("--start, --thin and --jitter-s belong to a trace: give --trace NAME|FILE")
        if self.warm_up_s and self.duration_s is not None and self.warm_up_s >= self.duration_s:
            raise UsageError("--warm-up-s must be shorter than --duration: nothing would be counted")


class Simulated(msgspec.Struct, frozen=True):
    """What belongs to the run at the same place in `runs`, and only simulations know."""

    scenario: str
    seed: int
    bound_per_s: float | None
    bound_tokens_per_s: float | None
    bound_limited_by: str | None
    by_size_class: list[SizeClass]
    extras: Extras
    optimum: Optimum | None


class GridResults(Results):
    """The public results, and beside each run its bounds."""

    simulated: list[Simulated]


@dataclass
class Grid:
    """Scenarios in the order of loads, policies, seeds; `bounds` and `loads` beside them."""

    scenarios: list[Scenario]
    loads: list[str]
    bounds: list[FluidBound | None]
    outcomes: list[Outcome] = field(default_factory=list)
    optima: dict[int, Optimum] = field(default_factory=dict)

    @classmethod
    def of(cls, asked: Asked) -> Grid:
        """Raises UsageError or ConfigError for what cannot be simulated."""
        base = _base(asked)
        capacity = fluid_bound(base)
        if capacity is not None and capacity.requests_per_s == 0:
            raise UsageError(_impossible(base, capacity))
        size = _sizing(asked, base)
        slo_ms = base.ttft_ms or base.latency_ms
        usual = [name for name in BUILT_IN if name != GUARDED or base.tpot_ms is not None]
        policies = [policy(name, size, slo_ms=slo_ms, tpot_ms=base.tpot_ms) for name in asked.policies or usual]
        grid = cls([], [], [])
        for label, workload in _workloads(asked, base, capacity):
            of_load = msgspec.structs.replace(base, workload=workload)
            bound = fluid_bound(of_load)
            for one in policies:
                for seed in asked.seeds:
                    grid.scenarios.append(_scenario(of_load, one, label, seed))
                    grid.loads.append(label)
                    grid.bounds.append(bound)
        return grid

    def find_optima(self) -> None:
        """Raises UsageError when a load is too large for it."""
        known: dict[tuple[str, int], Optimum] = {}
        for index, (label, scenario) in enumerate(zip(self.loads, self.scenarios, strict=True)):
            place = (label, scenario.seed)
            if place not in known:
                known[place] = clairvoyant(scenario)
            self.optima[index] = known[place]

    def results(self) -> GridResults:
        """Everything for `--json`."""
        return GridResults(environment(), [self._result(index) for index in self._all], [*map(self._beside, self._all)])

    def entries(self) -> list[Entry]:
        """Everything for the table."""
        return [
            Entry(self.loads[index], self.scenarios[index].policy, self._result(index), self._bound_per_s(index))
            for index in self._all
        ]

    def notes(self) -> list[str]:
        """What a reader of the table must know beside it, a line each."""
        bounds = {label: bound for label, bound in zip(self.loads, self.bounds, strict=True) if bound is not None}
        lines = [
            f"{label}: at most {bound.requests_per_s:.4g} requests/s within the objective (fluid bound: "
            f"{bound.batch:.0f} in flight per engine, {bound.step_ms:.3g} ms a step, limited by {bound.limited_by})"
            for label, bound in bounds.items()
        ]
        for index in self._all:
            classes = self.outcomes[index].by_size_class
            if len(classes) > 1 and any(one.shed for one in classes) and self._first_of_its_seeds(index):
                told = ", ".join(f"{_tokens(one)} {100 * (one.shed_share or 0.0):.0f} %" for one in classes)
                lines.append(f"{self.loads[index]}, {self.scenarios[index].policy}: shed by tokens: {told}")
        for index, best in self.optima.items():
            if index == 0 or self.loads[index] != self.loads[index - 1]:
                lines.append(f"{self.loads[index]}: {_told(best)}")
        return lines

    def page_runs(self) -> tuple[list[RunResult], list[RunRecords]]:
        """The runs of the last load and the first seed with every request, simulated again: pages show curves."""
        label, seed = self.loads[-1], self.scenarios[0].seed
        chosen = [i for i in self._all if self.loads[i] == label and self.scenarios[i].seed == seed]
        shown = [msgspec.structs.replace(self._result(index), mode=self.scenarios[index].policy) for index in chosen]
        return shown, [run_records(self.scenarios[index]) for index in chosen]

    def _first_of_its_seeds(self, index: int) -> bool:
        return self.scenarios[index].seed == self.scenarios[0].seed

    @property
    def _all(self) -> range:
        return range(len(self.scenarios))

    def _result(self, index: int) -> RunResult:
        bound = self._bound_per_s(index)
        result = self.outcomes[index].result
        offered = result.counts.offered / result.duration_s if result.duration_s else 0.0
        load = offered / bound if bound else None
        return msgspec.structs.replace(result, offered_load=load, workload=described(self.scenarios[index].workload))

    def _bound_per_s(self, index: int) -> float | None:
        bound = self.bounds[index]
        return None if bound is None else bound.requests_per_s

    def _beside(self, index: int) -> Simulated:
        bound, scenario = self.bounds[index], self.scenarios[index]
        return Simulated(
            scenario=scenario.digest(),
            seed=scenario.seed,
            bound_per_s=None if bound is None else bound.requests_per_s,
            bound_tokens_per_s=None if bound is None else bound.tokens_per_s,
            bound_limited_by=None if bound is None else bound.limited_by,
            by_size_class=self.outcomes[index].by_size_class,
            extras=self.outcomes[index].extras,
            optimum=self.optima.get(index),
        )


def described(workload: WorkloadSpec) -> str:
    """A load in one line."""
    if workload.trace is not None:
        return f"trace {workload.trace} at {workload.speed:g} times its speed"
    sizes = f"{workload.prompt_tokens} prompt tokens, {workload.output_tokens} output tokens"
    if workload.sizes_from is not None:
        sizes = f"sizes of {workload.sizes_from}"
    return f"{workload.arrivals} arrivals, {workload.rate:g} requests/s, {sizes}"


def _tokens(one: SizeClass) -> str:
    if one.to_tokens is None:
        return f"from {one.from_tokens}"
    return f"below {one.to_tokens}" if one.from_tokens == 0 else f"{one.from_tokens}–{one.to_tokens - 1}"


def _told(best: Optimum) -> str:
    parts = [f"of {best.offered} requests no policy serves more than {best.at_most:.1f} within the objective"]
    parts += [f"the best possible is {best.exact}"] if best.exact is not None else []
    parts += [f"refusing alone reaches {best.by_subset}"] if best.by_subset is not None else []
    return "; ".join(parts)


def _base(asked: Asked) -> Scenario:
    """The scenario of which load, policy and seed vary; generated load at any rate, for its lengths."""
    assert asked.profile is not None
    profile = profile_named(asked.profile)
    encoder = isinstance(profile, EncoderProfile)
    none = asked.ttft_ms is asked.tpot_ms is asked.latency_ms is None
    lengths = {"prompt_tokens": asked.prompt_tokens, "output_tokens": "1" if encoder else asked.output_tokens}
    workload: dict[str, Any] = {
        **lengths,
        "keys": asked.keys,
        "key_skew": asked.key_skew,
        "sizes_from": asked.sizes_from,
    }
    if asked.trace is None:
        workload |= {"rate": SAMPLE_RATE, "duration_s": SAMPLE_S, "arrivals": asked.arrivals, "cv": asked.cv}
    else:
        workload |= {"trace": asked.trace, "duration_s": asked.duration_s, "start_s": asked.start_s}
        workload |= {"thin": asked.thin, "jitter_s": asked.jitter_s}
    engine = {name: getattr(asked, name) for name in ENGINE_FIELDS}
    return _valid(
        lambda: Scenario(
            name="",
            policy="",
            engines=EngineSpec(profile=profile.name, **engine),
            workload=WorkloadSpec(**workload),
            clients=ClientSpec(retry=asked.retry, patience_s=asked.patience_s, deadline_ms=asked.deadline_ms),
            gateways=asked.gateways,
            engines_shared=asked.engines_shared,
            seed=asked.seeds[0],
            ttft_ms=TTFT_MS if none and not encoder else asked.ttft_ms,
            tpot_ms=TPOT_MS if none and not encoder else asked.tpot_ms,
            latency_ms=ENCODER_MS if none and encoder else asked.latency_ms,
            warm_up_s=asked.warm_up_s,
        )
    )


def _valid(make: Any) -> Scenario:
    try:
        made: Scenario = make()
    except ValueError as error:
        raise UsageError(str(error)) from None
    return made


def _workloads(asked: Asked, base: Scenario, capacity: FluidBound | None) -> list[tuple[str, WorkloadSpec]]:
    replace = msgspec.structs.replace
    if asked.trace is not None:
        speeds = asked.loads or (1.0,)
        # The duration is that of the run, whatever the speed.
        return [(f"×{speed:g}", replace(base.workload, speed=speed)) for speed in speeds]
    duration_s = asked.duration_s or DEFAULT_DURATION_S
    per_s = capacity.requests_per_s if capacity is not None else 0.0
    rates = [(f"{rate:g}/s", rate) for rate in asked.rates] or [(f"×{load:g}", load * per_s) for load in asked.loads]
    for _, rate in rates:
        if rate * duration_s > MAX_REQUESTS:
            raise UsageError(f"{rate:g} requests/s for {duration_s:g} s are more than {MAX_REQUESTS} requests")
    return [(label, replace(base.workload, rate=rate, duration_s=duration_s)) for label, rate in rates]


def _sizing(asked: Asked, base: Scenario) -> Sizing:
    """In-flight limit and batch of the built-in policies, from what one engine does within the objective."""
    profile = profile_named(base.engines.profile)
    tighter = msgspec.structs.replace(
        base,
        gateways=1,
        engines=msgspec.structs.replace(base.engines, count=1),
        tpot_ms=None if base.tpot_ms is None else base.tpot_ms * TPOT_SHARE,
    )
    bounds = [bound for bound in (base.latency_ms, base.ttft_ms) if bound is not None]
    return sizing(
        profile,
        fluid_bound(tighter),
        max_batch=base.engines.max_num_seqs,
        latency_ms=min(bounds) if bounds else None,
        in_flight=asked.in_flight,
        kv_tokens=base.engines.kv_tokens,
    )


def _scenario(base: Scenario, policy: Policy, label: str, seed: int) -> Scenario:
    return msgspec.structs.replace(
        base,
        name=f"{label} {policy.name}, seed {seed}",
        policy=policy.name,
        config=policy.config,
        gateway=policy.gateway,
        seed=seed,
    )


def _impossible(base: Scenario, capacity: FluidBound) -> str:
    """Why nothing can be served within the objective, and what could."""
    asked = ", ".join(
        f"{name} {value:g} ms"
        for name, value in (("TTFT", base.ttft_ms), ("TPOT", base.tpot_ms), ("latency", base.latency_ms))
        if value is not None
    )
    return (
        f"no request can be served within {asked} on {base.engines.profile}: the shortest step takes "
        f"{capacity.step_ms:.3g} ms; ask for more time, shorter requests, or a faster engine"
    )
