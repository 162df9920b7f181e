"""The keys of a store: make, list, change and revoke them, with a trail of who did what.

Every change takes the next number of the one row in `changes` first. So changes happen one after the other, a request
that is repeated is seen as one, and whoever follows the numbers (feed.py) misses none. Callers are threads: each call
is one transaction, and may wait for the database.
"""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct
from sqlalchemy import Connection, Row, delete, insert, select, tuple_, update

from forebay.config.schema import Limits
from forebay.core.model import Mode
from forebay.ledger import paging, tables
from forebay.ledger.credential import PREFIX, mint
from forebay.ledger.database import Database
from forebay.ledger.key import (
    ANY,
    ConflictError,
    InvalidError,
    Key,
    KeyChange,
    Known,
    NewKey,
    NotFoundError,
    State,
    check,
    fields_of,
    what_is_set,
    with_change,
)
from forebay.ledger.paging import Page

REMEMBERED_MS = 7 * 86_400_000
"""How long a repeated request is known as one."""

IDEMPOTENCY_CHARACTERS = 128

_keys, _audit, _requests = tables.keys, tables.audit, tables.requests


class By(NamedTuple):
    """Who asks for a change, and the word that makes a repeated request one."""

    actor: str
    idempotency: str | None = None


class Created(Struct, frozen=True):
    """A new key and, this once, what its owner is to send."""

    key: Key
    secret: Annotated[
        str | None,
        Meta(description="The whole key, shown this once. null when the same request had made it before."),
    ]


class Change(Struct, frozen=True):
    """One line of the trail."""

    id: int
    at: datetime
    actor: Annotated[str, Meta(description="token:FINGERPRINT, loopback, or cli:USER.")]
    action: str
    key_id: str
    detail: Annotated[dict[str, Any], Meta(description="Each changed field: [before, after].")]


class Filter(NamedTuple):
    """Which keys to list; None: whatever it is."""

    name: str | None = None  # a part of it
    team: str | None = None
    class_: str | None = None
    state: State | None = None


