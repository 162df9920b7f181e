"""The world of the balance benchmark: short and long prompts, conversations, and gateways that share engines."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from benchmarks.control_world import Stream, drawn
from forebay.core.dispatch.leases import Engine
from forebay.core.instant import SECOND, Instant
from forebay.core.model import EngineSignal, Request
from forebay.core.pool import Pool
from forebay.report.records import NEVER
from forebay.report.statistics import percentile
from forebay.sim.bounds import Size, limits_of, step_bound
from forebay.sim.engines import LanguageEngine
from forebay.sim.figures import Judge
from forebay.sim.run import Simulation, engine_profile
from forebay.sim.scenario import EngineSpec, Scenario, WorkloadSpec
from forebay.workload.arrival import Arrival
from forebay.workload.sizes import Sizes

PROFILE: Final = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"
ENGINES: Final = 16
GATEWAYS: Final = 8
TTFT_MS, TPOT_MS = 1000.0, 100.0
RAG_SHARE: Final = 0.15
WARM_UP_S: Final = 20.0
PAGE_EVERY_NS: Final = SECOND // 2

SYSTEM, QUESTION, ANSWER = "~600/0.7", "~120/1.0", "~189/1.0"
"""Of conversations: tokens before the first message, of each message, and of each answer."""
GOES_ON: Final = 0.8
"""Chance that a conversation has another turn."""
THINKS_S: Final = 8.0
"""Mean time from the end of an answer, as it was meant, to the next message."""

CONFIG: Final = """
[admission]
mode = "backpressure"
[queue]
deadline_s = 600
[[engines]]
name = "e"
kind = "simulated"
balance = "{policy}"
concurrency = {{ kind = "fixed", limit = 100000 }}
"""

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulation. `counters`: `own` (one gateway), `shared` (several, which see their own requests only), `old`
    (the same, with pages that are up to half a second old) or `pages` (they go by those pages alone). `lopsided` and
    `lopsided-old` are `shared` and `old` beside one that is not ours, and sends to the first engines only."""

    load_of: str  # "mix" or "talk"
    policy: str
    counters: str
    seed: int
    load: float
    duration_s: float


def mixed(rate: float, duration_s: float, seed: int) -> list[Arrival]:
    """Chat and RAG side by side."""
    streams = [
        Stream("chat", rate * (1 - RAG_SHARE), 0.0, duration_s),
        Stream("rag", rate * RAG_SHARE, 0.0, duration_s),
    ]
    return drawn(streams, seed)


def talks(rate: float, duration_s: float, seed: int) -> list[Arrival]:
    """Conversations: every message carries all that was said before. `rate` of messages per second, in the long run."""
    chance = Random(f"{seed}/talks")
    system, question, answer = (Sizes.parse(text) for text in (SYSTEM, QUESTION, ANSWER))
    found, at, number = [], 0.0, 0
    begin_rate = rate * (1 - GOES_ON)
    lead_s = 150.0  # conversations that are under way when it begins
    while at < duration_s + lead_s:
        at += chance.expovariate(begin_rate)
        number += 1
        moment, said = at - lead_s, 0
        prompt = system.draw(chance) + question.draw(chance)
        while True:
            output = answer.draw(chance)
            if 0 <= moment < duration_s:
                found.append(Arrival(int(moment * SECOND), "load", prompt, output, "", f"s{number}", said))
            if chance.random() >= GOES_ON:
                break
            said = prompt + output
            prompt = said + question.draw(chance)
            moment += 0.03 * output + chance.expovariate(1 / THINKS_S)
    return sorted(found, key=lambda arrival: arrival.at_ns)


LOADS = {"mix": mixed, "talk": talks}


def capacity(load_of: str) -> float:
    """Requests per second that all engines together could serve for ever, nothing being cached."""
    profile = engine_profile(EngineSpec(profile=PROFILE))
    sizes = [Size(a.prompt_tokens or 1, a.output_tokens or 1) for a in LOADS[load_of](100.0, 200.0, 0)]
    spec = EngineSpec(profile=PROFILE)
    one = step_bound(profile, limits_of(profile, spec), sizes, ttft_ms=TTFT_MS, tpot_ms=TPOT_MS)  # type: ignore[arg-type]
    return one.requests_per_s * ENGINES


