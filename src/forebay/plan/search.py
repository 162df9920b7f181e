"""The least number of engines that keeps the objective, for one kind of engine and one mode.

More engines help nearly always, so the search doubles its step until a number is enough, halves the gap, and then looks
at the neighbours of its answer: at the one below with every setup, at the next below with the best one, and at the one
above. What it found is believed only where these agree; where they do not, the answer says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from forebay.plan.candidates import Candidate
from forebay.plan.objective import Objective
from forebay.plan.setup import Setup, config_text, neighbours
from forebay.plan.traffic import Traffic
from forebay.plan.trials import Trial, Trials
from forebay.sim.scenario import ClientSpec, EngineSpec, Scenario

NEAR = -6.0
"""A setup that misses by less than this is worth varying: at 99 % asked, 93 % reached."""

CLOSE = 1.02
FACTOR_STEP = 1.25
FACTOR_LEAST, FACTOR_MOST = 0.1, 4.0
"""How much heavier traffic is looked for: to two percent, in steps of a quarter, within these bounds."""


class Probe(msgspec.Struct, frozen=True):
    """The best that a number of engines did."""

    engines: int
    setup: Setup
    trial: Trial


class Found(msgspec.Struct, frozen=True):
    """`best` is None when `most` engines were not enough. `probes` is all that was tried, by number of engines."""

    best: Probe | None
    probes: list[Probe]
    monotone: bool


class Bench:
    """Simulates fleets of one kind of engine under one traffic."""

    def __init__(
        self, trials: Trials, traffic: Traffic, candidate: Candidate, objective: Objective, seed: int, retry: str
    ) -> None:
        self.trials, self.traffic, self.candidate, self.objective = trials, traffic, candidate, objective
        self._seed, self._retry = seed, retry

    def scenario(self, engines: int, setup: Setup, factor: float = 1.0, *, longer: bool = False) -> Scenario:
        """The run of a fleet under `factor` times the traffic; `longer` takes the check beyond the window."""
        workload, warm_up_s = self.traffic.simulated(factor)
        more = self.traffic.longer() if longer else None
        if more is not None:
            workload, warm_up_s, _ = more
        objective = self.objective
        return Scenario(
            name=f"{engines} x {self.candidate.profile.name}",
            policy=str(setup),
            config=config_text(setup, objective, engines=engines),
            engines=EngineSpec(
                profile=self.candidate.profile.name,
                count=engines,
                max_num_seqs=setup.batch if setup.batch > 1 else None,
            ),
            workload=workload,
            clients=_clients(self._retry),
            seed=self._seed,
            ttft_ms=objective.ttft_ms,
            tpot_ms=objective.tpot_ms,
            latency_ms=objective.latency_ms,
            warm_up_s=warm_up_s,
        )

    def run(self, engines: int, tried: Sequence[Setup], factor: float = 1.0) -> list[Probe]:
        """The fleet under each setup."""
        trials = self.trials([self.scenario(engines, setup, factor) for setup in tried])
        return [Probe(engines, setup, trial) for setup, trial in zip(tried, trials, strict=True)]

    def best(self, engines: int, tried: Sequence[Setup], factor: float = 1.0) -> Probe:
        """The first setup if it keeps the objective, else the best of all, varied a little when it nearly does."""
        first = self.run(engines, tried[:1], factor)[0]
        if first.trial.meets(self.objective):
            return first
        best = max([first, *self.run(engines, tried[1:], factor)], key=self._margin)
        if not best.trial.meets(self.objective) and self._margin(best) >= NEAR:
            varied = self.run(engines, neighbours(best.setup, self.candidate), factor)
            best = max([best, *varied], key=self._margin)
        return best

    def _margin(self, probe: Probe) -> float:
        return probe.trial.margin(self.objective)


def least_engines(
    bench: Bench, tried: Sequence[Setup], *, low: int, guess: int, most: int, factor: float = 1.0
) -> Found:
    """The search from `guess`. Fewer than `low` engines are known not to be enough."""
    probes: dict[int, Probe] = {}
    order = list(tried)

    def enough(engines: int) -> bool:
        if engines not in probes:
            probes[engines] = probe = bench.best(engines, order, factor)
            # What did best is tried first from now on: where it is enough, nothing else is run.
            order.sort(key=lambda setup: setup != probe.setup)
            if probe.setup not in order:
                order.insert(0, probe.setup)
        return probes[engines].trial.meets(bench.objective)

    answer = _bracketed(enough, low=low, guess=min(max(guess, low), most), most=most)
    if answer is None:
        return Found(None, _sorted(probes), True)
    while answer > low and enough(answer - 1):
        answer -= 1
    second = answer - 2
    monotone = True
    if second >= low and second not in probes:
        probe = bench.run(second, order[:1], factor)[0]
        if probe.trial.meets(bench.objective):
            # Fewer engines were enough where one more was not: chance, which no answer should rest on.
            monotone = False
        probes[second] = probe
    if answer < most:
        monotone = monotone and enough(answer + 1)
    return Found(probes[answer], _sorted(probes), monotone)


def _bracketed(enough: Callable[[int], bool], *, low: int, guess: int, most: int) -> int | None:
    """The least number that is enough, as far as halving the gap finds it; None when `most` is not."""
    under, step = low - 1, 1
    if enough(guess):
        over = guess
        while over > low:
            at = max(low, over - step)
            if not enough(at):
                under = at
                break
            over, step = at, 2 * step
    else:
        over = under = guess
        while not enough(over) or over == under:
            if over >= most:
                return None
            under, over, step = over, min(most, over + step), 2 * step
    while over - under > 1:
        middle = (under + over) // 2
        if enough(middle):
            over = middle
        else:
            under = middle
    return over


def _sorted(probes: dict[int, Probe]) -> list[Probe]:
    return [probes[engines] for engines in sorted(probes)]


def sustained(bench: Bench, engines: int, tried: Sequence[Setup]) -> float:
    """The largest multiple of the traffic under which a fleet keeps the objective, to `CLOSE`; 0.0 for almost none."""

    def holds(factor: float) -> bool:
        return bench.best(engines, tried, factor).trial.meets(bench.objective)

    low = high = 1.0
    if holds(1.0):
        while high < FACTOR_MOST and low == high:
            high = round(low * FACTOR_STEP, 4)
            low, high = (high, high) if holds(high) else (low, high)
    else:
        while low > FACTOR_LEAST and low == high:
            low = round(high / FACTOR_STEP, 4)
            low, high = (low, high) if holds(low) else (low, low)
        if low == high:
            return 0.0
    while high / low > CLOSE:
        middle = round((low * high) ** 0.5, 4)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _clients(retry: str) -> ClientSpec:
    return msgspec.convert({"retry": retry}, ClientSpec)
