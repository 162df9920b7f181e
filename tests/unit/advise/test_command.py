"""`forebay advise` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from forebay.cli import advise
from forebay.cli import config as config_command
from forebay.errors import UsageError


def invoke(*arguments: str, answers: str = "") -> Result:
    return CliRunner().invoke(advise.command, list(arguments), input=answers)


def test_the_written_file_passes_config_check(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    result = invoke("--clients", "realtime", "--gpu", "h100", "--model", "8b", "--rate", "10", "--write", str(file))
    assert result.exit_code == 0, result.output
    assert "Begin with hybrid (preset realtime)" in result.stdout
    assert f"forebay serve --config {file}" in result.stdout
    checked = CliRunner().invoke(config_command.command, ["check", str(file)])
    assert checked.exit_code == 0, checked.output
    assert "mode = hybrid" in checked.stdout


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text("[server]\nport = 9\n")
    refused = invoke("--clients", "offline", "--write", str(file))
    assert isinstance(refused.exception, UsageError)
    assert "add --force" in str(refused.exception)
    assert file.read_text() == "[server]\nport = 9\n"
    assert invoke("--clients", "offline", "--write", str(file), "--force").exit_code == 0
    assert 'mode = "backpressure"' in file.read_text()
    unwritable = invoke("--clients", "offline", "--write", str(tmp_path / "no" / "such" / "folder.toml"))
    assert "cannot be written" in str(unwritable.exception)


def test_without_a_terminal_nothing_is_asked() -> None:
    result = invoke(answers="public\n")
    assert isinstance(result.exception, UsageError)
    assert "--clients internal|public|b2b|offline|realtime" in str(result.exception)


def test_in_a_terminal_it_asks_for_what_no_flag_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise, "in_terminal", lambda: True)
    answers = "internal\nvllm\nno\nunknown\nmuch\n-3\n3000\nyes\n\n\n"
    result = invoke("--bursty", answers=answers)
    assert result.exit_code == 0, result.output
    assert "Requests per second at the peak" in result.stdout
    assert "bursts far above" not in result.stdout, "a flag has said it"
    assert result.stdout.count("Give a number, or nothing") == 2
    assert "Begin with hybrid (preset internal)" in result.stdout


def test_json_holds_the_advice_and_the_file() -> None:
    result = invoke("--clients", "b2b", "--json", "--gpu", "a100", "--model", "8b")
    plain = json.loads(result.stdout)
    assert (plain["mode"], plain["preset"]) == ("admission", "b2b")
    assert plain["capacity"]["places"] > 0
    assert {"what", "when", "setting", "available"} == set(plain["later"][0])
    assert 'preset = "b2b"' in plain["config"]
    assert any("nobody may call" in warning for warning in plain["warnings"])


def test_contradictions_reach_the_person() -> None:
    result = invoke("--clients", "offline", "--ttft-ms", "200")
    assert isinstance(result.exception, UsageError)
    assert "contradict each other" in str(result.exception)
