"""What no policy can exceed: the fluid bound, and one engine that always has work, at every number in flight."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.control_world import ENGINES, MIXES, TPOT_MS, TTFT_MS, Stream, drawn, fluid
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.model import EngineModel
from forebay.engines.simulated.profile import StepProfile
from forebay.sim.bounds import Size, limits_of, saturation
from forebay.sim.scenario import EngineSpec

REQUESTS = 1200
SHARES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
"""In flight, of the fluid bound's batch."""


def closed_loop(profile: StepProfile, sizes: Sequence[Size], in_flight: int) -> tuple[float, float]:
    """Requests within the objective, and all of them, per second of one engine that always has so many in flight.

    The first third and what is left at the end are not counted.
    """
    engine = EngineModel(profile, limits_of(profile, EngineSpec(profile=profile.name)))
    clock_ns, started = 0, 0
    begun: dict[str, int] = {}
    first: dict[str, int] = {}
    good = done = 0
    count_from, from_ns = len(sizes) // 3, 0
    finished = 0
    while started < len(sizes) or begun:
        while started < len(sizes) and len(begun) < in_flight:
            engine.submit(str(started), sizes[started].prompt, sizes[started].output, clock_ns)
            begun[str(started)] = clock_ns
            started += 1
        if started == len(sizes):
            break
        result = engine.step(clock_ns)
        assert result is not None
        clock_ns += result.duration_ns
        for name, _ in result.tokens:
            first.setdefault(name, clock_ns)
        for name in result.finished:
            finished += 1
            if finished == count_from:
                from_ns = clock_ns
            elif finished > count_from:
                done += 1
                output = sizes[int(name)].output
                gap = (clock_ns - first[name]) / max(1, output - 1)
                good += gap <= TPOT_MS * 1e6 and first[name] - begun[name] <= TTFT_MS * 1e6
            del begun[name]
    seconds = (clock_ns - from_ns) / 1e9
    return good / seconds, done / seconds


def bounds(profiles: Sequence[str]) -> dict[str, dict[str, dict[str, float | str]]]:
    """Per profile and mix, of all engines: the fluid bound; the engine with an endless backlog and no objective; the
    most that it does within the objective at any number in flight."""
    found: dict[str, dict[str, dict[str, float | str]]] = {}
    for name in profiles:
        profile = profile_named(name)
        assert isinstance(profile, StepProfile)
        for mix in MIXES:
            arrivals = drawn([Stream(mix, 100.0, 0.0, REQUESTS / 100.0)], 0)
            sizes = [Size(one.prompt_tokens or 1, one.output_tokens or 1) for one in arrivals]
            bound = fluid(name, arrivals)
            full = saturation(profile, limits_of(profile, EngineSpec(profile=name)), sizes, rounds=1)
            tried = {max(1, round(share * bound.batch)): 0.0 for share in SHARES}
            for in_flight in tried:
                tried[in_flight] = closed_loop(profile, sizes * 2, in_flight)[0] * ENGINES
            best = max(tried, key=tried.__getitem__)
            found.setdefault(name, {})[mix] = {
                "fluid_per_s": bound.requests_per_s,
                "fluid_batch": bound.batch,
                "limited_by": bound.limited_by,
                "saturation_per_s": full.requests_per_s * ENGINES,
                "saturation_step_ms": full.mean_step_ms,
                "closed_loop_per_s": tried[best],
                "closed_loop_in_flight": float(best),
            }
    return found
