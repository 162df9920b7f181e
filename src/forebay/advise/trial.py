"""A quick simulation of the advised mode beside the other modes and no gateway, on the nearest shipped trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log
from typing import Literal

import msgspec

from forebay.advise.answers import Answers
from forebay.advise.document import config_file
from forebay.advise.recommend import TPOT_MS, Recommendation, per_second, recommend
from forebay.advise.settings import Setting
from forebay.core.model import Mode
from forebay.report.results import RunResult
from forebay.report.table import refused_share
from forebay.sim.scenario import ClientSpec, EngineSpec, Scenario, WorkloadSpec
from forebay.workload.trace import TraceInfo, shipped

REQUESTS = 4000
"""Requests of each run: enough for a p99, and a few seconds of work."""
SHORTEST_S, ENCODER_SHORTEST_S = 120.0, 2.0
"""Bursts and their ends must fit."""
PATIENCE_S = 30.0
ASSUMED_ENGINE, ASSUMED_ENCODER = ("h100", "8b"), ("a100", "bert-large/int8/seq128")
ASSUMED_LOAD = 1.2
"""Of the capacity, when no peak is said: below capacity all modes are alike."""
NO_GATEWAY = "no gateway"
ALIKE = 0.02
"""Differences of one seed that mean nothing."""

DISPERSION_10S = {
    "azure_llm_2023_code": 71.9,
    "azure_llm_2023_conv": 3.9,
    "mooncake_fast25_conversation": 2.1,
    "mooncake_fast25_synthetic": 1.2,
    "servegen_mlarge_1h_synth": 5.2,
    "servegen_mlarge_24h_synth": 2.6,
    "servegen_deepseek_r1_1h_synth": 11.3,
    "servegen_mm_image_1h_synth": 7.8,
}
"""Variance over mean of the arrivals in 10 s, of each shipped trace that has times; 1 is Poisson."""
USUAL = "azure_llm_2023_conv"
BURSTY, EVEN = 40.0, 2.0
"""What is looked for when the load is said to be bursty, and not to be."""
WEIGHTS = {"prompt": 1.0, "output": 1.0, "rate": 0.25, "dispersion": 0.5}
"""Of the logarithms of the ratios. The rate weighs little: replaying faster or slower corrects it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What was simulated and what came of it."""

    load: str
    runs: tuple[RunResult, ...]
    verdict: str


def nearest(answers: Answers) -> TraceInfo:
    """The shipped trace most like what was said.

    Like is: mean lengths, rate and dispersion of arrivals, by the weighted logarithms of their ratios. What was not
    said does not count; with nothing said it is the conversation trace.
    """
    wanted = None if answers.bursty is None else BURSTY if answers.bursty else EVEN

    def distance(name: str) -> float:
        info = known[name]
        pairs = {
            "prompt": (answers.prompt_tokens, info.prompt_tokens_mean),
            "output": (answers.output_tokens, info.output_tokens_mean),
            "rate": (answers.rate_per_s, info.rate or 1.0),
            "dispersion": (wanted, DISPERSION_10S[name]),
        }
        return sum(WEIGHTS[what] * abs(log(said / theirs)) for what, (said, theirs) in pairs.items() if said)

    known = {name: info for name, info in shipped().items() if name in DISPERSION_10S}
    usual_first = sorted(known, key=lambda name: name != USUAL)
    return known[min(usual_first, key=distance)]


def scenarios(answers: Answers, seed: int = 1) -> tuple[str, list[Scenario]]:
    """In words what is simulated; and a run for each mode, the advised one first, then no gateway."""
    said = answers.gpu is not None or answers.model is not None
    if not said:
        gpu, model = ASSUMED_ENCODER if answers.engine == "encoder" else ASSUMED_ENGINE
        answers = replace(answers, gpu=gpu, model=model)
    if answers.engine != "encoder":  # the capacity for the requests that are replayed
        trace = nearest(answers)
        prompt, output = round(trace.prompt_tokens_mean), round(trace.output_tokens_mean)
        answers = replace(answers, prompt_tokens=prompt, output_tokens=output)
    advice = recommend(answers)
    capacity = advice.capacity
    assert capacity is not None
    rate = answers.rate_per_s or ASSUMED_LOAD * capacity.rate_per_s
    workload, words = _workload(answers, rate)
    words += f" at {per_second(rate)} requests/s"
    if answers.rate_per_s is None:
        words += f" ({ASSUMED_LOAD:g} times the capacity, since no peak was said)"
    words += f", {answers.replicas} × {capacity.profile}" + ("" if said else " (assumed: no GPU was said)")
    modes = [advice.mode, *(mode for mode in Mode if mode is not advice.mode)]
    made = [_scenario(answers, advice, mode, workload, seed) for mode in modes]
    # Servers of encoders batch what waits by themselves; behind the gateway that has been done.
    engines = msgspec.structs.replace(made[0].engines, joins=answers.engine == "encoder")
    plain = msgspec.structs.replace(made[0], name=NO_GATEWAY, policy=NO_GATEWAY, gateway=False, engines=engines)
    return words, [*made, plain]


def _workload(answers: Answers, rate: float) -> tuple[WorkloadSpec, str]:
    duration_s = max(SHORTEST_S, REQUESTS / rate)
    if answers.engine == "encoder":
        # The cost of an encoder's batch does not depend on lengths, so no trace of them is nearer than another.
        arrivals: Literal["bursty", "poisson"] = "bursty" if answers.bursty else "poisson"
        duration_s = max(ENCODER_SHORTEST_S, REQUESTS / rate)
        spec = WorkloadSpec(rate=rate, arrivals=arrivals, duration_s=duration_s, prompt_tokens="128", output_tokens="1")
        return spec, f"{arrivals} arrivals"
    trace = nearest(answers)
    speed = rate / (trace.rate or 1.0)
    spec = WorkloadSpec(trace=trace.name, speed=speed, duration_s=duration_s, jitter_s=trace.grid_s)
    return spec, f"the trace {trace.name} ({trace.title}), {speed:.2g} times as fast,"


def _scenario(answers: Answers, advice: Recommendation, mode: Mode, workload: WorkloadSpec, seed: int) -> Scenario:
    """The advised file itself, with nothing but the mode changed."""
    offline = answers.clients == "offline"
    encodes = answers.engine == "encoder"
    assert advice.capacity is not None
    return Scenario(
        name=mode.value,
        policy=mode.value,
        config=config_file(answers, replace(advice, settings=_in_mode(advice, mode))),
        engines=EngineSpec(profile=advice.capacity.profile, count=answers.replicas),
        workload=workload,
        # Without retries every refusal is seen as one. A person leaves after half a minute; a job stays.
        clients=ClientSpec(patience_s=None if offline else PATIENCE_S),
        seed=seed,
        ttft_ms=None if encodes or offline else advice.figures["ttft_ms"],
        tpot_ms=None if encodes or offline else answers.tpot_ms or TPOT_MS,
        latency_ms=advice.figures["ttft_ms"] if encodes else None,
    )


def _in_mode(advice: Recommendation, mode: Mode) -> tuple[Setting, ...]:
    return tuple(
        replace(setting, value=mode.value) if (setting.section, setting.name) == ("admission", "mode") else setting
        for setting in advice.settings
    )


def try_out(answers: Answers, *, seed: int = 1, progress: Callable[[str], None] = lambda _: None) -> Trial:
    """Runs all of it. `progress` is told the name of each run that begins."""

    from forebay.sim.run import run

    words, made = scenarios(answers, seed)
    runs = []
    for scenario in made:
        progress(scenario.name)
        runs.append(msgspec.structs.replace(run(scenario).result, mode=scenario.name))
    nothing_lost = answers.clients == "offline" or answers.may_drop is False
    return Trial(words, tuple(runs), verdict(runs, nothing_lost=nothing_lost))


def verdict(runs: list[RunResult], *, nothing_lost: bool) -> str:
    """Whether the simulation agrees with the advice, which is the first of the runs.

    What counts is completions within the objective per second; or, where nothing may be lost, all completions.
    """
    advised = runs[0]
    if nothing_lost:
        lost = 100 * (1 - advised.counts.completed / advised.counts.offered)
        others = ", ".join(
            f"{run.mode} {100 * (1 - run.counts.completed / run.counts.offered):.0f} %" for run in runs[1:]
        )
        agrees = all(run.counts.completed <= advised.counts.completed for run in runs)
        word = "The simulation agrees" if agrees else "The simulation does not agree"
        return f"{word}: {advised.mode} loses {lost:.0f} % of the requests; {others}."
    best = max(runs, key=lambda run: run.goodput_per_s)
    shed = f"refuses {100 * refused_share(advised):.0f} % of the requests"
    if best.goodput_per_s <= advised.goodput_per_s * (1 + ALIKE):
        return (
            f"The simulation agrees: {advised.mode} has {advised.goodput_per_s:.2f} completions in time per second, "
            f"within {100 * ALIKE:.0f} % of the best, and {shed}."
        )
    more = f"{100 * (best.goodput_per_s / advised.goodput_per_s - 1):+.0f} %" if advised.goodput_per_s else "all"
    bounded = (
        " The senders of the trace do not slow down, as bounded ones do." if advised.mode == "backpressure" else ""
    )
    return (
        f"Here {best.mode} has more completions in time, {best.goodput_per_s:.2f} per second against "
        f"{advised.goodput_per_s:.2f} of {advised.mode} ({more}), which {shed}: consider it, unless the reasons above "
        f"weigh more.{bounded}"
    )
