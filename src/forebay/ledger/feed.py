"""Brings changes of stored keys to the running gateway within a second, whoever made them.

A thread asks the store for the number of the last change, four times a second: one row. Only when it has moved are the
changed keys read. The event loop is told of them, and of keys whose time has come. While the store does not answer,
the keys that are known stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Connection, select

from forebay.errors import ForebayError
from forebay.ledger import tables
from forebay.ledger.database import Database
from forebay.ledger.keyring import COLUMNS, Keyring, StoredKey

log = logging.getLogger(__name__)

POLL_S = 0.25
NUMBER = str(select(tables.changes.c.number))  # spelt once: four times a second for as long as the gateway runs
AT_ONCE, PAUSE_S = 1000, 0.002  # keys that the loop takes in one turn, and the time between two of them
COMPLAIN_S = 60.0  # between two lines in the log about a store that stays away

Rows = list[tuple[Any, ...]]


class KeyFeed:
    """Fills a keyring, and keeps it as the store has it. `changed` is called on the loop with the keys that differ.

    Without `load`, when the store is not there, the first look that finds it brings every key; then `whole` is called.
    """

    def __init__(
        self,
        database: Database,
        keyring: Keyring,
        changed: Callable[[list[StoredKey]], None],
        whole: Callable[[], None] = lambda: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.degraded: str | None = None  # why changes of keys are not seen; None: they are
        self._database = database
        self._keyring = keyring
        self._changed, self._whole = changed, whole
        self._wall = wall
        self._number = -1
        self._lock = threading.Lock()  # one look at the store at a time, so that numbers only go up
        self._stop = threading.Event()
        self._complained = 0.0
        self._thread = threading.Thread(target=self._follow, name="forebay-keys", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def load(self) -> None:
        """Read every key that is not revoked. Blocks; call it before `start`. Raises StoreError."""
        with self._database.read() as connection:
            self._number = _number(connection)
            self._keyring.take(_rows(connection, tables.keys.c.revoked_ms.is_(None)))
        self._keyring.expire(int(self._wall() * 1000))

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Follow the store from what `load` has seen, or from nothing."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a look at a store that does not answer is not waited for."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(POLL_S)

    def look(self) -> None:
        """Bring what has changed up to now to the loop. For threads that have just changed something.

        A coroutine that awaits such a thread finds the change in force. Raises StoreError.
        """
        with self._lock:
            with self._database.read() as connection:
                number = _number(connection)
                since = tables.keys.c.change > self._number
                rows = list(_rows(connection, since)) if number != self._number else []
            first, self._number = self._number < 0, number
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._take, rows[:AT_ONCE])
        for start in range(AT_ONCE, len(rows), AT_ONCE):
            time.sleep(PAUSE_S)  # in this thread: the loop serves meanwhile
            self._loop.call_soon_threadsafe(self._take, rows[start : start + AT_ONCE])
        if first:
            self._loop.call_soon_threadsafe(self._whole)

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self.look()
                self.degraded = None
            except ForebayError as error:
                self._say(error)
            except RuntimeError:
                return  # the loop is closed

    def _say(self, error: ForebayError) -> None:
        what = "the keys of the store are not known" if self._number < 0 else "changes of keys are not seen"
        self.degraded = f"{what}: {error}"
        now = time.monotonic()
        if not self._complained or now - self._complained > COMPLAIN_S:
            self._complained = now
            log.warning("%s", self.degraded)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._take, [])  # time passes without the store

    def _take(self, rows: Rows) -> None:
        changed = self._keyring.take(rows)
        changed += self._keyring.expire(int(self._wall() * 1000))
        if changed:
            self._changed(changed)


def _number(connection: Connection) -> int:
    return int(connection.exec_driver_sql(NUMBER).scalar_one())


def _rows(connection: Connection, which: Any) -> Iterator[tuple[Any, ...]]:
    """Rows as plain tuples, a part of them in memory at a time: there may be a hundred thousand."""
    wanted = select(*(tables.keys.c[name] for name in COLUMNS)).where(which)
    result = connection.execution_options(yield_per=AT_ONCE).execute(wanted)
    return (tuple(row) for row in result)
