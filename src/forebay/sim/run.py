"""A scenario put together and run: production pipelines, simulated engines and callers in one world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from random import Random

import msgspec

from forebay.config import schema
from forebay.config.build import KeyEntry, anonymous_entry, engine_names, guarded, key_table, pipeline_config
from forebay.config.schema import ANONYMOUS
from forebay.core.events import Event
from forebay.core.instant import SECOND
from forebay.core.model import Request
from forebay.core.pipeline import Pipeline
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.encoder import EncoderModel
from forebay.engines.simulated.model import EngineLimits, EngineModel
from forebay.engines.simulated.profile import Profile, StepProfile
from forebay.errors import UsageError
from forebay.report.results import RunResult
from forebay.sim.clients import Callers
from forebay.sim.engines import EncoderEngine, LanguageEngine, SimulatedEngine, Work
from forebay.sim.faults import Faults, Tell
from forebay.sim.figures import Extras, SizeClass, Window, extras, run_result, size_classes
from forebay.sim.fronts import Direct, Gated
from forebay.sim.gateway import Gateway
from forebay.sim.journal import Journal, Unobserved
from forebay.sim.records import Columns
from forebay.sim.scenario import EngineSpec, Scenario
from forebay.sim.signals import READ_EVERY_NS, Pages
from forebay.sim.world import TIMER, Time, World
from forebay.workload.arrival import Arrival

ENCODER_MAX_BATCH = 128
"""The largest batch that the encoders' curves were measured with."""


class Speed(msgspec.Struct, frozen=True):
    """How much was simulated. `events`: actions taken from the heap; `engine_steps`: forward passes, of which `leaps`
    were computed and the rest follow from those in closed form. `wall_s` is for whoever holds a clock to fill in."""

    events: int
    engine_steps: int
    leaps: int
    requests: int
    simulated_s: float
    wall_s: float | None = None


class Outcome(msgspec.Struct, frozen=True):
    """What came of a scenario."""

    result: RunResult
    speed: Speed
    by_size_class: list[SizeClass]
    extras: Extras


def run(scenario: Scenario, *, decisions: list[str] | None = None) -> Outcome:
    """Simulate a scenario to its end, when every request has its outcome. The same scenario gives the same bytes.

    `decisions` is filled with the decision log, if given. Raises UsageError or ConfigError for what cannot be run.
    """
    simulation = Simulation(scenario, decisions=decisions)
    simulation.run()
    return simulation.outcome()


class Simulation:
    """One scenario in a world of its own. `records` holds a row per request, to export after `run`."""

    def __init__(self, scenario: Scenario, *, decisions: list[str] | None = None) -> None:
        self.scenario = scenario
        self.config = scenario.loaded()
        self.world = World()
        self.parts = Parts(scenario, self.config, self.world)
        self.pipelines: list[Pipeline] = []
        if scenario.gateway:
            self._add_gateways(decisions)
        else:
            self.parts.callers.fronts = [Direct(self.world, self.parts.engines, self.parts.callers)]
        self._samples: list[tuple[int, list[Work], int]] = []

    @property
    def engines(self) -> Sequence[SimulatedEngine]:
        """All engines, by number."""
        return self.parts.engines

    @property
    def records(self) -> Columns:
        """A row per request."""
        return self.parts.callers.records

    def run(self) -> None:
        """Let everything happen."""
        parts = self.parts
        parts.begin()
        self.world.at(self.scenario.warm_up_ns, self._sample, TIMER)
        self.world.at(parts.end_ns, self._sample, TIMER)
        self.world.run_out()
        assert parts.callers.open == 0, "requests are left that nothing will end"

    def outcome(self) -> Outcome:
        """The figures of a run that is over."""
        scenario, records, window = self.scenario, self.records, self._window()
        mode = self.config.admission.mode.value if scenario.gateway else "direct"
        return Outcome(
            result=run_result(scenario, mode, records, window),
            speed=Speed(
                events=self.world.events,
                engine_steps=sum(engine.work().steps for engine in self.engines),
                leaps=sum(engine.leaps for engine in self.engines),
                requests=len(records),
                simulated_s=max(records.done_ns, default=0) / SECOND,
            ),
            by_size_class=size_classes(records, scenario.warm_up_ns),
            extras=extras(scenario, records, window),
        )

    def _add_gateways(self, decisions: list[str] | None) -> None:
        world, parts = self.world, self.parts
        for number in range(self.scenario.gateways):
            front = parts.gated(number)
            if decisions is not None:
                front.journal = Journal(decisions, number, lambda: world.now, call_name)
            pipeline = parts.pipeline(number, front.journal)
            front.driver = Gateway(world, pipeline, front)
            parts.connect(number, front)
            self.pipelines.append(pipeline)

    def _sample(self) -> None:
        engines = self.engines
        preemptions = sum(engine.model.preemptions for engine in engines if isinstance(engine, LanguageEngine))
        self._samples.append((self.world.now, [engine.work() for engine in engines], preemptions))

    def _window(self) -> Window:
        (from_ns, before, preempted), (to_ns, after, preempted_after) = self._samples
        work = Work()
        for one, other in zip(before, after, strict=True):
            work = work.plus(other.since(one))
        parts = self.parts
        return Window(
            from_ns=from_ns,
            to_ns=to_ns,
            engines=len(self.engines),
            work=work,
            seats=parts.seats,
            kv_tokens=parts.kv_tokens,
            best_tokens_per_s=parts.best_tokens_per_s,
            preemptions=preempted_after - preempted,
        )


