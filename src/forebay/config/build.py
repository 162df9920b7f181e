"""From a Config to the core's own settings. Milliseconds and seconds become nanoseconds here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, TypedDict

import msgspec

from forebay.config import schema
from forebay.config.concurrency import Window
from forebay.config.schema import ANONYMOUS, Config, depth_limit, tuner_kind, wait_budget_ms
from forebay.config.shadow import Retry
from forebay.core.admission.depth import DepthConfig
from forebay.core.admission.estimate import EstimateConfig
from forebay.core.admission.fair_share import FairShareConfig
from forebay.core.admission.forecast import ForecastConfig
from forebay.core.admission.retry_after import RetryConfig
from forebay.core.admission.retry_budget import RetryBudgetConfig
from forebay.core.admission.waiting_room import WaitingRoomConfig
from forebay.core.batching import BatchingConfig
from forebay.core.batching.dynamic import DynamicConfig
from forebay.core.batching.passthrough import PassThroughConfig
from forebay.core.dispatch.balance import AffinityConfig, BalanceConfig, LeastConfig, P2cConfig, RandomConfig
from forebay.core.dispatch.pressure import PressureConfig
from forebay.core.dispatch.ramp import RampConfig
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits import LimitConfig
from forebay.core.limits.aimd import AimdConfig
from forebay.core.limits.envoy import EnvoyConfig
from forebay.core.limits.fixed import FixedConfig
from forebay.core.limits.gradient2 import Gradient2Config
from forebay.core.limits.guarded import GuardedConfig
from forebay.core.limits.vegas import VegasConfig
from forebay.core.model import Mode
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.queueing.ordering import OrderConfig
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.core.shadows.shadow import ShadowConfig
from forebay.core.tuning import TunerConfig
from forebay.core.tuning.depth import TuningConfig
from forebay.core.tuning.derived import DerivedConfig
from forebay.core.tuning.fixed import FixedConfig as FixedDepthConfig
from forebay.core.tuning.stepwise import StepwiseConfig

UNBOUNDED = 1 << 62
UNLIMITED = schema.Limits()
FIXED_LIMIT, INITIAL_LIMIT = 64, 16  # requests in flight on one engine, where nothing else is said
FLOOR_SHARE = 0.02


class KeyEntry(msgspec.Struct, frozen=True):
    """What the data port needs to know about a caller."""

    id: str
    priority: int
    priority_class: str
    mode: Mode | None  # of the key, else of its class; None: the route's or the gateway's
    models: frozenset[str] | None  # None: any
    routes: frozenset[str] | None  # names of routes, or paths of [[routes]]; None: any
    weight: float = 1.0  # in the fair share
    hold_back: float = 0.0  # share of the places that it leaves to the classes above
    names_flows: bool = False  # may it split its share among flows that its requests name?
    wait_budget_ns: int = 0  # of its class; 0: the gateway's
    ttft_ns: int = 0  # objective of its class; 0: the gateway's
    max_output_tokens: int | None = None  # what it may ask an engine to generate; None: anything
    stored: bool = False  # it is a key of the store, whose usage the ledger keeps
    prepaid: bool = False  # it spends credit


class _ClassTerms(TypedDict):
    weight: float
    hold_back: float
    names_flows: bool
    wait_budget_ns: int
    ttft_ns: int


def pipeline_config(config: Config) -> PipelineConfig:
    """All rooms: one pool per engine entry, one engine per URL."""
    groups = _groups(config)
    keys = {key.id: key_terms(config, key_limits(key.limits), key.class_, key.team) for key in config.keys.static}
    keys[ANONYMOUS] = key_terms(config, key_limits(config.limits.default))
    return PipelineConfig(
        pools=tuple(_pool(config, engine) for engine in config.engines),
        keys=keys,
        groups=groups,
        over_budget=config.admission.over_budget,
        estimate=EstimateConfig(
            output_tokens_default=config.estimate.output_tokens_default,
            message_overhead_tokens=config.estimate.message_overhead_tokens,
            cached_weight=config.estimate.cached_weight,
        ),
    )


def engine_names(engine: schema.Engine) -> tuple[str, ...]:
    """`NAME/0`, `NAME/1` … in the order of the URLs; one name for an engine that is started here."""
    return tuple(f"{engine.name}/{number}" for number in range(max(1, len(engine.urls))))


def key_table(config: Config) -> dict[bytes, KeyEntry]:
    """sha256 of a key's secret -> its entry."""
    return {key.secret.digest(): _entry(config, key) for key in config.keys.static}


