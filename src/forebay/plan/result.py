"""What a plan says, as plain data: the file that `--json` writes. Money is US dollars, shares are of 1, times ms."""

from __future__ import annotations

from typing import Literal

import msgspec

from forebay.plan.objective import Objective
from forebay.plan.prices import Price
from forebay.plan.setup import Mode, Setup
from forebay.plan.traffic import TrafficFigures
from forebay.plan.trials import Trial
from forebay.report.results import Environment

Status = Literal["meets", "dearer", "impossible", "too many"]
"""`dearer`: not simulated, since its lower bound alone costs far more than an answer in hand. `too many`: not even with
as many GPUs as were allowed."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A trial, as a reader wants it."""

    attainment: float
    shed: float
    meets: bool
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p99: float | None
    latency_p50: float | None
    latency_p99: float | None
    busy: float | None


def figures(trial: Trial, objective: Objective) -> Figures:
    """The figures of a trial under an objective."""
    return Figures(
        attainment=trial.attainment,
        shed=trial.shed,
        meets=trial.meets(objective),
        ttft_p50=trial.ttft_p50,
        ttft_p99=trial.ttft_p99,
        tpot_p99=trial.tpot_p99,
        latency_p50=trial.latency_p50,
        latency_p99=trial.latency_p99,
        busy=trial.busy,
    )


class Cost(msgspec.Struct, frozen=True):
    """Of a fleet that runs all the time. Per million tokens: of those served, at the traffic's own mean over time.

    `low_per_month` and `high_per_month` are the same fleet at the cheapest and the dearest quote.
    """

    per_hour: float
    per_month: float
    low_per_month: float
    high_per_month: float
    per_million_tokens: float
    per_million_output_tokens: float


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Engines of one kind, how they are run, what they cost and what they did in the window."""

    gpu: str
    profile: str
    gpus_per_engine: int
    engines: int
    gpus: int
    setup: Setup
    cost: Cost
    window: Figures


class CandidateResult(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of engine: the least fleet of it, or why there is none."""

    gpu: str
    profile: str
    gpus_per_engine: int
    confidence: str
    price: Price
    bound_engines: int | None
    """Fewer than these cannot be enough, by the fluid bound."""
    bound_per_month: float | None
    status: Status
    why: str
    fleet: Fleet | None
    monotone: bool


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest fleet with a mode, over all candidates; `sustains` is the multiple of the traffic that the plan's
    own GPUs carry within the objective in that mode."""

    mode: Mode
    fleet: Fleet | None
    sustains: float | None


class Verdict(msgspec.Struct, frozen=True):
    """The article's claim that admission instead of backpressure saves 22 %, tested here.

    `saved` is the part of the bill saved by going from backpressure to the cheapest fleet under admission or hybrid;
    `per_gpu` the same as a continuous figure, from how much traffic the same GPUs sustain in each mode.
    """

    claimed: float
    saved_by_admission: float | None
    saved_by_hybrid: float | None
    per_gpu_by_admission: float | None
    per_gpu_by_hybrid: float | None
    text: str


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """`factor` times the traffic: what the planned fleet does, unchanged, and the fleet that it would take."""

    factor: float
    unchanged: Figures
    fleet: Fleet | None


class CountPoint(msgspec.Struct, frozen=True):
    """A number of engines that was tried, with its best setup."""

    engines: int
    gpus: int
    per_month: float
    attainment: float
    shed: float
    meets: bool


class CountCurve(msgspec.Struct, frozen=True):
    """All numbers tried of one kind of engine, in hybrid mode."""

    gpu: str
    profile: str
    points: list[CountPoint]


class TrafficPoint(msgspec.Struct, frozen=True):
    """`factor` times the traffic."""

    factor: float
    attainment: float
    shed: float


class TrafficCurve(msgspec.Struct, frozen=True):
    """The plan's GPUs under more and less traffic, in one mode with its best setup."""

    mode: Mode
    setup: Setup
    points: list[TrafficPoint]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The answer under more traffic than the window it was found with. `added` engines made up for what that showed."""

    what: str
    added: int
    figures: Figures


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    environment: Environment
    model: str
    dtype: str
    objective: Objective
    traffic: TrafficFigures
    prices_from: str
    prices_as_of: str
    hours_per_month: float
    answer: Fleet
    check: Check | None
    candidates: list[CandidateResult]
    comparisons: list[Comparison]
    verdict: Verdict | None
    sensitivity: list[Sensitivity]
    count_curves: list[CountCurve]
    traffic_curves: list[TrafficCurve]
    assumptions: list[str]
    simulations: int
    simulations_reused: int
    seed: int
    config: str

    def to_json(self) -> bytes:
        """The file that `--json` writes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"
