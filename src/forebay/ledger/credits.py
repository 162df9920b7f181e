"""The ledger of credits: double-entry, append-only, in whole tokens.

Every key has five accounts, which add up to zero. A transfer moves tokens between them, and its entries add up to zero:

    top_up    issued -> available (and what is owed, first)      adjust   the same, in either direction
    hold      available -> held: leased to one gateway           release, expire   held -> available, what was not used
    capture   held -> spent: used; beyond the lease from available, and beyond that it is owed (debt)

`available`, `held` and `spent` are never below zero. Balances are kept beside the entries that they are the sums of;
`forebay.ledger.verify` adds the entries up again. Every transfer has an idempotency key: repeated, it changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sqlalchemy import ColumnElement, Connection, bindparam, func, insert, select, update

from forebay.errors import UsageError
from forebay.ledger.booking import Page, Transfer, chunks, transfers_by
from forebay.ledger.database import Database
from forebay.ledger.tables import accounts, entries, leases, transfers

LARGEST = 1 << 53
"""Tokens of one transfer: exact in every JSON reader, and far from what 64 bits hold."""
KEY_LONGEST = 128
OURS = "~"
"""Idempotency keys of the gateway's own transfers begin with it; nobody else's may."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A gateway's wish for credit: `need` tokens to go on at all, `want` to go on for a while."""

    key: str
    need: int
    want: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What a gateway got of a key's credit, in tokens, and what is available beyond it."""

    tokens: int
    rest: int


@dataclass(slots=True)
class Lease:
    """Credit that one gateway may spend without asking, in tokens."""

    id: int
    key: str
    granted: int = 0
    captured: int = 0
    returned: int = 0

    COLUMNS: ClassVar = (leases.c.id, leases.c.key_id, leases.c.granted, leases.c.captured, leases.c.returned)

    @property
    def left(self) -> int:
        """What is neither used nor given back."""
        return self.granted - self.captured - self.returned