class FirstOnes:
    """Whoever knows of no other engines than the first ones."""

    prefix_bytes = 0

    def choose(
        self,
        engines: Sequence[Engine],
        request: Request,  # noqa: ARG002
        tokens: int,  # noqa: ARG002
        now: Instant,  # noqa: ARG002
        prompt: int | None = None,  # noqa: ARG002
    ) -> Engine | None:
        """The one that holds least of its own."""
        return min(engines[: ENGINES // GATEWAYS], key=lambda engine: engine.tokens)


class PagesAlone:
    """A router that knows what engines' pages said, and nothing of what it has sent since. `two`: of two by chance."""

    prefix_bytes = 0

    def __init__(self, pool: Pool, chance: Random | None) -> None:
        self._said: dict[str, int] = {}
        self._chance = chance
        told = pool.signalled

        def signalled(engine: Engine, signal: EngineSignal, now: Instant) -> None:
            self._said[engine.name] = (signal.running or 0) + (signal.waiting or 0)
            told(engine, signal, now)

        pool.signalled = signalled  # type: ignore[method-assign]

    def choose(
        self,
        engines: Sequence[Engine],
        request: Request,  # noqa: ARG002
        tokens: int,  # noqa: ARG002
        now: Instant,  # noqa: ARG002
        prompt: int | None = None,  # noqa: ARG002
    ) -> Engine | None:
        """The one whose page counted fewest requests."""
        among = list(engines) if self._chance is None else self._chance.sample(list(engines), 2)
        return min(among, key=lambda engine: self._said.get(engine.name, 0))


def measure(trial: Trial) -> Figures:
    """Simulate, and read the figures."""
    rate = trial.load * capacity(trial.load_of)
    arrivals = LOADS[trial.load_of](rate, trial.duration_s, trial.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arrivals.csv"
        _write(path, arrivals)
        simulation = Simulation(_scenario(trial, path))
        if trial.counters == "pages":
            for number, pipeline in enumerate(simulation.pipelines):
                (pool,) = pipeline.pools
                chance = Random(f"{trial.seed}/pages/{number}") if trial.policy == "p2c" else None
                pool.balancer = PagesAlone(pool, chance)
        if trial.counters.startswith("lopsided"):
            simulation.pipelines[0].pools[0].balancer = FirstOnes()
        # Where pages are not to be seen, the first one, of idle engines, is the only one.
        simulation.parts.pages_every_ns = PAGE_EVERY_NS if trial.counters.endswith(("old", "pages")) else 1 << 60
        simulation.run()
    return _figures(simulation)


def _scenario(trial: Trial, path: Path) -> Scenario:
    alone = trial.counters == "own"
    return Scenario(
        name=f"balance/{trial.load_of}",
        policy=trial.policy,
        config=CONFIG.format(policy=trial.policy),
        engines=EngineSpec(profile=PROFILE, count=ENGINES, prefix_cache=trial.load_of == "talk"),
        workload=WorkloadSpec(trace=str(path)),
        gateways=1 if alone else GATEWAYS,
        engines_shared=not alone,
        seed=trial.seed,
        ttft_ms=TTFT_MS,
        tpot_ms=TPOT_MS,
        warm_up_s=WARM_UP_S,
    )


def _write(path: Path, arrivals: Sequence[Arrival]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrival_s", "prompt_tokens", "output_tokens", "session_id", "prefix_tokens"))
        for one in arrivals:
            writer.writerow(
                (f"{one.at_ns / SECOND:.9f}", one.prompt_tokens, one.output_tokens, one.session, one.prefix_tokens)
            )


def _figures(simulation: Simulation) -> Figures:
    columns, scenario = simulation.records, simulation.scenario
    judge = Judge(scenario, columns)
    rows = [row for row in range(len(columns)) if columns.intended_ns[row] >= scenario.warm_up_ns]
    waits = sorted(
        (columns.first_token_ns[row] - columns.intended_ns[row]) / 1e6
        for row in rows
        if columns.first_token_ns[row] != NEVER
    )
    prompts = sum(columns.prompt_tokens)
    cached = sum(engine.model.cached_tokens for engine in simulation.engines if isinstance(engine, LanguageEngine))
    works = [engine.work().prompt_tokens + engine.work().output_tokens for engine in simulation.engines]
    return {
        "requests": float(len(rows)),
        "good": sum(judge.good(row) for row in rows) / len(rows),
        "ttft_p50_ms": percentile(waits, 0.5) or 0.0,
        "ttft_p99_ms": percentile(waits, 0.99) or 0.0,
        "cached": cached / prompts,
        "fullest": max(works) / (sum(works) / len(works)),
    }
