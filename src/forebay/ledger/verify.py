"""Adds everything up again: is the ledger what its entries say, and was any of it taken away?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, Row, Select, case, func, literal, or_, select

from forebay.ledger.booking import COUNTER, KINDS
from forebay.ledger.database import Database
from forebay.ledger.tables import accounts, entries, leases, transfers


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """One thing that does not add up: where, and the figures."""

    where: str
    text: str


def verify(database: Database) -> list[Discrepancy]:
    """Every discrepancy of the ledger, as of one moment; empty when it is clean. Raises StoreError."""
    with database.read() as connection:
        if not database.embedded:
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        return [found for check in CHECKS for found in check(connection)]


def _transfers_sum_to_zero(connection: Connection) -> Iterator[Discrepancy]:
    total, lines = func.coalesce(func.sum(entries.c.amount), 0), func.count(entries.c.amount)
    wanted = (
        select(transfers.c.id, total, lines)
        .outerjoin(entries, entries.c.transfer_id == transfers.c.id)
        .group_by(transfers.c.id)
        .having(or_(total != 0, lines < 2))
    )
    for number, tokens, count in connection.execute(wanted):
        yield Discrepancy(f"transfer {number}", f"its {count} entries add up to {tokens} tokens, not to zero")


def _entries_belong(connection: Connection) -> Iterator[Discrepancy]:
    wanted = (
        select(entries.c.transfer_id, transfers.c.key_id, accounts.c.key_id)
        .outerjoin(transfers, transfers.c.id == entries.c.transfer_id)
        .outerjoin(accounts, accounts.c.id == entries.c.account_id)
        .where(or_(transfers.c.id.is_(None), accounts.c.id.is_(None), transfers.c.key_id != accounts.c.key_id))
    )
    for number, key, other in connection.execute(wanted):
        yield Discrepancy(f"transfer {number}", f"it is of key {key}, but one of its entries of key {other}")


def _amounts_are_those_of_the_entries(connection: Connection) -> Iterator[Discrepancy]:
    """The account that each kind of transfer is about moved by the amount of the transfer."""
    about = case(
        (transfers.c.kind.in_(("top_up", "adjust")), literal("issued")),
        (transfers.c.kind == "capture", literal("spent")),
        else_=literal("held"),
    )
    sign = case((transfers.c.kind.in_(("hold", "capture")), 1), else_=-1)
    moved = func.coalesce(func.sum(case((accounts.c.kind == about, entries.c.amount), else_=0)), 0)
    wanted = (
        select(transfers.c.id, transfers.c.kind, transfers.c.amount, moved)
        .outerjoin(entries, entries.c.transfer_id == transfers.c.id)
        .outerjoin(accounts, accounts.c.id == entries.c.account_id)
        .group_by(transfers.c.id, transfers.c.kind, transfers.c.amount)
        .having(moved != sign * transfers.c.amount)
    )
    for number, kind, amount, tokens in connection.execute(wanted):
        yield Discrepancy(f"transfer {number}", f"a {kind} of {amount} tokens, but its entries move {tokens}")


def _balances_are_the_sums(connection: Connection) -> Iterator[Discrepancy]:
    total = func.coalesce(func.sum(entries.c.amount), 0)
    wanted = (
        select(accounts.c.key_id, accounts.c.kind, accounts.c.balance, total)
        .outerjoin(entries, entries.c.account_id == accounts.c.id)
        .group_by(accounts.c.id, accounts.c.key_id, accounts.c.kind, accounts.c.balance)
        .having(total != accounts.c.balance)
    )
    for key, kind, balance, tokens in connection.execute(wanted):
        yield Discrepancy(f"key {key}", f"{kind} stands at {balance} tokens, its entries add up to {tokens}")


def _keys_have_what_they_may(connection: Connection) -> Iterator[Discrepancy]:
    wanted = select(accounts.c.key_id, func.sum(accounts.c.balance), func.count()).group_by(accounts.c.key_id)
    wanted = wanted.having(or_(func.sum(accounts.c.balance) != 0, func.count() != len(KINDS)))
    for key, tokens, count in connection.execute(wanted):
        yield Discrepancy(f"key {key}", f"its {count} accounts add up to {tokens} tokens, not {len(KINDS)} to zero")
    owing = ("issued", "debt")
    wrong = or_(
        accounts.c.kind.in_(owing) & (accounts.c.balance > 0), accounts.c.kind.not_in(owing) & (accounts.c.balance < 0)
    )
    for key, kind, balance in connection.execute(
        select(accounts.c.key_id, accounts.c.kind, accounts.c.balance).where(wrong)
    ):
        yield Discrepancy(f"key {key}", f"{kind} stands at {balance} tokens, on the wrong side of zero")


def _no_transfer_is_missing(connection: Connection) -> Iterator[Discrepancy]:
    counted = select(
        transfers.c.key_id, func.count().label("n"), func.min(transfers.c.number).label("first"),
        func.max(transfers.c.number).label("last"),
    ).group_by(transfers.c.key_id).subquery()  # fmt: skip
    wanted = (
        select(accounts.c.key_id, accounts.c.transfers, counted.c.n, counted.c.first, counted.c.last)
        .outerjoin(counted, counted.c.key_id == accounts.c.key_id)
        .where(accounts.c.kind == COUNTER)
    )
    for key, said, count, first, last in connection.execute(wanted):
        if said != (count or 0) or (count and (first, last) != (1, count)):
            yield Discrepancy(
                f"key {key}", f"it had {said} transfers, but {count or 0} are here, numbered {first} to {last}"
            )


def _leases_are_their_transfers(connection: Connection) -> Iterator[Discrepancy]:
    def moved(*kinds: str) -> Select[int]:
        return (
            select(func.coalesce(func.sum(entries.c.amount), 0))
            .join(transfers, transfers.c.id == entries.c.transfer_id)
            .join(accounts, accounts.c.id == entries.c.account_id)
            .where(transfers.c.lease_id == leases.c.id, transfers.c.kind.in_(kinds), accounts.c.kind == "held")
            .correlate(leases)
        )

    granted, captured = moved("hold").scalar_subquery(), -moved("capture").scalar_subquery()
    returned = -moved("release", "expire").scalar_subquery()
    wanted = select(
        leases.c.id, leases.c.key_id, leases.c.state, leases.c.granted, granted, leases.c.captured, captured,
        leases.c.returned, returned,
    )  # fmt: skip
    for row in connection.execute(wanted):
        yield from _of_one_lease(row)


def _of_one_lease(row: Row[int, str, str, int, int, int, int, int, int]) -> Iterator[Discrepancy]:
    number, key, state, *figures = row
    where = f"lease {number} of key {key}"
    for word, said, moved in zip(("granted", "captured", "returned"), figures[::2], figures[1::2], strict=True):
        if said != moved:
            yield Discrepancy(where, f"{said} tokens {word}, but its transfers moved {moved}")
    granted, captured, returned = figures[::2]
    if captured + returned > granted or (state != "open" and captured + returned != granted):
        text = f"it is {state}: {granted} tokens granted, {captured} captured and {returned} returned"
        yield Discrepancy(where, text)


def _what_is_held_is_leased(connection: Connection) -> Iterator[Discrepancy]:
    left = func.sum(leases.c.granted - leases.c.captured - leases.c.returned)
    open_leases = select(leases.c.key_id, left.label("left")).where(leases.c.state == "open").group_by(leases.c.key_id)
    out = open_leases.subquery()
    wanted = (
        select(accounts.c.key_id, accounts.c.balance, func.coalesce(out.c.left, 0))
        .outerjoin(out, out.c.key_id == accounts.c.key_id)
        .where(accounts.c.kind == "held", accounts.c.balance != func.coalesce(out.c.left, 0))
    )
    for key, held, leased in connection.execute(wanted):
        yield Discrepancy(f"key {key}", f"{held} tokens are held, but {leased} are left of its open leases")


CHECKS = (
    _transfers_sum_to_zero,
    _entries_belong,
    _amounts_are_those_of_the_entries,
    _balances_are_the_sums,
    _keys_have_what_they_may,
    _no_transfer_is_missing,
    _leases_are_their_transfers,
    _what_is_held_is_leased,
)