class Credits:
    """Changes to the ledger. What takes no connection is one transaction; raises StoreError when the store refuses."""

    def __init__(self, database: Database) -> None:
        self.database = database

    # ---- by hand -----------------------------------------------------------------------------------------------

    def top_up(self, key: str, tokens: int, *, idempotency: str, actor: str, note: str = "") -> Transfer:
        """Give a key credit; what it owes is paid first. Raises UsageError for an amount that is none."""
        if not 0 < tokens <= LARGEST:
            raise UsageError(f"a top-up of {tokens} tokens: give 1 to {LARGEST}")
        return self._by_hand(key, "top_up", tokens, idempotency, actor, note)

    def adjust(self, key: str, tokens: int, *, idempotency: str, actor: str, note: str) -> Transfer:
        """Correct a key's credit by `tokens`, up or down; what is leased or spent stays. Raises UsageError."""
        if not 0 < abs(tokens) <= LARGEST:
            raise UsageError(f"an adjustment by {tokens} tokens: give 1 to {LARGEST}, or as much below zero")
        return self._by_hand(key, "adjust", tokens, idempotency, actor, note)

    def _by_hand(self, key: str, kind: str, tokens: int, idempotency: str, actor: str, note: str) -> Transfer:
        if not 0 < len(idempotency) <= KEY_LONGEST or idempotency.startswith(OURS):
            raise UsageError(f"an idempotency key has 1 to {KEY_LONGEST} characters and does not begin with {OURS!r}")
        with self.database.begin() as connection:
            page = Page(connection, [key], self.database.now_ms(connection))
            for before in transfers_by(connection, [idempotency]):
                if (before.key, before.kind, before.amount) != (key, kind, tokens):
                    raise UsageError(
                        f"the idempotency key {idempotency!r} was used for another transfer; take a new one"
                    )
                return before
            account = page.accounts[key]
            if tokens > 0:
                moves = {"issued": -tokens} | account.given_back(tokens)
            elif (available := account.balances["available"]) >= -tokens:
                moves = {"issued": -tokens, "available": tokens}
            else:
                raise UsageError(
                    f"the key {key} has {available} tokens available; no more than these can be taken back"
                )
            page.enter(key, kind, tokens, moves, idempotency, actor=actor, note=note)
            return page.write()[0]

    # ---- leases ------------------------------------------------------------------------------------------------

    def hold(self, journal: str, batch: int, holds: Sequence[Hold], ttl_ms: int) -> dict[str, Grant]:
        """Lease credit of some keys to the gateway of `journal`; of one that has none 0 tokens.

        Of what is available a gateway gets what it needs, and at most half when it merely wants more, so that others
        find some. Repeated with the same `batch` number, after an answer that got lost, it grants nothing again.
        """
        names = {hold.key: f"{OURS}hold:{journal}:{batch}:{hold.key}" for hold in holds}
        with self.database.begin() as connection:
            page = Page(connection, names, self.database.now_ms(connection))
            before = {transfer.key: transfer.amount for transfer in transfers_by(connection, names.values())}
            if not before:
                before = _granted(page, holds)
                ours = _extended(connection, journal, before, page.now_ms, ttl_ms)
                for key, tokens in before.items():
                    page.enter(key, "hold", tokens, {"available": -tokens, "held": tokens}, names[key], lease=ours[key])
                page.write()
            return {key: Grant(before.get(key, 0), page.accounts[key].balances["available"]) for key in names}

    def renew(self, journal: str, ttl_ms: int) -> None:
        """The gateway of `journal` lives: put off the end of its leases."""
        with self.database.begin() as connection:
            ends = self.database.now_ms(connection) + ttl_ms
            connection.execute(update(leases).where(_open_of(journal)).values(expires_ms=ends))

    def release(self, journal: str, batch: int, returns: Mapping[str, int]) -> None:
        """Give back credit that the gateway does not need now: key -> tokens of its open lease."""
        names = {key: f"{OURS}release:{journal}:{batch}:{key}" for key in returns}
        with self.database.begin() as connection:
            page = Page(connection, names, self.database.now_ms(connection))
            if transfers_by(connection, names.values()):
                return
            ours = _open_leases(connection, _open_of(journal), names)
            _give_back(page, "release", [(lease, returns[lease.key], names[lease.key]) for lease in ours])

    def close(self, connection: Connection, journal: str) -> int:
        """Give back what is left of all leases of a gateway that has ended. Returns how many there were."""
        return self._end(connection, _open_of(journal), "released")

    def late(self, but_of: str) -> dict[str, int]:
        """Gateways that were not heard of in time, by the store's clock, but not the caller: journal -> the end that
        they were last granted, in ms."""
        with self.database.read() as connection:
            late = _late(self.database.now_ms(connection), but_of)
            wanted = select(leases.c.journal, func.max(leases.c.expires_ms)).where(late).group_by(leases.c.journal)
            return {journal: int(ends_ms) for journal, ends_ms in connection.execute(wanted)}

    def expire(self, but_of: str, of: Mapping[str, int]) -> int:
        """End the leases of gateways that are late still, and were not heard of since `late` said so. Returns how
        many."""
        ended = 0
        for journal, ends_ms in of.items():
            with self.database.begin() as connection:
                late = _late(self.database.now_ms(connection), but_of) & (leases.c.journal == journal)
                ended += self._end(connection, late & (leases.c.expires_ms <= ends_ms), "expired")
        return ended

    def _end(self, connection: Connection, which: ColumnElement[bool], state: str) -> int:
        ended = 0
        keys = connection.execute(select(leases.c.key_id).where(which).distinct()).scalars().all()
        kind = "release" if state == "released" else "expire"
        for part in chunks(sorted(keys)):
            page = Page(connection, part, self.database.now_ms(connection))
            over = _open_leases(connection, which, part)  # read again: it is ours only now that the keys are locked
            _give_back(page, kind, [(lease, lease.left, f"{OURS}{kind}:{lease.id}") for lease in over], state)
            ended += len(over)
        return ended

    # ---- what was used -----------------------------------------------------------------------------------------

    def capture(self, connection: Connection, journal: str, sequence: int, used: Mapping[str, int]) -> dict[str, int]:
        """Take what was used from the gateway's leases: key -> tokens, up to record `sequence` of its journal.

        Returns what went beyond a lease, key -> tokens: the account has paid that, or owes it.
        """
        beyond: dict[str, int] = {}
        for keys in chunks(sorted(key for key, tokens in used.items() if tokens > 0)):
            page = Page(connection, keys, self.database.now_ms(connection))
            ours = {lease.key: lease for lease in _open_leases(connection, _open_of(journal), keys)}
            for key in keys:
                tokens, lease = used[key], ours.get(key)
                from_lease = 0 if lease is None else min(tokens, lease.left)
                from_available = min(tokens - from_lease, page.accounts[key].balances["available"])
                owed = tokens - from_lease - from_available
                moves = {"held": -from_lease, "available": -from_available, "debt": -owed, "spent": tokens}
                name = f"{OURS}capture:{journal}:{sequence}:{key}"
                page.enter(key, "capture", tokens, moves, name, lease=None if lease is None else lease.id)
                if lease is not None:
                    lease.captured += from_lease
                    if tokens > from_lease:
                        beyond[key] = tokens - from_lease
            _keep(connection, list(ours.values()), "open")
            page.write()
        return beyond

    def captured_beyond(
        self, connection: Connection, journal: str, sequence: int, used: Mapping[str, int]
    ) -> dict[str, int]:
        """What `capture` returned when it was called with the same before."""
        names = {f"{OURS}capture:{journal}:{sequence}:{key}": key for key in used}
        found: dict[str, int] = {}
        for part in chunks(list(names)):
            wanted = (
                select(transfers.c.idempotency, func.sum(entries.c.amount))
                .join(entries, entries.c.transfer_id == transfers.c.id)
                .join(accounts, accounts.c.id == entries.c.account_id)
                .where(transfers.c.idempotency.in_(part), transfers.c.lease_id.is_not(None))
                .where(accounts.c.kind.in_(("available", "debt")))
                .group_by(transfers.c.idempotency)
            )
            found.update((names[name], -int(tokens)) for name, tokens in connection.execute(wanted))
        return found


