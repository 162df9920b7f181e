"""Opening the store: SQLite or PostgreSQL by URL, brought to this version's tables, with errors for a person.

`begin` is a writing transaction and takes SQLite's one write lock at once, so that it never fails half-way for want of
it; `read` is a reading one. Both raise StoreError for whatever the database refuses, StoreGoneError when asking again
later may help.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, exc, inspect, make_url, text

from forebay.errors import ForebayError
from forebay.ledger.tables import HEAD

BUSY_MS = 5_000
CONNECT_S = 5
STATEMENT_MS = 30_000
REFUSED = ("authentication failed", "no password supplied", "pg_hba.conf", "does not exist")
"""What PostgreSQL says to who asks for something that waiting does not bring."""
MIGRATION_LOCK = 0x466F7265626179  # any number, but everybody's


class StoreError(ForebayError):
    """The store cannot be used as it is."""


class StoreGoneError(StoreError):
    """The store does not answer now; it may again."""


class Database:
    """One store. Safe to use from several threads, each with transactions of its own.

    Its tables are brought to this version's before its first use; without `migrate` other ones are refused.
    """

    def __init__(self, engine: Engine, *, migrate: bool = True, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.engine = engine
        self._wall_ns = wall_ns
        self._writing = engine.execution_options(forebay_writes=True)
        self._migrate, self._prepared, self._preparing = migrate, False, threading.Lock()

    @property
    def name(self) -> str:
        """Its URL, without the password."""
        return self.engine.url.render_as_string(hide_password=True).replace("+psycopg", "")

    @property
    def embedded(self) -> bool:
        """Is it SQLite, which only processes of one machine can share?"""
        return self.engine.dialect.name == "sqlite"

    @contextlib.contextmanager
    def begin(self) -> Iterator[Connection]:
        """A writing transaction, committed at the end of the block. Raises StoreError."""
        self.prepare()
        with self._stated(), self._writing.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A reading transaction: everything in it is seen as of one moment. Raises StoreError."""
        self.prepare()
        with self._stated(), self.engine.connect() as connection:
            yield connection

    def prepare(self) -> None:
        """See that it is there, with this version's tables. Raises StoreError."""
        if self._prepared:
            return
        with self._preparing:
            if not self._prepared:
                with self._stated():
                    self._bring_up_to_date()
                self._prepared = True

    def _bring_up_to_date(self) -> None:
        with self.engine.connect() as connection:
            found = _version(connection)
        if found == HEAD:
            return
        if not self._migrate:
            state = "has no tables yet" if found is None else f"is at version {found}, this Forebay needs {HEAD}"
            raise StoreError(f"the store {self.name} {state}; start a gateway on it, or run forebay keys create")
        with self._writing.begin() as connection:
            if not self.embedded:  # SQLite's write lock is held already
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
            _migrate(connection, self.name)

    def now_ms(self, connection: Connection) -> int:
        """The store's own wall clock: gateways with clocks of their own agree on it."""
        if self.embedded:
            return self._wall_ns() // 1_000_000
        return int(connection.execute(text("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)")).scalar_one())

    def close(self) -> None:
        self.engine.dispose()

    @contextlib.contextmanager
    def _stated(self) -> Iterator[None]:
        try:
            yield
        except exc.DBAPIError as error:
            raise _stated(error, self.name) from None
        except exc.TimeoutError:
            raise StoreGoneError(f"the store {self.name} does not answer; nothing was changed") from None


def open_store(
    url: str, *, migrate: bool = True, wait: bool = False, wall_ns: Callable[[], int] = time.time_ns
) -> Database:
    """Open the store at `url` and bring its tables to this version's.

    `sqlite:///relative.db`, `sqlite:////absolute.db` or `postgresql://user@host/database`. Without `migrate`, a store
    that another version made is refused. One that is not there is returned all the same to who will `wait` for it.
    `wall_ns` is the clock of an embedded store. Raises StoreError with what to do.
    """
    database = Database(_engine(_parsed(url)), migrate=migrate, wall_ns=wall_ns)
    try:
        database.prepare()
    except StoreGoneError:
        if not wait:
            database.close()
            raise
    except BaseException:
        database.close()
        raise
    return database


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except exc.ArgumentError:
        raise StoreError(
            "the store's URL cannot be read; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from None
    kind = parsed.drivername.partition("+")[0]
    if kind in {"postgresql", "postgres"}:
        return parsed.set(drivername="postgresql+psycopg")
    if kind != "sqlite":
        raise StoreError(f"the store cannot be a {kind} database; write sqlite:///FILE or postgresql://USER@HOST/NAME")
    if parsed.database in {None, "", ":memory:"}:
        raise StoreError("the store needs a file, since it outlives the process; write sqlite:///FILE")
    return parsed


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": BUSY_MS / 1000, "check_same_thread": False})
        event.listen(engine, "connect", _sqlite_connected)
        event.listen(engine, "begin", _sqlite_begins)
        return engine
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise StoreError("PostgreSQL needs its driver; install it with: pip install 'forebay[postgres]'") from None
    options = f"-c statement_timeout={STATEMENT_MS} -c lock_timeout={BUSY_MS} -c timezone=UTC"
    arguments = {"connect_timeout": CONNECT_S, "options": options, "application_name": "forebay"}
    return create_engine(url, connect_args=arguments, pool_pre_ping=True, pool_timeout=CONNECT_S)


def _sqlite_connected(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where we say so, DDL included
    cursor = connection.cursor()
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", f"busy_timeout = {BUSY_MS}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _sqlite_begins(connection: Connection) -> None:
    writes = connection.get_execution_options().get("forebay_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _migrate(connection: Connection, name: str) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", "forebay.ledger:migrations")
    config.attributes["connection"] = connection
    found = _version(connection)
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise StoreError(
            f"the store {name} was made by a newer Forebay (version {found}, this one knows up to {HEAD}); "
            "upgrade this Forebay, or use another store"
        )
    command.upgrade(config, "head")


def _stated(error: exc.DBAPIError, name: str) -> StoreError:
    """What the driver said, for a person; StoreGoneError if asking again may help."""
    said = str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
    lower = said.lower()
    if "unable to open database" in lower:
        return StoreGoneError(f"the store {name} cannot be opened; its folder must exist and be writable")
    if "not a database" in lower or "malformed" in lower:
        return StoreError(f"the store {name} is not a sound SQLite database ({said}); restore it, or use another file")
    if "readonly" in lower or "read-only" in lower:
        return StoreGoneError(
            f"the store {name} is read-only; give this user the right to write the file and its folder"
        )
    if "locked" in lower or "busy" in lower:
        return StoreGoneError(f"the store {name} is locked by another process; nothing was changed")
    if "full" in lower or "disk i/o" in lower:
        return StoreGoneError(f"the store {name} cannot be written ({said}); free some disk space")
    if isinstance(error, exc.OperationalError | exc.InterfaceError) or error.connection_invalidated:
        if any(words in lower for words in REFUSED):
            return StoreError(f"the store {name} lets us not in: {said}; correct its URL, PGPASSWORD or .pgpass")
        return StoreGoneError(f"the store {name} does not answer: {said}; start it, or correct the store's URL")
    return StoreError(f"the store {name} refused: {said}")
