"""How many requests of a small trace could be served within the objective, had everything been known beforehand.

Three figures, from the surest to the nearest:
- `at_most` bounds every policy, whatever it holds, reorders, splits or refuses. Each request is given the least engine
  time that it can cost in any batch, and the window in which it must be spent; fractions may be served, and preemption
  is free. That linear programme is solved exactly: the work that fits is a polymatroid, so cheapest-first is optimal.
- `exact` is the optimum itself, for one encoder: all inputs cost the same and have the same objective, so a best plan
  serves in order of arrival, and dynamic programming over (request, served so far) finds it.
- `by_subset`, for one continuously batching engine and few requests, is the best that refusing alone can do: the
  largest set which, submitted at arrival to the engine's own scheduler, ends within the objective. A policy that also
  holds requests back may pass it; none passes `at_most`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import floor, inf

import msgspec

from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.model import EngineLimits, EngineModel
from forebay.engines.simulated.profile import EncoderProfile, StepProfile
from forebay.errors import UsageError
from forebay.sim.bounds import Size, limits_of, sizes_of
from forebay.sim.run import ENCODER_MAX_BATCH
from forebay.sim.scenario import Scenario

MAX_REQUESTS = 400
"""The bounds are cubic in the requests."""
MAX_SUBSET_REQUESTS = 14

NS_PER_MS = 1_000_000
EPSILON_NS = 1e-3


class Optimum(msgspec.Struct, frozen=True):
    """Requests served within the objective; None where a figure is not defined or too expensive. See the module."""

    offered: int
    at_most: float
    exact: int | None = None
    by_subset: int | None = None


class Job(msgspec.Struct, frozen=True):
    """Work that a request costs at least, and the window for it, in ns."""

    work: float
    opens: int
    closes: int


def clairvoyant(scenario: Scenario) -> Optimum:
    """The optimum of a scenario's first seed. Raises UsageError without a time objective, or for too many requests."""
    arrivals = scenario.workload.draw(scenario.seed)
    if len(arrivals) > MAX_REQUESTS:
        raise UsageError(
            f"a clairvoyant optimum is found for at most {MAX_REQUESTS} requests, the workload has {len(arrivals)}: "
            "shorten it (duration) or thin it"
        )
    if scenario.ttft_ms is None and scenario.latency_ms is None:
        raise UsageError("a clairvoyant optimum needs an objective: a first token or a whole answer within some time")
    moments = [arrival.at_ns for arrival in arrivals]
    sizes = sizes_of(arrivals, prefix_cache=scenario.engines.prefix_cache)
    profile, engines = profile_named(scenario.engines.profile), scenario.engines
    if isinstance(profile, EncoderProfile):
        within_ns = _ns(min(bound for bound in (scenario.ttft_ms, scenario.latency_ms) if bound is not None))
        max_batch = engines.max_num_seqs or ENCODER_MAX_BATCH
        exact = encoder_optimum(profile, moments, within_ns, max_batch) if engines.count == 1 else None
        work = _least_work(profile, max_batch, within_ns)
        if work is None:
            return Optimum(len(moments), 0.0, exact)
        return Optimum(
            len(moments), fractional_optimum([Job(work, at, at + within_ns) for at in moments], engines.count), exact
        )
    limits = limits_of(profile, engines)
    at_most = min(
        fractional_optimum(jobs, engines.count) for jobs in _relaxations(profile, limits, scenario, moments, sizes)
    )
    by_subset = None
    if engines.count == 1 and len(sizes) <= MAX_SUBSET_REQUESTS and not engines.prefix_cache:
        by_subset = subset_optimum(profile, limits, scenario, moments, sizes, floor(at_most + 1e-6))
    return Optimum(len(sizes), at_most, None, by_subset)


def fractional_optimum(jobs: Sequence[Job], servers: int = 1) -> float:
    """Most jobs, fractions included, that fit their windows on so many servers, with free preemption.

    A set of work amounts fits exactly when in no interval the work confined to it exceeds servers x its length. Such
    sets form a polymatroid, so granting each job, cheapest first, all that still fits gives the optimum of the linear
    programme. Cubic in the jobs.
    """
    starts = sorted({job.opens for job in jobs})
    ends = sorted({job.closes for job in jobs})
    room = [[float(servers * (end - start)) for end in ends] for start in starts]
    served = 0.0
    for job in sorted(jobs, key=lambda job: job.work):
        around = [row for start, row in zip(starts, room, strict=True) if start <= job.opens]
        first = next(number for number, end in enumerate(ends) if end >= job.closes)
        # Only intervals that hold the whole window confine its work.
        granted = min((value for row in around for value in row[first:] if value > -inf), default=0.0)
        granted = max(0.0, min(granted, job.work))
        served += granted / job.work if job.work > EPSILON_NS else 1.0
        for row in around:
            for number in range(first, len(ends)):
                row[number] -= granted
    return served


def encoder_optimum(profile: EncoderProfile, moments: Sequence[int], within_ns: int, max_batch: int) -> int:
    """Most inputs, arriving at `moments` (ascending), that one encoder can return within `within_ns` of each.

    `best[k]` is the earliest instant at which k of the inputs so far can be done. The last batch of a plan that ends
    with input j consists of the b latest inputs: they have the latest deadlines, and all others cost the same.
    """
    count = len(moments)
    duration = [0, *(max(1, round(profile.batch_ms(size) * NS_PER_MS)) for size in range(1, max_batch + 1))]
    done_by: list[list[float]] = [[0.0] + [inf] * count]
    for last in range(1, count + 1):
        best = list(done_by[last - 1])
        for size in range(1, min(max_batch, last) + 1):
            before = done_by[last - size]
            earliest_deadline = moments[last - size] + within_ns
            for served, free_at in enumerate(before[: last - size + 1]):
                if free_at == inf:
                    break
                ends = max(free_at, moments[last - 1]) + duration[size]
                if ends <= earliest_deadline and ends < best[served + size]:
                    best[served + size] = ends
        done_by.append(best)
    return max(served for served, at in enumerate(done_by[-1]) if at < inf)


