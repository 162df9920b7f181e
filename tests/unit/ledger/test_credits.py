"""The ledger of credits: what each transfer moves, what is refused, what a repetition does, and what is added up."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest

from forebay.errors import UsageError
from forebay.ledger.credits import Credits, Grant, Hold
from forebay.ledger.database import Database, open_store
from forebay.ledger.posting import Posting, Tally
from forebay.ledger.statement import Balance, balance, balances, export, history
from forebay.ledger.verify import verify

TTL_MS = 60_000


class Gateway:
    """One gateway's side of the ledger."""

    def __init__(self, store: Database) -> None:
        self.posting, self.journal, self.batch, self.frame = Posting(store), uuid4().hex, 0, 0
        self.posting.register(self.journal, "here")

    def hold(self, key: str, need: int, want: int = 0, ttl_ms: int = TTL_MS) -> int:
        self.batch += 1
        return self.posting.credits.hold(self.journal, self.batch, [Hold(key, need, want)], ttl_ms)[key].tokens

    def release(self, key: str, tokens: int) -> None:
        self.batch += 1
        self.posting.credits.release(self.journal, self.batch, {key: tokens})

    def use(self, key: str, tokens: int) -> None:
        self.posting.post(self.journal, self.frame, self.frame + 1, used(key, tokens))
        self.frame += 1

    def end(self) -> None:
        self.posting.finish(self.journal, self.frame, self.frame, Tally())

    def expire(self) -> int:
        books = self.posting.credits
        return books.expire(self.journal, books.late(self.journal))


def used(key: str, tokens: int) -> Tally:
    tally = Tally()
    tally.add(key, 0, tokens, 0, prepaid=True)
    return tally


def give(store: Database, key: str, tokens: int) -> None:
    Credits(store).top_up(key, tokens, idempotency=uuid4().hex, actor="test")


def has(store: Database, key: str) -> tuple[int, int, int, int]:
    """(available, held, spent, debt), once the ledger has been added up."""
    assert verify(store) == []
    found = balance(store, key)
    return found.available, found.held, found.spent, found.debt


def test_a_key_without_credit_has_nothing(store: Database) -> None:
    assert balance(store, "nobody") == Balance("nobody", 0, 0, 0, 0, 0)
    assert Gateway(store).hold("nobody", 1) == 0
    assert has(store, "nobody") == (0, 0, 0, 0)


def test_the_way_of_a_token(store: Database) -> None:
    give(store, "k", 1000)
    gateway = Gateway(store)
    assert gateway.hold("k", 300) == 300
    assert has(store, "k") == (700, 300, 0, 0)
    gateway.use("k", 120)
    assert has(store, "k") == (700, 180, 120, 0)
    gateway.release("k", 100)
    assert has(store, "k") == (800, 80, 120, 0)
    gateway.end()
    assert has(store, "k") == (880, 0, 120, 0)
    assert [t.kind for t in history(store, key="k")] == ["release", "release", "capture", "hold", "top_up"]


def test_a_gateway_that_only_wants_leaves_half_to_the_others(store: Database) -> None:
    give(store, "k", 1000)
    first, second = Gateway(store), Gateway(store)
    assert first.hold("k", 10, want=5000) == 500
    assert second.hold("k", 400, want=5000) == 400
    assert first.hold("k", 400) == 100  # it needs more than there is: it gets what there is
    assert second.hold("k", 1) == 0
    assert has(store, "k") == (0, 1000, 0, 0)


def test_use_beyond_the_lease_is_taken_from_the_rest_and_then_owed(store: Database) -> None:
    give(store, "k", 100)
    gateway = Gateway(store)
    gateway.hold("k", 60)
    gateway.use("k", 90)
    assert has(store, "k") == (10, 0, 90, 0)
    gateway.use("k", 30)
    assert has(store, "k") == (0, 0, 120, 20)
    give(store, "k", 15)
    assert has(store, "k") == (0, 0, 120, 5)
    give(store, "k", 15)
    assert has(store, "k") == (10, 0, 120, 0)


def test_what_is_given_back_pays_what_is_owed_first(store: Database) -> None:
    give(store, "k", 100)
    one, other = Gateway(store), Gateway(store)
    one.hold("k", 100)
    other.use("k", 30)  # of a lease that was never its own
    assert has(store, "k") == (0, 100, 30, 30)
    one.end()
    assert has(store, "k") == (70, 0, 30, 0)


def test_a_batch_is_posted_once_however_often_it_is_sent(store: Database) -> None:
    give(store, "k", 100)
    gateway = Gateway(store)
    gateway.hold("k", 60)
    for _ in range(3):
        gateway.posting.post(gateway.journal, 0, 7, used("k", 25))
    assert has(store, "k") == (40, 35, 25, 0)
    assert gateway.posting.used(0) == {"k": (25, 25)}