def _granted(page: Page, holds: Sequence[Hold]) -> dict[str, int]:
    granted = {}
    for hold in holds:
        available = page.accounts[hold.key].balances["available"]
        if tokens := min(available, max(hold.need, min(hold.want, available // 2))):
            granted[hold.key] = tokens
    return granted


def _open_of(journal: str) -> ColumnElement[bool]:
    return (leases.c.journal == journal) & (leases.c.state == "open")


def _late(now_ms: int, but_of: str) -> ColumnElement[bool]:
    return (leases.c.state == "open") & (leases.c.expires_ms <= now_ms) & (leases.c.journal != but_of)


def _open_leases(
    connection: Connection, which: ColumnElement[bool], keys: Sequence[str] | Mapping[str, str]
) -> list[Lease]:
    found: list[Lease] = []
    for part in chunks(list(keys)):
        wanted = select(*Lease.COLUMNS).where(which & leases.c.key_id.in_(part)).order_by(leases.c.id)
        found += [Lease(*row) for row in connection.execute(wanted.with_for_update())]
    return found


def _extended(
    connection: Connection, journal: str, grants: Mapping[str, int], now_ms: int, ttl_ms: int
) -> dict[str, int]:
    """Add the grants to the gateway's open leases, or open them: key -> lease."""
    numbers: dict[str, int] = {}
    for keys in chunks(list(grants)):
        known = {lease.key: lease for lease in _open_leases(connection, _open_of(journal), keys)}
        rows = [
            {"of": lease.id, "to_granted": lease.granted + grants[key], "to_expires": now_ms + ttl_ms}
            for key, lease in known.items()
        ]
        if rows:
            grown = update(leases).where(leases.c.id == bindparam("of"))
            connection.execute(grown.values(granted=bindparam("to_granted"), expires_ms=bindparam("to_expires")), rows)
        new = [
            {"key_id": key, "journal": journal, "granted": grants[key], "captured": 0, "returned": 0,
             "state": "open", "opened_ms": now_ms, "expires_ms": now_ms + ttl_ms}
            for key in keys if key not in known
        ]  # fmt: skip
        if new:
            made = connection.execute(insert(leases).returning(leases.c.key_id, leases.c.id), new)
            numbers.update((key, number) for key, number in made)
        numbers.update((key, lease.id) for key, lease in known.items())
    return numbers


def _give_back(page: Page, kind: str, returns: Sequence[tuple[Lease, int, str]], state: str = "open") -> None:
    """Return tokens of leases (lease, tokens, idempotency key) to their keys; `state` is what the leases are then."""
    for lease, wish, name in returns:
        tokens = min(wish, lease.left)
        if tokens > 0:
            lease.returned += tokens
            moves = {"held": -tokens} | page.accounts[lease.key].given_back(tokens)
            page.enter(lease.key, kind, tokens, moves, name, lease=lease.id)
    _keep(page.connection, [lease for lease, _, _ in returns], state)
    page.write()


def _keep(connection: Connection, changed: Sequence[Lease], state: str) -> None:
    rows = [
        {"of": lease.id, "to_captured": lease.captured, "to_returned": lease.returned, "to_state": state}
        for lease in changed
    ]
    if rows:
        statement = update(leases).where(leases.c.id == bindparam("of")).values(
            captured=bindparam("to_captured"), returned=bindparam("to_returned"), state=bindparam("to_state")
        )  # fmt: skip
        connection.execute(statement, rows)
