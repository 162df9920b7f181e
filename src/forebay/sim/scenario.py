"""What is simulated, as plain data: a scenario is JSON, and its digest names it whoever made it.

Nothing here decides anything: policies are those of a normal configuration, read from its TOML text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from forebay.config import schema
from forebay.config.load import loads
from forebay.errors import UsageError
from forebay.workload.arrival import NS_PER_S, Arrival
from forebay.workload.generate import check_arrivals, filled, moments
from forebay.workload.trace import load_trace

DEFAULT_ENTRY = schema.Engine(name="engine", kind="simulated")
"""The engine entry of a config that has none."""

Positive = Annotated[float, Meta(gt=0)]
Whole = Annotated[int, Meta(ge=1)]


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all parts of a scenario."""


class FaultSpec(Spec, frozen=True, kw_only=True):
    """What ails some engines from `from_s` to `to_s` (None: to the end).

    `slow`: steps take `factor` times as long. `stalled`: no step begins. `crashed`: what it holds fails, connections
    are refused, and it is up again, empty, at `to_s`. `cold`: what it holds fails, it warms up, and refuses work until
    `to_s`. `lying`: it reports `factor` times the usage of what it serves.
    """

    kind: Literal["slow", "stalled", "crashed", "cold", "lying"]
    from_s: Annotated[float, Meta(ge=0)] = 0.0
    to_s: float | None = None
    factor: Positive = 2.0
    engines: tuple[int, ...] = ()
    """Numbers of the engines, from 0; empty for all."""

    def __post_init__(self) -> None:
        if self.kind == "stalled" and self.to_s is None:
            raise ValueError("a stall needs an end: set to_s")
        if self.to_s is not None and self.to_s <= self.from_s:
            raise ValueError(f"a fault ends at {self.to_s:g} s, before it begins at {self.from_s:g} s")


class EngineSpec(Spec, frozen=True, kw_only=True):
    """`count` alike engines of one calibrated profile; limits that are unset are the profile's own.

    For an encoder profile `max_num_seqs` is its largest batch, and `joins` says that it batches what waits by itself,
    as TEI and Triton do. `noise` is the relative standard deviation of step times.
    """

    profile: str
    count: Whole = 1
    max_num_seqs: Whole | None = None
    max_num_batched_tokens: Whole | None = None
    kv_tokens: Whole | None = None
    reserve_output: bool = False
    prefix_cache: bool = False
    joins: bool = False
    noise: Annotated[float, Meta(ge=0)] = 0.0
    faults: tuple[FaultSpec, ...] = ()


class ClientSpec(Spec, frozen=True):
    """How callers behave.

    `retry`: after a refusal as the official SDKs do (`sdk`, or `sdk-2025` for older ones, or `sdk-tickets` with retry
    tickets sent back), at once (`naive`), or never.
    `patience_s`: the caller leaves so long after it first sent, whatever has come of it. `deadline_ms`: told to the
    gateway with every attempt; SDKs also tell their read time-out, which is the patience, or 600 s.
    `max_tokens`: the cap that the caller sets: none, the next power of two from the answer's real length on, or that
    length itself. The gateway sees bytes: `bytes_per_token` on average, `bytes_noise` their relative standard deviation
    from request to request.
    """

    retry: Literal["none", "sdk", "sdk-tickets", "sdk-2025", "naive"] = "none"
    patience_s: Positive | None = None
    deadline_ms: Whole | None = None
    max_tokens: Literal["unset", "power-of-two", "exact"] = "unset"
    stream: bool = True
    bytes_per_token: Positive = 4.2
    bytes_noise: Annotated[float, Meta(ge=0, le=1)] = 0.1


