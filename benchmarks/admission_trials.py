"""What the admission study simulates: policies with one setting each, and what is kept of every run.

A trial replays a whole trace through the production pipeline in front of one simulated GPU, in admission mode: a
request starts at once or is refused, so a policy is judged by whom it lets in. The estimator begins knowing nothing and
learns from the engine's usage, as in production. The recording is cut into blocks with equally many requests; the first
is not counted, the others are what the statistics resample.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from forebay.core.dispatch.leases import Engine
from forebay.core.instant import Instant
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.profile import StepProfile
from forebay.sim.bounds import FluidBound, limits_of, sizes_of, step_bound
from forebay.sim.figures import Judge
from forebay.sim.records import COMPLETED
from forebay.sim.run import Simulation
from forebay.sim.scenario import ClientSpec, EngineSpec, Scenario, WorkloadSpec
from forebay.workload.arrival import Arrival
from forebay.workload.trace import load_trace

PROFILE: Final = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"
TTFT_MS, TPOT_MS = 1000.0, 50.0
"""The objective: loads are multiples of what the engine serves within it, and token goodput is counted by it."""
TRACES: Final = {"azure_llm_2023_code": 1.0, "azure_llm_2023_conv": 1.0, "servegen_mlarge_1h_synth": 0.5}
"""How much of each recording is replayed, from its beginning: some ten to twenty thousand requests."""
LOADS: Final = (1.2, 2.0, 4.0)
BLOCKS: Final = 16
"""Of each recording, of which the first is warm-up."""
SIZE_BOUNDS: Final = (512, 1024, 2048, 4096)
"""Of the size classes, in prompt and output tokens together."""
EVERYTHING: Final = 4096
"""Requests in flight where something else is the limit: more than the engine has places for."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a setting may have to be scaled by: the callers of a trace, and what the engine can do of its mix."""

    keys: tuple[str, ...]  # () when the trace names none: then everybody is one caller
    requests_per_minute: float
    tokens_per_minute: float


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule with one setting. `config` makes a configuration of it."""

    title: str
    settings: tuple[float, ...]
    config: Callable[[float, Load], str]
    blind: bool = False
    """Whether a request's own size makes no difference at the door: it starts when there is any room at all."""


def _config(concurrency: str, limits: str = "", load: Load | None = None, *, ttft_ms: float = TTFT_MS) -> str:
    """A configuration with nothing but the objective, the mode and the limit."""
    lines = ["[slo]", f"ttft_ms = {ttft_ms:g}", f"tpot_ms = {TPOT_MS:g}", "[admission]", 'mode = "admission"']
    if limits and load is not None:
        lines += ["[limits.default]", limits]
        for key in load.keys:
            lines += ["[[keys.static]]", f'id = "{key}"', f'secret = "secret-of-{key}"', f"limits = {{ {limits} }}"]
    lines += ["[[engines]]", 'name = "engine"', 'kind = "simulated"', f"concurrency = {{ {concurrency} }}"]
    return "\n".join(lines) + "\n"


def _requests(setting: float, _: Load) -> str:
    return _config(f'kind = "fixed", limit = {setting:.0f}')


def _tokens(setting: float, _: Load) -> str:
    return _config(f'kind = "fixed", limit = {EVERYTHING}, tokens = {setting:.0f}')


def _guarded(setting: float, _: Load) -> str:
    return _config('kind = "guarded"', ttft_ms=setting)


def _requests_per_key(setting: float, load: Load) -> str:
    limit = max(1, round(setting * load.requests_per_minute))
    return _config(f'kind = "fixed", limit = {EVERYTHING}', f"requests_per_minute = {limit}", load)


def _tokens_per_key(setting: float, load: Load) -> str:
    limit = max(1, round(setting * load.tokens_per_minute))
    return _config(f'kind = "fixed", limit = {EVERYTHING}', f"tokens_per_minute = {limit}", load)


def _steps(low: float, high: float, per_doubling: int) -> tuple[float, ...]:
    """From low to high, evenly in the logarithm."""
    found = [low]
    while found[-1] * 2 ** (1 / per_doubling) <= high * 1.001:
        found.append(low * 2 ** (len(found) / per_doubling))
    return tuple(found)


COUNTED: Final = "requests"
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
POLICIES: Final[dict[str, Policy]] = {
    COUNTED: Policy("requests in flight", _COUNTS, _requests),
    "tokens": Policy("expected tokens in flight", _steps(2000, 256_000, 2), _tokens),
    "tokens, blind": Policy("expected tokens in flight, blind to the size at the door", _steps(1000, 256_000, 1),
                            _tokens, blind=True),
    "guarded": Policy("guarded window", _steps(62.5, 4000, 1), _guarded),
    "requests per key": Policy("requests per minute and key", _steps(1 / 256, 1, 1), _requests_per_key),
    "tokens per key": Policy("tokens per minute and key", _steps(1 / 256, 1, 1), _tokens_per_key),
}  # fmt: skip
VARIANTS: Final = {
    "hybrid": "in hybrid mode: up to 50 ms of waiting",
    "capped": "callers set max_tokens, to the next power of two",
    "four engines": "four engines, four times the load",
}
"""What else the first pair is tried with, at one load."""
VARIANT_LOAD: Final = 2.0
PAIRS: Final = (
    (COUNTED, "tokens"),
    (COUNTED, "tokens, blind"),
    (COUNTED, "guarded"),
    ("requests per key", "tokens per key"),
)
"""By count, and by tokens."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulation. `load`: of the engine's fluid bound for this trace's mix."""

    trace: str
    load: float
    policy: str
    setting: float
    share: float = 1.0
    """Of what TRACES says."""
    variant: str = ""