def call_name(request: Request) -> str:
    """What a simulated request is called in the decision log: its number and attempt."""
    return f"{request.owner.index}.{request.owner.attempts}"


class Parts:
    """Everything of a scenario but the drivers of its gateways, which may be simulated or live. `world` is the time."""

    def __init__(self, scenario: Scenario, config: schema.Config, world: Time, *, front: type[Gated] = Gated) -> None:
        self.scenario = scenario
        self.world = world
        self._front = front
        self._config = config
        spec = scenario.engines
        profile = profile_named(spec.profile)
        arrivals, self.end_ns = _arrivals(scenario)
        if self.end_ns <= scenario.warm_up_ns:
            raise UsageError(
                f"{scenario.name}: the warm-up of {scenario.warm_up_s:g} s is as long as the load "
                f"({self.end_ns / SECOND:g} s): shorten it, or load for longer"
            )
        generates = isinstance(profile, StepProfile)
        self.callers = Callers(world, scenario, arrivals, _keys(config), generates=generates)
        self.callers.map_shared(config.responses.overload_status)
        self.callers.model = _model_name(config)
        self.callers.anonymous = ANONYMOUS
        self.engines: list[SimulatedEngine] = []
        self.seats, self.kv_tokens = ENCODER_MAX_BATCH if spec.max_num_seqs is None else spec.max_num_seqs, 0
        self.best_tokens_per_s: float | None = None
        if isinstance(profile, StepProfile):
            self._add_language_engines(spec, profile)
        else:
            for number in range(spec.count):
                encoder = EncoderModel(profile, self.seats)
                self.engines.append(EncoderEngine(world, f"{number}", encoder, joins=spec.joins))
        self._watchers: list[list[tuple[Tell, str]]] = [[] for _ in self.engines]
        self.pages_every_ns = READ_EVERY_NS
        """How often gateways read what engines say of themselves; may be set before the run."""

    def begin(self) -> None:
        """Expect the first arrival, the first probes and the faults."""
        interval_ns = int(self._config.engines[0].probe.interval_s * SECOND)
        Faults(self.world, self.engines, self._watchers, interval_ns).schedule(self.scenario.engines.faults)
        read = guarded(self._config, self._config.engines[0]) or len(self.engines_of(0)) > 1
        if self.scenario.gateway and read:
            Pages(self.world, self.engines, self._watchers, self._goes_on, self.pages_every_ns).begin()
        self.callers.begin()

    def _goes_on(self) -> bool:
        return self.world.now < self.end_ns or self.callers.open > 0

    def engines_of(self, gateway: int) -> list[int]:
        """Numbers of the engines that a gateway sends to."""
        if self.scenario.engines_shared:
            return list(range(len(self.engines)))
        return list(range(gateway, len(self.engines), self.scenario.gateways))

    def gated(self, gateway: int) -> Gated:
        """The front of a gateway; its driver is to be set."""
        names = engine_names(self._entry(gateway))
        owned = {name: self.engines[number] for name, number in zip(names, self.engines_of(gateway), strict=True)}
        return self._front(self.world, owned, self.callers, self._config.engines[0].timeouts)

    def pipeline(self, gateway: int, journal: Journal | None) -> Pipeline:
        """The production pipeline of a gateway, with a stream of chance of its own."""
        config = msgspec.structs.replace(self._config, engines=(self._entry(gateway),))
        return Pipeline(
            pipeline_config(config), Random(f"{self.scenario.seed}/core/{gateway}"), journal or Unobserved()
        )

    def connect(self, gateway: int, front: Gated) -> None:
        """Let callers send to a front whose driver is set, and let it probe its engines."""
        self.callers.fronts.append(front)

        def tell(event: Event) -> None:
            front.driver.report(event)

        for name, number in zip(engine_names(self._entry(gateway)), self.engines_of(gateway), strict=True):
            self._watchers[number].append((tell, name))

    def _entry(self, gateway: int) -> schema.Engine:
        urls = tuple(f"http://{number}" for number in self.engines_of(gateway))
        return msgspec.structs.replace(self._config.engines[0], urls=urls)

    def _add_language_engines(self, spec: EngineSpec, profile: StepProfile) -> None:
        limits = engine_limits(spec, profile)
        self.seats, self.kv_tokens = limits.max_num_seqs, limits.kv_tokens
        rates = [rate for batch, rate in profile.decode_tokens_per_s.items() if batch <= limits.max_num_seqs]
        self.best_tokens_per_s = max(rates, default=None)
        for number in range(spec.count):
            noise = Random(f"{self.scenario.seed}/engine/{number}") if spec.noise else None

            def make(noise: Random | None = noise) -> EngineModel:
                return EngineModel(profile, limits, prefix_cache=spec.prefix_cache, noise=spec.noise, rng=noise)

            self.engines.append(LanguageEngine(self.world, f"{number}", make, reuses=spec.prefix_cache))


