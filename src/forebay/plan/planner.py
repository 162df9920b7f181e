"""The whole procedure: candidates by cost, a search for each, the modes compared, the answer checked and varied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from forebay.errors import UsageError
from forebay.plan.candidates import Candidate
from forebay.plan.feasible import Prospect, low_engines, prospects
from forebay.plan.objective import Objective
from forebay.plan.prices import HOURS_PER_MONTH, Price
from forebay.plan.result import (
    CandidateResult,
    Check,
    Comparison,
    Cost,
    CountCurve,
    CountPoint,
    Fleet,
    Sensitivity,
    TrafficCurve,
    TrafficPoint,
    figures,
)
from forebay.plan.search import Bench, Found, Probe, least_engines, sustained
from forebay.plan.setup import MODES, Mode, Setup, setups
from forebay.plan.traffic import Traffic
from forebay.plan.trials import Trial, Trials

DEARER = 2.0
"""A candidate is not simulated when even its lower bound costs so many times an answer in hand."""

CHECK_ADDED_MOST = 0.25
"""The longer check may add this share of engines before it is reported as missed."""

HEAVIER = 1.15
"""The multiple of the traffic under which setups that all keep the objective are told apart."""

SENSITIVITY = (0.7, 1.3)
CURVE = (0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked."""

    candidates: Sequence[Candidate]
    traffic: Traffic
    objective: Objective
    most_gpus: int = 1024
    compare: bool = True
    vary: bool = True
    retry: str = "none"
    seed: int = 1


@dataclass(slots=True)
class Findings:
    """What was found; `make_plan` turns it into a `Plan`."""

    answer: Fleet
    candidate: Candidate
    check: Check | None
    candidates: list[CandidateResult]
    comparisons: list[Comparison] = field(default_factory=list)
    sensitivity: list[Sensitivity] = field(default_factory=list)
    count_curves: list[CountCurve] = field(default_factory=list)
    traffic_curves: list[TrafficCurve] = field(default_factory=list)


