"""The thread that writes the journal: settlements soon after they happened, open streams at every sync.

The event loop only appends to a list. A settlement is in the file (and so survives the end of the process) after one
write interval; it is on the disk (and survives a loss of power) after one sync interval and the time of the sync. While
the file cannot be written the records wait in memory, as many as that may hold, and `trouble` says so.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from errno import ENOSPC

from forebay.core.model import Lease
from forebay.ledger.journal import METERED, Frame, Journal, Record

log = logging.getLogger(__name__)

WAITING_MOST = 1_000_000
"""Records in memory while the journal cannot be written; about 100 MB."""
RETRY_S = 0.2


class Scribe:
    """Owns the journal while it runs. `written` is told of every frame, on this thread."""

    def __init__(
        self, journal: Journal, *, write_s: float, sync_s: float, bytes_most: int, wall_ms: Callable[[], int],
        written: Callable[[Frame], None],
    ) -> None:  # fmt: skip
        self.journal = journal
        self.trouble: str | None = None
        self.lost = 0  # records that neither file nor memory could hold
        self.streams: dict[int, Lease] = {}  # open ones of prepaid keys, by the number of their ticket
        self._write_s, self._sync_s, self._bytes_most = write_s, sync_s, bytes_most
        self._wall_ms, self._written = wall_ms, written
        self._waiting: deque[Record] = deque()
        self._metered: dict[int, int] = {}
        self._unsynced = False
        self._idle = True
        self._wake, self._stopped, self._sync_soon = threading.Event(), threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"journal {name}", daemon=True)
            for name, run in (("writer", self._run), ("sync", self._run_sync))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def note(self, record: Record) -> None:
        """Have a record written within the write interval. Called on the event loop; costs an append."""
        self._waiting.append(record)
        if self._idle:
            self._idle = False
            self._wake.set()

    def stream(self, lease: Lease) -> None:
        """A prepaid key's stream began: from now on what it generated is written at every sync."""
        self.streams[lease.ticket.sequence] = lease
        if self._idle:
            self._idle = False
            self._wake.set()

    def stop(self) -> None:
        """Write what waits, and end both threads."""
        self._stopped.set()
        self._wake.set()
        self._sync_soon.set()
        for thread in self._threads:
            thread.join()
        if self._waiting:
            self.lost += len(self._waiting)
            log.error("%d settlements are lost: the journal %s was never begun", self.lost, self.journal.folder)

    # ---- on the writer's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        meter_at = 0.0
        while not self._stopped.is_set():
            self._wake.wait()
            self._wake.clear()
            while not self._stopped.is_set():
                time.sleep(self._write_s if self.trouble is None else RETRY_S)  # an event costs more, each time
                now = time.monotonic()
                metered = now >= meter_at
                if metered:
                    meter_at = now + self._sync_s
                self._write(self._progress() if metered else [])
                # Idle is said first: what comes in between is seen here, or wakes this thread.
                self._idle = True
                if not self._waiting and not self.streams and self.trouble is None:
                    break
                self._idle = False
        self._write([])

    def _progress(self) -> list[Record]:
        """What the open streams have generated since they were last metered. Before the waiting records are taken:
        of a stream that ends now the end is written with it, or after."""
        records: list[Record] = []
        metered: dict[int, int] = {}
        for number, lease in list(self.streams.items()):
            generated = metered[number] = lease.generated
            if generated and generated != self._metered.get(number):
                ticket = lease.ticket
                tokens_in = ticket.demand.input_tokens
                records.append((METERED, ticket.request.key, number, tokens_in, generated, ticket.path.model))
        self._metered = metered
        return records

    def _wait_to_begin(self) -> None:
        """What an earlier process left in the folder has to be posted first, and the store is not there."""
        if self.trouble is None:
            log.warning("the journal %s is not begun before the store is there", self.journal.folder)
        self.trouble = f"the journal {self.journal.folder} waits for the store; what is used is in memory only"
        while len(self._waiting) > WAITING_MOST:
            self._waiting.popleft()
            self.lost += 1

    def _write(self, progress: list[Record]) -> None:
        if not self.journal.begun:
            self._wait_to_begin()
            return
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not waiting and not progress and self.trouble is None:  # in trouble an empty frame tries the file
            return
        try:
            if self.journal.full:
                self.journal.turn()
                self._metered.clear()
                progress = self._progress()  # the next segment has to tell of every open stream by itself
            if self.journal.size > self._bytes_most:
                raise OSError(ENOSPC, "it has the size that it may have, since the store takes nothing from it")
            frame = Frame(self.journal.number + 1, self._wall_ms(), progress + waiting)
            self.journal.append(frame.records, frame.at_ms)
        except OSError as error:
            self._metered.clear()
            self._keep(waiting)
            if self.trouble is None:
                log.error("the journal %s cannot be written: %s", self.journal.folder, error.strerror)
            self.trouble = f"the journal {self.journal.folder} cannot be written: {error.strerror}"
            return
        if self.trouble is not None:
            log.warning("the journal %s is written again", self.journal.folder)
            self.trouble = None
        if not self._unsynced:
            self._unsynced = True
            self._sync_soon.set()
        self._written(frame)

    def _keep(self, waiting: list[Record]) -> None:
        """Put records back, before those that have come since."""
        kept = waiting[:WAITING_MOST]
        self.lost += len(waiting) - len(kept)
        self._waiting.extendleft(reversed(kept))

    # ---- on the sync's thread: the disk may take its time, and writing must not wait for it ---------------------

    def _run_sync(self) -> None:
        while not self._stopped.is_set():
            self._sync_soon.wait()
            self._sync_soon.clear()
            if not self._unsynced:
                continue
            self._unsynced = False
            try:
                self.journal.sync()
            except OSError as error:
                # What the kernel gave up on is lost to a later sync as well; the process still has it in the file.
                log.error("the journal %s cannot be synced: %s", self.journal.folder, os.strerror(error.errno or 0))
            self._stopped.wait(self._sync_s)
