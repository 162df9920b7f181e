"""The world of the control benchmark: arrivals of several streams, callers that tire, and any front before engines.

It stands on the simulator's own parts. What it adds is what one scenario's workload cannot say: phases with mixes of
their own, keys with rates of their own, callers who leave when no first token comes, and fronts that are not Forebay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from random import Random

from forebay.config.build import KeyEntry, anonymous_entry, key_table
from forebay.config.schema import ANONYMOUS, Config
from forebay.core.instant import SECOND
from forebay.core.model import Refusal
from forebay.core.outcome import EvictReason
from forebay.core.pipeline import Pipeline
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.profile import StepProfile
from forebay.sim.bounds import FluidBound, Size, limits_of, step_bound
from forebay.sim.call import Call, Front
from forebay.sim.clients import Callers
from forebay.sim.engines import LanguageEngine
from forebay.sim.gateway import Gateway
from forebay.sim.run import Parts
from forebay.sim.scenario import ClientSpec, EngineSpec, Scenario, WorkloadSpec
from forebay.sim.world import ARRIVAL, Time, World
from forebay.workload.arrival import Arrival
from forebay.workload.sizes import Sizes

ENGINES = 4
TTFT_MS, TPOT_MS = 1000.0, 50.0
PATIENCE_S = 10.0

MIXES = {"chat": ("~553/1.0", "~189/1.0"), "rag": ("~4113/0.5", "~118/1.0"), "long": ("~292/0.7", "~557/0.8")}
"""Prompt and output tokens: log-normal, mean and coefficient of variation."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Poisson arrivals of one mix, `rate` per second within a span of seconds, spread evenly over `keys`."""

    mix: str
    rate: float
    from_s: float
    to_s: float
    keys: tuple[str, ...] = ("",)
    phase: str = "load"

    def arrivals(self, seed: int, number: int) -> Iterator[Arrival]:
        """In order of time. Moments, sizes and keys are chances of their own."""
        prompts, outputs = (Sizes.parse(text) for text in MIXES[self.mix])
        moments, sizes, keys = (Random(f"{seed}/{number}/{what}") for what in ("moments", "sizes", "keys"))
        at = self.from_s + moments.expovariate(self.rate)
        while at < self.to_s:
            prompt, output = prompts.draw(sizes), outputs.draw(sizes)
            yield Arrival(int(at * SECOND), self.phase, prompt, output, keys.choice(self.keys))
            at += moments.expovariate(self.rate)


def drawn(streams: Iterable[Stream], seed: int) -> list[Arrival]:
    """Everything that arrives. The same seed draws the same, whoever serves it."""
    return list(merge(*(stream.arrivals(seed, number) for number, stream in enumerate(streams))))


def fluid(profile: str, arrivals: Iterable[Arrival]) -> FluidBound:
    """The fluid bound of all engines for just these requests."""
    step = profile_named(profile)
    assert isinstance(step, StepProfile)
    sizes = [Size(arrival.prompt_tokens or 1, arrival.output_tokens or 1) for arrival in arrivals]
    one = step_bound(step, limits_of(step, EngineSpec(profile=profile)), sizes, ttft_ms=TTFT_MS, tpot_ms=TPOT_MS)
    return FluidBound(one.requests_per_s * ENGINES, one.tokens_per_s * ENGINES, one.batch, one.step_ms, one.limited_by)