def anonymous_entry(config: Config) -> KeyEntry | None:
    """The entry of callers without a key, or None when they are not served."""
    if not config.keys.anonymous:
        return None
    default = _class(config, "default")
    return KeyEntry(
        id=ANONYMOUS,
        priority=default.priority,
        priority_class="default",
        mode=default.mode,
        models=None,
        routes=None,
        max_output_tokens=output_cap(config, None),
        **_class_terms(config, default),
    )


def output_cap(config: Config, of_key: int | None) -> int | None:
    """The output cap that a key's requests get: the lower of its own and everybody's."""
    caps = [cap for cap in (of_key, config.estimate.cap_output_tokens) if cap is not None]
    return min(caps, default=None)


def _class(config: Config, name: str) -> schema.PriorityClass:
    return config.classes.get(name) or schema.PriorityClass()


def _entry(config: Config, key: schema.StaticKey) -> KeyEntry:
    return entry_of(
        config,
        key.id,
        key.class_,
        mode=key.mode,
        models=None if "*" in key.models else frozenset(key.models),
        routes=None if "*" in key.routes else frozenset(key.routes),
        cap_output_tokens=key.cap_output_tokens,
    )


def entry_of(
    config: Config,
    key_id: str,
    class_: str,
    *,
    mode: Mode | None,
    models: frozenset[str] | None,
    routes: frozenset[str] | None,
    cap_output_tokens: int | None = None,
    stored: bool = False,
    prepaid: bool = False,
) -> KeyEntry:
    """The entry of a key, with what its class says; a class that is gone says what `default` does."""
    name = class_ if class_ in config.classes else "default"
    group = _class(config, name)
    return KeyEntry(
        id=key_id,
        priority=group.priority,
        priority_class=name,
        mode=mode or group.mode,
        models=models,
        routes=routes,
        max_output_tokens=output_cap(config, cap_output_tokens),
        stored=stored,
        prepaid=prepaid,
        **_class_terms(config, group),
    )


def _class_terms(config: Config, group: schema.PriorityClass) -> _ClassTerms:
    """What a key has of its class."""
    budget_ms = 0.0 if group.ttft_ms is None else wait_budget_ms(config, group.ttft_ms)
    return {
        "weight": group.weight,
        "hold_back": group.hold_back,
        "names_flows": group.names_flows,
        "wait_budget_ns": int(budget_ms * MILLISECOND),
        "ttft_ns": int((group.ttft_ms or 0) * MILLISECOND),
    }


def key_terms(
    config: Config, limits: KeyLimits, class_: str = "default", team: str = "", *, prepaid: bool = False
) -> KeyTerms:
    """What a key of a class and team may do, beside and within its own limits."""
    shared = {
        f"team:{team}": config.teams[team].limits if team in config.teams else UNLIMITED,
        f"class:{class_}": _class(config, class_).limits,
        "all": config.limits.all,
    }
    return KeyTerms(limits, tuple(name for name, limits in shared.items() if limits != UNLIMITED), prepaid)


def _groups(config: Config) -> dict[str, KeyLimits]:
    """Limits that keys share: those of teams, of classes and of all."""
    shared = {f"team:{name}": team.limits for name, team in config.teams.items()}
    shared |= {f"class:{name}": group.limits for name, group in config.classes.items()}
    shared["all"] = config.limits.all
    return {name: key_limits(limits) for name, limits in shared.items() if limits != UNLIMITED}


def key_limits(limits: schema.ModelLimits) -> KeyLimits:
    """Limits of one level, as the core knows them."""
    of_models = limits.models if isinstance(limits, schema.Limits) else {}
    return KeyLimits(
        requests_per_minute=limits.requests_per_minute,
        tokens_per_minute=limits.tokens_per_minute,
        tokens_per_second=limits.tokens_per_second,
        burst_s=limits.burst_s,
        concurrency=limits.concurrency,
        input_tokens_per_minute=limits.input_tokens_per_minute,
        output_tokens_per_minute=limits.output_tokens_per_minute,
        weighted_tokens_per_minute=limits.weighted_tokens_per_minute,
        tokens_per_day=limits.tokens_per_day,
        tokens_per_month=limits.tokens_per_month,
        models={model: key_limits(of_model) for model, of_model in of_models.items()},
    )


