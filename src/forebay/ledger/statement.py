"""What the ledger says: balances, the history of transfers, and all of it as CSV or JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Literal

import msgspec
from sqlalchemy import Select, select

from forebay.errors import UsageError
from forebay.ledger.booking import KINDS, TRANSFER_COLUMNS, Transfer, as_transfers
from forebay.ledger.database import Database
from forebay.ledger.tables import accounts, entries, transfers

PAGE_MOST = 1000
EXPORT_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Balance:
    """What one key has, in tokens: topped_up = available + held + spent - debt."""

    key: str
    topped_up: int  # what was ever given to it, corrections included
    available: int
    held: int  # leased to gateways, which may spend it
    spent: int
    debt: int  # used beyond what it had; the next top-up pays it


def balance(database: Database, key: str) -> Balance:
    """What a key has; all zero for one that never had credit. Raises StoreError."""
    with database.read() as connection:
        rows = connection.execute(select(accounts.c.kind, accounts.c.balance).where(accounts.c.key_id == key))
        return _balance(key, {kind: tokens for kind, tokens in rows})  # noqa: C416 - rows are typed, dict() wants pairs


def balances(database: Database, *, after: str = "", limit: int = 100) -> list[Balance]:
    """A page of keys that ever had credit, in the order of their ids; the next page is `after` its last key."""
    with database.read() as connection:
        wanted = select(accounts.c.key_id).where(accounts.c.key_id > after).distinct()
        keys = connection.execute(wanted.order_by(accounts.c.key_id).limit(_page(limit))).scalars().all()
        found: dict[str, dict[str, int]] = {key: {} for key in keys}
        rows = select(accounts.c.key_id, accounts.c.kind, accounts.c.balance).where(accounts.c.key_id.in_(keys))
        for key, kind, tokens in connection.execute(rows):
            found[key][kind] = tokens
    return [_balance(key, kinds) for key, kinds in found.items()]


def _balance(key: str, kinds: dict[str, int]) -> Balance:
    issued, available, held, spent, debt = (kinds.get(kind, 0) for kind in KINDS)
    return Balance(key, -issued, available, held, spent, -debt)


def history(
    database: Database, *, key: str | None = None, before: int | None = None, limit: int = 100
) -> list[Transfer]:
    """A page of transfers, the newest first; the next page is `before` the id of its last one."""
    wanted = select(*TRANSFER_COLUMNS).order_by(transfers.c.id.desc()).limit(_page(limit))
    if key is not None:
        wanted = wanted.where(transfers.c.key_id == key)
    if before is not None:
        wanted = wanted.where(transfers.c.id < before)
    with database.read() as connection:
        return as_transfers(connection.execute(wanted))


def export(database: Database, form: Literal["csv", "json"], *, key: str | None = None) -> Iterator[str]:
    """All transfers with their entries, the oldest first, in pieces of text: CSV with a header, or a JSON array.

    It is one transaction, so that it shows one moment of the ledger, and it holds one page of it in memory.
    """
    if form not in {"csv", "json"}:
        raise UsageError(f"the ledger cannot be exported as {form!r}; choose csv or json")
    rows = _exported(database, key)
    return _csv(rows) if form == "csv" else _json(rows)


Row = dict[str, int | str | None]


def _exported(database: Database, key: str | None) -> Iterator[list[Row]]:
    last = 0
    with database.read() as connection:
        while True:
            wanted = select(*TRANSFER_COLUMNS).where(transfers.c.id > last)
            if key is not None:
                wanted = wanted.where(transfers.c.key_id == key)
            page = as_transfers(connection.execute(wanted.order_by(transfers.c.id).limit(EXPORT_PAGE)))
            if not page:
                return
            last = page[-1].id
            moves: dict[int, dict[str, int]] = {transfer.id: {} for transfer in page}
            for transfer, kind, amount in connection.execute(_entries(page[0].id, last, key)):
                moves[transfer][kind] = amount
            yield [asdict(t) | {kind: moves[t.id].get(kind, 0) for kind in KINDS} for t in page]


def _entries(first: int, last: int, key: str | None) -> Select[int, str, int]:
    wanted = (
        select(entries.c.transfer_id, accounts.c.kind, entries.c.amount)
        .join(accounts, accounts.c.id == entries.c.account_id)
        .where(entries.c.transfer_id.between(first, last))
    )
    return wanted if key is None else wanted.where(accounts.c.key_id == key)


def _csv(pages: Iterator[list[Row]]) -> Iterator[str]:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Transfer)] + list(KINDS), lineterminator="\n")
    writer.writeheader()
    for page in pages:
        writer.writerows({name: _plain(value) for name, value in row.items()} for row in page)
        yield text.getvalue()
        text.seek(0)
        text.truncate()
    yield text.getvalue()


def _plain(value: int | str | None) -> int | str | None:
    """A note that a spreadsheet would run as a formula is text."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _json(pages: Iterator[list[Row]]) -> Iterator[str]:
    separator = "[\n"
    for page in pages:
        for row in page:
            yield separator + msgspec.json.encode(row).decode()
            separator = ",\n"
    yield "[]\n" if separator == "[\n" else "\n]\n"


def _page(limit: int) -> int:
    if not 0 < limit <= PAGE_MOST:
        raise UsageError(f"a page of {limit}: ask for 1 to {PAGE_MOST}")
    return limit
