"""The store of keys: what is kept of them, what a change changes, and the trail of it. On SQLite and PostgreSQL."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, text

from forebay.config.schema import Limits, ModelLimits
from forebay.core.model import Mode
from forebay.ledger import tables
from forebay.ledger.asking import converted
from forebay.ledger.credential import verify
from forebay.ledger.database import Database, StoreError
from forebay.ledger.key import ConflictError, InvalidError, KeyChange, Known, NewKey, NotFoundError, what_is_set
from forebay.ledger.keys import By, Filter, KeyStore

ME = By("cli:me")
SOON = datetime.now(UTC) + timedelta(days=1)
KNOWN = Known(frozenset({"default", "gold"}), frozenset({"*", "chat", "/v1/mine"}), frozenset({"ops"}))


@pytest.fixture
def keys(store: Database) -> KeyStore:
    return KeyStore(store)


def change(**values: Any) -> KeyChange:
    return converted(values, KeyChange)


def everything(store: Database) -> str:
    """All that the store holds, as text."""
    with store.read() as connection:
        return "".join(str(connection.execute(select(table)).all()) for table in tables.metadata.sorted_tables)


def test_a_key_is_kept_with_all_that_was_agreed_and_without_its_secret(keys: KeyStore) -> None:
    limits = Limits(requests_per_minute=60, burst_s=0.5, models={"llama": ModelLimits(concurrency=0)})
    asked = NewKey(
        name="alice's laptop", team="ops", class_="gold", mode=Mode.ADMISSION, models=("b", "a"), routes=("chat",),
        limits=limits, cap_output_tokens=100, prepaid=True, expires_at=SOON,
    )  # fmt: skip
    made = keys.create(asked, ME)
    key = keys.show(made.key.id)
    assert key == made.key
    assert (key.name, key.team, key.class_, key.mode) == ("alice's laptop", "ops", "gold", Mode.ADMISSION)
    assert (key.models, key.routes, key.limits) == (("a", "b"), ("chat",), limits)
    assert (key.cap_output_tokens, key.prepaid, key.state, key.revoked_at) == (100, True, "active", None)
    assert abs((key.expires_at or SOON) - SOON) < timedelta(milliseconds=1)
    assert made.secret is not None
    assert made.secret[-32:] not in everything(keys.database)
    with keys.database.read() as connection:
        assert verify(made.secret.encode(), bytes(connection.execute(select(tables.keys.c.verifier)).scalar_one()))


def test_a_name_is_enough_for_a_key(keys: KeyStore) -> None:
    key = keys.create(NewKey(name="plain"), ME).key
    assert (key.models, key.routes, key.limits, key.class_, key.team) == (("*",), ("*",), None, "default", None)
    assert keys.show("plain") == key


def test_a_key_is_found_by_id_or_name_or_what_its_owner_sends(keys: KeyStore) -> None:
    made = keys.create(NewKey(name="alice"), ME)
    assert made.secret is not None
    for name in (made.key.id, "alice", made.secret, f"sk-fb-{made.key.id}"):
        assert keys.show(name) == made.key
    other = keys.create(NewKey(name="alice"), ME).key
    with pytest.raises(ConflictError, match=f"2 keys have the name 'alice'.*{min(made.key.id, other.id)}"):
        keys.show("alice")
    keys.revoke(made.key.id, ME)
    assert keys.show("alice") == other, "a revoked key gives its name free"
    with pytest.raises(NotFoundError) as raised:
        keys.show("sk-fb-aaaaaaaaaaaaaaaa-a-secret-that-somebody-pasted")
    assert "pasted" not in str(raised.value)


def test_a_change_changes_what_it_names_and_nothing_else(keys: KeyStore) -> None:
    before = keys.create(
        NewKey(name="a", limits=Limits(requests_per_minute=1, tokens_per_minute=2), expires_at=SOON), ME
    ).key  # fmt: skip
    after = keys.change("a", change(limits={"tokens_per_minute": 5, "concurrency": 0}, **{"class": "gold"}), ME)
    assert after.limits == Limits(requests_per_minute=1, tokens_per_minute=5, concurrency=0)
    assert (after.class_, after.expires_at, after.name) == ("gold", before.expires_at, "a")
    after = keys.change("a", change(limits={"requests_per_minute": None}, expires_at=None), ME)
    assert after.limits == Limits(tokens_per_minute=5, concurrency=0)
    assert after.expires_at is None
    assert keys.change("a", change(limits=None), ME).limits is None
    assert keys.change("a", change(limits={"models": {"m": {"concurrency": 3}}}), ME).limits == Limits(
        models={"m": ModelLimits(concurrency=3)}
    )
    assert keys.change("a", change(name="b", models=["*", "x"]), ME).models == ("*",)


def test_revoking_is_for_good(keys: KeyStore) -> None:
    key = keys.create(NewKey(name="a"), ME).key
    revoked = keys.revoke("a", ME)
    assert revoked.state == "revoked"
    assert keys.revoke(key.id, ME) == revoked, "once more changes nothing"
    with pytest.raises(ConflictError, match="was revoked; make a new one"):
        keys.change(key.id, change(name="b"), ME)
    assert [line.action for line in keys.trail(key.id).data] == ["revoke", "create"]


def test_who_changed_what_is_kept(keys: KeyStore, store: Database) -> None:
    key = keys.create(NewKey(name="a"), By("token:1234")).key
    keys.change("a", change(limits={"requests_per_minute": 5}), By("cli:root"))
    trail = keys.trail(key.id).data
    assert [(line.actor, line.action) for line in trail] == [("cli:root", "change"), ("token:1234", "create")]
    assert trail[0].detail == {"limits": [None, {"requests_per_minute": 5}]}
    assert trail[1].detail["name"] == [None, "a"]
    for statement in ("UPDATE audit SET actor = 'me'", "DELETE FROM audit"):
        with pytest.raises(StoreError, match="only ever added to"), store.begin() as connection:
            connection.execute(text(statement))


def test_pages_hold_every_key_once(keys: KeyStore) -> None:
    made = [keys.create(NewKey(name=f"key {i}", team="ops" if i % 2 else None), ME).key.id for i in range(7)]
    seen: list[str] = []
    cursor = None
    while True:
        page = keys.page(Filter(), cursor=cursor, limit=3)
        seen += [key.id for key in page.data]
        if (cursor := page.next_cursor) is None:
            break
    assert sorted(seen) == sorted(made)
    assert len(seen) == 7
    trail = keys.trail(limit=5)
    rest = keys.trail(limit=5, cursor=trail.next_cursor)
    assert [line.key_id for line in (*trail.data, *rest.data)] == made[::-1]
    assert rest.next_cursor is None


def test_a_list_is_filtered(keys: KeyStore) -> None:
    for name, team, class_ in (("Alice 100%", "ops", "gold"), ("bob_x", "ops", "default"), ("carol", None, "gold")):
        keys.create(NewKey(name=name, team=team, class_=class_), ME)
    keys.revoke("carol", ME)
    with keys.database.begin() as connection:
        connection.execute(tables.keys.update().where(tables.keys.c.name == "bob_x").values(expires_ms=1))

    def names(**which: Any) -> list[str]:
        return sorted(key.name for key in keys.page(Filter(**which)).data)

    assert names(name="alice") == ["Alice 100%"]
    assert names(name="%") == ["Alice 100%"], "no pattern, a part of the name"
    assert names(name="_") == ["bob_x"]
    assert names(team="ops", class_="gold") == ["Alice 100%"]
    assert (names(state="active"), names(state="expired"), names(state="revoked")) == (
        ["Alice 100%"], ["bob_x"], ["carol"],
    )  # fmt: skip


@pytest.mark.parametrize("cursor", ["x", "", "e30", "WyJhIl0", "WzEsMl0", "[1]", "x" * 5000, "é"])
def test_a_cursor_that_nobody_handed_out(keys: KeyStore, cursor: str) -> None:
    for page in (lambda: keys.page(Filter(), cursor=cursor), lambda: keys.trail(cursor=cursor + "!")):
        with pytest.raises(InvalidError, match="cursor: is not one that was handed out"):
            page()


def test_a_request_that_is_repeated_is_carried_out_once(keys: KeyStore) -> None:
    again = By("token:1", "word")
    first, second = keys.create(NewKey(name="a"), again), keys.create(NewKey(name="a"), again)
    assert first.key == second.key
    assert second.secret is None, "it is shown once"
    with pytest.raises(ConflictError, match="used for another request"):
        keys.create(NewKey(name="b"), again)
    with pytest.raises(ConflictError, match="used for another request"):
        keys.create(NewKey(name="a"), By("token:2", "word"))
    changed = By("token:1", "other")
    keys.change("a", change(limits={"requests_per_minute": 5}), changed)
    keys.change("a", change(limits={"requests_per_minute": 6}), ME)
    assert keys.change("a", change(limits={"requests_per_minute": 5}), changed).limits == Limits(requests_per_minute=6)
    assert len(keys.page(Filter()).data) == 1
    for word in ("", "x" * 129, "a\nb"):
        with pytest.raises(InvalidError, match="printable characters"):
            keys.create(NewKey(name="a"), By("token:1", word))


def test_the_same_request_from_many_at_once_makes_one_key(keys: KeyStore) -> None:
    made: list[Any] = []
    threads = [
        threading.Thread(target=lambda: made.append(keys.create(NewKey(name="a"), By("me", "w")))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.key.id for each in made}) == 1
    assert sum(each.secret is not None for each in made) == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"name": ""}, "name: must be text of length >= 1"),
        ({"name": "a\x00b"}, "name: is empty, or holds control characters"),
        ({"name": "a" * 129}, "name: must be text of length <= 128"),
        ({}, "Object missing required field `name`"),
        ({"name": "a", "team": "x y"}, "team: is no name"),
        ({"name": "a", "klass": "gold"}, "klass: is not known here; did you mean 'class'"),
        (
            {"name": "a", "limits": {"tokens_per_minuet": 1}},
            "limits.tokens_per_minuet: .*did you mean 'tokens_per_minute'",
        ),
        ({"name": "a", "limits": {"models": {"m": {"concurency": 1}}}}, "did you mean 'concurrency'"),
        ({"name": "a", "limits": {"tokens_per_minute": -1}}, "limits.tokens_per_minute: must be a whole number >= 0"),
        ({"name": "a", "limits": {"tokens_per_minute": 1 << 60}}, "must be a whole number <= 9007199254740992"),
        ({"name": "a", "limits": {"tokens_per_minute": 1.5}}, "must be a whole number"),
        ({"name": "a", "limits": {"tokens_per_minute": True}}, "must be a whole number"),
        ({"name": "a", "limits": {"tokens_per_minute": "9"}}, "must be a whole number"),
        ({"name": "a", "limits": {"burst_s": 0}}, "limits.burst_s: must be a number > 0"),
        (
            {"name": "a", "limits": {"tokens_per_second": 1, "burst_s": 0.1}},
            "limits.burst_s: allows less than one token",
        ),
        ({"name": "a", "cap_output_tokens": 0}, "cap_output_tokens: must be a whole number >= 1"),
        ({"name": "a", "models": []}, "models: must be a list of length >= 1"),
        ({"name": "a", "mode": "fast"}, "mode: Invalid enum value 'fast'"),
        ({"name": "a", "routes": ["chat", "chatt"]}, r"routes\[1\]: 'chatt' is not known here; did you mean 'chat'"),
        ({"name": "a", "class": "golden"}, "class: 'golden' is not known here; did you mean 'gold'"),
        ({"name": "a", "team": "opps"}, "team: 'opps' is not known here; did you mean 'ops'"),
        (
            {"name": "a", "expires_at": "2020-01-01T00:00:00Z"},
            "expires_at: .*is in the past; to end a key now, revoke it",
        ),
        ({"name": "a", "expires_at": "2999-01-01T00:00:00"}, "expires_at: must be a time with a timezone"),
        ({"name": "a", "expires_at": "soon"}, "expires_at: Invalid RFC3339"),
    ],
)
def test_what_cannot_be_is_refused_with_where_and_why(store: Database, asked: dict[str, Any], said: str) -> None:
    keys = KeyStore(store, KNOWN)
    with pytest.raises(InvalidError, match=said):
        keys.create(converted(asked, NewKey), ME)
    assert keys.page(Filter()).data == []


def test_names_of_a_configuration_are_asked_of_changes_too(store: Database) -> None:
    keys = KeyStore(store, KNOWN)
    keys.create(NewKey(name="a", class_="gold", routes=("/v1/mine",), team="ops"), ME)
    for wrong in (
        {"class": "silver"},
        {"routes": ["*", "/v2"]},
        {"team": "dev"},
        {"expires_at": "2020-01-01T00:00:00Z"},
    ):
        with pytest.raises(InvalidError):
            keys.change("a", change(**wrong), ME)
    with pytest.raises(InvalidError, match="less than one token"):
        keys.change("a", change(limits={"tokens_per_second": 1, "burst_s": 0.5}), ME)
    assert keys.change("a", change(team=None), ME).team is None


def test_what_is_set_of_limits_is_what_differs_from_none() -> None:
    limits = Limits(requests_per_minute=0, models={"m": ModelLimits(tokens_per_second=5, burst_s=1.0)})
    assert what_is_set(limits) == {
        "requests_per_minute": 0,
        "models": {"m": {"tokens_per_second": 5, "burst_s": 1.0}},
    }
    assert what_is_set(Limits()) == {}
