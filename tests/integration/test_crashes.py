"""kill -9 under load: what was used is in the ledger, what was not used is not, and no key spends more than it had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.crashes import crash
from tests.integration.processes import simulated
from tests.stores import new_store

WINDOW_S = 0.5
"""Ten times the stated interval: this machine may be busy with something else. The soak says what it really was."""

ENGINE = ("--model-name", "m", "--time-scale", "2", "--seed", "1")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.peers)])
def test_kill_9_costs_the_last_moment_at_most(tmp_path: Path, kind: str) -> None:
    with new_store(kind, tmp_path) as url, simulated(tmp_path, *ENGINE) as engine:
        report = crash(tmp_path, url, engine.url, rounds=6, window_s=WINDOW_S, seed=1, answers=(50, 300))
    assert report.rounds == 6
    assert report.used_tokens > 2_000
