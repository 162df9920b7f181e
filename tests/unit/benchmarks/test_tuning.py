"""The comparison of depth tuners: the same arrivals for all, and a table of what was measured."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks import tuning
from benchmarks.tuning import ALONE, DEFAULT, FAMILIES, POLICIES, SHIFT_LOAD, Trial, arrivals, config, measure, trials
from forebay.config import loads
from forebay.config.schema import depth_limit, tuner_kind


def test_every_policy_meets_the_same_arrivals() -> None:
    for case, load in (("chat", 2.0), ("shift", SHIFT_LOAD)):
        first, *others = (
            arrivals(Trial(ALONE, policy, case, load, 3)) for policy in ("derived", "stepwise", "fixed 1")
        )
        assert len(first) > 1000
        assert all(other == first for other in others)
    assert arrivals(Trial(ALONE, "derived", "chat", 2.0, 4)) != arrivals(Trial(ALONE, "derived", "chat", 2.0, 3))


def test_the_policies_are_what_they_are_called() -> None:
    for policy in POLICIES:
        loaded = loads(config(ALONE, policy), environment={}).config
        kind, _, depth = policy.partition(" ")
        assert tuner_kind(loaded) == kind
        assert depth == "" or depth_limit(loaded) == int(depth)
    assert loads(config(DEFAULT, "derived"), environment={}).config.admission.wait_budget_ms is None


def test_the_table_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LADDER_S", 12.0)
    monkeypatch.setattr(tuning, "WARM_UP_S", 2.0)
    figures = measure(Trial(ALONE, "fixed 256", "chat", 5.0, 1))
    assert figures["depth_at_end"] == 256
    assert figures["goodput"] < 0.9, "a queue of 256 is too long to be served in time"
    assert figures["missed"] > 0
    shift = {f"{phase}/{name}": 0.5 for phase in tuning.PHASES for name in ("goodput", "wait_p99_ms", "missed")}
    rows = [
        {**asdict(trial), "figures": figures | (shift if trial.case == "shift" else {})} for trial in trials((1, 2))
    ]
    text = tuning.section({"rows": rows, "seeds": 2, "command": "c", "environment": {"commit": "abc"}})
    row = next(line for line in text.splitlines() if line.startswith("| fixed 256 |"))
    assert f"| {100 * figures['goodput']:.1f} ± 0.0 |" in row
    assert sum(line.startswith("| derived |") for line in text.splitlines()) == 2 * len(FAMILIES)
