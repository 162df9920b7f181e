"""The benchmark of restarts: what the second half of its starts finds in the store, and what it says of the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from benchmarks import core_http, restart
from forebay.config.schema import Limits
from forebay.ledger.database import open_store
from forebay.ledger.posting import Posting
from forebay.ledger.tables import keys


def test_every_key_has_a_day_and_used_some_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_http, "ACTIVE", 2)
    url = f"sqlite:///{tmp_path / 'store.db'}"
    assert len(core_http.fill(url, 5).usual) == 5
    restart.use_all(url)
    store = open_store(url)
    with store.read() as connection:
        rows = connection.execute(select(keys.c.id, keys.c.limits)).all()
        now_ms = store.now_ms(connection)
    assert len(rows) == 5 + 2 + 1
    assert all(msgspec.json.decode(limits, type=Limits).tokens_per_day for _, limits in rows)
    assert Posting(store).used(now_ms) == {key: (1_200, 1_200) for key, _ in rows}
    store.close()


@pytest.mark.parametrize(("slowest", "verdict"), [(1.9, "met"), (2.1, "**missed**")])
def test_the_slowest_restart_is_held_to_the_target(slowest: float, verdict: str) -> None:
    spread = {"median": 1.5, "min": 1.2, "max": slowest, "n": 3}
    result: dict[str, Any] = {
        "environment": {"at": "now", "commit": "abc", "dirty": False, "machine": "M", "cpus": 2, "load_before": 0.1,
                        "system": "Linux", "python": "3.11"},
        "command": "c", "rounds_run": 3, "keys": 100_000,
        "cases": {case: {"first_s": 1.0, "restart_s": spread, "cpu_s": spread} for case in restart.CASES},
    }  # fmt: skip
    text = restart.markdown(result)
    assert f"The slowest took {slowest:.2f} s: {verdict}." in text
    assert f"1.50 (1.20–{slowest:.2f})" in text
