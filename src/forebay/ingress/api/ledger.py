"""Endpoints for credits: give some to a key, see history and balances, export all of it, and have it added up again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct

from forebay.ingress.api.asking import body_of, query_of
from forebay.ingress.api.keys import KEYS, in_thread, json
from forebay.ingress.api.table import Asked, Endpoint, Reply
from forebay.ledger import paging, statement
from forebay.ledger.booking import Transfer
from forebay.ledger.credits import Credits
from forebay.ledger.database import Database
from forebay.ledger.key import ConflictError
from forebay.ledger.keys import KeyStore
from forebay.ledger.paging import PAGE_DEFAULT, Page
from forebay.ledger.statement import Balance
from forebay.ledger.verify import Discrepancy, verify

LEDGER = "/api/v1/ledger"
MOST = 1 << 53


class Credit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens to give to a key; below zero: to take away."""

    tokens: Annotated[int, Meta(ge=-MOST, le=MOST, description="Below zero they are taken away.")]
    note: Annotated[str, Meta(max_length=1000, description="What it is for.")] = ""


class Credited(Struct, frozen=True):
    """What was entered, and what the key has now."""

    transfer: Transfer
    balance: Balance


class HistoryQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which transfers to list."""

    key: Annotated[str | None, Meta(description="Id of the key.")] = None
    cursor: Annotated[str | None, Meta(description="next_cursor of the page before.")] = None
    limit: Annotated[int, Meta(description="Most that one page holds, up to 1000.")] = PAGE_DEFAULT


class BalancesQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which balances to list."""

    cursor: Annotated[str | None, Meta(description="next_cursor of the page before.")] = None
    limit: Annotated[int, Meta(description="Most that one page holds, up to 1000.")] = PAGE_DEFAULT


class ExportQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to export."""

    key: Annotated[str | None, Meta(description="Id of the key; all keys without it.")] = None
    format: Literal["csv", "json"] = "json"


class Verified(Struct, frozen=True):
    """Does the ledger add up?"""

    clean: bool
    discrepancies: list[Discrepancy]


class LedgerEndpoints:
    """Answers from the ledger; every call waits for the database in a thread."""

    def __init__(self, database: Database, keys: KeyStore, credited: Callable[[str], None]) -> None:
        """`credited` is told of a key whose credit has changed."""
        self._database = database
        self._told = credited
        self._keys = keys
        self._credits = Credits(database)

    def endpoints(self) -> Iterator[Endpoint]:
        """Each with what it takes and gives."""
        credit = f"{KEYS}/{{key}}/credit"
        yield Endpoint(
            "POST", credit, "Give a prepaid key credit.", self._credit, takes=Credit, gives=Credited, status=201,
            repeatable=True, errors=(400, 404, 409),
        )  # fmt: skip
        yield Endpoint("GET", credit, "The credit of a key.", self._balance, gives=Balance, errors=(404, 409))
        yield Endpoint(
            "GET", f"{LEDGER}/history", "Transfers, the newest first.", self._history, query=HistoryQuery,
            gives=Page[Transfer], errors=(400,),
        )  # fmt: skip
        yield Endpoint(
            "GET", f"{LEDGER}/balances", "The credit of every key that ever had some, by id.", self._balances,
            query=BalancesQuery, gives=Page[Balance], errors=(400,),
        )  # fmt: skip
        yield Endpoint(
            "GET", f"{LEDGER}/export", "Every transfer with its entries, the oldest first.", self._export,
            query=ExportQuery, errors=(400,),
        )  # fmt: skip
        yield Endpoint(
            "GET", f"{LEDGER}/verify", "Add everything up again. 200 when it adds up, 409 when not.", self._verify,
            gives=Verified, errors=(409,),
        )  # fmt: skip

    async def _credit(self, asked: Asked) -> Reply:
        wanted = body_of(asked, Credit)
        done = await in_thread(lambda: self._credited(asked, wanted))
        self._told(done.balance.key)
        return json(done, 201)

    def _credited(self, asked: Asked, wanted: Credit) -> Credited:
        key = self._keys.show(asked.place)
        if not key.prepaid:
            raise ConflictError(f"key {key.id} is not prepaid; change that first, or credit would have no effect")
        if key.revoked_at is not None and wanted.tokens > 0:
            raise ConflictError(f"key {key.id} was revoked; credit would be lost on it")
        enter = self._credits.top_up if wanted.tokens > 0 else self._credits.adjust
        word = asked.idempotency or f"api-{secrets.token_hex(12)}"
        transfer = enter(key.id, wanted.tokens, idempotency=word, actor=asked.actor, note=wanted.note)
        return Credited(transfer, statement.balance(self._database, key.id))

    async def _balance(self, asked: Asked) -> Reply:
        return json(await in_thread(lambda: statement.balance(self._database, self._keys.show(asked.place).id)))

    async def _history(self, asked: Asked) -> Reply:
        query = query_of(asked, HistoryQuery)

        def page() -> Page[Transfer]:
            limit = paging.check_limit(query.limit)
            before = None if query.cursor is None else paging.read(query.cursor, tuple[int])[0]
            found = statement.history(self._database, key=query.key, before=before, limit=limit)
            more = paging.written(found[-1].id) if len(found) == limit else None
            return Page(found, more)

        return json(await in_thread(page))

    async def _balances(self, asked: Asked) -> Reply:
        query = query_of(asked, BalancesQuery)

        def page() -> Page[Balance]:
            limit = paging.check_limit(query.limit)
            after = "" if query.cursor is None else paging.read(query.cursor, tuple[str])[0]
            found = statement.balances(self._database, after=after, limit=limit)
            return Page(found, paging.written(found[-1].key) if len(found) == limit else None)

        return json(await in_thread(page))

    async def _export(self, asked: Asked) -> Reply:
        query = query_of(asked, ExportQuery)
        pieces = statement.export(self._database, query.format, key=query.key)
        kind = b"text/csv; charset=utf-8" if query.format == "csv" else b"application/json"
        first = await in_thread(lambda: next(pieces, ""))  # a store that does not answer is told with a status
        name = f'content-disposition: attachment; filename="ledger.{query.format}"\r\n'.encode()
        return Reply(200, kind=kind, extra=name, pieces=_in_thread(first, pieces))

    async def _verify(self, asked: Asked) -> Reply:
        del asked
        found = await in_thread(lambda: verify(self._database))
        return json(Verified(not found, found), 409 if found else 200)


async def _in_thread(first: str, pieces: Iterator[str]) -> AsyncIterator[bytes]:
    """The pieces one by one, each made in a thread; the transaction that they are read in ends with them."""
    piece: str | None = first
    try:
        while piece is not None:
            yield piece.encode()
            piece = await asyncio.to_thread(next, pieces, None)
    finally:
        if isinstance(pieces, Generator):
            await asyncio.to_thread(pieces.close)
