"""The article's experiment: its three approaches on the GPU that its figures imply, and on what load they could hold.

The article gives p99, utilization and requests per second of three approaches, but no load, model, GPU or settings. Its
requests per second over its utilization are about 2,230 to 2,560 in all three rows, which is what one A100 makes of
BERT-large in FP16 at 128 tokens (2,480 measured). So that is the engine here, batching what waits by itself, and the
approaches are the gateway's modes before it. What is not known is searched for: one load for all three, and for each
approach its own limits. A fit is judged by its worst figure of nine, since any single row can be fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from forebay.report.page import render_page
from forebay.report.results import Environment, Results, environment
from forebay.sim.export import run_records
from forebay.sim.policies import Sizing, config_text
from forebay.sim.run import Outcome, run
from forebay.sim.scenario import EngineSpec, Scenario, WorkloadSpec

PROFILE = "a100-40gb/bert-large/fp16/seq128"
PEAK_PER_S = 2480.0
"""Measured: NVIDIA's TensorRT table, batch 128."""
SEEDS = (1, 2, 3, 4, 5)
DURATION_S, WARM_UP_SHARE = 36.0, 1 / 6
OBJECTIVE_MS = 500.0
"""Where the article's own tuner calls p99 past its target."""

MAX_BATCH = 128
"""Where the measured curve ends."""
UNBOUNDED_DEPTH = 100_000
DEFAULTS = "hybrid, Forebay's defaults"

Approach = Literal["backpressure", "admission", "hybrid"]
APPROACHES: tuple[Approach, ...] = ("backpressure", "admission", "hybrid")

ServedAs = Literal["completed", "in time"]
UtilizationAs = Literal["busy", "share of peak"]


class Claim(msgspec.Struct, frozen=True):
    """A row of the article's table."""

    p99_ms: float
    utilization: float
    served_per_s: float


CLAIMS: dict[Approach, Claim] = {
    "backpressure": Claim(842.0, 0.61, 1400.0),
    "admission": Claim(180.0, 0.43, 1100.0),
    "hybrid": Claim(210.0, 0.74, 1650.0),
}


class Load(msgspec.Struct, frozen=True):
    """Arrivals that all approaches face: mean rate per second, and their shape."""

    rate: float
    arrivals: Literal["poisson", "gamma", "bursty"]
    cv: float = 1.0

    def __str__(self) -> str:
        shape = f"gamma gaps of CV {self.cv:g}" if self.arrivals == "gamma" else self.arrivals
        return f"{self.rate:g} requests/s, {shape}"


class Gate(msgspec.Struct, frozen=True):
    """Settings of an approach: requests at the engine, its largest batch, and what may wait before it, how long.

    `depth` bounds what waits in hybrid mode, and None leaves that to the wait budget; `hold_s` is for backpressure.
    """

    mode: Approach
    in_flight: int
    batch: int
    wait_budget_ms: float | None = None
    depth: int | None = None
    hold_s: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.in_flight} at the engine", f"batches up to {self.batch}"]
        parts += [f"wait budget {self.wait_budget_ms:g} ms"] if self.wait_budget_ms is not None else []
        parts += [f"queue of {self.depth}"] if self.depth is not None else []
        parts += [f"held up to {self.hold_s:g} s"] if self.hold_s is not None else []
        return ", ".join(parts)


class Reading(NamedTuple):
    """What the article's words may mean."""

    served: ServedAs
    utilization: UtilizationAs

    def __str__(self) -> str:
        return f"served: {self.served}; utilization: {self.utilization}"


READINGS = (
    Reading("completed", "busy"),
    Reading("completed", "share of peak"),
    Reading("in time", "busy"),
    Reading("in time", "share of peak"),
)


