"""The ledger's side of a running gateway: what tickets used goes out, credit comes in, and nobody waits for a database.

Everything here runs on the event loop and only appends to lists or reads integers. The scribe's threads write the
journal, the clerk's thread talks to the store; their answers come back by `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol
from uuid import uuid4

from forebay.config.ledger import Ledger
from forebay.core.instant import SECOND
from forebay.core.model import NOTHING_USED, Demand, Lease, Refusal, Request, Ticket
from forebay.core.quota.credits import CreditLine
from forebay.errors import ForebayError
from forebay.ledger.clerk import Answers, Clerk
from forebay.ledger.credits import Hold
from forebay.ledger.database import Database, StoreGoneError
from forebay.ledger.journal import PREPAID, SETTLED, Frame, Journal
from forebay.ledger.posting import Posting
from forebay.ledger.recovery import recover
from forebay.ledger.scribe import Scribe

log = logging.getLogger(__name__)

FRESH_S = 1.0
"""For so long an account that had nothing more is not asked again."""
SOON_S = 10.0
"""A lease that lasted less than this is followed by one of twice the size."""
TEND_S = 0.05
LONG_AGO = -1e9
GATHERING = 0.8
"""Of the write interval; the rest is for the writing."""
GOLDEN = 0.618034


@dataclass(frozen=True, slots=True)
class DeskConfig:
    """Times in seconds, sizes in bytes, credit in tokens."""

    journal: Path
    write_s: float = 0.01
    sync_s: float = 0.05
    post_s: float = 1.0
    bytes_most: int = 1 << 30
    lease_tokens: int = 20_000
    lease_tokens_most: int = 2_000_000
    lease_ttl_s: float = 300.0
    lease_wait_s: float = 2.0
    idle_s: float = 60.0
    waiting_most: int = 1000

    @classmethod
    def of(cls, section: Ledger) -> DeskConfig:
        """What the section of the configuration says."""
        return cls(
            Path(section.journal),
            write_s=section.write_interval_ms / 1000,
            sync_s=section.sync_interval_ms / 1000,
            post_s=section.post_interval_ms / 1000,
            bytes_most=section.journal_max_bytes,
            lease_tokens=section.lease_tokens,
            lease_ttl_s=section.lease_ttl_s,
            lease_wait_s=section.lease_wait_s,
            idle_s=section.lease_idle_s,
            waiting_most=section.waiting_limit,
        )


class Before(NamedTuple):
    """What keys had used of the running day and month when the journal was begun, in tokens."""

    of_keys: dict[str, tuple[int, int]]
    of_models: dict[tuple[str, str], tuple[int, int]]  # part of the same, of models whose days are counted apart


NOTHING_BEFORE = Before({}, {})


class Till(Protocol):
    """The gateway, as far as credit goes."""

    def lease_credit(self, key: str, tokens: int, *, last: bool = False) -> None:
        """Give a prepaid key more to spend; `last`: its account has no more."""
        ...

    def cover_credit(self, key: str, tokens: int) -> None:
        """Say that a prepaid key's account has paid, or owes, so much of what went beyond its leases."""
        ...

    def return_credit(self, key: str) -> int:
        """Take back what is free of a prepaid key's credit."""
        ...

    def credit(self, key: str) -> CreditLine | None:
        """What a key may spend; None for one that is not prepaid."""
        ...

    def estimate(self, request: Request) -> Demand:
        """What a request is expected to cost."""
        ...


class Waiter(Protocol):
    """A request that waits for its key's credit."""

    waits_for_credit: bool

    def credit_came(self) -> None:
        """Go on: the pipeline decides."""
        ...

    def no_credit_came(self) -> None:
        """It did not come in time."""
        ...


@dataclass(slots=True)
class _Key:
    """What the desk knows of one prepaid key."""

    want: int  # tokens of its next lease
    need: int = 0  # tokens that requests wait for
    asked: bool = False
    granted_at: float = LONG_AGO
    short_at: float = LONG_AGO  # when the store had less than was needed
    thin_at: float = LONG_AGO  # when it gave less than was wanted
    seen_at: float = LONG_AGO