def test_frames_that_do_not_join_are_refused(store: Database) -> None:
    gateway = Gateway(store)
    with pytest.raises(Exception, match="not the store that the journal belongs to"):
        gateway.posting.post(gateway.journal, 5, 9, used("k", 1))
    assert has(store, "k") == (0, 0, 0, 0)
    assert gateway.posting.used(0) == {}


def test_a_hold_whose_answer_was_lost_grants_nothing_again(store: Database) -> None:
    give(store, "k", 100)
    gateway = Gateway(store)
    for _ in range(2):
        assert gateway.posting.credits.hold(gateway.journal, 1, [Hold("k", 30, 30), Hold("l", 5, 5)], TTL_MS) == {
            "k": Grant(30, 70),
            "l": Grant(0, 0),
        }
    for _ in range(2):
        gateway.posting.credits.release(gateway.journal, 2, {"k": 10})
    assert has(store, "k") == (80, 20, 0, 0)


def test_a_top_up_is_made_once(store: Database) -> None:
    ledger = Credits(store)
    first = ledger.top_up("k", 50, idempotency="invoice-7", actor="ann", note="paid")
    assert ledger.top_up("k", 50, idempotency="invoice-7", actor="ann", note="paid") == first
    with pytest.raises(UsageError, match="was used for another transfer"):
        ledger.top_up("k", 51, idempotency="invoice-7", actor="ann")
    with pytest.raises(UsageError, match="was used for another transfer"):
        ledger.top_up("other", 50, idempotency="invoice-7", actor="ann")
    assert has(store, "k") == (50, 0, 0, 0)


