"""docs/traces.md names all that can be read, replayed and generated."""

from __future__ import annotations

from pathlib import Path

from forebay.telemetry.recorder import COLUMNS
from forebay.workload.generate import CLIENTS_SETTINGS, SHAPES
from forebay.workload.trace import shipped
from forebay.workload.tracefile import NAMES, plain_name

PAGE = (Path(__file__).parents[3] / "docs" / "traces.md").read_text("utf-8")
WORDS = {plain_name(word) for word in PAGE.split("`")[1::2]}


def test_every_column_that_is_understood_is_named() -> None:
    assert {name for names in NAMES.values() for name in names} <= WORDS


def test_every_column_of_the_record_is_named() -> None:
    assert set(COLUMNS) <= WORDS


def test_every_trace_that_ships_is_named() -> None:
    assert set(shipped()) <= WORDS


def test_every_kind_of_arrivals_is_named_with_its_settings() -> None:
    for name, shape in SHAPES.items():
        assert f"`{name}`" in PAGE
        assert not shape.settings or f"| `{shape.settings}` |" in PAGE, name
    assert f"`{CLIENTS_SETTINGS}`" in PAGE
