"""`forebay keys` and `forebay ledger` as a person types them: what is printed, and how mistakes end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from forebay.cli import group
from forebay.errors import ForebayError

CREDENTIAL = re.compile(r"sk-fb-[a-z2-7]{16}-[a-z2-7]{32}")


class Shell:
    """Runs commands on one store; `said` is what the last one printed beside its result."""

    def __init__(self, folder: Path) -> None:
        self.store = f"sqlite:///{folder / 'keys.db'}"
        self.said = ""

    def __call__(self, *words: str) -> str:
        result = CliRunner().invoke(group, [*words, "--store", self.store], standalone_mode=False)
        if result.exception is not None:
            raise result.exception
        self.said = result.stderr
        return result.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def forebay(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_a_key_is_shown_once_and_alone(forebay: Shell) -> None:
    printed = forebay("keys", "create", "alice laptop", "--tokens-per-minute", "100k", "--expires", "90d")
    assert CREDENTIAL.fullmatch(printed.strip())
    assert "it is shown only now" in forebay.said
    secret = printed.strip()[-32:]
    for words in (("list",), ("list", "--json"), ("show", "alice laptop"), ("audit",)):
        assert secret not in forebay("keys", *words)
    (key,) = forebay.json("keys", "list")["data"]
    assert (key["name"], key["limits"]["tokens_per_minute"], key["state"]) == ("alice laptop", 100_000, "active")


def test_a_key_with_everything(forebay: Shell) -> None:
    made = forebay.json(
        "keys", "create", "r", "--team", "ops", "--class", "gold", "--mode", "hybrid", "--model", "a", "--model", "b",
        "--route", "chat", "--cap-output-tokens", "1_000", "--credit", "2M", "--requests-per-minute", "60",
        "--burst-s", "1.5", "--for-model", "a", "tokens-per-minute=5k", "--expires", "2999-01-31",
    )  # fmt: skip
    key = made["key"]
    assert CREDENTIAL.fullmatch(made["secret"])
    assert (key["team"], key["class"], key["mode"], key["models"], key["routes"]) == (
        "ops", "gold", "hybrid", ["a", "b"], ["chat"],
    )  # fmt: skip
    assert (key["cap_output_tokens"], key["prepaid"], key["expires_at"]) == (1000, True, "2999-01-31T00:00:00Z")
    assert (key["limits"]["requests_per_minute"], key["limits"]["burst_s"]) == (60, 1.5)
    assert key["limits"]["models"]["a"]["tokens_per_minute"] == 5000
    assert forebay.json("keys", "show", "r")["credit"]["available"] == 2_000_000


def test_limits_are_set_and_taken_away_one_by_one(forebay: Shell) -> None:
    forebay("keys", "create", "a", "--tokens-per-minute", "100k", "--concurrency", "2")
    said = forebay("keys", "limit", "a", "--requests-per-minute", "60", "--tokens-per-minute", "none")
    assert "requests_per_minute 60, concurrency 2" in said
    assert "those of [limits.default]" in forebay("keys", "limit", "a", "--default")
    assert forebay.json("keys", "show", "a")["limits"] is None


def test_a_key_is_changed_and_revoked(forebay: Shell) -> None:
    key = forebay.json("keys", "create", "a", "--expires", "1h", "--team", "x")["key"]["id"]
    forebay("keys", "change", "a", "--name", "b", "--expires", "none", "--team", "none", "--class", "gold")
    shown = forebay.json("keys", "show", key)
    assert (shown["name"], shown["expires_at"], shown["team"], shown["class"]) == ("b", None, None, "gold")
    assert "is revoked" in forebay("keys", "revoke", "b")
    assert forebay.json("keys", "show", key)["state"] == "revoked"
    actions = [line["action"] for line in forebay.json("keys", "audit", key)["data"]]
    assert actions == ["revoke", "change", "create"]
    assert all(line["actor"].startswith("cli:") for line in forebay.json("keys", "audit")["data"])


def test_credit_counts_once_with_a_word(forebay: Shell) -> None:
    key = forebay.json("keys", "create", "r", "--prepaid")["key"]["id"]
    for _ in range(2):
        assert "5000 tokens available" in forebay("keys", "credit", "r", "5k", "--idempotency-key", "invoice-1")
    assert "4000 tokens available" in forebay("keys", "credit", "r", "1k", "--take", "--note", "refund")
    assert [each["amount"] for each in forebay.json("ledger", "history", "r")] == [-1000, 5000]
    assert "refund" in forebay("ledger", "history")
    assert forebay.json("ledger", "balances")[0]["available"] == 4000
    assert key in forebay("ledger", "balances")
    assert forebay.json("ledger", "verify") == {"clean": True, "discrepancies": []}
    assert "adds up" in forebay("ledger", "verify")
    assert [row["amount"] for row in json.loads(forebay("ledger", "export", key))] == [5000, -1000]
    assert len(forebay("ledger", "export", "--format", "csv").splitlines()) == 3
    forebay("keys", "revoke", "r")
    assert len(forebay.json("ledger", "history", key)) == 2


def test_a_list_that_is_cut_says_how_to_go_on(forebay: Shell) -> None:
    for name in ("one", "two", "three"):
        forebay("keys", "create", name)
    forebay("keys", "list", "--limit", "2")
    cursor = forebay.said.split("--cursor ")[1].strip()
    assert [key["name"] for key in forebay.json("keys", "list", "--cursor", cursor)["data"]] == ["one"]


MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("keys", "create", ""), "name: must be text of length >= 1"),
    (("keys", "create", "b", "--requests-per-minute", "-5"), "limits.requests_per_minute: must be a whole number >= 0"),
    (("keys", "create", "b", "--requests-per-minute", "1.5"), "limits.requests_per_minute: must be a whole number"),
    (("keys", "create", "b", "--tokens-per-day", "9e99"), "is no number; write 60, 100_000, 100k or 2M, or none"),
    (("keys", "create", "b", "--tokens-per-day", "99999999G"), "must be a whole number <= 9007199254740992"),
    (("keys", "create", "b", "--tokens-per-second", "1", "--burst-s", "0.5"), "allows less than one token at once"),
    (("keys", "create", "b", "--expires", "2020-01-01"), "is in the past"),
    (("keys", "create", "b", "--expires", "tomorrow"), "is no time; write 30d, 12h"),
    (("keys", "create", "b", "--expires", "999999999y"), "is too far away"),
    (("keys", "create", "b", "--class", "x y"), "class: is no name"),
    (("keys", "create", "b", "--for-model", "m", "tokenz=5"), "limits.models"),
    (("keys", "create", "b", "--credit", "0"), "--credit 0: a number of tokens above 0"),
    (("keys", "create", "b", "--mode", "fast"), "is not one of"),
    (("keys", "show", "nobody"), "there is no key 'nobody'; see: forebay keys list"),
    (("keys", "revoke", "nobody"), "there is no key"),
    (("keys", "limit", "a"), "say which limit to change"),
    (("keys", "limit", "a", "--default", "--concurrency", "1"), "say which limit to change"),
    (("keys", "change", "a"), "say what to change"),
    (("keys", "credit", "a", "5"), "is not prepaid"),
    (("keys", "credit", "a", "none"), "a number above 0"),
    (("keys", "list", "--cursor", "x"), "cursor: is not one that was handed out"),
    (("keys", "list", "--limit", "0"), "not in the range"),
    (("ledger", "history", "nobody"), "there is no key"),
]


@pytest.mark.parametrize(("words", "says"), MISTAKES, ids=[" ".join(words)[:40] for words, _ in MISTAKES])
def test_a_mistake_is_one_clear_line(forebay: Shell, words: tuple[str, ...], says: str) -> None:
    forebay("keys", "create", "a")
    with pytest.raises((ForebayError, click.ClickException), match=re.escape(says)) as raised:
        forebay(*words)
    error = raised.value
    assert error.exit_code != 0
    assert "\n" not in (error.format_message() if isinstance(error, click.ClickException) else str(error))
    assert len(forebay.json("keys", "list")["data"]) == 1


def test_a_store_that_is_not_there_is_not_made_by_asking(forebay: Shell, tmp_path: Path) -> None:
    with pytest.raises(ForebayError, match="there is no store at sqlite:"):
        forebay("keys", "list")
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_names_the_store_and_what_keys_may_refer_to(tmp_path: Path) -> None:
    config = tmp_path / "f.toml"
    config.write_text(f'[keys]\nstore = "sqlite:///{tmp_path / "mine.db"}"\n[classes.gold]\npriority = 1\n')
    run: Callable[..., Any] = lambda *words: CliRunner().invoke(group, [*words, "--config", str(config)])  # noqa: E731
    assert CREDENTIAL.search(run("keys", "create", "a", "--class", "gold").stdout)
    assert (tmp_path / "mine.db").exists()
    refused = CliRunner().invoke(
        group, ["keys", "create", "b", "--class", "golden", "--config", str(config)], standalone_mode=False
    )
    assert "class: 'golden' is not known here; did you mean 'gold'" in str(refused.exception)


def test_a_ledger_that_does_not_add_up_is_exit_status_1(forebay: Shell) -> None:
    import sqlite3

    forebay("keys", "create", "r", "--credit", "5")
    with sqlite3.connect(forebay.store.removeprefix("sqlite:///")) as raw:
        raw.execute("UPDATE accounts SET balance = 6 WHERE kind = 'available'")
    raw.close()
    result = CliRunner().invoke(group, ["ledger", "verify", "--store", forebay.store])
    assert result.exit_code == 1
    assert "6" in result.stderr


@pytest.mark.parametrize("command", ["keys", "ledger"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    shown = CliRunner().invoke(group, [command, "--help"]).stdout
    assert f"forebay {command} " in shown
    for name in re.findall(r"^  ([a-z]+)  ", shown, re.MULTILINE):
        assert CliRunner().invoke(group, [command, name, "--help"]).exit_code == 0
