"""Keys in memory: what a credential opens, when it stops to, and what changes bring."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.config.build import KeyEntry
from forebay.config.load import loads
from forebay.config.schema import Config, Limits
from forebay.core.model import Mode
from forebay.core.quota.terms import KeyLimits
from forebay.ledger.credential import Minted, mint
from forebay.ledger.database import Database, StoreGoneError, open_store
from forebay.ledger.feed import KeyFeed
from forebay.ledger.key import KeyChange, NewKey
from forebay.ledger.keyring import Keyring, StoredKey
from forebay.ledger.keys import By, KeyStore

ME = By("me")
CONFIG = loads(
    """
[limits.default]
requests_per_minute = 7
[limits.all]
concurrency = 9
[classes.gold]
priority = 5
mode = "admission"
weight = 2.0
[teams.ops]
limits = { tokens_per_minute = 5 }
[[keys.static]]
id = "static"
secret = "sk-static"
"""
).config


def row(minted: Minted, **other: Any) -> tuple[Any, ...]:
    """A row of the store."""
    values = {
        "expires_ms": None, "revoked_ms": None, "team": None, "class": "default", "mode": None, "models": None,
        "routes": None, "limits": None, "cap_output_tokens": None, "prepaid": 0,
    } | other  # fmt: skip
    return (minted.public_id, minted.verifier, *values.values())


def ring(*rows: tuple[Any, ...], config: Config = CONFIG) -> Keyring:
    made = Keyring(config)
    made.take(rows)
    return made


def test_the_right_credential_opens_and_no_other() -> None:
    one, other = mint(), mint()
    keys = ring(row(one), row(other))
    found = keys.find(one.credential.encode())
    assert found is not None
    assert (found.id, found.stored, found.prepaid) == (one.public_id, True, False)
    for wrong in (
        mint().credential,
        one.credential[:-1] + "x",
        f"sk-fb-{one.public_id}-{other.credential[-32:]}",
        "sk-static",
        "",
        one.credential.upper(),
        one.public_id,
    ):
        assert keys.find(wrong.encode()) is None
        assert keys.why_not(wrong.encode()) is None, "who does not have the key learns nothing of it"


def test_an_entry_has_what_its_key_and_its_class_say() -> None:
    minted = mint()
    spelt = {
        "class": "gold", "models": '["a","b"]', "routes": '["chat"]', "cap_output_tokens": 50, "prepaid": 1,
    }  # fmt: skip
    entry = ring(row(minted, **spelt)).find(minted.credential.encode())
    assert entry == KeyEntry(
        minted.public_id,
        5,
        "gold",
        Mode.ADMISSION,
        frozenset({"a", "b"}),
        frozenset({"chat"}),
        2.0,
        max_output_tokens=50,
        stored=True,
        prepaid=True,
    )
    own = ring(row(minted, **spelt, mode="hybrid")).find(minted.credential.encode())
    assert own is not None
    assert own.mode is Mode.HYBRID


def test_a_class_that_is_gone_is_the_default_one() -> None:
    minted = mint()
    entry = ring(row(minted, **{"class": "silver"})).find(minted.credential.encode())
    assert entry is not None
    assert (entry.priority_class, entry.priority) == ("default", 0)


def test_the_core_is_told_limits_groups_and_whether_it_pays_first() -> None:
    own, plain = mint(), mint()
    keys = ring(row(own, limits='{"concurrency":3}', team="ops", prepaid=1), row(plain))
    by_id = {key.id: keys.agreed(key) for key in keys.open_keys()}
    assert by_id[own.public_id].limits == KeyLimits(concurrency=3)
    assert by_id[own.public_id].groups == ("team:ops", "all")
    assert by_id[own.public_id].prepaid
    assert by_id[plain.public_id].limits == KeyLimits(requests_per_minute=7), "those of [limits.default]"


def test_keys_with_the_same_terms_share_them() -> None:
    many = [mint() for _ in range(50)]
    keys = ring(*(row(each, limits='{"concurrency":3}') for each in many))
    assert len({id(keys.agreed(key)) for key in keys.open_keys()}) == 1
    assert len({id(key.terms) for key in keys.open_keys()}) == 1


def test_expiry_needs_no_database_and_no_clock_opens_again() -> None:
    soon, later, never = mint(), mint(), mint()
    keys = ring(row(later, expires_ms=2000), row(soon, expires_ms=1000), row(never))
    assert keys.expire(999) == []
    assert [key.id for key in keys.expire(1000)] == [soon.public_id]
    assert keys.find(soon.credential.encode()) is None
    assert keys.why_not(soon.credential.encode()) == "has expired"
    assert keys.expire(0) == [], "the wall clock stepped back"
    assert keys.find(soon.credential.encode()) is None
    assert keys.find(later.credential.encode()) is not None
    assert [key.id for key in keys.expire(10**15)] == [later.public_id]
    assert keys.find(never.credential.encode()) is not None


def test_a_new_expiry_counts_and_the_old_one_does_not() -> None:
    minted = mint()
    keys = ring(row(minted, expires_ms=1000))
    keys.take([row(minted, expires_ms=3000)])
    assert keys.expire(1500) == []
    assert keys.find(minted.credential.encode()) is not None
    keys.take([row(minted, expires_ms=None)])
    assert keys.expire(5000) == []
    assert keys.find(minted.credential.encode()) is not None


def test_a_revoked_key_is_known_as_one() -> None:
    minted = mint()
    keys = ring(row(minted))
    keys.take([row(minted, revoked_ms=5)])
    assert keys.find(minted.credential.encode()) is None
    assert keys.why_not(minted.credential.encode()) == "was revoked"
    assert list(keys.open_keys()) == []
    assert keys.knows(minted.public_id)


def test_a_static_key_with_the_same_id_goes_first() -> None:
    minted = mint()._replace(public_id="static")
    keys = ring(row(minted))
    assert list(keys.open_keys()) == []
    assert not keys.knows("static")


def test_a_reload_changes_what_classes_mean() -> None:
    minted = mint()
    keys = ring(row(minted, **{"class": "gold"}))
    keys.reconfigure(loads("classes.gold.priority = 9\nlimits.default.concurrency = 1").config)
    (key,) = keys.open_keys()
    assert keys.agreed(key).limits == KeyLimits(concurrency=1)
    entry = keys.find(minted.credential.encode())
    assert entry is not None
    assert (entry.priority, entry.mode) == (9, None)


def test_a_key_costs_little_memory() -> None:
    """Rows of what hundred thousand keys are made of; what is counted is objects for the collector to walk."""
    made = mint()
    rows = [(f"{i:016d}", made.verifier, *row(made)[2:]) for i in range(2000)]
    gc.collect()
    before = len(gc.get_objects())
    keys = ring(*rows)
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    assert len(keys) == 2000


# ---- the feed


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = open_store(f"sqlite:///{tmp_path / 'keys.db'}")
    yield opened
    opened.close()


class Watched:
    """A feed whose loop runs when asked, and what it told."""

    def __init__(self, database: Database) -> None:
        self.keyring = Keyring(CONFIG)
        self.told: list[list[str]] = []
        self.now = 1.0
        self.feed = KeyFeed(database, self.keyring, self._changed, wall=lambda: self.now)
        self.feed.load()
        self.loop = asyncio.new_event_loop()
        self.feed._loop = self.loop

    def _changed(self, keys: list[StoredKey]) -> None:
        self.told.append(sorted(key.id for key in keys))

    def look(self) -> None:
        self.feed.look()
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()


@pytest.fixture
def watched(database: Database) -> Iterator[Watched]:
    made = Watched(database)
    yield made
    made.loop.close()


def test_a_look_brings_what_changed_and_nothing_else(database: Database, watched: Watched) -> None:
    keys = KeyStore(database)
    first, second = (keys.create(NewKey(name=name), ME) for name in "ab")
    watched.look()
    assert watched.told == [sorted([first.key.id, second.key.id])]
    watched.look()
    assert len(watched.told) == 1, "nothing has changed"
    keys.revoke("a", ME)
    keys.change("b", KeyChange(name="c"), ME)
    keys.revoke("c", ME)
    watched.look()
    assert watched.told[1] == sorted([first.key.id, second.key.id])
    assert list(watched.keyring.open_keys()) == []


def test_load_brings_every_key_that_is_not_revoked(database: Database) -> None:
    keys = KeyStore(database)
    kept, revoked = (keys.create(NewKey(name=name), ME) for name in "ab")
    keys.revoke("b", ME)
    watched = Watched(database)
    watched.loop.close()
    assert [key.id for key in watched.keyring.open_keys()] == [kept.key.id]
    assert not watched.keyring.knows(revoked.key.id)
    assert kept.secret is not None
    assert watched.keyring.find(kept.secret.encode()) is not None


def test_time_alone_closes_a_key(database: Database, watched: Watched) -> None:
    keys = KeyStore(database)
    made = keys.create(NewKey(name="a"), ME)
    with database.begin() as connection:
        connection.exec_driver_sql("UPDATE keys SET expires_ms = 5000, change = 2")
        connection.exec_driver_sql("UPDATE changes SET number = 2")
    watched.look()
    watched.now = 6.0
    watched.look()
    assert watched.told == [[made.key.id], [made.key.id]]
    assert list(watched.keyring.open_keys()) == []


def test_many_changes_come_in_parts(database: Database, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.ledger.feed.AT_ONCE", 2)
    keys = KeyStore(database)
    made = sorted(keys.create(NewKey(name=str(i)), ME).key.id for i in range(5))
    watched.look()
    assert [len(part) for part in watched.told] == [2, 2, 1]
    assert sorted(key for part in watched.told for key in part) == made


def test_a_store_that_is_gone_leaves_the_keys_as_they_are(
    database: Database, watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = KeyStore(database).create(NewKey(name="a", limits=Limits(concurrency=1)), ME)
    watched.look()
    assert made.secret is not None

    def gone() -> None:
        raise StoreGoneError("the store is away")

    monkeypatch.setattr(watched.feed, "look", gone)
    turns = iter([False, False, True])
    monkeypatch.setattr(watched.feed._stop, "wait", lambda _seconds: next(turns))
    watched.feed._follow()
    assert watched.feed.degraded == "changes of keys are not seen: the store is away"
    assert caplog.text.count("the store is away") == 1, "one line, not one each time"
    assert watched.keyring.find(made.secret.encode()) is not None
