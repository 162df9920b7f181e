"""A hundred kills under load on each store, and how long a restart takes with a hundred thousand keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.crashes import crash
from tests.integration.processes import simulated
from tests.integration.test_crashes import ENGINE
from tests.stores import new_store

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]
WINDOW_S = 0.5


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_hundred_kills(tmp_path: Path, kind: str) -> None:
    with new_store(kind, tmp_path) as url, simulated(tmp_path, *ENGINE) as engine:
        report = crash(tmp_path, url, engine.url, rounds=100, window_s=WINDOW_S, seed=2, answers=(20, 1000))
    starts = sorted(report.starts_s)
    print(
        f"{kind}: {report.rounds} kills, {report.used_tokens} tokens used, {report.lost_tokens} lost; "
        f"the oldest of these at best {1000 * max(report.windows_s, default=0):.0f} ms before its kill; "
        f"start to listening {starts[len(starts) // 2]:.2f} s median, {starts[-1]:.2f} s at most"
    )
    assert report.rounds == 100