@dataclass(slots=True)
class Tally:
    """Of one block, by size class: requests and tokens, offered and refused; and the tokens of good answers."""

    offered: list[int] = field(default_factory=lambda: [0] * (len(SIZE_BOUNDS) + 1))
    refused: list[int] = field(default_factory=lambda: [0] * (len(SIZE_BOUNDS) + 1))
    tokens_offered: int = 0
    tokens_refused: int = 0
    good_tokens: int = 0  # of output, of requests within the objective
    good: int = 0


@dataclass(slots=True)
class Measured:
    """What is kept of a run: a tally per block, and of every answer its times in ms and its block."""

    tallies: list[Tally]
    ttft_ms: array[float]
    latency_ms: array[float]
    block: array[int]
    seconds: float  # in which the counted requests came


@cache
def _arrivals(trace: str, share: float) -> list[Arrival]:
    """The recording, at its own speed."""
    found = load_trace(trace)
    return found[: round(share * TRACES[trace] * len(found))]


@cache
def _bound(trace: str) -> FluidBound:
    profile = profile_named(PROFILE)
    assert isinstance(profile, StepProfile)
    limits = limits_of(profile, EngineSpec(profile=PROFILE))
    return step_bound(profile, limits, sizes_of(_arrivals(trace, 1.0)), ttft_ms=TTFT_MS, tpot_ms=TPOT_MS)


def load_of(trace: str) -> Load:
    """What the engine could do of a trace's mix within the objective, and the keys in it."""
    arrivals = _arrivals(trace, 1.0)
    rate = 60.0 * _bound(trace).requests_per_s
    tokens = sum((one.prompt_tokens or 1) + (one.output_tokens or 1) for one in arrivals) / len(arrivals)
    keys = tuple(sorted({one.key for one in arrivals} - {""}))
    return Load(keys, rate, rate * tokens)


def speed_of(trace: str, load: float) -> float:
    """How many times as fast as it was recorded a trace must be replayed for this load, on average."""
    arrivals = _arrivals(trace, 1.0)
    rate = len(arrivals) / (arrivals[-1].at_ns / 1e9)
    return load * _bound(trace).requests_per_s / rate


class _BlindEngine(Engine):
    """Has room for anything as long as what it holds is within its limits."""

    __slots__ = ()

    def has_room(self, tokens: int, now: Instant, prompt: int | None = None, priority: int = 0) -> bool:  # noqa: ARG002
        return Engine.has_room(self, 0, now, prompt, priority)


def measure(trial: Trial) -> Measured:
    """Replay, and count."""
    policy, arrivals = POLICIES[trial.policy], _arrivals(trial.trace, trial.share)
    engines = 4 if trial.variant == "four engines" else 1
    speed = speed_of(trial.trace, trial.load) * engines
    text = policy.config(trial.setting, load_of(trial.trace))
    if trial.variant == "hybrid":
        text = text.replace('mode = "admission"', 'mode = "hybrid"')
    scenario = Scenario(
        name=trial.trace,
        policy=trial.policy,
        config=text,
        engines=EngineSpec(profile=PROFILE, count=engines),
        workload=WorkloadSpec(trace=trial.trace, speed=speed, duration_s=(arrivals[-1].at_ns + 1) / 1e9 / speed),
        clients=ClientSpec(max_tokens="power-of-two" if trial.variant == "capped" else "unset"),
        ttft_ms=TTFT_MS,
        tpot_ms=TPOT_MS,
    )
    simulation = Simulation(scenario)
    if policy.blind:
        for pipeline in simulation.pipelines:
            for pool in pipeline.pools:
                for engine in pool.engines:
                    engine.__class__ = _BlindEngine
    simulation.run()
    return _counted(simulation)


def _counted(simulation: Simulation) -> Measured:
    columns = simulation.records
    judge, rows = Judge(simulation.scenario, columns), len(columns)
    first = rows // BLOCKS
    seconds = (columns.intended_ns[rows - 1] - columns.intended_ns[first]) / 1e9
    kept = Measured([Tally() for _ in range(BLOCKS - 1)], array("d"), array("d"), array("b"), seconds)
    for row in range(first, rows):
        block = min(BLOCKS - 2, (row - first) * (BLOCKS - 1) // (rows - first))
        tally, prompt, output = kept.tallies[block], columns.prompt_tokens[row], columns.asked_tokens[row]
        size = sum(prompt + output >= bound for bound in SIZE_BOUNDS)
        tally.offered[size] += 1
        tally.tokens_offered += prompt + output
        if columns.outcome[row] != COMPLETED:
            tally.refused[size] += 1
            tally.tokens_refused += prompt + output
            continue
        came = columns.intended_ns[row]
        kept.ttft_ms.append((columns.first_token_ns[row] - came) / 1e6)
        kept.latency_ms.append((columns.done_ns[row] - came) / 1e6)
        kept.block.append(block)
        if judge.good(row):
            tally.good += 1
            tally.good_tokens += output
    return kept


def plan(
    traces: Sequence[str], loads: Sequence[float], share: float, every: int, variants: Sequence[str]
) -> list[Trial]:
    """Every n-th setting of every policy; the variants of the first pair."""
    return [
        Trial(trace, load, name, setting, share)
        for trace in traces
        for load in loads
        for name, policy in POLICIES.items()
        for setting in policy.settings[::every]
    ] + [
        Trial(trace, VARIANT_LOAD, name, setting, share, variant)
        for trace in traces
        for variant in variants
        for name in PAIRS[0]
        for setting in POLICIES[name].settings[::every]
    ]
