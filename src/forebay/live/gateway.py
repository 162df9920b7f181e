"""The one owner of the pipeline: it calls the core, carries out the effects, and keeps the one timer armed.

Everything here runs on the event-loop thread. Carrying out an effect may cause a new report (an engine that refuses at
once), so effects go through one queue and are carried out in order, never nested.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from forebay.core.effects import Abort, Dispatch, Effect, Refuse
from forebay.core.events import Event
from forebay.core.instant import FOREVER, SECOND, Instant
from forebay.core.model import Demand, Lease, Refusal, Request, Ticket, Usage
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.quota.credits import CreditLine
from forebay.core.quota.terms import KeyTerms, OverBudget
from forebay.live.clock import Clock, monotonic


class Owner(Protocol):
    """What the gateway tells the adapter that made a request (Request.owner)."""

    def queued(self, ticket: Ticket) -> None:
        """It waits."""
        ...

    def dispatched(self, lease: Lease) -> None:
        """It may start on the lease's engine, now."""
        ...

    def refused(self, refusal: Refusal) -> None:
        """It was shed or evicted: answer it."""
        ...

    def aborted(self, lease: Lease) -> None:
        """Stop the engine's work on it."""
        ...


class Gateway:
    """Drives a pipeline on an event loop."""

    def __init__(self, pipeline: Pipeline, loop: asyncio.AbstractEventLoop, clock: Clock = monotonic) -> None:
        self.pipeline = pipeline
        self.clock = clock
        self._loop = loop
        self._effects: deque[Effect] = deque()
        self._applying = False
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at: Instant = FOREVER  # of the timer; far away when there is none

    def screen(self, request: Request) -> Refusal | None:
        """The verdict from the header alone; a refusal is final."""
        refuse = self.pipeline.screen(request, self.clock())
        return None if refuse is None else refuse.refusal

    def offer(self, request: Request) -> None:
        """Decide a request. Its owner hears of the result before this returns."""
        self._apply(self.pipeline.offer(request, self.clock()))

    def cancel(self, ticket: Ticket, usage: Usage | None) -> None:
        """The client of a ticket left."""
        self._apply(self.pipeline.cancel(ticket, self.clock(), usage))

    def report(self, event: Event) -> None:
        """Pass on what happened at an engine."""
        self._apply(self.pipeline.report(event, self.clock()))

    def meter(self, lease: Lease) -> int:
        """Debit what a stream generated beyond what is paid for. Returns for how long it must be held, in ns: FOREVER
        when it has to end."""
        return self.pipeline.meter(lease, self.clock())

    @property
    def slows(self) -> bool:
        """Is a stream that its key cannot pay slowed?"""
        return self.pipeline.over_budget is OverBudget.SLOW

    def set_key(self, key: str, terms: KeyTerms) -> None:
        """Make a key known, or give it other terms."""
        self.pipeline.quota.set_key(key, terms, self.clock())

    def remove_key(self, key: str) -> None:
        """Forget a key that was set."""
        self.pipeline.quota.remove_key(key)

    def restore_usage(self, key: str, day_tokens: int, month_tokens: int, model: str = "") -> None:
        """Count what a key used of the running day and month before this process began; `model`: what of that was of
        this model, for the limits of the model alone."""
        self.pipeline.quota.restore_usage(key, day_tokens, month_tokens, self.clock(), model)

    def lease_credit(self, key: str, tokens: int, *, last: bool = False) -> None:
        """Give a prepaid key more to spend here. Raises KeyError for another key."""
        self.pipeline.quota.lease_credit(key, tokens, last=last)

    def cover_credit(self, key: str, tokens: int) -> None:
        """Say that a prepaid key's account has paid, or owes, so much of what went beyond its leases. Raises KeyError
        for another key."""
        self.pipeline.quota.cover_credit(key, tokens)

    def return_credit(self, key: str) -> int:
        """Take back what of a prepaid key's credit is free. Raises KeyError for another key."""
        return self.pipeline.quota.return_credit(key)

    def credit(self, key: str) -> CreditLine | None:
        """What a key may spend here; None for one that is not prepaid."""
        return self.pipeline.budget(key).credit

    def estimate(self, request: Request) -> Demand:
        """What a request is expected to cost."""
        return self.pipeline.estimator.estimate(request)

    def recount(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        """Prompts are counted by other tokenizers from now on: model (or "*": all others) -> which."""
        self.pipeline.estimator.recount(before, after)

    def read_wall(self, wall_ns: int) -> None:
        """It is so many nanoseconds since 1970."""
        self.pipeline.quota.set_wall(wall_ns - self.clock())

    def reconfigure(self, config: PipelineConfig) -> None:
        """Take other settings. Raises ValueError, with nothing changed, for those that need a restart."""
        self._apply(self.pipeline.reconfigure(config, self.clock()))

    def drain(self) -> None:
        """Admit nothing more."""
        self._apply(self.pipeline.drain(self.clock()))

    def abandon(self) -> None:
        """Evict what still waits."""
        self._apply(self.pipeline.abandon(self.clock()))

    def stop(self) -> None:
        """Disarm the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _apply(self, effects: list[Effect]) -> None:
        if effects:
            self._effects.extend(effects)
            if not self._applying:
                self._carry_out()
        pipeline = self.pipeline
        if pipeline.queued or pipeline.learning or pipeline.tune_at < self._wakes_at:
            self._arm()

    def _carry_out(self) -> None:
        pending = self._effects
        self._applying = True
        try:
            while pending:
                effect = pending.popleft()
                if isinstance(effect, Dispatch):
                    for lease in effect.leases:
                        # An effect before this one may have ended the lease already.
                        if lease.open:
                            lease.ticket.request.owner.dispatched(lease)
                elif isinstance(effect, Refuse):
                    effect.request.owner.refused(effect.refusal)
                elif isinstance(effect, Abort):
                    effect.lease.ticket.request.owner.aborted(effect.lease)
                else:
                    effect.ticket.request.owner.queued(effect.ticket)
        finally:
            self._applying = False

    def _arm(self) -> None:
        """Keep one timer at the next wake-up. A timer that fires too early only polls for nothing."""
        now = self.clock()
        wake = self.pipeline.next_wakeup(now)
        if wake is None or self._wakes_at <= wake:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = wake
        self._timer = self._loop.call_later(max(0, wake - now) / SECOND, self._wake)

    def _wake(self) -> None:
        self._timer, self._wakes_at = None, FOREVER
        self._apply(self.pipeline.poll(self.clock()))
