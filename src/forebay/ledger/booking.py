"""How transfers are written: accounts locked in one order, entries that add up to zero, balances kept beside them.

A `Page` is one transaction's work on the accounts of some keys. Locks are taken in the order of the keys, so two
gateways never wait for each other in a ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, bindparam, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from forebay.ledger.tables import accounts, entries, transfers

KINDS = ("issued", "available", "held", "spent", "debt")
COUNTER = "available"
"""The account on which a key's transfers are counted."""
CHUNK = 500  # keys in one statement: SQLite takes 32,766 parameters, and locks should be short

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One line of the ledger. `amount` is in tokens; only an adjustment's may be below zero."""

    id: int
    key: str
    number: int  # 1, 2, 3 … of its key
    kind: str
    amount: int
    lease: int | None
    idempotency: str
    actor: str
    note: str
    at_ms: int


TRANSFER_COLUMNS = (
    transfers.c.id, transfers.c.key_id, transfers.c.number, transfers.c.kind, transfers.c.amount,
    transfers.c.lease_id, transfers.c.idempotency, transfers.c.actor, transfers.c.note, transfers.c.at_ms,
)  # fmt: skip


def as_transfers(rows: Iterable[Any]) -> list[Transfer]:
    """Rows of TRANSFER_COLUMNS."""
    return [Transfer(*row) for row in rows]


@dataclass(slots=True)
class Accounts:
    """The accounts of one key, locked until the transaction ends."""

    ids: dict[str, int] = field(default_factory=dict)
    balances: dict[str, int] = field(default_factory=dict)
    transfers: int = 0
    changed: set[str] = field(default_factory=set)

    def given_back(self, tokens: int) -> dict[str, int]:
        """Where tokens go that become free: to what is owed first, the rest is available."""
        owed = min(tokens, -self.balances["debt"])
        return {"debt": owed, "available": tokens - owed}


class Page:
    """The transfers of one transaction. Nothing is in the store before `write`."""

    def __init__(self, connection: Connection, keys: Iterable[str], now_ms: int) -> None:
        self.connection = connection
        self.now_ms = now_ms
        self.accounts = _locked(connection, sorted(set(keys)))
        self._rows: list[dict[str, Any]] = []
        self._moves: list[dict[str, int]] = []

    def enter(
        self, key: str, kind: str, amount: int, moves: dict[str, int], idempotency: str, *,
        lease: int | None = None, actor: str = "gateway", note: str = "",
    ) -> None:  # fmt: skip
        """Add a transfer: `moves` says by how much each account changes."""
        assert sum(moves.values()) == 0, "ledger: a transfer made or lost tokens"
        account = self.accounts[key]
        for name, change in moves.items():
            if change:
                account.balances[name] += change
                account.changed.add(name)
        account.transfers += 1
        account.changed.add(COUNTER)
        self._rows.append({
            "key_id": key, "number": account.transfers, "kind": kind, "amount": amount, "lease_id": lease,
            "idempotency": idempotency, "actor": actor, "note": note, "at_ms": self.now_ms,
        })  # fmt: skip
        self._moves.append({name: change for name, change in moves.items() if change})

    def write(self) -> list[Transfer]:
        """Write the transfers, in the order in which they were entered."""
        if not self._rows:
            return []
        made = insert(transfers).returning(transfers.c.id, sort_by_parameter_order=True)
        numbers = self.connection.execute(made, self._rows).scalars().all()
        lines = [
            {"transfer_id": number, "account_id": self.accounts[row["key_id"]].ids[name], "amount": change}
            for number, row, moves in zip(numbers, self._rows, self._moves, strict=True)
            for name, change in moves.items()
        ]
        self.connection.execute(insert(entries), lines)
        balances = [
            {
                "of": account.ids[name],
                "to_balance": account.balances[name],
                "to_transfers": account.transfers if name == COUNTER else 0,
            }
            for account in self.accounts.values()
            for name in sorted(account.changed)
        ]
        change = update(accounts).where(accounts.c.id == bindparam("of"))
        self.connection.execute(
            change.values(balance=bindparam("to_balance"), transfers=bindparam("to_transfers")), balances
        )
        return [
            Transfer(number, *(row[column.name] for column in TRANSFER_COLUMNS[1:]))
            for number, row in zip(numbers, self._rows, strict=True)
        ]


def transfers_by(connection: Connection, idempotency: Iterable[str]) -> list[Transfer]:
    """The transfers that were made under these idempotency keys."""
    found: list[Transfer] = []
    for names in chunks(list(idempotency)):
        rows = connection.execute(select(*TRANSFER_COLUMNS).where(transfers.c.idempotency.in_(names)))
        found += as_transfers(rows)
    return found


def insert_or(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    """An INSERT that may say what to do ON CONFLICT, in the store's dialect; both spell it alike."""
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)


def chunks(items: Sequence[T]) -> Iterator[list[T]]:
    """Parts that fit one statement."""
    rest = iter(items)
    while part := list(islice(rest, CHUNK)):
        yield part


def _locked(connection: Connection, keys: list[str]) -> dict[str, Accounts]:
    """The accounts of `keys`, made where there are none."""
    found: dict[str, Accounts] = {key: Accounts() for key in keys}
    for part in chunks(keys):
        _read(connection, part, found)
        if new := [key for key in part if not found[key].ids]:
            rows = [{"key_id": key, "kind": kind, "balance": 0, "transfers": 0} for key in new for kind in KINDS]
            connection.execute(insert_or(connection.dialect.name, accounts).on_conflict_do_nothing(), rows)
            _read(connection, new, found)
    return found


def _read(connection: Connection, keys: list[str], into: dict[str, Accounts]) -> None:
    columns = (accounts.c.key_id, accounts.c.kind, accounts.c.id, accounts.c.balance, accounts.c.transfers)
    wanted = select(*columns).where(accounts.c.key_id.in_(keys)).order_by(accounts.c.key_id, accounts.c.id)
    for key, kind, number, balance, count in connection.execute(wanted.with_for_update()):
        account = into[key]
        account.ids[kind], account.balances[kind] = number, balance
        if kind == COUNTER:
            account.transfers = count
