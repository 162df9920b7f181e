"""From findings to a plan: the verdict on the article's claim, what was assumed, and the configuration file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.engines.simulated.profile import EncoderProfile, StepProfile
from forebay.plan.candidates import Candidate, dtype_of, model_of
from forebay.plan.planner import Findings, Planner, Question
from forebay.plan.prices import HOURS_PER_MONTH, PriceBook
from forebay.plan.result import Comparison, Fleet, Plan, Verdict
from forebay.plan.setup import Mode, config_text
from forebay.plan.trials import Trials
from forebay.report.results import environment

CLAIMED = 0.22
"""Part of the bill that a client of the article's author saved by going from backpressure to refusals."""

ALIKE = 0.05
"""Savings smaller than this are within what a fitted engine model and one draw of arrivals can tell."""

DEAR_SHED = 0.02
"""Refusing more than this is part of the price of a saving, and said with it."""

FRONT_END_MS = 12
"""Time to first token that a real server's front end adds on an A100; the engine model leaves it out."""


def make_plan(
    question: Question,
    trials: Trials,
    book: PriceBook,
    *,
    notes: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The answer to a question. Raises UsageError when nothing keeps the objective."""
    findings = Planner(question, trials, say).find()
    candidate = findings.candidate
    return Plan(
        environment=environment(),
        model=model_of(candidate.profile),
        dtype=dtype_of(candidate.profile),
        objective=question.objective,
        traffic=question.traffic.figures,
        prices_from=book.origin if book.provider is None else f"{book.origin}, {book.provider} only",
        prices_as_of=as_of(question.candidates),
        hours_per_month=HOURS_PER_MONTH,
        answer=findings.answer,
        check=findings.check,
        candidates=findings.candidates,
        comparisons=findings.comparisons,
        verdict=verdict(findings.comparisons) if findings.comparisons else None,
        sensitivity=findings.sensitivity,
        count_curves=findings.count_curves,
        traffic_curves=findings.traffic_curves,
        assumptions=[*notes, *_assumptions(question, findings)],
        simulations=trials.ran + trials.reused,
        simulations_reused=trials.reused,
        seed=question.seed,
        config=_config(question, findings),
    )


def as_of(candidates: Sequence[Candidate]) -> str:
    """The dates of the quotes behind all prices."""
    dates = sorted({date for one in candidates for date in one.price.as_of.split(" to ") if date})
    undated = any(not one.price.as_of for one in candidates)
    if not dates:
        return "undated, given by the user"
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{span} (some undated)" if undated else span


def verdict(comparisons: Sequence[Comparison]) -> Verdict:
    """Does admission, or the hybrid, save what the article says against backpressure?"""
    by_mode: dict[Mode, Comparison] = {one.mode: one for one in comparisons}
    saved = {mode: _saved(by_mode["backpressure"].fleet, by_mode[mode].fleet) for mode in by_mode}
    per_gpu = {mode: _spared(by_mode["backpressure"].sustains, by_mode[mode].sustains) for mode in by_mode}
    text = _verdict_text(by_mode, saved, per_gpu)
    return Verdict(CLAIMED, saved["admission"], saved["hybrid"], per_gpu["admission"], per_gpu["hybrid"], text)


def _saved(before: Fleet | None, after: Fleet | None) -> float | None:
    if before is None or after is None:
        return None
    return 1 - after.cost.per_hour / before.cost.per_hour


def _spared(before: float | None, after: float | None) -> float | None:
    """Part of the GPUs that a mode spares, were they divisible: one that carries twice as much needs half of them."""
    return 1 - before / after if before is not None and after else None


def _verdict_text(
    by_mode: dict[Mode, Comparison], saved: dict[Mode, float | None], per_gpu: dict[Mode, float | None]
) -> str:
    if by_mode["backpressure"].fleet is None:
        return "Backpressure alone keeps this objective with no allowed number of GPUs, so no saving can be stated."
    parts = []
    for mode in ("admission", "hybrid"):
        bill, continuous = saved[mode], per_gpu[mode]
        if bill is None:
            parts.append(f"{mode} keeps the objective with no allowed number of GPUs")
            continue
        words = f"the cheapest fleet under {mode} {_change(bill)}"
        if continuous is not None and _change(continuous) == _change(bill):
            words += ", and would if GPUs could be divided"
        elif continuous is not None:
            words += f" (if GPUs could be divided, by the traffic that the same ones carry, it {_change(continuous)})"
        parts.append(words)
    best = max(saved[mode] or 0.0 if (one := per_gpu[mode]) is None else one for mode in ("admission", "hybrid"))
    if best >= CLAIMED - ALIKE:
        judgement = "The claimed 22 % is within reach for this traffic and objective."
        fleets = [by_mode[mode].fleet for mode in ("admission", "hybrid")]
        refused = max((fleet.window.shed for fleet in fleets if fleet is not None), default=0.0)
        if refused > DEAR_SHED:
            judgement += f" It is paid for in refusals, of up to {100 * refused:.0f} % of the requests."
    elif best > ALIKE:
        judgement = "There is a saving, but not the claimed 22 %, for this traffic and objective."
    else:
        judgement = "The claimed 22 % is not found for this traffic and objective."
        if (per_gpu["admission"] or saved["admission"] or 0.0) < -ALIKE:
            judgement += " Without a waiting room, bursts are refused that could have been served in time."
    return f"Against backpressure alone at the same objective, {'; '.join(parts)}. {judgement}"


def _change(part: float) -> str:
    if abs(part) < 0.005:
        return "costs the same"
    return f"saves {100 * part:.0f} %" if part > 0 else f"costs {-100 * part:.0f} % more"


def _assumptions(question: Question, findings: Findings) -> list[str]:
    traffic, candidate = question.traffic, findings.candidate
    window, price = traffic.window, candidate.price
    simulated = f"Simulated: {window.duration_s / 60:.3g} minutes from second {window.start_s:.0f}, {window.why}"
    if window.warm_up_s:
        simulated += f"; {window.warm_up_s:.0f} s before it are served and not counted"
    is_trace = traffic.workload.trace is not None
    more = "arrivals, faster or slower: bursts grow denser too" if is_trace else "process at another rate"
    is_language_model = isinstance(candidate.profile, StepProfile)
    front_end = (
        f"allow about {FRONT_END_MS} ms more per first token" if is_language_model else "it adds to every latency"
    )
    confidence = getattr(candidate.profile, "confidence", "of a measured curve")
    retries = "do not return" if question.retry == "none" else f"retry as {question.retry}"
    lines = [
        f"{simulated}.",
        f"More or less traffic is the same {more}.",
        f"Prices: {price.basis}; on demand, {HOURS_PER_MONTH:g} hours a month, without storage, network or discounts.",
        "The shipped quotes are second-hand: put your own in with --price.",
        f"Engines: the calibrated model {candidate.profile.name}, confidence {confidence}; all healthy, so add spares.",
        f"A server's front end is left out: {front_end}.",
        f"One gateway; no prefix cache; callers do not say how long an answer may be; refused callers {retries}.",
        "Per million tokens: the fleet's bill over the tokens that the mean traffic brings and that are served.",
    ]
    if findings.check is None:
        lines.append("No longer check was made: the window is all of the traffic.")
    if any(not one.monotone for one in findings.candidates):
        lines.append(
            "For a candidate marked ~ more engines did not always do better: take its number as plus or minus one."
        )
    return lines


def _config(question: Question, findings: Findings) -> str:
    answer, candidate = findings.answer, findings.candidate
    profile = candidate.profile
    month = f"{answer.cost.per_month:,.0f} USD a month at {candidate.price.usd_per_hour:g} per GPU and hour"
    lines = [
        f"Made by `forebay plan` for {question.traffic.figures.name}.",
        f"Objective: {question.objective}.",
        f"{answer.engines} engines of {candidate.name}, calibrated as {profile.name}.",
        f"{month}; prices as of {as_of(question.candidates)}.",
        f"Simulated: {100 * answer.window.attainment:.2f} % in time, {100 * answer.window.shed:.2f} % refused.",
        "Put the addresses of your engines in below.",
    ]
    if isinstance(profile, StepProfile):
        parallel = f" --tensor-parallel-size {profile.gpus}" if profile.gpus > 1 else ""
        lines.append(
            f"Start each as it was simulated: vllm serve MODEL{parallel} --max-num-seqs {profile.max_num_seqs} "
            f"--max-num-batched-tokens {profile.max_num_batched_tokens}"
        )
    elif isinstance(profile, EncoderProfile):
        lines.append(f"The gateway forms batches of up to {answer.setup.batch}; each engine runs one at a time.")
    urls = [f"http://engine-{number}.example:8000" for number in range(answer.engines)]
    return config_text(answer.setup, question.objective, engines=answer.engines, urls=urls, note="\n".join(lines))