class KeyStore:
    """Keys in a database. `known`: names of the configuration that keys may refer to, when one is at hand."""

    def __init__(self, database: Database, known: Known | None = None) -> None:
        self.database = database
        self.known = known

    def create(self, asked: NewKey, by: By) -> Created:
        """Make a key. Raises InvalidError, ConflictError, StoreError."""
        with self.database.begin() as connection:
            number, now_ms = self._next(connection)
            if (done := self._done_before(connection, by, ("create", asked))) is not None:
                return Created(self._get(connection, done, now_ms), None)
            check(asked, self.known, _at(now_ms))
            made = mint()
            row = {
                "id": made.public_id,
                "verifier": made.verifier,
                "prepaid": int(asked.prepaid),
                "created_ms": now_ms,
                "change": number,
                "limits": _stored_limits(asked.limits),
                **_stored({name: getattr(asked, field) for field, name in _PLAIN.items()}),
            }
            connection.execute(insert(_keys).values(row))
            key = self._get(connection, made.public_id, now_ms)
            self._note(connection, by, "create", key.id, {n: [None, v] for n, v in _seen(key).items()}, now_ms)
            self._remember(connection, by, ("create", asked), key.id, now_ms)
        return Created(key, made.credential)

    def show(self, name: str) -> Key:
        """The key of this id, or the one that has this name and is not revoked. Raises NotFoundError, ConflictError."""
        with self.database.read() as connection:
            return self._get(connection, self._id_of(connection, name), self.database.now_ms(connection))

    def page(self, which: Filter, *, cursor: str | None = None, limit: int = paging.PAGE_DEFAULT) -> Page[Key]:
        """Keys, the newest first. Raises InvalidError for a bad cursor or limit."""
        paging.check_limit(limit)
        wanted = select(_keys).order_by(_keys.c.created_ms.desc(), _keys.c.id.desc()).limit(limit + 1)
        if cursor is not None:
            place = paging.read(cursor, tuple[int, str])
            wanted = wanted.where(tuple_(_keys.c.created_ms, _keys.c.id) < place)
        if which.name is not None:
            wanted = wanted.where(_keys.c.name.icontains(which.name, autoescape=True))
        if which.team is not None:
            wanted = wanted.where(_keys.c.team == which.team)
        if which.class_ is not None:
            wanted = wanted.where(_keys.c["class"] == which.class_)
        with self.database.read() as connection:
            now_ms = self.database.now_ms(connection)
            expired = _keys.c.expires_ms.is_not(None) & (_keys.c.expires_ms <= now_ms)
            if which.state == "revoked":
                wanted = wanted.where(_keys.c.revoked_ms.is_not(None))
            elif which.state is not None:
                wanted = wanted.where(_keys.c.revoked_ms.is_(None), expired if which.state == "expired" else ~expired)
            rows = connection.execute(wanted).all()
        more = paging.written(rows[limit - 1].created_ms, rows[limit - 1].id) if len(rows) > limit else None
        return Page([_key(row, now_ms) for row in rows[:limit]], more)

    def change(self, name: str, asked: KeyChange, by: By) -> Key:
        """Change a key. Raises NotFoundError, InvalidError, ConflictError (it is revoked), StoreError."""
        with self.database.begin() as connection:
            number, now_ms = self._next(connection)
            key_id = self._id_of(connection, name)
            if self._done_before(connection, by, ("change", key_id, asked)) is not None:
                return self._get(connection, key_id, now_ms)
            before = self._get(connection, key_id, now_ms)
            if before.revoked_at is not None:
                raise ConflictError(f"key {key_id} was revoked; make a new one")
            check(asked, self.known, _at(now_ms))
            values = _stored(dict(fields_of(asked)))
            if asked.limits is not UNSET:
                limits = None if asked.limits is None else with_change(before.limits, asked.limits)
                values["limits"] = _stored_limits(limits)
            return self._changed(
                connection, by, before, {**values, "change": number}, ("change", key_id, asked), now_ms
            )

    def revoke(self, name: str, by: By) -> Key:
        """End a key for good; one that is revoked already stays so. Raises NotFoundError, StoreError."""
        with self.database.begin() as connection:
            number, now_ms = self._next(connection)
            key_id = self._id_of(connection, name)
            before = self._get(connection, key_id, now_ms)
            if before.revoked_at is not None:
                return before
            values = {"revoked_ms": now_ms, "change": number}
            return self._changed(connection, by, before, values, ("revoke", key_id), now_ms)

    def trail(
        self, key_id: str | None = None, *, cursor: str | None = None, limit: int = paging.PAGE_DEFAULT
    ) -> Page[Change]:
        """Who changed what, the newest first. Raises InvalidError for a bad cursor or limit."""
        paging.check_limit(limit)
        wanted = select(_audit).order_by(_audit.c.id.desc()).limit(limit + 1)
        if key_id is not None:
            wanted = wanted.where(_audit.c.key_id == key_id)
        if cursor is not None:
            wanted = wanted.where(_audit.c.id < paging.read(cursor, tuple[int])[0])
        with self.database.read() as connection:
            rows = connection.execute(wanted).all()
        more = paging.written(rows[limit - 1].id) if len(rows) > limit else None
        changes = [
            Change(row.id, _at(row.at_ms), row.actor, row.action, row.key_id, msgspec.json.decode(row.detail))
            for row in rows[:limit]
        ]
        return Page(changes, more)

    # ---- inside one transaction ------------------------------------------------------------------------------

    def _next(self, connection: Connection) -> tuple[int, int]:
        """(number of this change, now): the row stays locked until the transaction ends."""
        number = tables.changes.c.number
        taken = connection.execute(update(tables.changes).values(number=number + 1).returning(number)).scalar_one()
        return int(taken), self.database.now_ms(connection)

    def _id_of(self, connection: Connection, name: str) -> str:
        wanted = name.removeprefix(PREFIX).partition("-")[0] if name.startswith(PREFIX) else name
        if connection.execute(select(_keys.c.id).where(_keys.c.id == wanted)).first() is not None:
            return wanted
        shown = f"{PREFIX}{wanted}…" if name.startswith(PREFIX) else repr(name)
        found = connection.execute(
            select(_keys.c.id).where(_keys.c.name == name, _keys.c.revoked_ms.is_(None)).order_by(_keys.c.id).limit(9)
        ).scalars().all()  # fmt: skip
        if not found:
            raise NotFoundError(f"there is no key {shown}; see: forebay keys list")
        if len(found) > 1:
            raise ConflictError(f"{len(found)} keys have the name {shown}; say which by its id: {', '.join(found)}")
        return str(found[0])

    def _get(self, connection: Connection, key_id: str, now_ms: int) -> Key:
        return _key(connection.execute(select(_keys).where(_keys.c.id == key_id)).one(), now_ms)

    def _changed(
        self, connection: Connection, by: By, before: Key, values: dict[str, Any], asked: tuple[Any, ...], now_ms: int
    ) -> Key:
        connection.execute(update(_keys).where(_keys.c.id == before.id).values(values))
        after = self._get(connection, before.id, now_ms)
        old, new = _seen(before), _seen(after)
        differences = {name: [old[name], new[name]] for name in new if old[name] != new[name]}
        self._note(connection, by, asked[0], before.id, differences, now_ms)
        self._remember(connection, by, asked, before.id, now_ms)
        return after

    def _done_before(self, connection: Connection, by: By, asked: tuple[Any, ...]) -> str | None:
        """The key that the same request changed before. Raises ConflictError when its word was another request's."""
        if by.idempotency is None:
            return None
        if not 1 <= len(by.idempotency) <= IDEMPOTENCY_CHARACTERS or not by.idempotency.isprintable():
            raise InvalidError(f"has 1 to {IDEMPOTENCY_CHARACTERS} printable characters", "idempotency-key")
        row = connection.execute(select(_requests).where(_requests.c.idempotency == by.idempotency)).first()
        if row is None:
            return None
        if bytes(row.asked) != _digest(by.actor, asked):
            raise ConflictError("this idempotency key was used for another request; take a new one")
        return str(row.key_id)

    def _remember(self, connection: Connection, by: By, asked: tuple[Any, ...], key_id: str, now_ms: int) -> None:
        if by.idempotency is None:
            return
        connection.execute(delete(_requests).where(_requests.c.at_ms < now_ms - REMEMBERED_MS))
        row = {"idempotency": by.idempotency, "asked": _digest(by.actor, asked), "key_id": key_id, "at_ms": now_ms}
        connection.execute(insert(_requests).values(row))

    def _note(
        self, connection: Connection, by: By, action: str, key_id: str, detail: dict[str, Any], now_ms: int
    ) -> None:
        row = {"at_ms": now_ms, "actor": by.actor, "action": action, "key_id": key_id}
        connection.execute(insert(_audit).values({**row, "detail": msgspec.json.encode(detail).decode()}))