class Tiring(Callers):
    """Callers who leave when an attempt has brought no first token within PATIENCE_S, or hang up in mid-answer.

    Who has left does not come back. `hang_up_share` of them leave at some moment of the first PATIENCE_S.
    """

    def __init__(
        self, world: Time, scenario: Scenario, arrivals: Iterator[Arrival], config: Config, *, hang_up_share: float
    ) -> None:
        keys = {"": anonymous_entry(config) or KeyEntry("", 0, "default", None, None, None)}
        keys |= {entry.id: entry for entry in key_table(config).values()}
        super().__init__(world, scenario, arrivals, keys, generates=True)
        self.map_shared(config.responses.overload_status)
        self.model, self.anonymous = "sim", ANONYMOUS
        self.profile = scenario.engines.profile
        self.waits: list[tuple[float, float]] = []
        """Of served requests: queue wait, and what it is of its own budget; in ms, and of 1."""
        self.late = 0
        """Attempts that were evicted because they had waited their budget."""
        self.displaced = 0
        self.counted_from_ns = 0
        """Requests that came earlier are left out of the counts here."""
        self.abort_ms: list[float] = []
        """Of each caller who hung up in mid-answer: simulated time until the engine was told to stop."""
        self._leaving: dict[int, int] = {}
        self._hang_up_share = hang_up_share
        self._moods = Random(f"{scenario.seed}/moods")

    def turned_away(self, call: Call, status: int) -> None:
        """Refused by somebody who says nothing but the status."""
        self._end_or_retry(call, "shed", "queue_full", status, {})

    def refused(self, call: Call, refusal: Refusal) -> None:
        if self._counts(call):
            self.late += refusal.reason is EvictReason.EXPIRED
            self.displaced += refusal.reason is EvictReason.DISPLACED
        super().refused(call, refusal)

    def completed(self, call: Call) -> None:
        ticket = call.ticket
        if ticket is not None and self._counts(call):
            budget_ns = ticket.wait_budget_ns
            self.waits.append((ticket.queue_wait_ns / 1e6, ticket.queue_wait_ns / budget_ns if budget_ns else 0.0))
        super().completed(call)

    def _counts(self, call: Call) -> bool:
        return self.records.intended_ns[call.index] >= self.counted_from_ns

    def _send(self, call: Call) -> None:
        super()._send(call)
        now = self._world.now
        self._world.at(now + int(PATIENCE_S * SECOND), partial(self._tire, call, call.attempts), ARRIVAL)
        if self._hang_up_share and self._moods.random() < self._hang_up_share:
            self._world.at(now + int(PATIENCE_S * SECOND * self._moods.random()), partial(self._hang_up, call), ARRIVAL)

    def _tire(self, call: Call, attempt: int) -> None:
        if not (call.done or call.front is None or call.first_token) and call.attempts == attempt:
            self._leave(call)

    def _hang_up(self, call: Call) -> None:
        if call.done or not call.first_token:
            return
        self._leaving[call.index] = self._world.now
        self._leave(call)

    def aborted(self, call: Call) -> None:
        """An engine is told to stop."""
        left_at = self._leaving.pop(call.index, None)
        if left_at is not None:
            self.abort_ms.append((self._world.now - left_at) / 1e6)


class WatchedEngine:
    """Passes on to an engine, and tells the callers of its aborts."""

    def __init__(self, engine: LanguageEngine, callers: Tiring) -> None:
        self._abort, self._callers = engine.abort, callers

    def abort(self, call: Call) -> None:
        """Stop working on it."""
        self._abort(call)
        self._callers.aborted(call)


@dataclass(slots=True)
class Run:
    """A simulation that is over."""

    scenario: Scenario
    callers: Tiring
    arrivals: list[Arrival]
    engines: list[LanguageEngine]
    pipelines: list[Pipeline] = field(default_factory=list)

    @property
    def made_tokens(self) -> int:
        """Output tokens that the engines made, wanted or not."""
        return sum(engine.work().output_tokens for engine in self.engines)


MakeFront = Callable[[World, list[LanguageEngine], Tiring, int], Front]
"""A front that is not Forebay, of the world, the engines, the callers and a seed."""


def simulate(
    config: str | MakeFront,
    profile: str,
    arrivals: list[Arrival],
    *,
    seconds: float,
    seed: int,
    counted_from_s: float = 0.0,
    retry: str = "none",
    hang_up_share: float = 0.0,
    parts_of: type[Parts] = Parts,
    callers_of: type[Tiring] = Tiring,
) -> Run:
    """Let the arrivals come, and everything end. `config` is that of a Forebay, or makes another front."""
    text = config if isinstance(config, str) else ""
    scenario = Scenario(
        name="control",
        policy="control",
        config=text,
        engines=EngineSpec(profile=profile, count=ENGINES),
        workload=WorkloadSpec(rate=1.0, duration_s=seconds),  # its own arrivals are not used
        clients=ClientSpec(retry=retry),  # type: ignore[arg-type]
        seed=seed,
        ttft_ms=TTFT_MS,
        tpot_ms=TPOT_MS,
    )
    world, loaded = World(), scenario.loaded()
    parts = parts_of(scenario, loaded, world)
    callers = callers_of(world, scenario, iter(arrivals), loaded, hang_up_share=hang_up_share)
    parts.callers = callers
    callers.counted_from_ns = int(counted_from_s * SECOND)
    engines = [engine for engine in parts.engines if isinstance(engine, LanguageEngine)]
    for engine in engines:
        engine.abort = WatchedEngine(engine, callers).abort  # type: ignore[method-assign]
    run = Run(scenario, callers, arrivals, engines)
    if isinstance(config, str):
        front = parts.gated(0)
        pipeline = parts.pipeline(0, None)
        front.driver = Gateway(world, pipeline, front)
        parts.connect(0, front)
        run.pipelines.append(pipeline)
    else:
        callers.fronts.append(config(world, engines, callers, seed))
    parts.begin()
    world.run_out()
    assert callers.open == 0, "requests are left that nothing will end"
    return run