def engine_limits(spec: EngineSpec, profile: StepProfile) -> EngineLimits:
    """The limits of a spec, the profile's own where it sets none. Raises UsageError when they do not fit together."""
    try:
        return EngineLimits(
            max_num_seqs=spec.max_num_seqs or profile.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens or profile.max_num_batched_tokens,
            kv_tokens=spec.kv_tokens or profile.kv_tokens,
            reserve_output=spec.reserve_output,
            max_mixed_tokens=profile.max_mixed_tokens,
        )
    except ValueError as error:
        raise UsageError(f"the engine cannot be like this: {error}") from None


def engine_profile(spec: EngineSpec) -> Profile:
    """The calibrated profile of a spec. Raises UsageError, with the nearest names, when there is none."""
    return profile_named(spec.profile)


def _arrivals(scenario: Scenario) -> tuple[Iterator[Arrival], int]:
    """The arrivals, and the end of the load in ns."""
    workload = scenario.workload
    if workload.duration_s is not None and workload.trace is None:
        stream = workload.stream(scenario.seed)
        first = next(stream, None)
        end_ns = int(workload.duration_s * SECOND)
        known = [] if first is None else [first]
    else:
        known, stream = workload.draw(scenario.seed), iter(())
        end_ns = known[-1].at_ns + 1 if known else 0
    if not known:
        raise UsageError(f"{scenario.name}: the workload holds no request: raise the rate or the duration")
    return chain(known, stream), end_ns


def _keys(config: schema.Config) -> dict[str, KeyEntry]:
    """What the configuration says of its keys; `""` is any other one."""
    plain = KeyEntry("", 0, "default", None, None, None)
    return {"": anonymous_entry(config) or plain} | {entry.id: entry for entry in key_table(config).values()}


def _model_name(config: schema.Config) -> str:
    models = config.engines[0].models
    return "sim" if "*" in models else models[0]