def _least_work(profile: EncoderProfile, max_batch: int, within_ns: int) -> float | None:
    """An input's least share of a batch that ends in time, in ns; None when no batch does."""
    batches = ((size, profile.batch_ms(size) * NS_PER_MS) for size in range(1, max_batch + 1))
    return min((took / size for size, took in batches if took <= within_ns), default=None)


def subset_optimum(
    profile: StepProfile,
    limits: EngineLimits,
    scenario: Scenario,
    moments: Sequence[int],
    sizes: Sequence[Size],
    at_most: int,
) -> int:
    """Size of the largest set of requests that, submitted at arrival, all end within the objective."""
    for count in range(min(at_most, len(sizes)), 0, -1):
        for chosen in combinations(range(len(sizes)), count):
            if _all_in_time(profile, limits, scenario, [(moments[i], sizes[i]) for i in chosen]):
                return count
    return 0


def _all_in_time(
    profile: StepProfile, limits: EngineLimits, scenario: Scenario, requests: Sequence[tuple[int, Size]]
) -> bool:
    engine = EngineModel(profile, limits)
    first: dict[str, int] = {}
    clock, taken, ended = 0, 0, 0
    while ended < len(requests):
        while taken < len(requests) and requests[taken][0] <= clock:
            size = requests[taken][1]
            engine.submit(str(taken), size.prompt, size.output, clock, cached_tokens=size.cached)
            taken += 1
        result = engine.step(clock)
        if result is None:
            clock = requests[taken][0]
            continue
        clock += result.duration_ns
        for name, _ in result.tokens:
            at, size = requests[int(name)]
            begun = first.setdefault(name, clock)
            if begun == clock and scenario.ttft_ms is not None and clock - at > scenario.ttft_ms * NS_PER_MS:
                return False
        for name in result.finished:
            at, size = requests[int(name)]
            per_token = (clock - first[name]) / max(1, size.output - 1)
            if scenario.tpot_ms is not None and per_token > scenario.tpot_ms * NS_PER_MS:
                return False
            if scenario.latency_ms is not None and clock - at > scenario.latency_ms * NS_PER_MS:
                return False
            ended += 1
    return True


def _relaxations(
    profile: StepProfile, limits: EngineLimits, scenario: Scenario, moments: Sequence[int], sizes: Sequence[Size]
) -> list[list[Job]]:
    """Least work in its window, for some ways to attribute a step's time to its requests; each alone is a bound."""
    families: list[list[Job]] = []
    for tokens in (0.0, 32.0, 128.0, 512.0, 2048.0, 8192.0):
        per_token, per_sequence = _attribution(profile, limits, min(tokens, limits.max_num_batched_tokens))
        prefill = [_prefill_ms(profile, size, per_token, per_sequence) for size in sizes]
        decode = [_decode_ms(profile, size, per_token, per_sequence) for size in sizes]
        if scenario.ttft_ms is not None:
            within = _ns(scenario.ttft_ms)
            families.append([Job(ms * NS_PER_MS, at, at + within) for at, ms in zip(moments, prefill, strict=True)])
        windows = [_whole_window_ns(scenario, size) for size in sizes]
        if all(window is not None for window in windows):
            families.append(
                [
                    Job((early + late) * NS_PER_MS, at, at + (window or 0))
                    for at, early, late, window in zip(moments, prefill, decode, windows, strict=True)
                ]
            )
    return families


def _attribution(profile: StepProfile, limits: EngineLimits, tokens: float) -> tuple[float, float]:
    """(ms per token, ms per sequence) that together never exceed the token and fixed parts of any step.

    The roofline is convex, so its tangent at `tokens` lies below it everywhere; what the tangent leaves at zero tokens,
    and the fixed launch cost, are shared by at most `max_num_seqs` sequences.
    """
    roofline = (profile.w**profile.p + (profile.r * tokens) ** profile.p) ** (1.0 / profile.p)
    slope = profile.r * (profile.r * tokens / roofline) ** (profile.p - 1.0) if tokens else 0.0
    intercept = max(0.0, roofline - slope * tokens)
    return slope + profile.e, profile.seq + (profile.c0 + intercept) / limits.max_num_seqs


def _prefill_ms(profile: StepProfile, size: Size, per_token: float, per_sequence: float) -> float:
    pairs = (size.prompt * size.prompt - size.cached * size.cached) / 2
    return (size.prompt - size.cached) * per_token + per_sequence + profile.att * pairs / 1e6


def _decode_ms(profile: StepProfile, size: Size, per_token: float, per_sequence: float) -> float:
    steps = size.output - 1
    context = steps * size.prompt + steps * (steps - 1) / 2
    return steps * (per_token + per_sequence) + profile.kv * context / 1e3


def _whole_window_ns(scenario: Scenario, size: Size) -> int | None:
    """Time from arrival by which all work must be done to be within the objective, if that is bounded."""
    bounds = []
    if scenario.latency_ms is not None:
        bounds.append(scenario.latency_ms)
    if scenario.ttft_ms is not None and scenario.tpot_ms is not None:
        bounds.append(scenario.ttft_ms + (size.output - 1) * scenario.tpot_ms)
    return _ns(min(bounds)) if bounds else None


def _ns(ms: float) -> int:
    return round(ms * NS_PER_MS)
