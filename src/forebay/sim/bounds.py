"""What no schedule can exceed for long: the fluid bound of an engine model, and the engine under an endless backlog.

The fluid bound treats requests as a stream of constant composition. With x requests begun and ended per step, a step
computes x times the mean prompt and x times the mean answer, reads x times the mean context, and holds x times the
mean KV; the rate is x / step time. The step time has a fixed part and is convex, so the rate grows with x until a
limit binds: sequences, batch tokens, KV cache, or the objective. A policy that sheds long requests more than short
ones serves an easier mix and may pass the bound in requests per second: compare the shed shares by size as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import ceil, inf
from typing import Literal, NamedTuple

import msgspec

from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.model import EngineLimits, EngineModel
from forebay.engines.simulated.profile import EncoderProfile, StepProfile
from forebay.sim.run import ENCODER_MAX_BATCH, engine_limits
from forebay.sim.scenario import EngineSpec, Scenario
from forebay.workload.arrival import Arrival

BINS = 64
GRID = 200
"""Operating points that are tried below the physical limit where the objective trades batch against speed."""

Binding = Literal["sequences", "batch tokens", "kv", "objective", "nothing"]


class Size(NamedTuple):
    """Tokens of one request; `cached` of the prompt need not be computed."""

    prompt: int
    output: int
    cached: int = 0


class FluidBound(msgspec.Struct, frozen=True):
    """Most that all engines together serve within the objective, without end.

    `tokens_per_s` counts as results do: output tokens, or the input's for an encoder. `batch` sequences and `step_ms`
    describe the operating point, `limited_by` what keeps it from being larger.
    """

    requests_per_s: float
    tokens_per_s: float
    batch: float
    step_ms: float
    limited_by: Binding


class _Mix(NamedTuple):
    """Means per request of what step times and memory depend on."""

    decodes: float
    chunks: float
    prefill: float
    context: float
    pairs: float
    held: float
    pieces: tuple[float, ...]
    """Prompt tokens computed in one step, in BINS groups of equal number, ascending."""


def fluid_bound(scenario: Scenario, arrivals: Sequence[Arrival] | None = None) -> FluidBound | None:
    """The bound for the scenario's own mix of lengths; None when it has no requests.

    Faults and noise are left out: it bounds healthy engines. Raises UsageError for an unknown profile.
    """
    drawn = scenario.workload.draw(scenario.seed) if arrivals is None else arrivals
    sizes = sizes_of(drawn, prefix_cache=scenario.engines.prefix_cache)
    if not sizes:
        return None
    profile = profile_named(scenario.engines.profile)
    if isinstance(profile, EncoderProfile):
        one = encoder_bound(
            profile, sizes, scenario.engines.max_num_seqs or ENCODER_MAX_BATCH, latency_ms=_latency_bound(scenario)
        )
    else:
        one = step_bound(
            profile,
            limits_of(profile, scenario.engines),
            sizes,
            ttft_ms=scenario.ttft_ms,
            tpot_ms=scenario.tpot_ms,
            latency_ms=scenario.latency_ms,
        )
    count = scenario.engines.count
    return msgspec.structs.replace(
        one, requests_per_s=one.requests_per_s * count, tokens_per_s=one.tokens_per_s * count
    )


def sizes_of(arrivals: Iterable[Arrival], *, prefix_cache: bool = False) -> list[Size]:
    """Sizes of drawn arrivals; with a prefix cache every repeated prefix is taken for cached."""
    return [
        Size(a.prompt_tokens or 1, a.output_tokens or 1, min(a.prefix_tokens, (a.prompt_tokens or 1) - 1))
        if prefix_cache
        else Size(a.prompt_tokens or 1, a.output_tokens or 1)
        for a in arrivals
    ]


def limits_of(profile: StepProfile, spec: EngineSpec) -> EngineLimits:
    """The limits of a scenario's engines: its own, or the profile's."""
    return engine_limits(spec, profile)


def step_bound(
    profile: StepProfile,
    limits: EngineLimits,
    sizes: Sequence[Size],
    *,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    latency_ms: float | None = None,
) -> FluidBound:
    """The fluid bound of one continuously batching engine.

    Requests that cannot meet the objective at an operating point are served there and not counted.
    """
    mix = _mix(sizes, limits)
    places: list[tuple[float, Binding]] = [
        (limits.max_num_seqs / (mix.decodes + mix.chunks), "sequences"),
        (limits.max_num_batched_tokens / (mix.decodes + mix.prefill), "batch tokens"),
        (limits.kv_tokens / mix.held, "kv"),
    ]
    most, limited_by = min(places)
    objective = _Objective(sizes, limits, ttft_ms, tpot_ms, latency_ms)
    best: FluidBound | None = None
    for number in range(1, GRID + 1):
        begun = most * number / GRID
        step = _step_ms(profile, mix, begun)
        good, tokens = objective.met(step)
        per_s = begun / step * 1000.0 / len(sizes)
        binding: Binding = limited_by if number == GRID else "objective"
        point = FluidBound(good * per_s, tokens * per_s, begun * (mix.decodes + mix.chunks), step, binding)
        if best is None or point.requests_per_s > best.requests_per_s:
            best = point
    assert best is not None
    return best


class _Objective:
    """How many requests are within the objective when every step takes so long: fewer, the longer it takes."""

    def __init__(
        self,
        sizes: Sequence[Size],
        limits: EngineLimits,
        ttft_ms: float | None,
        tpot_ms: float | None,
        latency_ms: float | None,
    ) -> None:
        longest: list[tuple[float, int]] = []
        for size in sizes:
            chunks = _chunks(size, limits)
            step = inf if tpot_ms is None else tpot_ms
            if ttft_ms is not None:
                step = min(step, ttft_ms / chunks)
            if latency_ms is not None:
                step = min(step, latency_ms / (chunks + size.output - 1))
            longest.append((step, size.output))
        longest.sort(reverse=True)
        self._longest = [-step for step, _ in longest]
        self._tokens = [0, *accumulate(tokens for _, tokens in longest)]

    def met(self, step_ms: float) -> tuple[int, int]:
        """Requests within the objective, and their output tokens."""
        good = bisect_right(self._longest, -step_ms)
        return good, self._tokens[good]


def encoder_bound(
    profile: EncoderProfile, sizes: Sequence[Size], max_batch: int, *, latency_ms: float | None = None
) -> FluidBound:
    """The largest batch that is computed within `latency_ms`, one after the other without a gap.

    The wait for the batch before is left out: a bound, not a promise.
    """
    fitting = [size for size in range(1, max_batch + 1) if latency_ms is None or profile.batch_ms(size) <= latency_ms]
    if not fitting:
        return FluidBound(0.0, 0.0, 0.0, profile.batch_ms(1), "objective")
    batch = max(fitting, key=lambda size: size / profile.batch_ms(size))
    step = profile.batch_ms(batch)
    rate = batch / step * 1000.0
    # Results count an embedding's input where there is no output.
    tokens = sum(size.output if size.output > 1 else size.prompt for size in sizes) / len(sizes)
    return FluidBound(rate, rate * tokens, batch, step, "sequences" if batch == max_batch else "objective")


def _latency_bound(scenario: Scenario) -> float | None:
    """An encoder shows its first result with its last, so either objective bounds the whole answer."""
    bounds = [bound for bound in (scenario.latency_ms, scenario.ttft_ms) if bound is not None]
    return min(bounds) if bounds else None


def _chunks(size: Size, limits: EngineLimits) -> int:
    return max(1, ceil((size.prompt - size.cached) / limits.max_num_batched_tokens))


def _mix(sizes: Sequence[Size], limits: EngineLimits) -> _Mix:
    decodes = chunks = prefill = context = pairs = held = 0.0
    cuts: list[int] = []
    for size in sizes:
        prompt, steps = size.prompt, size.output - 1
        pieces = _chunks(size, limits)
        decodes += steps
        chunks += pieces
        prefill += prompt - size.cached
        whole, rest = divmod(prompt - size.cached, limits.max_num_batched_tokens)
        cuts += [limits.max_num_batched_tokens] * whole + ([rest] if rest else [])
        context += steps * prompt + steps * (steps - 1) / 2
        pairs += (prompt * prompt - size.cached * size.cached) / 2
        if limits.reserve_output:
            held += (prompt + size.output) * (pieces + steps)
        else:
            filling = size.cached * pieces + (prompt - size.cached) * (pieces + 1) / 2
            held += filling + steps * prompt + steps * (steps + 1) / 2
    count = len(sizes)
    return _Mix(
        decodes=decodes / count,
        chunks=chunks / count,
        prefill=prefill / count,
        context=context / count,
        pairs=pairs / count,
        held=held / count,
        pieces=_bins(cuts),
    )


def _bins(values: list[int]) -> tuple[float, ...]:
    """Means of BINS groups of equal number; by convexity a group's mean never costs more than its members."""
    ordered = sorted(values)
    edges = [len(ordered) * number // BINS for number in range(BINS + 1)]
    groups = (ordered[low:high] for low, high in pairwise(edges))
    return tuple(sum(group) / len(group) for group in groups if group)


def _step_ms(profile: StepProfile, mix: _Mix, begun: float) -> float:
    """Least mean time of a step when `begun` requests begin and end per step, in ms.

    Two lower bounds of the convex roofline hold, and the larger is used: that of the mean tokens, and that of prompts
    which each come whole into some step, which is what makes a memory-bound engine slower than its mean.
    """
    decodes = begun * mix.decodes
    tokens = decodes + begun * mix.prefill
    alone = _roofline(profile, decodes)
    whole = sum(_roofline(profile, decodes + piece) - alone for piece in mix.pieces) / len(mix.pieces)
    roofline = max(_roofline(profile, tokens), alone + begun * mix.chunks * whole)
    fixed = profile.c0 + roofline + profile.e * tokens + profile.seq * begun * (mix.decodes + mix.chunks)
    return float(fixed + profile.kv * begun * mix.context / 1e3 + profile.att * begun * mix.pairs / 1e6)


def _roofline(profile: StepProfile, tokens: float) -> float:
    return float((profile.w**profile.p + (profile.r * tokens) ** profile.p) ** (1.0 / profile.p))


class Saturation(msgspec.Struct, frozen=True):
    """What an engine model did under an endless backlog."""

    requests_per_s: float
    tokens_per_s: float
    mean_step_ms: float
    mean_batch: float


def saturation(profile: StepProfile, limits: EngineLimits, sizes: Sequence[Size], *, rounds: int = 3) -> Saturation:
    """Runs the engine itself with work always waiting: the sizes in order, again and again, `rounds` times.

    The first and the last round count only as filling and emptying.
    """
    engine = EngineModel(profile, limits)
    backlog = deque((number, size) for number, size in enumerate(list(sizes) * (rounds + 2)))
    first, last = len(sizes), len(sizes) * (rounds + 1)
    clock_ns = done = steps = from_ns = 0
    tokens = spent_ns = batch = 0
    while done < last:
        while backlog and engine.num_waiting < 8:
            number, size = backlog.popleft()
            engine.submit(str(number), size.prompt, size.output, clock_ns, cached_tokens=size.cached)
        result = engine.step(clock_ns)
        assert result is not None, "the backlog is endless"
        clock_ns += result.duration_ns
        done += len(result.finished)
        if done <= first:
            from_ns, tokens, steps, batch, counted_from = clock_ns, 0, 0, 0, done
            continue
        tokens += sum(made for _, made in result.tokens)
        steps += 1
        batch += result.batch_seqs
    spent_ns = clock_ns - from_ns
    seconds = spent_ns / 1e9
    return Saturation((done - counted_from) / seconds, tokens / seconds, seconds * 1e3 / steps, batch / steps)