class Measured(msgspec.Struct, frozen=True):
    """Means over seeds. `p99_ms` is of completed requests; `share_of_peak` is completed per second over PEAK_PER_S."""

    p99_ms: float
    busy: float
    share_of_peak: float
    served_per_s: float
    goodput_per_s: float
    shed: float

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Measured:
        results = [outcome.result for outcome in outcomes]
        return cls(
            p99_ms=_mean(result.latency_ms.p99 or 0.0 for result in results),
            busy=_mean(result.utilization.busy or 0.0 for result in results),
            share_of_peak=_mean(result.served_per_s / PEAK_PER_S for result in results),
            served_per_s=_mean(result.served_per_s for result in results),
            goodput_per_s=_mean(result.goodput_per_s for result in results),
            shed=_mean(
                (result.counts.shed + result.counts.evicted) / max(1, result.counts.offered) for result in results
            ),
        )

    def read(self, reading: Reading) -> Claim:
        """The three figures as the article may have meant them."""
        used = self.busy if reading.utilization == "busy" else self.share_of_peak
        return Claim(self.p99_ms, used, self.served_per_s if reading.served == "completed" else self.goodput_per_s)


def misfit(measured: Claim, claim: Claim) -> float:
    """The worst of the three figures, as a factor above 1: 1.2 is 20 % more, or as much less."""
    pairs = zip(msgspec.structs.astuple(measured), msgspec.structs.astuple(claim), strict=True)
    return math.exp(max(abs(math.log(max(ours, 1e-9) / theirs)) for ours, theirs in pairs))


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def scenario(load: Load, gate: Gate, seed: int, *, duration_s: float = DURATION_S) -> Scenario:
    """One run of an approach; the first WARM_UP_SHARE of it does not count."""
    config = config_text(
        gate.mode,
        Sizing(gate.in_flight),
        slo_ms=OBJECTIVE_MS,
        wait_budget_ms=gate.wait_budget_ms,
        depth_limit=gate.depth or UNBOUNDED_DEPTH,
        deadline_s=gate.hold_s,
    )
    return _scenario(gate.mode, config, gate.batch, load, seed, duration_s)


def default_scenario(load: Load, seed: int, *, duration_s: float = DURATION_S) -> Scenario:
    """Forebay as it comes, told only the objective."""
    config = f'[slo]\nttft_ms = {OBJECTIVE_MS:g}\n[admission]\nmode = "hybrid"\n'
    return _scenario(DEFAULTS, config, MAX_BATCH, load, seed, duration_s)


def _scenario(name: str, config: str, batch: int, load: Load, seed: int, duration_s: float) -> Scenario:
    return Scenario(
        name=f"{load}: {name}, seed {seed}",
        policy=name,
        config=config,
        engines=EngineSpec(profile=PROFILE, max_num_seqs=batch, joins=True),
        workload=WorkloadSpec(
            rate=load.rate,
            arrivals=load.arrivals,
            cv=load.cv,
            duration_s=duration_s,
            prompt_tokens="128",
            output_tokens="1",
        ),
        seed=seed,
        latency_ms=OBJECTIVE_MS,
        warm_up_s=duration_s * WARM_UP_SHARE,
    )


# ---- the search ----------------------------------------------------------------------------------------------------

LOADS = (
    *(Load(rate, "gamma", cv) for cv in (8.0, 12.0, 16.0) for rate in (1500.0, 1800.0, 2100.0)),
    *(Load(rate, "gamma", 24.0) for rate in (1200.0, 1500.0)),
    Load(1800.0, "bursty"),
    Load(2300.0, "poisson"),
)
GATES: dict[Approach, tuple[Gate, ...]] = {
    "backpressure": (
        Gate("backpressure", 8, 4, hold_s=0.82),
        Gate("backpressure", 16, 8, hold_s=0.82),
        Gate("backpressure", 64, 32),
        Gate("backpressure", 256, 128),
    ),
    "admission": tuple(
        Gate("admission", in_flight, batch)
        for in_flight, batch in ((32, 32), (128, 32), (220, 3), (256, 8), (384, 128))
    ),
    "hybrid": tuple(
        Gate("hybrid", in_flight, batch, wait_budget_ms=budget)
        for in_flight, batch, budget in ((64, 32, 180.0), (256, 128, 60.0), (256, 128, 180.0))
    ),
}
"""The lengths of queues and batches that the article's latencies allow, and its patience at the p99 that it reports."""


class Fit(msgspec.Struct, frozen=True):
    """The nearest settings under a reading, and the worst factor between a measured and a claimed figure."""

    served: ServedAs
    utilization: UtilizationAs
    load: Load
    gates: dict[str, Gate]
    worst: float


Runner = Callable[[Sequence[Scenario]], Sequence[Outcome]]


