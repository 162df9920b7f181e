"""Endpoints for keys: make, list, change, revoke them, give them credit, and see who did what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from forebay.errors import ForebayError
from forebay.ingress.api.asking import body_of, query_of, refused
from forebay.ingress.api.table import Asked, Endpoint, Reply
from forebay.ledger.key import Key, KeyChange, NewKey, State
from forebay.ledger.keys import By, Change, Created, Filter, KeyStore
from forebay.ledger.paging import PAGE_DEFAULT, Page

T = TypeVar("T")

KEYS, AUDIT = "/api/v1/keys", "/api/v1/audit"


class KeysQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"class_": "class"}):
    """Which keys to list."""

    name: Annotated[str | None, Meta(description="A part of the name.")] = None
    team: str | None = None
    class_: str | None = None
    state: State | None = None
    cursor: Annotated[str | None, Meta(description="next_cursor of the page before.")] = None
    limit: Annotated[int, Meta(description="Most that one page holds, up to 1000.")] = PAGE_DEFAULT


class AuditQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which changes to list."""

    key: Annotated[str | None, Meta(description="Id of the key that was changed.")] = None
    cursor: Annotated[str | None, Meta(description="next_cursor of the page before.")] = None
    limit: Annotated[int, Meta(description="Most that one page holds, up to 1000.")] = PAGE_DEFAULT


class KeyEndpoints:
    """Answers from a store. Every call waits for the database in a thread; `look` brings its change into force."""

    def __init__(self, store: KeyStore, look: Callable[[], None]) -> None:
        self._store = store
        self._look = look

    def endpoints(self) -> Iterator[Endpoint]:
        """Each with what it takes and gives."""
        one = f"{KEYS}/{{key}}"
        yield Endpoint(
            "GET", KEYS, "List keys, the newest first.", self._list, query=KeysQuery, gives=Page[Key], errors=(400,)
        )
        yield Endpoint(
            "POST", KEYS, "Make a key. Its secret is in this answer and nowhere else.", self._create,
            takes=NewKey, gives=Created, status=201, repeatable=True, errors=(400, 409),
        )  # fmt: skip
        yield Endpoint("GET", one, "A key, by its id or name.", self._show, gives=Key, errors=(404, 409))
        yield Endpoint(
            "PATCH", one, "Change a key or its limits.", self._change, takes=KeyChange, gives=Key, repeatable=True,
            errors=(400, 404, 409),
        )  # fmt: skip
        yield Endpoint(
            "DELETE", one, "Revoke a key: new requests get 401; those that wait or run are finished.", self._revoke,
            gives=Key, repeatable=True, errors=(404, 409),
        )  # fmt: skip
        yield Endpoint(
            "POST", f"{one}/revoke", "The same as DELETE.", self._revoke, gives=Key, repeatable=True, errors=(404, 409)
        )
        yield Endpoint(
            "GET", AUDIT, "Who changed what, the newest first.", self._trail, query=AuditQuery, gives=Page[Change],
            errors=(400,),
        )  # fmt: skip

    async def _list(self, asked: Asked) -> Reply:
        query = query_of(asked, KeysQuery)
        which = Filter(query.name, query.team, query.class_, query.state)
        return json(await in_thread(lambda: self._store.page(which, cursor=query.cursor, limit=query.limit)))

    async def _create(self, asked: Asked) -> Reply:
        wanted = body_of(asked, NewKey)
        return json(await self._and_look(lambda: self._store.create(wanted, by(asked))), 201)

    async def _show(self, asked: Asked) -> Reply:
        return json(await in_thread(lambda: self._store.show(asked.place)))

    async def _change(self, asked: Asked) -> Reply:
        wanted = body_of(asked, KeyChange)
        return json(await self._and_look(lambda: self._store.change(asked.place, wanted, by(asked))))

    async def _revoke(self, asked: Asked) -> Reply:
        return json(await self._and_look(lambda: self._store.revoke(asked.place, by(asked))))

    async def _trail(self, asked: Asked) -> Reply:
        query = query_of(asked, AuditQuery)
        return json(await in_thread(lambda: self._store.trail(query.key, cursor=query.cursor, limit=query.limit)))

    async def _and_look(self, work: Callable[[], T]) -> T:
        """Change something, and answer when the gateway knows of it."""

        def changed() -> T:
            done = work()
            self._look()
            return done

        return await in_thread(changed)


def by(asked: Asked) -> By:
    """Who asks."""
    return By(asked.actor, asked.idempotency)


async def in_thread(work: Callable[[], T]) -> T:
    """Wait for the database without keeping the event loop. Raises Problem for what it refuses."""
    try:
        return await asyncio.to_thread(work)
    except ForebayError as error:
        raise refused(error) from None


def json(value: Any, status: int = 200) -> Reply:
    """An answer in JSON."""
    return Reply(status, msgspec.json.encode(value))
