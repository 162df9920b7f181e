"""The default file and the reference say exactly what the schema does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from forebay.cli.config import command
from forebay.config import Config, loads
from forebay.config.render import allowed, default_file, description, example, tables, toml, with_reference
from forebay.config.schema import Mode

DOCS = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_default_file_is_the_defaults() -> None:
    assert loads(default_file(), environment={}) == (Config(), ())


def test_every_commented_setting_is_valid_once_uncommented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: tuple[Path, Path]
) -> None:
    for name, source in (("tls.crt", 0), ("tls.key", 1), ("ca.pem", 0)):
        (tmp_path / name).write_bytes(certificate[source].read_bytes())
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"^#(?=\S)", "", default_file(), flags=re.MULTILINE)
    environment = {
        "FOREBAY_ADMIN_TOKEN": "a",
        "FOREBAY_ADMIN_READ_TOKEN": "d",
        "ENGINE_API_KEY": "b",
        "TEAM_A_KEY": "c",
        "FOREBAY_RETRY_TICKET_SECRET": "e" * 32,
    }
    config, warnings = loads(text, environment=environment)
    assert warnings == ()
    assert config.engines[0].name == "llama"
    assert config.keys.static[0].limits.concurrency == 8
    assert config.classes["interactive"].priority == 1
    assert config.routes[0].engine == "llama"


def test_every_field_says_what_it_is_for() -> None:
    for table in tables():
        assert table.text
        for info in table.fields:
            assert len(description(info)) > 10, (table.header, info.name)
            assert description(info).endswith("."), (table.header, info.name)
            assert allowed(info.type)
            if info.default is None:
                assert example(info) is not None, (table.header, info.name)


def test_values_are_written_as_toml() -> None:
    assert toml(Mode.HYBRID) == '"hybrid"'
    assert toml(("a", 'b"c')) == '["a", "b\\"c"]'
    assert (toml(True), toml(2.5), toml(3)) == ("true", "2.5", "3")


def test_the_reference_in_the_docs_is_current() -> None:
    page = DOCS.read_text("utf-8")
    assert with_reference(page) == page, "run: python -m forebay.config.render --docs"


def test_the_example_in_the_docs_is_valid() -> None:
    example_file = re.search(r"```toml\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    assert example_file is not None
    config, warnings = loads(example_file[1], environment={"TEAM_A_KEY": "sk"})
    assert warnings == ()
    assert config.keys.static[0].limits.tokens_per_second == 5000


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="generated: begin"):
        with_reference("# nothing here")


def test_check_prints_figures_and_warnings(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text('[[engines]]\nname = "e"\nurls = ["http://a", "http://b"]\n[shared]\n')
    result = CliRunner().invoke(command, ["check", str(file)])
    assert result.exit_code == 0
    assert result.stdout.startswith("OK\n  mode = hybrid\n")
    assert "engine e (openai): 2 instance(s), 32 in flight at first (guarded), models *" in result.stdout
    assert f"warning: {file}:4: [shared]: is accepted" in result.stderr
    answer = json.loads(CliRunner().invoke(command, ["check", str(file), "--json"]).stdout)
    assert answer["ok"] is True
    assert answer["derived"]["wait_budget_ms"] == 50
    assert answer["derived"]["engines"][0]["instances"] == ["e/0", "e/1"]


def test_check_ends_with_2_and_one_line_per_problem(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[server]\nport = -1\nhots = 3\n")
    result = CliRunner().invoke(command, ["check", str(file)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"{file}:3: [server] hots: unknown field; did you mean 'host'?",
        f"{file}:2: [server] port: is -1, must be a whole number >= 0; change it",
    ]
    as_json = CliRunner().invoke(command, ["check", str(file), "--json"])
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout)["errors"] == result.stderr.splitlines()


def test_show_prints_the_default_file_or_its_values() -> None:
    assert CliRunner().invoke(command, ["show"]).stdout == default_file()
    values = json.loads(CliRunner().invoke(command, ["show", "--json"]).stdout)
    assert values["server"]["port"] == 8080
    assert values["admission"]["mode"] == "hybrid"
