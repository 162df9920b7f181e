"""Opening the store: what is made, what is refused, and what is said."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import insert, select, text

from forebay.ledger import tables
from forebay.ledger.database import Database, StoreError, StoreGoneError, open_store


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'store.db'}"


def add_twice(store: Database, row: dict[str, object]) -> None:
    with store.begin() as connection:
        connection.execute(insert(tables.journals).values(row))
        connection.execute(insert(tables.journals).values(row))


def test_the_tables_are_those_that_the_code_knows(tmp_path: Path) -> None:
    store = open_store(url(tmp_path))
    with store.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []
    store.close()


def test_head_is_the_newest_script() -> None:
    config = Config()
    config.set_main_option("script_location", "forebay.ledger:migrations")
    assert ScriptDirectory.from_config(config).get_current_head() == tables.HEAD


def test_sqlite_keeps_what_it_said_it_wrote(tmp_path: Path) -> None:
    store = open_store(url(tmp_path))
    with store.read() as connection:
        said = [
            connection.execute(text(f"PRAGMA {p}")).scalar() for p in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert said == ["wal", 2, 1]
    store.close()


def test_a_transaction_that_fails_changes_nothing(tmp_path: Path) -> None:
    store = open_store(url(tmp_path))
    row = {"id": "j", "gateway": "g", "posted": 0, "opened_ms": 0, "posted_ms": 0}
    with pytest.raises(StoreError, match="UNIQUE"):
        add_twice(store, row)
    with store.read() as connection:
        assert connection.execute(select(tables.journals)).all() == []
    store.close()


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    open_store(url(tmp_path)).close()
    with sqlite3.connect(tmp_path / "store.db") as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.close()
    with pytest.raises(StoreError, match=r"newer Forebay \(version 9999.*upgrade"):
        open_store(url(tmp_path))


def test_a_store_without_tables_is_left_alone_where_none_may_be_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no tables yet"):
        open_store(url(tmp_path), migrate=False)


def test_several_gateways_that_start_at_once_migrate_once(tmp_path: Path) -> None:
    failures: list[Exception] = []

    def start() -> None:
        try:
            open_store(url(tmp_path)).close()
        except Exception as error:  # whatever it is, the test is to say it
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("nonsense", "cannot be read; write sqlite:///FILE or postgresql://"),
        ("mysql://root@localhost/x", "cannot be a mysql database"),
        ("sqlite://", "needs a file"),
        ("sqlite:////no/such/folder/x.db", "its folder must exist"),
        ("postgresql://me:hunter2@127.0.0.1:1/x", "does not answer"),
    ],
)
def test_what_cannot_be_opened_is_said_with_what_to_do(wrong: str, said: str) -> None:
    with pytest.raises(StoreError, match=said) as raised:
        open_store(wrong)
    assert "hunter2" not in str(raised.value)


def test_another_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"something else, and long enough to be read as a header" * 100)
    with pytest.raises(StoreError, match="not a sound SQLite database"):
        open_store(url(tmp_path))


def test_a_locked_store_is_gone_for_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.ledger.database.BUSY_MS", 1)
    store = open_store(url(tmp_path))
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreGoneError, match="locked by another process"), store.begin():
        pytest.fail("two writers at once")
    other.close()
    store.close()


def test_the_ledger_is_only_ever_added_to(tmp_path: Path) -> None:
    store = open_store(url(tmp_path))
    row = {
        "key_id": "k", "number": 1, "kind": "top_up", "amount": 5, "idempotency": "i", "actor": "a", "note": "",
        "at_ms": 0,
    }  # fmt: skip
    with store.begin() as connection:
        connection.execute(insert(tables.transfers).values(row))
    for statement in ("UPDATE transfers SET amount = 6", "DELETE FROM transfers"):
        with pytest.raises(StoreError, match="only ever added"), store.begin() as connection:
            connection.execute(text(statement))
    with store.read() as connection:
        assert connection.execute(select(tables.transfers.c.amount)).scalars().all() == [5]
    store.close()