def search(runner: Runner, *, seeds: Sequence[int] = (1,), duration_s: float = 24.0, shared: bool = True) -> list[Fit]:
    """The nearest fit under each reading, over all LOADS and GATES.

    `shared`: one load for all three approaches, as a comparison needs. Otherwise each approach may have its own, and
    the fits have one gate each: what a row could be by itself.
    """
    tried = [(load, gate) for load in LOADS for approach in APPROACHES for gate in GATES[approach]]
    scenarios = [scenario(load, gate, seed, duration_s=duration_s) for load, gate in tried for seed in seeds]
    outcomes = iter(runner(scenarios))
    figures = {place: Measured.of([next(outcomes) for _ in seeds]) for place in tried}
    if shared:
        return [_shared_fit(figures, reading) for reading in READINGS]
    return [fit for reading in READINGS for fit in _single_fits(figures, reading)]


Figures = dict[tuple[Load, Gate], Measured]


def _nearest(figures: Figures, load: Load, approach: Approach, reading: Reading) -> tuple[float, Gate]:
    ranked = [(misfit(figures[load, gate].read(reading), CLAIMS[approach]), gate) for gate in GATES[approach]]
    return min(ranked, key=lambda pair: pair[0])


def _shared_fit(figures: Figures, reading: Reading) -> Fit:
    fits = []
    for load in LOADS:
        nearest = {approach: _nearest(figures, load, approach, reading) for approach in APPROACHES}
        gates: dict[str, Gate] = {approach: gate for approach, (_, gate) in nearest.items()}
        fits.append(Fit(*reading, load, gates, max(worst for worst, _ in nearest.values())))
    return min(fits, key=lambda fit: fit.worst)


def _single_fits(figures: Figures, reading: Reading) -> Iterator[Fit]:
    for approach in APPROACHES:
        fits = []
        for load in LOADS:
            worst, gate = _nearest(figures, load, approach, reading)
            fits.append(Fit(*reading, load, {approach: gate}, worst))
        yield min(fits, key=lambda fit: fit.worst)


# ---- the experiment ------------------------------------------------------------------------------------------------


PATIENT = Gate("hybrid", 256, MAX_BATCH, wait_budget_ms=OBJECTIVE_MS / 2)
"""Forebay's hybrid where half of the objective may be spent waiting, and two of the largest batches may be there."""


class Nearest(NamedTuple):
    """A load for all, and the settings of each."""

    load: Load
    gates: dict[Approach, Gate]


# Found by `search` (forebay sim article --search) and written down, so that the experiment takes minutes.
FIRST_READING = Reading("completed", "share of peak")
NEAREST: dict[Reading, Nearest] = {
    FIRST_READING: Nearest(
        Load(2100.0, "gamma", 12.0),
        {
            "backpressure": Gate("backpressure", 8, 4, hold_s=0.82),
            "admission": Gate("admission", 220, 3),
            "hybrid": Gate("hybrid", 64, 32, wait_budget_ms=180.0),
        },
    ),
    Reading("completed", "busy"): Nearest(
        Load(1500.0, "gamma", 16.0),
        {
            "backpressure": Gate("backpressure", 256, 128),
            "admission": Gate("admission", 384, 128),
            "hybrid": Gate("hybrid", 256, 128, wait_budget_ms=180.0),
        },
    ),
}
SINGLE_READING = Reading("completed", "busy")
SINGLE: dict[Approach, tuple[Load, Gate]] = {
    "backpressure": (Load(1200.0, "gamma", 24.0), Gate("backpressure", 256, 128)),
    "admission": (Load(1500.0, "gamma", 24.0), Gate("admission", 384, 128)),
    "hybrid": (Load(1800.0, "gamma", 12.0), Gate("hybrid", 256, 128, wait_budget_ms=180.0)),
}

AS_WRITTEN: dict[Approach, Gate] = {
    # Its worker takes up to 8, one batch at a time, and lets everybody wait.
    "backpressure": Gate("backpressure", 8, 8),
    # max_inflight 32; max_queue 10 stands behind it and is never reached.
    "admission": Gate("admission", 32, 32),
    # A queue of 20, a time-out of 100 ms; its token gate is left out: it never refills, and shuts after 46 requests.
    "hybrid": Gate("hybrid", 32, 32, wait_budget_ms=100.0, depth=20),
}
"""The settings of the article's own listings."""


