"""The quick simulation: which trace, which runs, and what is concluded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from forebay.advise import trial
from forebay.advise.answers import Answers
from forebay.core.model import Mode
from forebay.report.results import RunResult


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({}, "azure_llm_2023_conv"),
        ({"prompt_tokens": 2000, "output_tokens": 30}, "azure_llm_2023_code"),
        ({"bursty": True}, "azure_llm_2023_code"),
        ({"prompt_tokens": 12_000, "output_tokens": 350}, "mooncake_fast25_conversation"),
        ({"prompt_tokens": 1500, "output_tokens": 1200}, "servegen_deepseek_r1_1h_synth"),
        ({"rate_per_s": 1.2, "prompt_tokens": 1405, "output_tokens": 211}, "servegen_mlarge_24h_synth"),
    ],
)
def test_the_nearest_trace(said: dict[str, Any], name: str) -> None:
    assert trial.nearest(Answers(clients="realtime", **said)).name == name


def test_every_trace_with_times_may_be_the_nearest() -> None:
    assert set(trial.DISPERSION_10S) == {name for name, info in trial.shipped().items() if info.duration_s}


def test_the_runs_differ_in_nothing_but_the_mode() -> None:
    words, made = trial.scenarios(Answers(clients="realtime", rate_per_s=30.0))
    assert [one.name for one in made] == ["hybrid", "backpressure", "admission", "no gateway"]
    assert [one.loaded().admission.mode for one in made[:3]] == [Mode.HYBRID, Mode.BACKPRESSURE, Mode.ADMISSION]
    assert [one.gateway for one in made] == [True, True, True, False]
    assert len({one.workload.speed for one in made}) == 1
    assert len({msgspec.structs.replace(one.loaded().admission, mode=Mode.HYBRID) for one in made}) == 1
    assert "at 30 requests/s" in words
    assert "assumed: no GPU was said" in words


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "REQUESTS", 100)
    monkeypatch.setattr(trial, "SHORTEST_S", 4.0)
    monkeypatch.setattr(trial, "ENCODER_SHORTEST_S", 0.2)


@pytest.mark.usefixtures("quick")
def test_an_encoder_behind_admission_forms_no_batches() -> None:
    answers = Answers(clients="realtime", engine="encoder", gpu="t4", model="bert-base/fp16/seq128", ttft_ms=100.0)
    hybrid, _, admission, plain = trial.try_out(answers).runs
    assert (hybrid.mode, admission.mode, plain.mode) == ("hybrid", "admission", "no gateway")
    assert hybrid.goodput_per_s > 1.3 * admission.goodput_per_s


@pytest.mark.usefixtures("quick")
def test_offline_work_is_judged_by_what_is_lost() -> None:
    tried = trial.try_out(Answers(clients="offline", gpu="l4", model="8b", rate_per_s=6.0))
    assert tried.runs[0].mode == "backpressure"
    assert tried.runs[0].counts.completed == tried.runs[0].counts.offered
    assert tried.verdict.startswith("The simulation agrees: backpressure loses 0 %")


@pytest.mark.usefixtures("quick")
def test_the_same_seed_tries_the_same() -> None:
    answers = Answers(clients="b2b", gpu="h100", model="8b")
    told: list[str] = []
    once, again = trial.try_out(answers, seed=3, progress=told.append), trial.try_out(answers, seed=3)
    assert once == again
    assert told == [run.mode for run in once.runs]


@pytest.mark.usefixtures("quick")
def test_a_simulation_that_disagrees_says_so() -> None:
    runs: list[RunResult] = list(trial.try_out(Answers(clients="realtime", gpu="h100", model="8b")).runs)
    better = msgspec.structs.replace(runs[1], goodput_per_s=2 * runs[0].goodput_per_s + 1)
    said = trial.verdict([runs[0], better], nothing_lost=False)
    assert said.startswith(f"Here {better.mode} has more completions in time")
    assert "do not slow down" in trial.verdict(
        [msgspec.structs.replace(runs[0], mode="backpressure"), better], nothing_lost=False
    )
    nothing = msgspec.structs.replace(runs[0], goodput_per_s=0.0)
    assert "(all)" in trial.verdict([nothing, better], nothing_lost=False)
    lossy = msgspec.structs.replace(runs[0].counts, completed=runs[0].counts.completed - 1)
    worse = msgspec.structs.replace(runs[0], counts=lossy)
    assert "does not agree" in trial.verdict([worse, runs[0]], nothing_lost=True)


def test_answers_can_be_completed_without_losing_what_was_said() -> None:
    said = Answers(clients="public", upstreams=("http://a:1", "http://b:1"))
    assert replace(said, gpu="h100").urls == said.urls