def _pool(config: Config, engine: schema.Engine) -> PoolConfig:
    queue = config.queue
    budgets = [wait_budget_ms(config), *(wait_budget_ms(config, group.ttft_ms) for group in config.classes.values())]
    concurrency = engine.concurrency
    tried = concurrency.shadow
    return PoolConfig(
        name=engine.name,
        engines=engine_names(engine),
        models=engine.models,
        mode=config.admission.mode,
        hold_ns=int(queue.deadline_s * SECOND),
        depth=DepthConfig(
            depth_limit=depth_limit(config),
            held_limit=queue.held_limit,
            tokens_limit=queue.tokens_limit,
            bytes_limit=queue.bytes_limit,
        ),
        tuning=TuningConfig(
            tuner=_tuner(config, tuner_kind(config)),
            shadow=_shadow_tuner(config),
            shadow_depth=queue.shadow.depth_limit,
            frozen=config.tuner.frozen,
            kept=config.tuner.log,
            wait_budget_ns=int(max(budgets) * MILLISECOND),
        ),
        forecast=_forecast(config),
        retry_budget=RetryBudgetConfig() if config.admission.retry_budget else None,
        retry_tickets=config.admission.retry_tickets,
        waiting_room=WaitingRoomConfig(config.admission.waiting_room, int(config.admission.waiting_room_s * SECOND)),
        retry=_retry(config.admission.retry, engine),
        batching=_batching(engine.batching or config.batching),
        limit=_limit(config, concurrency, limit_kind(config, engine)),
        limit_shadow=None if tried is None else _limit(config, tried, limit_kind(config, engine, tried)),
        shadow=_shadow(config, engine),
        ramp=RampConfig(span_ns=int(engine.slow_start_s * SECOND)),
        pressure=PressureConfig(high=config.gpu.memory_high),
        balance=_balance(engine, engine.balance),
        fair=FairShareConfig() if config.admission.fair_share else None,
        ttft_ns=int(config.slo.ttft_ms * MILLISECOND),
        order=_order(queue.order),
        floors=floor_shares(config),
    )


def _shadow(config: Config, engine: schema.Engine) -> ShadowConfig:
    tried, admission, classes = config.admission.shadow, config.admission, config.classes
    room = WaitingRoomConfig(
        admission.waiting_room if tried.waiting_room is None else tried.waiting_room,
        int((tried.waiting_room_s or admission.waiting_room_s) * SECOND),
    )
    other_room = tried.waiting_room is not None or tried.waiting_room_s is not None
    other_floors = any(group.shadow.floor_share is not None for group in classes.values())
    return ShadowConfig(
        forecast=_shadow_forecast(config),
        fair=FairShareConfig() if tried.fair_share else None,
        retry=None if tried.retry is None else _retry(tried.retry, engine),
        retry_budget=RetryBudgetConfig() if tried.retry_budget else None,
        waiting_room=room if other_room else None,
        balance=None if engine.shadow.balance is None else _balance(engine, engine.shadow.balance),
        order=None if config.queue.shadow.order is None else _order(config.queue.shadow.order),
        floors=floor_shares(config, shadow=True) if other_floors else None,
        hold_backs=tuple(
            (name, group.shadow.hold_back) for name, group in classes.items() if group.shadow.hold_back is not None
        ),
    )


def _shadow_forecast(config: Config) -> ForecastConfig | None:
    """The acting one's settings, with those that are tried in their place."""
    tried = config.admission.shadow
    others = {
        "wait_budget_ns": None if tried.wait_budget_ms is None else int(tried.wait_budget_ms * MILLISECOND),
        "late_share": tried.late_share,
        "tail_z": tried.tail_z,
        "budget_floor_slots": tried.floor_slots,
    }
    given: dict[str, Any] = {name: value for name, value in others.items() if value is not None}
    return replace(_forecast(config), **given) if given else None


def _shadow_tuner(config: Config) -> TunerConfig | None:
    if config.queue.shadow.depth_limit is not None:
        return FixedDepthConfig()
    return None if config.tuner.shadow is None else _tuner(config, config.tuner.shadow)


def _tuner(config: Config, kind: Literal["derived", "stepwise", "fixed"]) -> TunerConfig:
    tuner = config.tuner
    if kind == "fixed":
        return FixedDepthConfig()
    made: StepwiseConfig | DerivedConfig = StepwiseConfig() if kind == "stepwise" else DerivedConfig()
    if isinstance(made, DerivedConfig) and tuner.wait_ms is not None:
        made = replace(made, wait_ns=int(tuner.wait_ms * MILLISECOND))
    return replace(
        made,
        least=made.least if tuner.least is None else tuner.least,
        most=made.most if tuner.most is None else tuner.most,
        interval_ns=made.interval_ns if tuner.interval_s is None else int(tuner.interval_s * SECOND),
    )


def floor_shares(config: Config, *, shadow: bool = False) -> tuple[tuple[int, float], ...]:
    """(priority, part of the turns it keeps) of all but the highest priority, and the lowest unless it is set.

    `shadow`: with the floors that are tried in the place of those in force.
    """
    classes = {"default": schema.PriorityClass(), **config.classes}
    priorities = sorted({group.priority for group in classes.values()})
    shares: dict[int, float] = {}
    for group in classes.values():
        usual = FLOOR_SHARE if group.priority != priorities[0] else 0.0
        tried = group.shadow.floor_share if shadow else None
        told = group.floor_share if tried is None else tried
        share = usual if told is None else told
        if share and group.priority != priorities[-1]:
            shares[group.priority] = max(share, shares.get(group.priority, 0.0))
    return tuple(sorted(shares.items()))


