"""What can be said before anything is simulated: who can keep the objective at all, and with how few engines not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.engines.simulated.profile import StepProfile
from forebay.errors import UsageError
from forebay.plan.candidates import Candidate
from forebay.plan.objective import Objective
from forebay.plan.traffic import Alone, Traffic, alone
from forebay.sim.bounds import FluidBound, fluid_bound
from forebay.sim.scenario import EngineSpec, Scenario

SLACK = 1.02
"""An objective exactly at what an idle engine needs is not one to aim at."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """A candidate under one traffic and objective. `why_not` is empty when it can keep the objective at all."""

    candidate: Candidate
    alone: Alone
    bound: FluidBound
    low: int
    """Fewer engines cannot be enough, by the fluid bound of one."""
    guess: int
    """Engines that the fluid bound asks for when nothing may be put off beyond the window."""
    why_not: str

    @property
    def low_usd_per_hour(self) -> float:
        """What the bound alone costs."""
        return self.low * self.candidate.usd_per_hour


def prospects(found: Sequence[Candidate], traffic: Traffic, objective: Objective) -> list[Prospect]:
    """All candidates, the cheapest bound first. Raises UsageError when none can keep the objective."""
    every = [_prospect(candidate, traffic, objective) for candidate in found]
    if all(one.why_not for one in every):
        raise UsageError(impossible(every, traffic, objective))
    return sorted(every, key=lambda one: (bool(one.why_not), one.low_usd_per_hour))


def low_engines(bound: FluidBound, traffic: Traffic, objective: Objective, factor: float = 1.0) -> int:
    """Engines below which the fluid bound rules a fleet out, under `factor` times the traffic.

    What may come late may also be served after the window: a patient objective needs less in it, and one that does not
    bound the wait at all is bounded by nothing here.
    """
    patience_ms = objective.latency_ms or objective.ttft_ms or math.inf
    window_s = traffic.window.duration_s / (1.0 if traffic.workload.trace is None else factor)
    return _engines(bound, traffic, objective, factor * window_s / (window_s + patience_ms / 1000))


def _engines(bound: FluidBound, traffic: Traffic, objective: Objective, part: float) -> int:
    needed = part * traffic.figures.window_requests_per_s * (1 - objective.max_shed) * objective.attainment
    return max(1, math.ceil(needed / bound.requests_per_s - 1e-9)) if bound.requests_per_s > 0 else 1


def _prospect(candidate: Candidate, traffic: Traffic, objective: Objective) -> Prospect:
    needs = alone(candidate.profile, traffic.sizes, objective)
    scenario = Scenario(
        name=candidate.profile.name,
        policy="bound",
        engines=EngineSpec(profile=candidate.profile.name),
        workload=traffic.workload,
        ttft_ms=objective.ttft_ms,
        tpot_ms=objective.tpot_ms,
        latency_ms=objective.latency_ms,
    )
    bound = fluid_bound(scenario, traffic.windowed())
    assert bound is not None, "a window holds requests"
    low = low_engines(bound, traffic, objective)
    guess = max(low, _engines(bound, traffic, objective, 1.0))
    return Prospect(candidate, needs, bound, low, guess, _why_not(candidate, needs, objective))


def _why_not(candidate: Candidate, needs: Alone, objective: Objective) -> str:
    least = objective.attainment * (1 - objective.max_shed)
    if needs.within >= least:
        return ""
    if needs.fits < least and isinstance(candidate.profile, StepProfile):
        return (
            f"{100 * (1 - needs.fits):.1f} % of requests do not fit its KV cache ({candidate.profile.kv_tokens} tokens)"
        )
    return f"an idle engine serves {100 * needs.within:.1f} % of requests in time, {100 * least:.1f} % are asked"


def impossible(every: Sequence[Prospect], traffic: Traffic, objective: Objective) -> str:
    """Why no candidate can keep the objective, and the nearest that one can."""
    parts, nearest = [], []
    for name, bound in objective.bounds().items():
        fastest = min(every, key=lambda one: _needed(one.alone, name))
        needed = _needed(fastest.alone, name)
        if needed <= bound:
            nearest.append(f"--{name}-ms {bound:g}")
            continue
        if math.isinf(needed):
            return _too_large(every, traffic)
        what = {"ttft": "a first token", "tpot": "a further token", "latency": "a whole answer"}[name]
        median = (
            f"{_ms(fastest.alone.ttft_p50)} for the median prompt of {traffic.figures.name}, and "
            if name == "ttft"
            else ""
        )
        parts.append(
            f"{name} {bound:g} ms cannot be met by any candidate: the fastest, {fastest.candidate.name} "
            f"({fastest.candidate.profile.name}), alone with one request needs {median}{_ms(needed)} for {what} of the "
            f"{100 * objective.attainment:g} % that are asked"
        )
        nearest.append(f"--{name}-ms {_up(needed * SLACK)}")
    if not parts:
        return _jointly(every, objective)
    return f"{'; '.join(parts)}. The nearest objective that a fleet of any size can meet is {' '.join(nearest)}"


def _jointly(every: Sequence[Prospect], objective: Objective) -> str:
    best = max(every, key=lambda one: one.alone.within)
    needs = " ".join(f"--{name}-ms {_up(_needed(best.alone, name) * SLACK)}" for name in objective.bounds())
    asked = " and ".join(f"{name} {bound:g} ms" for name, bound in objective.bounds().items())
    return (
        f"no candidate can keep {asked} together: the best, {best.candidate.name} ({best.candidate.profile.name}), "
        f"serves {100 * best.alone.within:.1f} % of requests in time even when each is alone. The nearest that it can "
        f"meet is about {needs}, or --attainment {math.floor(1000 * best.alone.within) / 10:g}"
    )


def _too_large(every: Sequence[Prospect], traffic: Traffic) -> str:
    best = max(every, key=lambda one: one.alone.fits)
    return (
        f"too many requests of {traffic.figures.name} fit no candidate's KV cache: even on "
        f"{best.candidate.profile.name} only {100 * best.alone.fits:.1f} % do; add GPUs with more memory"
    )


def _needed(needs: Alone, name: str) -> float:
    return {"ttft": needs.ttft_attained, "tpot": needs.tpot_attained, "latency": needs.latency_attained}[name]


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _up(value: float) -> str:
    """Rounded up to two significant digits."""
    scale = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / scale - 1e-9) * scale:g}"