def test_top_ups_at_once_are_all_there(store: Database) -> None:
    def give_five() -> None:
        for _ in range(5):
            give(store, "k", 3)

    threads = [threading.Thread(target=give_five) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert has(store, "k") == (60, 0, 0, 0)


@pytest.mark.parametrize("tokens", [0, -5, 1 << 60])
def test_a_top_up_of_no_amount_is_refused(store: Database, tokens: int) -> None:
    with pytest.raises(UsageError, match="a top-up of"):
        Credits(store).top_up("k", tokens, idempotency="x", actor="ann")


@pytest.mark.parametrize("name", ["", "x" * 129, "~hold:1"])
def test_an_idempotency_key_is_the_callers_own(store: Database, name: str) -> None:
    with pytest.raises(UsageError, match="an idempotency key has"):
        Credits(store).top_up("k", 1, idempotency=name, actor="ann")


def test_an_adjustment_takes_back_no_more_than_is_free(store: Database) -> None:
    ledger = Credits(store)
    give(store, "k", 100)
    Gateway(store).hold("k", 60)
    with pytest.raises(UsageError, match="has 40 tokens available"):
        ledger.adjust("k", -41, idempotency="a", actor="ann", note="mistake")
    ledger.adjust("k", -40, idempotency="b", actor="ann", note="mistake")
    ledger.adjust("k", 7, idempotency="c", actor="ann", note="kindness")
    assert has(store, "k") == (7, 60, 0, 0)
    assert balance(store, "k").topped_up == 67


def test_the_leases_of_a_gateway_that_never_returns_expire(store: Database) -> None:
    give(store, "k", 100)
    lost, alive = Gateway(store), Gateway(store)
    lost.hold("k", 60, ttl_ms=0)
    alive.hold("k", 20, ttl_ms=0)
    lost.use("k", 15)
    assert alive.expire() == 1
    assert has(store, "k") == (65, 20, 15, 0)
    lost.use("k", 5)  # it comes back after all: what it used is taken from what is free
    assert has(store, "k") == (60, 20, 20, 0)
    assert alive.expire() == 0


def test_a_lease_that_was_renewed_does_not_expire(store: Database) -> None:
    give(store, "k", 100)
    gateway, other = Gateway(store), Gateway(store)
    gateway.hold("k", 60, ttl_ms=0)
    gateway.posting.credits.renew(gateway.journal, TTL_MS)
    assert other.expire() == 0
    assert has(store, "k") == (40, 60, 0, 0)


def test_many_keys_in_one_call(store: Database) -> None:
    names = [f"k{number:04}" for number in range(1200)]
    gateway, tally = Gateway(store), Tally()
    for name in names[:600]:
        tally.add(name, 0, 1, 2, prepaid=True)
    holds = [Hold(name, 5, 5) for name in names]
    assert set(gateway.posting.credits.hold(gateway.journal, 1, holds, TTL_MS).values()) == {Grant(0, 0)}
    gateway.posting.post(gateway.journal, 0, 1, tally)
    assert verify(store) == []
    page = balances(store, limit=1000)
    assert [b.key for b in page] == names[:1000]
    assert [b.key for b in balances(store, after=page[-1].key)] == names[1000:1100]
    assert {b.debt for b in page[:600]} == {3}
    assert {b.debt for b in page[600:]} == {0}


def test_the_history_comes_in_pages(store: Database) -> None:
    for number in range(5):
        give(store, "k", number + 1)
        give(store, "l", 100)
    first = history(store, key="k", limit=3)
    rest = history(store, key="k", before=first[-1].id, limit=3)
    assert [t.amount for t in first + rest] == [5, 4, 3, 2, 1]
    assert [t.number for t in first + rest] == [5, 4, 3, 2, 1]
    with pytest.raises(UsageError, match="a page of 0"):
        history(store, limit=0)


def test_the_export_is_the_ledger(store: Database) -> None:
    Credits(store).top_up("k", 100, idempotency="=1+1", actor="ann", note='with "quotes", and\nlines')
    gateway = Gateway(store)
    gateway.hold("k", 60)
    gateway.use("k", 90)
    give(store, "l", 1)
    rows = json.loads("".join(export(store, "json")))
    assert [(r["key"], r["kind"], r["amount"]) for r in rows] == [
        ("k", "top_up", 100), ("k", "hold", 60), ("k", "capture", 90), ("l", "top_up", 1),
    ]  # fmt: skip
    assert [rows[2][kind] for kind in ("issued", "available", "held", "spent", "debt")] == [0, -30, -60, 90, 0]
    lines = list(csv.DictReader(io.StringIO("".join(export(store, "csv", key="k")))))
    assert [line["amount"] for line in lines] == ["100", "60", "90"]
    assert (lines[0]["idempotency"], lines[0]["note"]) == ("'=1+1", 'with "quotes", and\nlines')


def test_an_empty_ledger_is_exported_too(store: Database) -> None:
    assert json.loads("".join(export(store, "json"))) == []
    assert "".join(export(store, "csv")).startswith("id,key,number,kind,amount")
    with pytest.raises(UsageError, match="choose csv or json"):
        export(store, "xml")  # type: ignore[arg-type]


def test_a_gateway_that_was_heard_of_since_it_seemed_late_keeps_its_leases(store: Database) -> None:
    """Whoever saw it late looks again before it ends anything."""
    slow, other = Gateway(store), Gateway(store)
    slow.posting.credits.top_up("k", 100, idempotency="i", actor="ann")
    slow.posting.credits.hold(slow.journal, 1, [Hold("k", 40, 40)], -1)
    late = other.posting.credits.late(other.journal)
    assert set(late) == {slow.journal}
    slow.posting.credits.renew(slow.journal, 1)
    time.sleep(0.003)  # late again, and later than was seen
    assert other.posting.credits.expire(other.journal, late) == 0
    assert other.expire() == 1


def test_use_is_counted_by_day_and_month(store: Database) -> None:
    posting, journal = Posting(store), uuid4().hex
    posting.register(journal, "here")
    day = 86_400_000
    leap = 11_016 * day  # 2000-02-29
    for number, at_ms in enumerate((leap - 1, leap, leap + day - 1, leap + day)):
        tally = Tally()
        tally.add("k", at_ms, 10, 5, prepaid=False)
        posting.post(journal, number, number + 1, tally)
    assert posting.used(leap) == {"k": (30, 45)}
    assert posting.used(leap + day) == {"k": (15, 15)}
    assert posting.used(leap + 31 * day) == {"k": (0, 15)}
    assert posting.used(leap + 40 * day) == {}


FORGERIES = [
    ("UPDATE accounts SET balance = balance + 1 WHERE kind = 'available'", "available stands at"),
    ("UPDATE entries SET amount = amount - 1 WHERE amount = -60", "add up to -1 tokens, not to zero"),
    ("DELETE FROM transfers WHERE kind = 'capture'", "it had 3 transfers, but 2 are here"),
    ("UPDATE transfers SET amount = 80 WHERE kind = 'capture'", "a capture of 80 tokens, but its entries move 90"),
    ("UPDATE leases SET captured = 0", "0 tokens captured, but its transfers moved 60"),
    ("UPDATE leases SET state = 'released', granted = 70, returned = 10", "70 tokens granted, but its transfers"),
    ("DELETE FROM entries WHERE amount = 90", "entries add up to -90 tokens"),
    ("UPDATE transfers SET key_id = 'l', number = 9 WHERE kind = 'hold'", "it is of key l, but one of its entries of"),
    ("DELETE FROM accounts WHERE kind = 'debt'", "its 4 accounts"),
]


@pytest.mark.parametrize(("forgery", "said"), FORGERIES)
def test_what_does_not_add_up_is_found(tmp_path: Path, forgery: str, said: str) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    give(store, "k", 100)
    gateway = Gateway(store)
    gateway.hold("k", 60)
    gateway.use("k", 90)
    assert verify(store) == []
    raw = sqlite3.connect(tmp_path / "store.db")
    for (trigger,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        raw.execute(f"DROP TRIGGER {trigger}")
    raw.execute("PRAGMA ignore_check_constraints = ON")
    assert raw.execute(forgery).rowcount > 0
    raw.commit()
    raw.close()
    assert any(said in f"{found.where}: {found.text}" for found in verify(store)), verify(store)
    store.close()