def limit_kind(config: Config, engine: schema.Engine, concurrency: Window | None = None) -> str:
    """The kind that is set, else the one that fits: the size of batches that are formed here has to be told, and a
    limit or a bound of tokens that was given is meant. `concurrency` is the engine's own, or that in its shadow."""
    concurrency = concurrency or engine.concurrency
    if concurrency.kind is not None:
        return concurrency.kind
    told = concurrency.limit is not None or concurrency.tokens is not None
    return "fixed" if told or (engine.batching or config.batching).kind != "passthrough" else "guarded"


def initial_limit(config: Config, engine: schema.Engine) -> int:
    """Requests in flight on one of its URLs at first."""
    usual = FIXED_LIMIT if limit_kind(config, engine) == "fixed" else INITIAL_LIMIT
    return engine.concurrency.limit or usual


def guarded(config: Config, engine: schema.Engine) -> bool:
    """Does a limit of this engine, in force or in shadow, go by what the engine says of itself?"""
    shadow = engine.concurrency.shadow
    kinds = [limit_kind(config, engine)] + ([limit_kind(config, engine, shadow)] if shadow is not None else [])
    return "guarded" in kinds


def _shortest(ms: float, others: Iterable[float | None]) -> int:
    return int(min((ms, *(other for other in others if other is not None))) * MILLISECOND)


def _limit(config: Config, concurrency: Window, kind: str) -> LimitConfig:
    tokens = _bound(concurrency.tokens)
    if kind == "fixed":
        return FixedConfig(limit=concurrency.limit or FIXED_LIMIT, tokens=tokens)
    initial, least, most = concurrency.limit or INITIAL_LIMIT, concurrency.least, concurrency.most
    if kind == "guarded":
        slo, classes = config.slo, config.classes.values()
        return GuardedConfig(
            tpot_ns=_shortest(slo.tpot_ms, (group.tpot_ms for group in classes)),
            ttft_ns=_shortest(slo.ttft_ms, (group.ttft_ms for group in classes)),
            latency_ns=_shortest(slo.latency_ms or slo.ttft_ms, (group.latency_ms for group in classes)),
            kv_tokens=concurrency.kv_tokens,
            initial=initial,
            least=least,
            most=most,
        )
    if kind == "aimd":
        aimd = AimdConfig(initial=initial, least=least, most=most, tokens=tokens, signal=concurrency.signal)
        in_time = concurrency.signal == "ttft"
        return replace(aimd, late_ns=int(config.slo.ttft_ms * MILLISECOND)) if in_time else aimd
    if kind == "vegas":
        return VegasConfig(initial=initial, least=least, most=most, tokens=tokens, signal=concurrency.signal)
    if kind == "gradient2":
        return Gradient2Config(initial=initial, least=least, most=most, tokens=tokens, signal=concurrency.signal)
    return EnvoyConfig(least=least, most=most, tokens=tokens, signal=concurrency.signal)


def _forecast(config: Config) -> ForecastConfig:
    admission = config.admission
    return ForecastConfig(
        wait_budget_ns=int(wait_budget_ms(config) * MILLISECOND),
        budget_floor_slots=admission.floor_slots,
        budget_ceiling_ns=int(config.slo.ttft_ms * MILLISECOND),
        tail_z=admission.tail_z,
        late_share=admission.late_share,
    )


def _retry(retry: Retry, engine: schema.Engine) -> RetryConfig:
    return RetryConfig(
        share_least=retry.share_least,
        share_most=retry.share_most,
        headroom=retry.headroom,
        beyond_ns=int(retry.beyond_s * SECOND),
        probe_interval_ns=int(engine.probe.interval_s * SECOND),
    )


def _order(order: str) -> OrderConfig:
    return OrderConfig(adaptive=order == "adaptive")


def _balance(engine: schema.Engine, balance: str) -> BalanceConfig:
    if balance == "affinity":
        return AffinityConfig(prefix_bytes=engine.prefix_bytes)
    if balance == "p2c":
        return P2cConfig()
    return RandomConfig() if balance == "random" else LeastConfig()


def _batching(batching: schema.Batching) -> BatchingConfig:
    if batching.kind == "passthrough":
        return PassThroughConfig()
    return DynamicConfig(
        max_size=batching.max_size,
        max_tokens=_bound(batching.max_tokens),
        linger_ns=int(batching.linger_ms * MILLISECOND),
    )


def _bound(limit: int | None) -> int:
    return UNBOUNDED if limit is None else limit
