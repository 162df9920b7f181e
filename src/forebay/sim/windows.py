"""Fits the part of a step model that an engine's own counters show, without sending it anything.

Between two scrapes an engine has made so many steps, of so many tokens; its busy time, or the mean time between the
tokens of a sequence, says how long one took on average. Windows with different mixes make a small linear system. Means
hide the knee of the roofline and the attention of prompts, and nothing shows the time before the scheduler: a probing
run finds those. The file that comes out is the same.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from forebay.engines.simulated.fitted import Coefficient, FrontEnd, Residuals
from forebay.engines.simulated.profile import StepProfile
from forebay.errors import UsageError
from forebay.report.statistics import percentile
from forebay.sim.calibrate import MOST_ERROR, WANTS, Calibration, rates
from forebay.sim.squares import gram, solve_nonnegative, standard_error

FEWEST_WINDOWS = 8
FEWEST_STEPS = 5
NAMES = ("c0", "e", "seq", "kv")

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (-?[0-9][0-9.eE+-]*)", re.MULTILINE)
_WANTED = frozenset(
    {
        "forebay_engine_steps_total",
        "forebay_engine_busy_seconds_total",
        "vllm:iteration_tokens_total_count",
        "vllm:iteration_tokens_total_sum",
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:inter_token_latency_seconds_count",
        "vllm:kv_cache_usage_perc",
    }
)


class Scrape(NamedTuple):
    """An engine's counters at one moment. Totals since its start; None where it does not publish one.

    `steps`: forward passes; `tokens`: computed in them, prompts and answers; `generated`: tokens of answers; `busy_s`:
    time in steps; `gaps_s`, `gaps`: sum and count of the times between tokens; `context`: tokens in the KV cache now.
    """

    steps: float
    tokens: float
    generated: float
    busy_s: float | None
    gaps_s: float | None
    gaps: float | None
    context: float | None


def scrape_of(metrics: str, kv_tokens: int | None) -> Scrape | None:
    """The counters in the text of /metrics, vLLM's names or our engines'; None where steps are not counted."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics):
        if name in _WANTED:
            sums[name] = sums.get(name, 0.0) + float(value)
    steps = sums.get("forebay_engine_steps_total", sums.get("vllm:iteration_tokens_total_count"))
    generated, prompts = sums.get("vllm:generation_tokens_total"), sums.get("vllm:prompt_tokens_total")
    if steps is None or generated is None or prompts is None:
        return None
    usage = sums.get("vllm:kv_cache_usage_perc")
    return Scrape(
        steps=steps,
        tokens=sums.get("vllm:iteration_tokens_total_sum", prompts + generated),
        generated=generated,
        busy_s=sums.get("forebay_engine_busy_seconds_total"),
        gaps_s=sums.get("vllm:inter_token_latency_seconds_sum"),
        gaps=sums.get("vllm:inter_token_latency_seconds_count"),
        context=None if usage is None or kv_tokens is None else usage * kv_tokens,
    )


class Window(NamedTuple):
    """Means over the steps between two scrapes; `step_ms` is what they took."""

    step_ms: float
    tokens: float
    sequences: float
    context: float
    steps: float


def windows_of(scrapes: Sequence[Scrape]) -> list[Window]:
    """The windows in which the engine worked; those over a restart of its counters are left out."""
    return [window for pair in itertools.pairwise(scrapes) if (window := _window(*pair)) is not None]


def _window(before: Scrape, after: Scrape) -> Window | None:
    steps = after.steps - before.steps
    if steps < FEWEST_STEPS:
        return None
    step_s = None
    if before.busy_s is not None and after.busy_s is not None:
        step_s = (after.busy_s - before.busy_s) / steps
    elif None not in (before.gaps_s, before.gaps, after.gaps_s, after.gaps):
        gaps = (after.gaps or 0.0) - (before.gaps or 0.0)
        step_s = ((after.gaps_s or 0.0) - (before.gaps_s or 0.0)) / gaps if gaps > 0 else None
    tokens, generated = after.tokens - before.tokens, after.generated - before.generated
    if step_s is None or step_s <= 0 or tokens < 0 or generated < 0:
        return None
    context = ((before.context or 0.0) + (after.context or 0.0)) / 2
    return Window(step_s * 1e3, tokens / steps, generated / steps, context, steps)


def fit_windows(windows: Sequence[Window], like: StepProfile) -> Calibration:
    """A step model without a knee: c0, per token, per sequence, per token of context. Limits and names are `like`'s.

    Raises UsageError when there are too few windows.
    """
    if len(windows) < FEWEST_WINDOWS:
        raise UsageError(
            f"too little to fit from: {len(windows)} stretches in which the engine made steps, at least "
            f"{FEWEST_WINDOWS} are needed; observe for longer, or while it serves"
        )
    columns = [
        [1.0] * len(windows),
        [window.tokens for window in windows],
        [window.sequences for window in windows],
        [window.context / 1e3 for window in windows],
    ]
    # Relative errors, and a mean over more steps says more.
    weights = [window.steps / window.step_ms**2 for window in windows]
    seen = [window.step_ms for window in windows]
    products = gram(columns, weights)
    weighted = [weight * value for weight, value in zip(weights, seen, strict=True)]
    moments = [sum(x * y for x, y in zip(column, weighted, strict=True)) for column in columns]
    solution = solve_nonnegative(products, moments, sum(x * y for x, y in zip(seen, weighted, strict=True)))
    by_name = dict(zip(NAMES, solution.values, strict=True))
    profile = replace(
        like,
        c0=by_name["c0"],
        e=by_name["e"],
        seq=by_name["seq"],
        kv=by_name["kv"],
        w=0.0,
        r=0.0,
        p=2.0,
        att=0.0,
    )
    variance = solution.squares / max(1, len(windows) - len(NAMES))
    coefficients = _coefficients(products, solution.values, variance)
    off = sorted(
        abs(sum(value * column[row] for value, column in zip(solution.values, columns, strict=True)) / seen[row] - 1.0)
        for row in range(len(windows))
    )
    residuals = Residuals(0, None, None, percentile(off, 0.5), percentile(off, 0.9))
    unknown = ", ".join(one.name for one in coefficients if not one.known)
    level = "medium" if (residuals.tpot_p50 or 0.0) <= 0.05 else "low"
    profile = replace(rates(profile), confidence=f"{level}, from counters; not identified: {unknown}")
    return Calibration(profile, FrontEnd(), coefficients, residuals, 1)


def _coefficients(products: list[list[float]], values: Sequence[float], variance: float) -> list[Coefficient]:
    found = []
    for index, name in enumerate(NAMES):
        value, error = values[index], standard_error(products, values, index, variance)
        known = value > 0 and error <= MOST_ERROR * value
        found.append(Coefficient(name, value, error, known, "" if known else f"a probing run, or {WANTS[name]}"))
    hidden = {"w": 0.0, "r": 0.0, "p": 2.0, "att": 0.0, "front": 0.0, "front_token": 0.0}
    return found + [Coefficient(name, value, math.inf, False, "a probing run") for name, value in hidden.items()]