_PLAIN = {
    "name": "name", "team": "team", "class_": "class", "mode": "mode", "models": "models", "routes": "routes",
    "cap_output_tokens": "cap_output_tokens", "expires_at": "expires_at",
}  # fmt: skip
"""Fields of NewKey that are stored as `_stored` says, with the names of their columns."""


def _stored(values: dict[str, Any]) -> dict[str, Any]:
    """Fields as the table has them."""
    stored: dict[str, Any] = {}
    for name, value in values.items():
        if name == "expires_at":
            stored["expires_ms"] = None if value is None else int(value.timestamp() * 1000)
        elif name in {"models", "routes"}:
            stored[name] = None if "*" in value else msgspec.json.encode(sorted(set(value))).decode()
        elif name == "prepaid":
            stored[name] = int(value)
        else:
            stored[name] = value.value if isinstance(value, Mode) else value
    return stored


def _stored_limits(limits: Limits | None) -> str | None:
    return None if limits is None else msgspec.json.encode(what_is_set(limits), order="sorted").decode()


def _key(row: Row[Any], now_ms: int) -> Key:
    mapped = row._mapping
    state: State = "active"
    if row.revoked_ms is not None:
        state = "revoked"
    elif row.expires_ms is not None and row.expires_ms <= now_ms:
        state = "expired"
    return Key(
        id=row.id,
        name=row.name,
        state=state,
        team=row.team,
        class_=mapped["class"],
        mode=None if row.mode is None else Mode(row.mode),
        models=ANY if row.models is None else msgspec.json.decode(row.models, type=tuple[str, ...]),
        routes=ANY if row.routes is None else msgspec.json.decode(row.routes, type=tuple[str, ...]),
        limits=None if row.limits is None else msgspec.json.decode(row.limits, type=Limits),
        cap_output_tokens=row.cap_output_tokens,
        prepaid=bool(row.prepaid),
        created_at=_at(row.created_ms),
        expires_at=None if row.expires_ms is None else _at(row.expires_ms),
        revoked_at=None if row.revoked_ms is None else _at(row.revoked_ms),
    )


def _seen(key: Key) -> dict[str, Any]:
    """A key for the trail: plain data, of the limits only what is set."""
    plain = msgspec.to_builtins(key)
    plain["limits"] = None if key.limits is None else what_is_set(key.limits)
    return {name: value for name, value in plain.items() if name not in {"id", "state", "created_at"}}


def _at(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def _digest(actor: str, asked: tuple[Any, ...]) -> bytes:
    return blake2b(msgspec.json.encode((actor, asked)), digest_size=32).digest()