class Row(msgspec.Struct, frozen=True):
    """An approach: what was claimed of it, what was measured, and half of the range over the seeds."""

    name: str
    load: str
    settings: str
    claim: Claim | None
    measured: Measured
    half_range: Measured
    misfit: float | None


class Table(msgspec.Struct, frozen=True):
    """Rows that are read alike."""

    title: str
    served: ServedAs
    utilization: UtilizationAs
    rows: list[Row]


class Experiment(msgspec.Struct, frozen=True):
    """Everything that was found, for `--json`."""

    environment: Environment
    profile: str
    peak_per_s: float
    objective_ms: float
    duration_s: float
    seeds: list[int]
    tables: list[Table]

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


class _Case(NamedTuple):
    name: str
    load: Load
    settings: str
    claim: Claim | None
    make: Callable[[int, float], Scenario]


def experiment(runner: Runner, *, seeds: Sequence[int] = SEEDS, duration_s: float = DURATION_S) -> Experiment:
    """The nearest settings that were found, each row by itself, and the article's listings, all with the same seeds."""
    plans = [
        (f"One load for all, nearest; {reading}", reading, _nearest_cases(fit)) for reading, fit in NEAREST.items()
    ]
    plans.append((f"Each row by itself, nearest; {SINGLE_READING}", SINGLE_READING, _single_cases()))
    plans.append(("As the article's listings are set, on the first of these loads", FIRST_READING, _written_cases()))
    scenarios = [case.make(seed, duration_s) for _, _, cases in plans for case in cases for seed in seeds]
    outcomes = iter(runner(scenarios))
    tables = [
        Table(title, *reading, [_row(case, [next(outcomes) for _ in seeds], reading) for case in cases])
        for title, reading, cases in plans
    ]
    return Experiment(environment(), PROFILE, PEAK_PER_S, OBJECTIVE_MS, duration_s, list(seeds), tables)


def page(found: Experiment) -> str:
    """The first table's runs over time, one seed, as a page of its own."""
    fit, seed = NEAREST[FIRST_READING], found.seeds[0]
    scenarios = [case.make(seed, found.duration_s) for case in _nearest_cases(fit)]
    results = [run(scenario).result for scenario in scenarios]
    results = [msgspec.structs.replace(result, mode=result.policy) for result in results]
    summary = [f"{fit.load}, seed {seed}, on a simulated A100 with BERT-large in FP16. {found.tables[0].title}."]
    title = "The article's three approaches, and Forebay's defaults"
    return render_page(title, summary, Results(found.environment, results), [run_records(one) for one in scenarios])


def _nearest_cases(fit: Nearest) -> list[_Case]:
    cases = [_case(approach, fit.load, fit.gates[approach]) for approach in APPROACHES]
    told = "64 at the engine, wait budget 50 ms"

    def by_default(seed: int, duration_s: float) -> Scenario:
        return default_scenario(fit.load, seed, duration_s=duration_s)

    def patient(seed: int, duration_s: float) -> Scenario:
        return scenario(fit.load, PATIENT, seed, duration_s=duration_s)

    cases.append(_Case(DEFAULTS, fit.load, told, None, by_default))
    cases.append(_Case("hybrid, half the objective to wait", fit.load, str(PATIENT), None, patient))
    return cases


def _single_cases() -> list[_Case]:
    return [_case(approach, *SINGLE[approach]) for approach in APPROACHES]


def _written_cases() -> list[_Case]:
    return [_case(approach, NEAREST[FIRST_READING].load, AS_WRITTEN[approach]) for approach in APPROACHES]


def _case(approach: Approach, load: Load, gate: Gate) -> _Case:
    return _Case(
        approach,
        load,
        str(gate),
        CLAIMS[approach],
        lambda seed, duration_s: scenario(load, gate, seed, duration_s=duration_s),
    )


def _row(case: _Case, outcomes: Sequence[Outcome], reading: Reading) -> Row:
    mean = Measured.of(outcomes)
    each = [msgspec.structs.astuple(Measured.of([outcome])) for outcome in outcomes]
    half = Measured(*((max(values) - min(values)) / 2 for values in zip(*each, strict=True)))
    worst = None if case.claim is None else misfit(mean.read(reading), case.claim)
    return Row(case.name, str(case.load), case.settings, case.claim, mean, half, worst)
