"""Whole traces through the engine model, against an independent simulation with the same coefficients.

The reference admits by prompt and whole output, counts an answer of one token with 0 ms per output token, cuts a
trace by its own clock, and adds a jitter to times that lie on a grid.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import pytest

from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.model import EngineLimits, EngineModel
from forebay.engines.simulated.profile import StepProfile
from forebay.engines.simulated.replay import Timeline, Work, replay
from forebay.workload.arrival import Arrival
from forebay.workload.trace import load_trace

with (files("forebay") / "data" / "calibration" / "reference_runs.csv").open() as file:
    RUNS = list(csv.DictReader(file))


@cache
def recorded(trace: str, jitter_s: float, limit_s: float | None) -> list[Arrival]:
    return load_trace(trace, jitter_s=jitter_s, duration_s=limit_s)


def replayed(run: dict[str, str]) -> tuple[list[Work], Timeline]:
    profile = profile_named(run["entry"])
    assert isinstance(profile, StepProfile)
    limit_s = float(run["limit_s"]) if run["limit_s"] else None
    work = [
        Work(round(one.at_ns / float(run["speed"])), one.prompt_tokens or 1, one.output_tokens or 1)
        for one in recorded(run["trace"], float(run["jitter_s"]), limit_s)
    ]
    limits = EngineLimits(profile.max_num_seqs, profile.max_num_batched_tokens, profile.kv_tokens, reserve_output=True)
    return work, replay(EngineModel(profile, limits), work)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[int(len(ordered) * share)]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['trace']}-x{run['speed']}-{run['entry'].split('/')[0]}")
def test_a_trace_replayed_comes_to_the_reference(run: dict[str, str]) -> None:
    work, timeline = replayed(run)
    ttft = timeline.ttft_ms()
    tpot = timeline.tpot_ms()
    tpot += [0.0] * (len(work) - len(tpot))
    assert len(work) == int(run["requests"])
    assert len(work) * 1e9 / work[-1].at_ns == pytest.approx(float(run["rps"]), rel=0.002)
    assert timeline.steps == pytest.approx(int(run["steps"]), rel=0.01)
    assert timeline.output_tokens_per_s() == pytest.approx(float(run["out_tok_s"]), rel=0.01)
    assert quantile(ttft, 0.5) == pytest.approx(float(run["ttft_p50_ms"]), rel=0.03)
    assert quantile(ttft, 0.9) == pytest.approx(float(run["ttft_p90_ms"]), rel=0.03)
    assert quantile(ttft, 0.99) == pytest.approx(float(run["ttft_p99_ms"]), rel=0.03)
    assert quantile(tpot, 0.5) == pytest.approx(float(run["tpot_p50_ms"]), rel=0.01)
    assert quantile(tpot, 0.99) == pytest.approx(float(run["tpot_p99_ms"]), rel=0.01)


def test_a_leap_covers_many_steps() -> None:
    """What makes a day of thousands of engines affordable: the work grows with the requests, not with the tokens."""
    (deepseek,) = (run for run in RUNS if "deepseek" in run["trace"])
    work, timeline = replayed(deepseek)
    assert timeline.stretches < 3 * len(work)
    assert timeline.steps > 10 * timeline.stretches