class Desk:
    """Binds one gateway to one store. `bind` it to the gateway, `start` it on the loop, `stop` it after the drain."""

    def __init__(
        self, database: Database, config: DeskConfig, *, wait: bool = False, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """Takes the journal's folder, posts what an earlier process left there, and begins a new journal.

        `wait`: when the store is not there, that is done later, as soon as it is; `opened` says whether it was. Raises
        ForebayError when the folder, the journal in it or the store cannot be used.
        """
        self.config = config
        self.recovered = 0
        self.before = NOTHING_BEFORE
        self._name = uuid4().hex
        self._wall_ns, self._wall_latest = wall_ns, 0
        self._posting = Posting(database)
        self._journal = journal = Journal(config.journal)
        self._opened: Callable[[], None] = lambda: None
        self._scribe = Scribe(
            journal, write_s=config.write_s * GATHERING, sync_s=config.sync_s, bytes_most=config.bytes_most,
            wall_ms=self._wall_ms, written=self._written,
        )  # fmt: skip
        self._clerk = Clerk(
            self._posting, self._name, open_books=self._open_books, post_s=config.post_s,
            lease_ttl_s=config.lease_ttl_s,
            deliver=lambda granted: self._call(self._granted, granted),
            beyond=lambda tokens: self._call(self._paid_beyond, tokens),
            lapsed=lambda: self._call(self._lapsed),
            posted=journal.posted,
        )  # fmt: skip
        try:
            self._clerk.open()
        except StoreGoneError as error:
            if not wait:
                journal.end(remove=False)
                raise
            self._clerk.trouble = str(error)
            log.error("%s; the gateway starts without it, and asks again", error)
        except BaseException:
            journal.end(remove=False)
            raise
        self._timer: asyncio.TimerHandle | None = None
        self._keys: dict[str, _Key] = {}
        self._waiting: dict[str, list[Waiter]] = {}
        self._deadlines: deque[tuple[float, str, Waiter]] = deque()
        self.waiting = 0
        self.refused = 0
        self._turn = 0.0
        self._idle_at = 0.0

    # ---- life --------------------------------------------------------------------------------------------------

    def _open_books(self) -> None:
        journal, wall_ms = self._journal, self._wall_ms()
        try:
            self.recovered = recover(journal, self._posting)
            self.before = Before(self._posting.used(wall_ms), self._posting.used_of_models(wall_ms))
            self._posting.register(self._name, str(self.config.journal.absolute()))
            journal.begin(self._name)
        except OSError as error:
            raise ForebayError(f"the journal {journal.folder} cannot be written: {error.strerror}") from None
        self._opened()

    @property
    def opened(self) -> bool:
        """Has the store been there, so that all that was used before is known?"""
        return self._journal.begun

    def used(self) -> dict[str, tuple[int, int]]:
        """key -> tokens that it used today and this month, as the store knows them. Blocks; for the start."""
        return self._posting.used(self._wall_ms())

    def used_of_models(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(key, model) -> the same, of models whose days are counted apart. Blocks; for the start."""
        return self._posting.used_of_models(self._wall_ms())

    def start(self, loop: asyncio.AbstractEventLoop, till: Till, opened: Callable[[], None] = lambda: None) -> None:
        """Work from now on. `opened` is called on the loop when a store that was waited for is there."""
        self._loop, self._till = loop, till
        self._opened = lambda: self._call(opened)
        self._scribe.start()
        self._clerk.start()
        self._timer = loop.call_later(TEND_S, self._tend)

    def stop(self) -> None:
        """Write and post what there is, and give the leases back. Blocks, for some seconds when the store is away."""
        if self._timer is None:  # it was never started
            self._journal.end(remove=False)
            return
        self._timer.cancel()
        self._scribe.stop()
        done = self._clerk.stop() and self._scribe.trouble is None
        if not done:
            log.warning("the store did not take everything; the next start posts what the journal holds")
        self._journal.end(remove=done)

    # ---- figures -----------------------------------------------------------------------------------------------

    @property
    def degraded(self) -> list[str]:
        """What does not work now, in words; empty when all does."""
        return [text for text in (self._scribe.trouble, self._clerk.trouble) if text is not None]

    @property
    def lost(self) -> int:
        """Settlements that neither the journal nor memory could hold."""
        return self._scribe.lost

    @property
    def posted(self) -> int:
        """Settlements that the store has taken since the start."""
        return self._clerk.settlements

    @property
    def writable(self) -> bool:
        """Can the journal be written?"""
        return self._scribe.trouble is None

    @property
    def store_up(self) -> bool:
        """Does the store answer?"""
        return self._clerk.trouble is None

    @property
    def journal_bytes(self) -> int:
        """Size of the journal's folder."""
        return self._journal.size

    def lag_s(self) -> float:
        """Age of the oldest settlement that the store does not have."""
        return self._clerk.lag_s()

    # ---- observer of tickets -----------------------------------------------------------------------------------

    def closed(self, ticket: Ticket) -> None:
        """A request ended: what it used goes to the journal."""
        usage, kind, path = ticket.usage, SETTLED, ticket.path
        if path.credit is not None:
            kind = PREPAID
            metered = self._scribe.streams.pop(ticket.sequence, None) is not None
            if ticket.request.key not in self._keys and (free := path.credit.give_back()):
                self._clerk.give_back(ticket.request.key, free)  # the key was forgotten while this ran
            if usage is None and metered:
                usage = NOTHING_USED
        if usage is not None:
            tokens_in, tokens_out = usage.charged_input, usage.output_tokens
            if tokens_out < 0:  # an engine's word of less than nothing would mint tokens
                tokens_out = 0
            self._scribe.note((kind, ticket.request.key, ticket.sequence, tokens_in, tokens_out, path.model))

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        """Nothing was used."""

    # ---- prepaid requests --------------------------------------------------------------------------------------

    def knows(self, key: str) -> bool:
        """Is the pipeline's word on a prepaid key's credit worth anything now? If not, its credit is asked for."""
        line = self._till.credit(key)
        if line is None or line.left > 0 or self._just_told(key):
            return True
        if self._scribe.trouble is None:
            self._ask(key, 0)
        return False

    def arrive(self, request: Request, waiter: Waiter) -> bool:
        """A prepaid key's request is whole: may it go on to the pipeline now?

        If not, and it `waits_for_credit` then, it hears of it later, once, unless it must `leave`; else it is refused.
        """
        key = request.key
        line = self._till.credit(key)
        if line is None:
            return True
        if self._scribe.trouble is not None:
            self.refused += 1
            return False
        need, left = self._till.estimate(request).reserved, line.left
        state = self._state(key)
        if need <= left:
            if left - need < state.want // 2 and not state.asked and self._loop.time() - state.thin_at > FRESH_S:
                self._ask(key, 0)
            return True
        if self._just_told(key):
            return True
        if self._clerk.trouble is not None or self.waiting >= self.config.waiting_most:
            self.refused += 1
            return False
        self._ask(key, need)
        waiter.waits_for_credit = True
        self.waiting += 1
        self._waiting.setdefault(key, []).append(waiter)
        self._deadlines.append((self._loop.time() + self.config.lease_wait_s, key, waiter))
        return False

    def why_closed(self) -> str:
        """Why a request is refused, for its caller: nothing of the machine's paths or addresses."""
        if self._scribe.trouble is not None:
            return "what this key uses cannot be written down now"
        if self._clerk.trouble is not None:
            return "this key's credit cannot be looked up now"
        return "too many requests wait for their keys' credit"

    def come_back_ns(self) -> int:
        """When to come back, spread over two seconds."""
        self._turn = (self._turn + GOLDEN) % 1
        return int((1 + 2 * self._turn) * SECOND)

    def leave(self, waiter: Waiter) -> None:
        """The client of a waiting request has gone."""
        if waiter.waits_for_credit:
            waiter.waits_for_credit = False
            self.waiting -= 1

    def streams(self, lease: Lease) -> None:
        """A stream of a prepaid key was dispatched: it is metered into the journal from now on."""
        self._scribe.stream(lease)

    def drain(self) -> None:
        """Nothing is admitted any more: let those that wait be told so by the pipeline."""
        for key in list(self._waiting):
            self._wake(key)

    def forget(self, key: str) -> None:
        """A key is not served any more: its credit goes back."""
        if self._keys.pop(key, None) is not None:
            self._give_back(key)
            self._wake(key)

    def credited(self, key: str) -> None:
        """A key's credit was changed by hand: what the store said of it a moment ago counts no more."""
        if (state := self._keys.get(key)) is not None:
            state.short_at = state.thin_at = LONG_AGO

    # ---- inside ------------------------------------------------------------------------------------------------

    def _state(self, key: str) -> _Key:
        state = self._keys.get(key)
        if state is None:
            state = self._keys[key] = _Key(self.config.lease_tokens)
        state.seen_at = self._loop.time()
        return state

    def _just_told(self, key: str) -> bool:
        """Did the store say, a moment ago, that there is no more than what is here?"""
        state = self._keys.get(key)
        return state is not None and self._loop.time() - state.short_at < FRESH_S

    def _ask(self, key: str, need: int) -> None:
        """Ask for a lease; `need` adds to what others of the key wait for."""
        state = self._state(key)
        if state.asked and not need:
            return
        state.asked = True
        state.need += need
        self._clerk.ask(Hold(key, state.need, max(state.want, state.need)))

    def _granted(self, granted: Answers) -> None:
        now = self._loop.time()
        for key, (hold, grant) in granted.items():
            state = self._keys.get(key)
            if state is None or self._till.credit(key) is None:  # forgotten in the meantime
                if grant.tokens:
                    self._clerk.give_back(key, grant.tokens)
                continue
            self._till.lease_credit(key, grant.tokens, last=not grant.rest)
            if grant.tokens < hold.want:
                state.thin_at = now
            elif now - state.granted_at < SOON_S:
                state.want = min(2 * state.want, self.config.lease_tokens_most)
            if grant.tokens < hold.need or not grant.tokens:
                state.short_at = now
            state.granted_at = now
            state.need = max(0, state.need - hold.need)
            state.asked = False
            if state.need:  # others came while this was under way
                self._ask(key, 0)
            else:
                self._wake(key)

    def _paid_beyond(self, beyond: dict[str, int]) -> None:
        """The accounts paid what the leases did not cover: a later lease must not pay it again, and lie idle for it."""
        for key, tokens in beyond.items():
            if self._till.credit(key) is not None:
                self._till.cover_credit(key, tokens)
                self._state(key)  # so that what is free now goes back when the key is idle

    def _wake(self, key: str) -> None:
        for waiter in self._waiting.pop(key, ()):
            if waiter.waits_for_credit:
                self.leave(waiter)
                waiter.credit_came()

    def _tend(self) -> None:
        """Many times a second: end waits that are over, ask for streams that run short, return what lies idle."""
        now = self._loop.time()
        self._timer = self._loop.call_later(TEND_S, self._tend)
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].waits_for_credit):
            _, key, waiter = self._deadlines.popleft()
            if waiter.waits_for_credit:
                self._waiting[key].remove(waiter)
                self.leave(waiter)
                self.refused += 1
                waiter.no_credit_came()
        for lease in list(self._scribe.streams.values()):
            key = lease.ticket.request.key
            line = self._till.credit(key)
            if line is not None and not line.left and not self._just_told(key):
                self._ask(key, 0)
        if now >= self._idle_at:
            self._idle_at = now + self.config.idle_s / 4
            self._return_idle(now)

    def _return_idle(self, now: float) -> None:
        for key, state in list(self._keys.items()):
            line = self._till.credit(key)
            if now - state.seen_at > self.config.idle_s and not state.asked and (line is None or not line.held):
                del self._keys[key]
                self._give_back(key)

    def _lapsed(self) -> None:
        """The store was away for so long that others take this gateway for dead: its credit is no longer its own."""
        for key in list(self._keys):
            self._give_back(key)

    def _give_back(self, key: str) -> None:
        if self._till.credit(key) is not None and (tokens := self._till.return_credit(key)):
            self._clerk.give_back(key, tokens)

    def _wall_ms(self) -> int:
        """Milliseconds since 1970; a clock that was set back stands still until it is past again."""
        self._wall_latest = max(self._wall_latest, self._wall_ns() // 1_000_000)
        return self._wall_latest

    # ---- from the threads --------------------------------------------------------------------------------------

    def _written(self, frame: Frame) -> None:
        self._clerk.take(frame)

    def _call(self, what: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:
            pass  # the loop has ended
