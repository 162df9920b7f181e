"""The thread that works with the store: posts the journal, leases credit, renews leases and ends those of the dead.

The event loop leaves its wishes here and never waits; answers go back through `deliver`. While the store is away the
wishes stay, settlements add up per key, and `trouble` says so. A wish whose answer was lost is repeated under the same
number, which the store knows again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forebay.errors import ForebayError
from forebay.ledger.credits import Grant, Hold
from forebay.ledger.journal import METERED, PREPAID, Frame
from forebay.ledger.posting import Posting, Tally

log = logging.getLogger(__name__)

RENEWALS = 4  # in the life of a lease
LAPSES_AFTER = 0.75  # of its life without a renewal: others may soon take it for dead
RETRY_S = 0.25
STOP_S = 5.0
FRAMES_LEFT = 1000


Answers = Mapping[str, tuple[Hold, Grant]]
"""By key: what was asked for, and what was granted."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Frames that are being posted; the same ones until the store has them."""

    upto: int
    tally: Tally
    since: float  # when the oldest of them was settled


class Clerk:
    """One gateway's dealings with the store. What it is given to call is called on this thread."""

    def __init__(
        self, posting: Posting, journal: str, *, open_books: Callable[[], None], post_s: float, lease_ttl_s: float,
        deliver: Callable[[Answers], None], beyond: Callable[[dict[str, int]], None], lapsed: Callable[[], None],
        posted: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.trouble: str | None = None
        self.posted = 0  # number of the last frame that the store has
        self.settlements = 0  # that the store has taken
        self.opened = False
        self._posting, self._journal, self._open_books = posting, journal, open_books
        self._post_s, self._ttl_s = post_s, lease_ttl_s
        self._deliver, self._beyond, self._lapsed, self._tell_posted = deliver, beyond, lapsed, posted
        self._lock = threading.Condition()
        self._tally, self._upto, self._since = Tally(), 0, 0.0
        self._batch: _Batch | None = None
        self._asked: dict[str, Hold] = {}
        self._holding: list[Hold] = []
        self._returned: dict[str, int] = {}
        self._returning: dict[str, int] = {}
        self._wish = 0  # number of the last wish that was sent
        self._renewed_at = time.monotonic()
        self._has_lapsed = False
        self._lapse_s = lease_ttl_s * LAPSES_AFTER
        self._late: dict[str, tuple[int, float]] = {}  # journal -> the end of its leases, and since when that is over
        self._tend_at = 0.0
        self._post_at = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    # ---- from other threads ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def open(self) -> None:
        """Open the books, unless they are open. Raises ForebayError. Called before `start`, or on this thread."""
        if not self.opened:
            self._open_books()
            self.opened = True

    def take(self, frame: Frame) -> None:
        """A frame was written to the journal: it is to be posted."""
        with self._lock:
            if not self._tally.settlements:
                self._since = time.monotonic()
            self._upto = frame.number
            for kind, key, _, tokens_in, tokens_out, model in frame.records:
                if kind != METERED:
                    self._tally.add(key, frame.at_ms, tokens_in, tokens_out, kind == PREPAID, model)

    def ask(self, hold: Hold) -> None:
        """Lease credit of a key to this gateway; the answer is delivered."""
        with self._lock:
            self._asked[hold.key] = hold
            self._lock.notify()

    def give_back(self, key: str, tokens: int) -> None:
        """The gateway does not need so much of a key's lease."""
        with self._lock:
            self._returned[key] = self._returned.get(key, 0) + tokens

    def lag_s(self) -> float:
        """Age of the oldest settlement that is not in the store; 0 when all are."""
        with self._lock:
            batch = self._batch
            if batch is not None and batch.tally.settlements:
                return time.monotonic() - batch.since
            return time.monotonic() - self._since if self._tally.settlements else 0.0

    def stop(self) -> bool:
        """Post what is left, give the leases back and end; False when the store did not take it all in time."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join(STOP_S)
        return not self._thread.is_alive() and self.trouble is None

    # ---- on this thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._asked and not self._holding and not self._stopping:
                    self._lock.wait(self._post_s)
                stopping = self._stopping
            try:
                self._finish() if stopping else self._work()
            except ForebayError as error:
                self._failed(str(error))
            except Exception as error:  # a thread that ends unseen would be the worst of all
                log.exception("the ledger's thread met an error of Forebay's own")
                self._failed(f"an error of Forebay's own: {error}")
            else:
                if self.trouble is not None:
                    log.warning("the store answers again")
                self.trouble = None
            if stopping:
                return
            if self.trouble is not None:
                time.sleep(RETRY_S)

    def _failed(self, text: str) -> None:
        if self.trouble is None:
            log.error("%s", text)
        self.trouble = text
        self._watch_lease()

    def _work(self) -> None:
        """One round. What somebody waits for comes first; but what lapsed is no part of a lease that is opened now."""
        self.open()
        if self._has_lapsed:
            self._give_back()
        self._hold()
        now = time.monotonic()
        if now >= self._post_at:
            self._post()
            self._give_back()
            self._post_at = now + self._post_s
        if now >= self._tend_at:
            self._posting.credits.renew(self._journal, int(self._ttl_s * 1000))
            self._renewed_at, self._has_lapsed = now, False
            self._expire(now)
            self._tend_at = now + self._ttl_s / RENEWALS

    def _expire(self, now: float) -> None:
        """End the leases of the dead. A store's clock that was set forward makes everybody late: only who was not heard
        of for so long by this machine's own time, too, that it has stopped spending them, is taken for dead."""
        late = self._posting.credits.late(but_of=self._journal)
        self._late = {
            journal: (ends_ms, self._late[journal][1] if self._late.get(journal, (0, 0.0))[0] == ends_ms else now)
            for journal, ends_ms in late.items()
        }
        dead = {name: ends_ms for name, (ends_ms, since) in self._late.items() if now - since > self._lapse_s}
        if dead:
            self._posting.credits.expire(self._journal, dead)

    def _hold(self) -> None:
        if not self._holding:
            with self._lock:
                self._holding, self._asked = list(self._asked.values()), {}
            if not self._holding:
                return
            self._wish += 1
        granted = self._posting.credits.hold(self._journal, self._wish, self._holding, int(self._ttl_s * 1000))
        answers = {hold.key: (hold, granted[hold.key]) for hold in self._holding}
        self._holding = []
        self._deliver(answers)

    def _post(self) -> None:
        if self._batch is None:
            with self._lock:
                if not self._tally.settlements and self._upto - self.posted < FRAMES_LEFT:
                    return  # open streams alone: the store need not hear of every frame
                self._batch, self._tally = _Batch(self._upto, self._tally, self._since), Tally()
        batch = self._batch
        beyond = self._posting.post(self._journal, self.posted, batch.upto, batch.tally)
        self.posted, self._batch = batch.upto, None
        if beyond:
            self._beyond(beyond)
        self.settlements += batch.tally.settlements
        self._tell_posted(batch.upto)

    def _give_back(self) -> None:
        if not self._returning:
            with self._lock:
                self._returning, self._returned = self._returned, {}
            if not self._returning:
                return
            self._wish += 1
        self._posting.credits.release(self._journal, self._wish, self._returning)
        self._returning = {}

    def _watch_lease(self) -> None:
        """Without renewal the leases end soon, in the eyes of others: what is left of them must not be spent."""
        if not self._has_lapsed and time.monotonic() - self._renewed_at > self._lapse_s:
            self._has_lapsed = True
            self._lapsed()

    def _finish(self) -> None:
        self.open()
        if self._batch is not None:
            self._post()
        with self._lock:
            upto, tally = self._upto, self._tally
        self._posting.finish(self._journal, self.posted, max(upto, self.posted), tally)
        self.posted = upto
