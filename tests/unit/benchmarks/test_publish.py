"""Where the figures of a benchmark go."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import publish, trials

PAGE = (
    "# Title\n\n<!-- generated: one -->\nold\n<!-- end: one -->\n\nkept\n\n<!-- generated: two -->\n<!-- end: two -->\n"
)


@dataclass(frozen=True)
class Trial:
    seed: int
    load: float


def doubled(trial: Trial) -> dict[str, float]:
    return {"load": 2 * trial.load}


def test_sections_are_replaced_and_the_rest_is_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    publish.write_sections(page, {"two": "| b |", "one": "| a |"})
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("# Title\n\n<!-- generated: one -->\n\n| a |\n<!-- end: one -->\n\nkept\n")
    publish.write_sections(page, {"two": "| b |", "one": "| a |"})
    assert page.read_text() == text, "writing the same once more changes nothing"


def test_a_page_without_a_section_is_left_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(ValueError, match="generated: three"):
        publish.write_sections(page, {"one": "| a |", "three": "| c |"})
    assert page.read_text() == PAGE


def test_results_go_where_they_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    assert publish.write_results("some", {"rows": [1], "unit": "µs"}, path) == path
    assert json.loads(path.read_text()) == {"rows": [1], "unit": "µs"}
    assert "µs" in path.read_text()


def test_a_command_spells_out_what_is_not_usual() -> None:
    assert publish.command("core", "--rounds", 3) == "python -m benchmarks.core --rounds 3"
    assert publish.command_of_seeds("balance", 5, 5) == "python -m benchmarks.balance"
    assert publish.command_of_seeds("control", 2, 5, "--quick") == "python -m benchmarks.control --quick --seeds 2"


def test_a_row_for_each_trial_in_their_order() -> None:
    wanted = [Trial(2, 0.5), Trial(1, 3.0), Trial(1, 0.5)]
    assert trials.rows_of(doubled, wanted, 1) == [
        {"seed": trial.seed, "load": trial.load, "figures": {"load": 2 * trial.load}} for trial in wanted
    ]