class Planner:
    """Answers one question. `say` is told what is being looked at."""

    def __init__(self, question: Question, trials: Trials, say: Callable[[str], None] = lambda _: None) -> None:
        self._ask, self._trials, self._say = question, trials, say
        self._prospects = prospects(question.candidates, question.traffic, question.objective)
        self._found: dict[tuple[str, Mode], Found] = {}

    def find(self) -> Findings:
        """The findings. Raises UsageError when nothing within the allowed number of GPUs keeps the objective."""
        cheapest = self._search_all("hybrid")
        if cheapest is None and not self._ask.compare:
            raise UsageError(self._none_enough())
        best: dict[Mode, tuple[Prospect, Probe] | None] = {"hybrid": cheapest}
        if self._ask.compare:
            for mode in MODES[1:]:
                best[mode] = self._search_all(mode)
        answers = [one for mode in MODES if (one := best.get(mode)) is not None]
        if not answers:
            raise UsageError(self._none_enough())
        # `min` keeps the first of equals: hybrid before the others.
        prospect, probe = min(answers, key=lambda one: one[1].engines * one[0].candidate.usd_per_hour)
        checked, check = self._checked(prospect, self._sturdiest(prospect, probe))
        findings = Findings(
            self.fleet(prospect.candidate, checked),
            prospect.candidate,
            check,
            [self._result(p) for p in self._prospects],
        )
        findings.count_curves = self._count_curves()
        if self._ask.compare:
            findings.comparisons = [self._comparison(mode, best[mode], prospect, checked.engines) for mode in MODES]
        if self._ask.vary:
            findings.sensitivity = [self._sensitivity(factor, prospect, checked) for factor in SENSITIVITY]
            findings.traffic_curves = self._traffic_curves(best, prospect, checked.engines)
        return findings

    # ---- the search ------------------------------------------------------------------------------------------

    def _bench(self, candidate: Candidate) -> Bench:
        ask = self._ask
        return Bench(self._trials, ask.traffic, candidate, ask.objective, ask.seed, ask.retry)

    def _most(self, candidate: Candidate) -> int:
        return self._ask.most_gpus // candidate.gpus

    def _search_all(self, mode: Mode) -> tuple[Prospect, Probe] | None:
        """The cheapest fleet in a mode, over all candidates that are worth a look."""
        best: tuple[Prospect, Probe] | None = None
        for prospect in self._prospects:
            candidate = prospect.candidate
            in_hand = None if best is None else best[1].engines * best[0].candidate.usd_per_hour
            if prospect.why_not or prospect.low > self._most(candidate):
                continue
            # The other modes are only asked what they cost at best: a bound above that settles it.
            if in_hand is not None and prospect.low_usd_per_hour >= in_hand * (DEARER if mode == "hybrid" else 1.0):
                continue
            self._say(f"{candidate.name}, {mode}")
            known = self._found.get((candidate.profile.name, "hybrid"))
            guess = known.best.engines if known is not None and known.best is not None else prospect.guess
            found = least_engines(
                self._bench(candidate),
                setups(candidate, self._ask.objective, prospect.bound, mode),
                low=prospect.low,
                guess=guess,
                most=self._most(candidate),
            )
            self._found[candidate.profile.name, mode] = found
            if found.best is not None:
                cost = found.best.engines * candidate.usd_per_hour
                if in_hand is None or cost < in_hand:
                    best = (prospect, found.best)
        return best

    def _none_enough(self) -> str:
        """No fleet within the bound on GPUs was enough: the nearest, and what it would keep."""
        objective, most = self._ask.objective, self._ask.most_gpus
        near = [
            (probe, prospect)
            for prospect in self._prospects
            if (found := self._found.get((prospect.candidate.profile.name, "hybrid"))) is not None
            for probe in found.probes
        ]
        if not near:
            least = min(
                (one for one in self._prospects if not one.why_not), key=lambda one: one.low * one.candidate.gpus
            )
            gpus = least.low * least.candidate.gpus
            return (
                f"this traffic needs more than --max-gpus {most}: at least {gpus} x {least.candidate.gpu} by the fluid "
                f"bound; raise --max-gpus to {2 * gpus}, or plan for a part of the traffic"
            )
        probe, prospect = max(near, key=lambda one: one[0].trial.margin(objective))
        trial, candidate = probe.trial, prospect.candidate
        reached = {"ttft": trial.ttft_p99, "tpot": trial.tpot_p99, "latency": trial.latency_p99}
        shown = ", ".join(f"{name} p99 {reached[name] or 0:.0f} ms" for name in objective.bounds())
        return (
            f"no fleet of up to {most} GPUs keeps it: {objective}. The nearest, {probe.engines} x {candidate.name} "
            f"({probe.setup}), serves {100 * trial.attainment:.1f} % in time and refuses {100 * trial.shed:.1f} % "
            f"({shown}); raise --max-gpus, or relax the objective to that"
        )

    # ---- the answer and what surrounds it --------------------------------------------------------------------

    def fleet(self, candidate: Candidate, probe: Probe, factor: float = 1.0) -> Fleet:
        """A probe with its cost."""
        gpus = probe.engines * candidate.gpus
        return Fleet(
            gpu=candidate.gpu,
            profile=candidate.profile.name,
            gpus_per_engine=candidate.gpus,
            engines=probe.engines,
            gpus=gpus,
            setup=probe.setup,
            cost=cost(gpus, candidate.price, self._ask.traffic, probe.trial, factor),
            window=figures(probe.trial, self._ask.objective),
        )

    def _sturdiest(self, prospect: Prospect, probe: Probe) -> Probe:
        """Of the setups with which as many engines are enough, the one that does best under heavier traffic."""
        self._say(f"{prospect.candidate.name}, the sturdiest setup")
        bench, objective = self._bench(prospect.candidate), self._ask.objective
        tried = self._setups(probe.setup.mode, prospect)
        enough = [one for one in bench.run(probe.engines, tried) if one.trial.meets(objective)]
        heavier = bench.run(probe.engines, [one.setup for one in enough], HEAVIER)
        best = max(range(len(enough)), key=lambda index: heavier[index].trial.margin(objective))
        return enough[best]

    def _checked(self, prospect: Prospect, probe: Probe) -> tuple[Probe, Check | None]:
        """The answer under the longer stretch, with engines added until that keeps the objective too."""
        more = self._ask.traffic.longer()
        if more is None:
            return probe, None
        bench, objective = self._bench(prospect.candidate), self._ask.objective
        most = probe.engines + max(1, int(probe.engines * CHECK_ADDED_MOST))
        engines = probe.engines
        while True:
            self._say(f"{prospect.candidate.name}, longer check of {engines} engines")
            trial = self._trials([bench.scenario(engines, probe.setup, longer=True)])[0]
            if trial.meets(objective) or engines >= most:
                break
            engines += 1
        check = Check(what=more[2], added=engines - probe.engines, figures=figures(trial, objective))
        return (probe if engines == probe.engines else bench.run(engines, [probe.setup])[0]), check

    def _result(self, prospect: Prospect) -> CandidateResult:
        candidate, objective = prospect.candidate, self._ask.objective
        found = self._found.get((candidate.profile.name, "hybrid"))
        low = None if prospect.why_not else prospect.low
        result = CandidateResult(
            gpu=candidate.gpu,
            profile=candidate.profile.name,
            gpus_per_engine=candidate.gpus,
            confidence=getattr(candidate.profile, "confidence", "measured curve"),
            price=candidate.price,
            bound_engines=low,
            bound_per_month=None if low is None else prospect.low_usd_per_hour * HOURS_PER_MONTH,
            status="impossible",
            why=prospect.why_not,
            fleet=None,
            monotone=True,
        )
        if prospect.why_not:
            return result
        if found is None:
            if prospect.low > self._most(candidate):
                return msgspec.structs.replace(result, status="too many", why="its lower bound is above --max-gpus")
            return msgspec.structs.replace(
                result, status="dearer", why="its lower bound alone costs over twice the answer"
            )
        if found.best is None:
            best = max(found.probes, key=lambda probe: probe.trial.margin(objective))
            shares = f"{100 * best.trial.attainment:.1f} % in time, {100 * best.trial.shed:.1f} % refused"
            why = f"{best.engines} engines: {shares}"
            return msgspec.structs.replace(result, status="too many", why=why)
        return msgspec.structs.replace(
            result, status="meets", fleet=self.fleet(candidate, found.best), monotone=found.monotone
        )

    def _comparison(
        self, mode: Mode, best: tuple[Prospect, Probe] | None, answer: Prospect, engines: int
    ) -> Comparison:
        """What a mode costs, and what the answer's own GPUs sustain in it."""
        self._say(f"{answer.candidate.name}, how much more {mode} carries")
        tried = self._setups(mode, answer)
        carried = sustained(self._bench(answer.candidate), engines, tried) if self._ask.vary else None
        fleet = None if best is None else self.fleet(best[0].candidate, best[1])
        return Comparison(mode=mode, fleet=fleet, sustains=carried)

    def _setups(self, mode: Mode, prospect: Prospect) -> list[Setup]:
        """Setups of a mode on a kind of engine, the one that did best first."""
        tried = setups(prospect.candidate, self._ask.objective, prospect.bound, mode)
        found = self._found.get((prospect.candidate.profile.name, mode))
        if found is not None and found.best is not None:
            tried = [found.best.setup, *(setup for setup in tried if setup != found.best.setup)]
        return tried

    def _sensitivity(self, factor: float, prospect: Prospect, probe: Probe) -> Sensitivity:
        candidate, objective = prospect.candidate, self._ask.objective
        self._say(f"{candidate.name}, {factor:g} times the traffic")
        bench = self._bench(candidate)
        unchanged = bench.run(probe.engines, [probe.setup], factor)[0]
        found = least_engines(
            bench,
            self._setups(probe.setup.mode, prospect),
            low=low_engines(prospect.bound, self._ask.traffic, objective, factor),
            guess=max(1, round(probe.engines * factor)),
            most=self._most(candidate),
            factor=factor,
        )
        fleet = None if found.best is None else self.fleet(candidate, found.best, factor)
        return Sensitivity(factor=factor, unchanged=figures(unchanged.trial, objective), fleet=fleet)

    def _count_curves(self) -> list[CountCurve]:
        curves = []
        for prospect in self._prospects:
            candidate = prospect.candidate
            found = self._found.get((candidate.profile.name, "hybrid"))
            if found is None:
                continue
            points = [
                CountPoint(
                    probe.engines,
                    probe.engines * candidate.gpus,
                    probe.engines * candidate.usd_per_hour * HOURS_PER_MONTH,
                    probe.trial.attainment,
                    probe.trial.shed,
                    probe.trial.meets(self._ask.objective),
                )
                for probe in found.probes
            ]
            curves.append(CountCurve(candidate.gpu, candidate.profile.name, points))
        return curves

    def _traffic_curves(
        self, best: dict[Mode, tuple[Prospect, Probe] | None], prospect: Prospect, engines: int
    ) -> list[TrafficCurve]:
        bench = self._bench(prospect.candidate)
        curves = []
        for mode in MODES:
            if mode not in best:
                continue
            self._say(f"{prospect.candidate.name}, {mode} under more and less traffic")
            setup = self._setups(mode, prospect)[0]
            trials = self._trials([bench.scenario(engines, setup, factor) for factor in CURVE])
            points = [TrafficPoint(f, trial.attainment, trial.shed) for f, trial in zip(CURVE, trials, strict=True)]
            curves.append(TrafficCurve(mode, setup, points))
        return curves


def cost(gpus: int, price: Price, traffic: Traffic, trial: Trial, factor: float = 1.0) -> Cost:
    """Of `gpus` GPUs that run all the time, against the tokens served at `factor` times the traffic's mean rate."""
    per_hour = gpus * price.usd_per_hour
    figure = traffic.figures
    served = 3600 * factor * figure.requests_per_s * (1 - trial.shed)
    output = max(1e-9, served * figure.output_tokens_mean)
    both = output + served * figure.prompt_tokens_mean
    return Cost(
        per_hour=per_hour,
        per_month=per_hour * HOURS_PER_MONTH,
        low_per_month=gpus * price.low * HOURS_PER_MONTH,
        high_per_month=gpus * price.high * HOURS_PER_MONTH,
        per_million_tokens=1e6 * per_hour / both,
        per_million_output_tokens=1e6 * per_hour / output,
    )