class WorkloadSpec(Spec, frozen=True):
    """When requests come and how large they are: a trace (by shipped name, or path), or `rate` arrivals per second.

    `duration_s` is needed with `rate`. `arrivals` is a text of `workload.generate`: `poisson`, `spike:factor=4` … Sizes
    are texts of `workload.sizes.Sizes`, or drawn from a trace (`sizes_from`), and hold where the trace says nothing.
    `keys` spreads requests over so many keys `k0`, `k1` … where the trace names none, evenly unless `key_skew` is set.
    """

    trace: str | None = None
    speed: Positive = 1.0
    start_s: Annotated[float, Meta(ge=0)] = 0.0
    duration_s: Positive | None = None
    thin: Annotated[float, Meta(gt=0, le=1)] = 1.0
    jitter_s: Annotated[float, Meta(ge=0)] = 0.0
    rate: Positive | None = None
    arrivals: str = "poisson"
    cv: Positive = 3.0
    prompt_tokens: str = "512"
    output_tokens: str = "128"
    sizes_from: str | None = None
    keys: Whole = 1
    key_skew: Annotated[float, Meta(ge=0, le=10)] = 0.0

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.rate is None):
            raise ValueError("a workload is either a trace or a rate: give exactly one of the two")
        if self.rate is not None and self.duration_s is None:
            raise ValueError("a workload of a given rate needs a duration_s")
        try:
            check_arrivals(self.arrivals)
        except UsageError as error:
            raise ValueError(str(error)) from None

    def draw(self, seed: int) -> list[Arrival]:
        """All arrivals in time order, sizes and keys filled in. The same seed draws the same.

        Raises UsageError when the trace cannot be used.
        """
        return list(self.stream(seed))

    def stream(self, seed: int) -> Iterator[Arrival]:
        """The same one by one: those of a rate are drawn as they are asked for."""
        return filled(
            self._moments(seed),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            sizes_from=self.sizes_from,
            keys=self.keys,
            key_skew=self.key_skew,
            seed=seed,
        )

    def _moments(self, seed: int) -> Iterable[Arrival]:
        if self.trace is not None:
            return load_trace(
                self.trace,
                speed=self.speed,
                start_s=self.start_s,
                duration_s=self.duration_s,
                thin=self.thin,
                jitter_s=self.jitter_s,
                seed=seed,
            )
        assert self.rate is not None
        assert self.duration_s is not None
        return moments(self.arrivals, rate=self.rate, duration_s=self.duration_s, cv=self.cv, seed=seed)


class Scenario(Spec, frozen=True, kw_only=True):
    """One run: a policy, the engines, the load and the callers.

    `config` is the text of a normal configuration. Its first `[[engines]]` entry, if any, gives name, concurrency and
    batching of the simulated engines; URLs are ignored. Engines are dealt out to the gateways in turn, unless
    `engines_shared`, where every gateway sends to all. Arrivals are dealt out in turn, or by a hash of their key.
    The objective (`ttft_ms`, `tpot_ms`, `latency_ms`) is what goodput is counted by. Requests of the first `warm_up_s`
    are served, and not counted. `gateway=False` sends everything straight to the engines.
    """

    name: str
    policy: str
    config: str = ""
    engines: EngineSpec
    workload: WorkloadSpec
    clients: ClientSpec = ClientSpec()
    gateways: Whole = 1
    engines_shared: bool = False
    spread: Literal["in-turn", "by-key"] = "in-turn"
    seed: int = 1
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None
    warm_up_s: Annotated[float, Meta(ge=0)] = 0.0
    gateway: bool = True

    def __post_init__(self) -> None:
        if not self.engines_shared and self.gateways > self.engines.count:
            raise ValueError(
                f"{self.gateways} gateways cannot each own one of {self.engines.count} engines: "
                "add engines, or set engines_shared"
            )
        for fault in self.engines.faults:
            for number in fault.engines:
                if not 0 <= number < self.engines.count:
                    raise ValueError(f"a fault names engine {number}, there are {self.engines.count} from 0 on")

    def digest(self) -> str:
        """Hexadecimal name of the content, the same on every machine."""
        # Decoded once: where a whole number was given for a float, 1 and 1.0 are the same content.
        plain = msgspec.json.decode(msgspec.json.encode(self), type=Scenario)
        return hashlib.sha256(msgspec.json.encode(plain, order="deterministic")).hexdigest()[:32]

    def loaded(self) -> schema.Config:
        """The configuration, its engine entries reduced to the one that is simulated.

        Raises ConfigError when the text is no usable configuration.
        """
        config = loads(self.config, name=f"config of {self.name}", environment={}).config
        entry = config.engines[0] if config.engines else DEFAULT_ENTRY
        return msgspec.structs.replace(config, engines=(entry,))

    @property
    def warm_up_ns(self) -> int:
        """End of the warm-up."""
        return int(self.warm_up_s * NS_PER_S)


def scenario_from(data: Any) -> Scenario:
    """A scenario from JSON-like data. Raises UsageError that names the field."""
    try:
        return msgspec.convert(data, Scenario)
    except msgspec.ValidationError as error:
        raise UsageError(f"this is not a scenario: {error}") from None
