"""Bringing a gateway's journal into the store, exactly once, and what the store then knows of each key's use.

The number of the last frame that was posted is stored in the transaction that posts it, so a batch whose answer was
lost is recognised when it is posted again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Dialect, Table, case, func, or_, select, update

from forebay.ledger.booking import insert_or
from forebay.ledger.credits import Credits
from forebay.ledger.database import Database, StoreError
from forebay.ledger.tables import journals, model_usage, usage

DAY_MS = 86_400_000

_COUNTS = ("requests", "input_tokens", "output_tokens")
_place = itemgetter(0)


@dataclass(slots=True)
class Use:
    """What one key used on one day."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def add(self, requests: int, input_tokens: int, output_tokens: int) -> None:
        """Count more."""
        self.requests += requests
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens


@dataclass(slots=True)
class Tally:
    """Settlements added up, to be posted together."""

    uses: dict[tuple[str, int], Use] = field(default_factory=dict)  # by key and day since 1970
    of_models: dict[tuple[str, str, int], Use] = field(default_factory=dict)  # by key, model and day: part of the same
    captured: dict[str, int] = field(default_factory=dict)  # tokens of prepaid keys
    settlements: int = 0

    def add(self, key: str, at_ms: int, input_tokens: int, output_tokens: int, prepaid: bool, model: str = "") -> None:
        """One settlement; of a `model` whose days are counted apart."""
        self.settlements += 1
        place = (key, at_ms // DAY_MS)
        use = self.uses.get(place)
        if use is None:
            use = self.uses[place] = Use()
        use.requests += 1
        use.input_tokens += input_tokens
        use.output_tokens += output_tokens
        if model:
            self.of_models.setdefault((key, model, place[1]), Use()).add(1, input_tokens, output_tokens)
        if prepaid:
            self.captured[key] = self.captured.get(key, 0) + input_tokens + output_tokens


class Posting:
    """One gateway's side of the store. Each call is one transaction; raises StoreError when the store refuses."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.credits = Credits(database)

    def register(self, journal: str, gateway: str) -> None:
        """Make a new journal known; `gateway` says to a person where it is. Repeated, it changes nothing."""
        with self.database.begin() as connection:
            now = self.database.now_ms(connection)
            row = {"id": journal, "gateway": gateway[:128], "posted": 0, "opened_ms": now, "posted_ms": now}
            connection.execute(insert_or(connection.dialect.name, journals).values(row).on_conflict_do_nothing())

    def posted(self, journal: str) -> int | None:
        """The number of the last frame that the store holds of a journal; None when it does not know it."""
        with self.database.read() as connection:
            return connection.execute(select(journals.c.posted).where(journals.c.id == journal)).scalar()

    def post(self, journal: str, after: int, upto: int, tally: Tally) -> dict[str, int]:
        """Post the frames beyond `after` up to `upto`, whose settlements `tally` adds up.

        Returns what went beyond the gateway's leases, key -> tokens, and was taken from the accounts themselves.
        """
        with self.database.begin() as connection:
            if self._moves_on(connection, journal, after, upto):
                return self._take(connection, journal, upto, tally)
            return self.credits.captured_beyond(connection, journal, upto, tally.captured)

    def finish(self, journal: str, after: int, upto: int, tally: Tally) -> int:
        """Post the last frames of a gateway that has ended, and give back its leases. Returns how many there were."""
        with self.database.begin() as connection:
            if self._moves_on(connection, journal, after, upto):
                self._take(connection, journal, upto, tally)
            now = self.database.now_ms(connection)
            connection.execute(update(journals).where(journals.c.id == journal).values(closed_ms=now))
            return self.credits.close(connection, journal)

    def _moves_on(self, connection: Connection, journal: str, after: int, upto: int) -> bool:
        """Move the journal's position. False when it was moved there before."""
        here = (journals.c.id == journal) & (journals.c.posted == after)
        now = self.database.now_ms(connection)
        if connection.execute(update(journals).where(here).values(posted=upto, posted_ms=now)).rowcount == 1:
            return True
        found = connection.execute(select(journals.c.posted).where(journals.c.id == journal)).scalar()
        if found is not None and found >= upto:
            return False
        raise StoreError(
            f"the store {self.database.name} has journal {journal} up to {found}, and {after} was expected: it is not "
            "the store that the journal belongs to, or an older copy of it"
        )

    def _take(self, connection: Connection, journal: str, upto: int, tally: Tally) -> dict[str, int]:
        for table, uses in ((usage, tally.uses), (model_usage, tally.of_models)):
            if rows := _usage_rows(uses):
                grow = _grow(connection.dialect, table)
                connection.exec_driver_sql(grow.text, grow.parameters(rows))
        return self.credits.capture(connection, journal, upto, tally.captured)

    def used(self, at_ms: int) -> dict[str, tuple[int, int]]:
        """key -> tokens that it used in the day and in the month of `at_ms`, in and out together."""
        return {key: (int(of_day), int(of_month)) for key, of_day, of_month in self._used(usage, at_ms)}

    def used_of_models(self, at_ms: int) -> dict[tuple[str, str], tuple[int, int]]:
        """(key, model) -> the same, of models whose days are counted apart."""
        found = self._used(model_usage, at_ms)
        return {(key, model): (int(of_day), int(of_month)) for key, model, of_day, of_month in found}

    def _used(self, table: Table, at_ms: int) -> Sequence[Any]:
        day = civil_day(at_ms // DAY_MS)
        today = (table.c.period == "day") & (table.c.start == day)
        month = (table.c.period == "month") & (table.c.start == day // 100)
        tokens = table.c.input_tokens + table.c.output_tokens
        columns = (func.sum(case((which, tokens), else_=0)) for which in (today, month))
        names = [column for column in table.primary_key.columns if column.name not in {"period", "start"}]
        wanted = select(*names, *columns).where(or_(today, month)).group_by(*names)
        with self.database.read() as connection:
            return connection.execute(wanted).all()


class _Grow:
    """The statement that adds to a row of use, or makes it, compiled once: SQLAlchemy's own way of binding thousands of
    rows costs more than the store takes to write them."""

    def __init__(self, dialect: Dialect, table: Table) -> None:
        self._row = [column.name for column in table.columns]
        statement = insert_or(dialect.name, table)
        grown = {name: table.c[name] + statement.excluded[name] for name in _COUNTS}
        upsert = statement.on_conflict_do_update(index_elements=list(table.primary_key.columns), set_=grown)
        compiled = upsert.compile(dialect=dialect, column_keys=self._row)
        self.text = str(compiled)
        self._named = compiled.positiontup is None  # as the driver wants them
        assert self._named or compiled.positiontup == self._row, "posting: a row has another order than the table"

    def parameters(self, rows: list[tuple[Any, ...]]) -> list[Any]:
        """Rows as the driver wants them."""
        return [dict(zip(self._row, row, strict=True)) for row in rows] if self._named else rows


@cache
def _grow(dialect: Dialect, table: Table) -> _Grow:
    return _Grow(dialect, table)


def _usage_rows(uses: Mapping[tuple[Any, ...], Use]) -> list[tuple[Any, ...]]:
    """What is added to the use of each day and month, in the order of the keys: gateways lock rows in one order."""
    found: dict[tuple[Any, ...], Use] = {}
    for (*names, days), use in uses.items():
        day = civil_day(days)
        for place in ((*names, "day", day), (*names, "month", day // 100)):
            total = found.get(place)
            if total is None:
                total = found[place] = Use()
            total.add(use.requests, use.input_tokens, use.output_tokens)
    return [
        (*place, use.requests, use.input_tokens, use.output_tokens) for place, use in sorted(found.items(), key=_place)
    ]


@lru_cache(maxsize=8)
def civil_day(days: int) -> int:
    """Days since 1970 as a date of the calendar, 20261130."""
    date = datetime.fromtimestamp(days * DAY_MS / 1000, UTC)
    return date.year * 10_000 + date.month * 100 + date.day
