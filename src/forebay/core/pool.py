"""A pool: engines that are interchangeable, and the one queue in front of them.

It holds one object of each room and answers what concerns them all; verdicts.py judges, the pipeline decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from forebay.core.admission.capacity import Capacity
from forebay.core.admission.depth import DepthConfig, DepthGate
from forebay.core.admission.fair_share import FairShare, FairShareConfig
from forebay.core.admission.forecast import ForecastConfig, WaitForecast
from forebay.core.admission.retry_after import RetryConfig, RetryLadder
from forebay.core.admission.retry_budget import RetryBudgetConfig
from forebay.core.admission.returns import Returns
from forebay.core.admission.waiting_room import WaitingRoomConfig
from forebay.core.admission.warmup import WarmupClock
from forebay.core.batching import BatchingConfig
from forebay.core.batching import build as build_batcher
from forebay.core.batching.passthrough import PassThroughConfig
from forebay.core.dispatch.balance import BalanceConfig
from forebay.core.dispatch.balance import build as build_balancer
from forebay.core.dispatch.balance.least import LeastConfig
from forebay.core.dispatch.health import UP, HealthConfig, Readiness
from forebay.core.dispatch.leases import Engine
from forebay.core.dispatch.pressure import PressureConfig
from forebay.core.dispatch.ramp import RampConfig
from forebay.core.dispatch.totals import Totals
from forebay.core.instant import MILLISECOND, SECOND, Chance, Instant
from forebay.core.limits import LimitConfig
from forebay.core.limits.fixed import FixedConfig
from forebay.core.limits.pair import shadowed, succeeded
from forebay.core.model import HYBRID, EngineSignal, Mode, Request
from forebay.core.queueing.bounded import FairQueue
from forebay.core.queueing.floor import FloorShare
from forebay.core.queueing.ordering import OrderConfig, standing
from forebay.core.shadows.shadow import ShadowConfig, Shadows
from forebay.core.tuning.depth import TuningConfig
from forebay.core.tuning.pair import Tuners

LAST_CALL_NS = MILLISECOND
"""A forming batch leaves this long before one of its members expires."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Engines of one pool, and the settings of its rooms."""

    name: str
    engines: tuple[str, ...]  # names, unique in the gateway
    models: tuple[str, ...] = ("*",)
    mode: Mode = HYBRID
    hold_ns: int = 30 * SECOND  # longest wait in backpressure mode
    depth: DepthConfig = field(default_factory=DepthConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    forecast: ForecastConfig = field(default_factory=ForecastConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    retry_budget: RetryBudgetConfig | None = None  # None: every retry is looked at
    retry_tickets: bool = False  # are promised places kept for whoever shows a retry ticket?
    waiting_room: WaitingRoomConfig = field(default_factory=WaitingRoomConfig)
    batching: BatchingConfig = field(default_factory=PassThroughConfig)
    limit: LimitConfig = field(default_factory=FixedConfig)
    limit_shadow: LimitConfig | None = None
    shadow: ShadowConfig = field(default_factory=ShadowConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    ramp: RampConfig = field(default_factory=RampConfig)
    pressure: PressureConfig = field(default_factory=PressureConfig)
    balance: BalanceConfig = field(default_factory=LeastConfig)
    fair: FairShareConfig | None = None  # None: no flow is refused for what it had before
    ttft_ns: int = SECOND  # objective for the first token, of requests that bring none of their own
    order: OrderConfig = field(default_factory=OrderConfig)
    floors: tuple[tuple[int, float], ...] = ()  # (priority, part of the turns that it keeps)


class Pool:
    """The rooms of one pool."""

    def __init__(self, config: PoolConfig, chance: Chance) -> None:
        self.config = config
        self._chance = chance
        self.mode = config.mode
        self.queue = FairQueue(config.order)
        self.returning = FairQueue(config.order)  # those that came back, and give way to new requests
        self.floor = FloorShare(dict(config.floors)) if config.floors else None
        self.depth = DepthGate(config.depth)
        self.forecast = WaitForecast(config.forecast)
        self.tuning = Tuners(config.tuning, config.depth.depth_limit, chance)
        self.depth.depth_limit = self.tuning.acting.depth
        self.ladder = RetryLadder(config.retry, chance)
        self.returns = Returns(config.retry_budget, reserves=config.retry_tickets)
        self.capacity = Capacity()
        self.warmup = WarmupClock()
        self.batcher = build_batcher(config.batching)
        self.balancer = build_balancer(config.balance, chance)
        self.totals = Totals()
        several = len(config.engines) > 1
        self.engines = tuple(
            Engine(
                name,
                shadowed(config.limit, config.limit_shadow, chance),
                config.health,
                config.ramp,
                config.pressure,
                counts_prompts=several,
                totals=self.totals,
            )
            for name in config.engines
        )
        self.learning = self._learning()
        self.single = self.batcher.max_size == 1
        self.shares = config.fair is not None
        self.fair_shares: dict[int, FairShare] = {}  # by priority: classes share with their like
        self.reconfigured = False
        self._tokens_each = 1.0  # of a request; before any was seen, others' count for something all the same
        self.shadows: Shadows | None = None  # the pipeline puts them in

    def _learning(self) -> tuple[Engine, ...]:
        """The engines whose limits want to be told what goes on."""
        return tuple(engine for engine in self.engines if engine.limit.learns)

    def check_reconfigurable(self, config: PoolConfig) -> None:
        """Raise ValueError for settings that cannot change while it works."""
        old = self.config
        named = (config.name, config.engines, config.models) == (old.name, old.engines, old.models)
        if not named or config.batching != old.batching:
            raise ValueError(f"pool {old.name}: engines, models and batching need a restart")

    def reconfigure(self, config: PoolConfig, now: Instant) -> None:
        """Take other settings; what was learned stays, save what a changed limit has learned of its engine."""
        old, self.config, self.reconfigured = self.config, config, True
        self.mode = config.mode
        if (config.depth, config.tuning) != (old.depth, old.tuning):
            self.tuning = self.tuning.succeeded(old.tuning, config.tuning, config.depth.depth_limit, now)
            self.depth = DepthGate(config.depth)
            self.depth.depth_limit = self.tuning.acting.depth
        self.forecast.reconfigure(config.forecast)
        self.returns.reconfigure(config.retry_budget, reserves=config.retry_tickets)
        self.ladder.config = config.retry
        if config.fair != old.fair:
            self.fair_shares = {}
            self.shares = config.fair is not None
        if config.floors != old.floors:
            self.floor = FloorShare(dict(config.floors)) if config.floors else None
        if config.order != old.order:
            self.queue.standing, self.returning.standing = standing(config.order), standing(config.order)
        if config.balance != old.balance:
            self.balancer = build_balancer(config.balance, self._chance)
        for engine in self.engines:
            engine.reconfigure(config.ramp, config.pressure)
        before, after = (old.limit, old.limit_shadow), (config.limit, config.limit_shadow)
        if after != before:
            for engine in self.engines:
                engine.relimit(succeeded(engine.limit, before, after, self._chance), now)
            self.learning = self._learning()

    def room(self, request: Request, tokens: int, prompt: int, now: Instant) -> Engine | None:
        """The engine that would take this request now; `tokens` are expected of it and of those ahead of it,
        `prompt` of it are to be read."""
        engines = self.engines
        if len(engines) == 1:
            return engines[0] if engines[0].has_room(tokens, now, prompt, request.priority) else None
        if not self.totals.below_limit:
            return None
        return self.balancer.choose(engines, request, tokens, now, prompt)

    @property
    def prefix_bytes(self) -> int:
        """Of a body, whose hash its balancer wants to know, or else one in shadow; 0: none."""
        own = self.balancer.prefix_bytes
        return own if own or self.shadows is None else self.shadows.prefix_bytes

    def signalled(self, engine: Engine, signal: EngineSignal, now: Instant) -> None:
        """An engine told something of itself; what it holds of others is compared with what the others hold."""
        engine.signalled(signal, now)
        if len(self.engines) == 1:
            return
        found = [count for e in self.engines if (count := e.others.found(now)) is not None]
        usual, shared = sum(found) / max(1, len(found)), any(found)
        if in_flight := self.in_flight:
            each = sum(e.tokens for e in self.engines) / in_flight
            self._tokens_each += 0.2 * (each - self._tokens_each) if self._tokens_each > 1.0 else each - 1.0
        for one in self.engines:
            one.others.usual, one.shared, one.tokens_each = usual, shared, self._tokens_each

    @property
    def places(self) -> int:
        """Most leases, or batches, that its engines may hold."""
        return self.totals.places

    def free(self, now: Instant) -> int:
        """Places that are free on engines that may be given work."""
        return sum(e.window(now) - e.places for e in self.engines if e.has_room(0, now))

    @property
    def waiting(self) -> int:
        """All that wait."""
        return self.queue.waiting + self.returning.waiting

    def held_back(self, request: Request, now: Instant) -> bool:
        """Must it leave what is free to the classes above it?"""
        if request.hold_back <= 0.0 or self.free(now) > request.hold_back * self.places:
            return False
        return self.floor is None or not self.floor.due(request.priority)

    def band(self, priority: int) -> int:
        """Where a request of this priority stands in the queue: above all when its floor owes it a turn."""
        floor = self.floor
        return floor.top if floor is not None and floor.due(priority) else priority

    def prefill_ns(self, input_tokens: int) -> int:
        """Time that prompts need on the engine that has the least to do, a new one's included; 0 when not known."""
        least = 0.0
        for engine in self.learning:
            rate = engine.limit.prefill_rate
            if rate > 0.0 and engine.health.readiness is UP:
                took = (engine.prefill_tokens + input_tokens) / rate
                least = took if not least or took < least else least
        return int(least)

    @property
    def up_places(self) -> int:
        """Places of the engines that are up: what the rate of releases goes by when one comes or goes."""
        return sum(e.limit.requests for e in self.engines if e.health.readiness is UP)

    def batch_leaves_at(self, now: Instant) -> Instant:
        """When the waiting requests may leave for an engine that has room; the queue must not be empty."""
        if self.single:
            return now
        queue = self.queue
        at = self.batcher.ready_at(len(queue), queue.tokens, queue.oldest(), now)
        expiry = queue.next_expiry()
        # A free engine and a caller whose patience ends before the linger: it leaves while it can.
        return at if expiry is None or at < expiry - LAST_CALL_NS else expiry - LAST_CALL_NS

    def wakeups(self, now: Instant) -> Iterator[Instant]:
        """The instants at which time alone changes something; somebody must wait."""
        for line in (self.queue, self.returning):
            if (expiry := line.next_expiry()) is not None:
                yield expiry
        for engine in self.engines:
            if engine.health.ejected_until > now and engine.health.readiness is UP:
                yield engine.health.ejected_until
            elif engine.restrained and (at := engine.grows_at(now)) is not None:
                yield at
            if (slack := engine.slack) is not None and slack.short:
                yield slack.look_at
        if not self.single and (head := self.queue.head()) is not None:
            ask = head.demand.tokens, now, head.demand.input_tokens, head.request.priority
            if any(engine.has_room(*ask) for engine in self.engines):  # no balancer is asked: it may draw
                yield self.batch_leaves_at(now)

    @property
    def up(self) -> bool:
        """Is any engine ready and not ejected for good reason?"""
        return self.serving_from(0) is not None

    @property
    def warming(self) -> bool:
        """Is any engine on its way up?"""
        return any(e.health.readiness is Readiness.WARMING for e in self.engines)

    def serving_from(self, now: Instant) -> Instant | None:
        """When an engine may be given work again: `now` when one may already, None when none is ready."""
        soonest: Instant | None = None
        for engine in self.engines:
            if engine.health.readiness is UP:
                until = engine.health.ejected_until
                if until <= now:
                    return now
                soonest = until if soonest is None else min(soonest, until)
        return soonest

    @property
    def in_flight(self) -> int:
        """Leases open on all its engines."""
        return self.totals.in_flight

    def drain_rate(self, now: Instant) -> float:
        """Slot releases per second of all its engines; 0.0 when nothing is known."""
        return self.forecast.drain_rate(self.totals.in_flight, now)

    def paced(self) -> float:
        """Requests per second at the pace of its streams, with every place taken; 0.0 where no limit looks at that."""
        return sum(engine.capacity(self.forecast.first_ns) for engine in self.learning)

    def fair(self, priority: int) -> FairShare | None:
        """The shares among the flows of one priority; None when nothing is kept of them."""
        share = self.fair_shares.get(priority)
        if share is None and self.config.fair is not None:
            share = self.fair_shares[priority] = FairShare(self.config.fair)
        return share

    def turn(self, request: Request) -> float | None:
        """Its tag by the fair share, which remembers longer than the queue; None: the queue's own counts."""
        fair = self.fair(request.priority)
        return None if fair is None else fair.tag(request.flow or request.key)
