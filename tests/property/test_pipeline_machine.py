"""The pipeline against a naive model: any order of events, every invariant after every step."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.core.admission.depth import DepthConfig
from forebay.core.admission.fair_share import FairShareConfig
from forebay.core.admission.forecast import ForecastConfig
from forebay.core.batching import DynamicConfig
from forebay.core.dispatch.health import HealthConfig
from forebay.core.effects import Abort, Dispatch, Effect, Queued, Refuse
from forebay.core.events import (
    EngineDown,
    EngineUp,
    EngineWarming,
    Failed,
    Finished,
    FirstToken,
    Undelivered,
)
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.limits.guarded import GuardedConfig
from forebay.core.model import Lease, Mode, Refusal, Request, Ticket, TicketState, Usage
from forebay.core.outcome import EvictReason, FailReason, Outcome, ShedReason
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.core.shadows.shadow import ShadowConfig
from forebay.core.tuning.depth import TuningConfig
from forebay.core.tuning.derived import DerivedConfig
from forebay.core.tuning.stepwise import StepwiseConfig
from forebay.testing import check_empty, check_invariants

CHAT = PoolConfig(
    name="chat",
    engines=("a", "b"),
    models=("chat",),
    depth=DepthConfig(depth_limit=6, held_limit=9, tokens_limit=3_000, bytes_limit=40_000),
    limit=FixedConfig(limit=3, tokens=1_200),
    limit_shadow=GuardedConfig(initial=2, least=1, kv_tokens=900, interval_ns=SECOND),
    shadow=ShadowConfig(ForecastConfig(wait_budget_ns=5 * MILLISECOND), FairShareConfig(burst_s=0.5)),
    hold_ns=5 * SECOND,
    health=HealthConfig(failures_max=1),
    fair=FairShareConfig(reserve_from=4),
    retry_tickets=True,
    tuning=TuningConfig(
        DerivedConfig(least=1, most=9, interval_ns=2 * SECOND, releases_min=1, releases_enough=2, busy=0.1),
        StepwiseConfig(least=1, interval_ns=5 * SECOND, answers_min=1),
    ),
)
EMBED = PoolConfig(
    name="embed",
    engines=("c",),
    models=("embed",),
    depth=DepthConfig(depth_limit=12, held_limit=12),
    limit=FixedConfig(limit=2, tokens=2_000),
    batching=DynamicConfig(max_size=4, max_tokens=900, linger_ns=20 * MILLISECOND),
)
LONE = PoolConfig(name="lone", engines=("d",), models=("*",), limit=GuardedConfig(initial=2, least=1, kv_tokens=9_000))
LIMITS = {
    "free": None,
    "requests": KeyLimits(requests_per_minute=7),
    "tokens": KeyLimits(tokens_per_minute=3_000, tokens_per_second=400, burst_s=2.0),
    "places": KeyLimits(concurrency=2),
    "nothing": KeyLimits(requests_per_minute=0),
}
CONFIG = PipelineConfig(pools=(CHAT, EMBED, LONE), keys={k: KeyTerms(v) for k, v in LIMITS.items() if v is not None})
MAY_NOT_RETRY = {ShedReason.NEVER_FITS}

durations = st.sampled_from([0, 1, MILLISECOND, 7 * MILLISECOND, 50 * MILLISECOND, SECOND, 9 * SECOND, 70 * SECOND])
usages = st.one_of(
    st.none(),
    st.builds(Usage, st.integers(0, 2_000), st.integers(0, 2_000)),
    st.sampled_from([Usage(0, 0), Usage(1, 10**12), Usage(10**12, 1), Usage(5, 5, exact=False)]),
)


class Watcher:
    """The observer: counts what it is told, and checks that nothing is told twice."""

    def __init__(self) -> None:
        self.closed_tickets: list[Ticket] = []
        self.sheds = 0

    def closed(self, ticket: Ticket) -> None:
        assert ticket.state is TicketState.CLOSED
        assert all(ticket is not other for other in self.closed_tickets[-50:]), "a ticket was closed twice"
        self.closed_tickets.append(ticket)

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        assert predicted_wait_ns >= 0
        self.sheds += 1


class PipelineMachine(RuleBasedStateMachine):
    """Rules are what a driver may do; `waiting` and `running` are the naive model."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.watcher = Watcher()
        self.pipeline = Pipeline(CONFIG, Random(7), self.watcher)
        self.offered = 0
        self.waiting: list[Ticket] = []
        self.running: list[Lease] = []
        self.ended: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.past: list[Lease] = []

    # ---- the naive model -------------------------------------------------------------------------------------

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Dispatch):
                self._dispatched(effect)
            elif isinstance(effect, Queued):
                assert effect.ticket not in self.waiting
                self.waiting.append(effect.ticket)
            elif isinstance(effect, Abort):
                assert not effect.lease.open, "an abort follows the end of the lease"
            elif effect.ticket is not None:
                self._evicted(effect)
            else:
                self._shed(effect)

    def _dispatched(self, effect: Dispatch) -> None:
        assert effect.leases, "an empty dispatch"
        assert len({id(lease.engine) for lease in effect.leases}) == 1, "a batch goes to one engine"
        for lease in effect.leases:
            ticket = lease.ticket
            assert lease.open, "a closed lease was dispatched"
            assert ticket.outcome is None, "a closed ticket was dispatched"
            assert ticket.lease is lease
            assert ticket.arrived <= ticket.dispatched == lease.opened == self.now
            if ticket in self.waiting:
                assert ticket.expires > self.now, "an expired ticket was dispatched"
                self.waiting.remove(ticket)
            assert all(lease.ticket is not ticket for lease in self.running), "a ticket runs twice"
            self.running.append(lease)

    def _evicted(self, effect: Refuse) -> None:
        ticket = effect.ticket
        assert ticket is not None
        assert ticket.outcome is Outcome.EVICTED
        assert isinstance(effect.refusal.reason, EvictReason)
        assert ticket.closed == self.now >= ticket.arrived
        self._check_refusal(effect)
        self.waiting.remove(ticket)
        self.ended[Outcome.EVICTED] += 1

    def _shed(self, effect: Refuse) -> None:
        assert isinstance(effect.refusal.reason, ShedReason)
        self._check_refusal(effect)
        self.ended[Outcome.SHED] += 1

    @staticmethod
    def _check_refusal(effect: Refuse) -> None:
        refusal = effect.refusal
        limited = LIMITS[effect.request.key]
        hopeless = refusal.reason in MAY_NOT_RETRY or (limited is not None and limited.requests_per_minute == 0)
        if refusal.retry_after_ns is None:
            assert hopeless, f"{refusal.reason} without a time to come back"
        else:
            assert refusal.retry_after_ns > 0, f"{refusal.reason} promises a place now"

    def _closes(self, lease: Lease, outcome: Outcome) -> None:
        self.running.remove(lease)
        self.past = [*self.past[-5:], lease]
        self.ended[outcome] += 1

    def budgets(self) -> dict[str, Any]:
        """All that a refusal must leave untouched."""
        return {
            key: (b.open, [meter.remaining(self.now) for meter in b.path._meters], b.path.headers(self.now))
            for key in LIMITS
            for b in [self.pipeline.budget(key)]
        }

    # ---- rules -----------------------------------------------------------------------------------------------

    @initialize(up=st.booleans())
    def start(self, up: bool) -> None:
        if up:
            for engine in "abcd":
                self.apply(self.pipeline.report(EngineUp(engine), self.now))

    @rule(
        key=st.sampled_from(sorted(LIMITS)),
        model=st.sampled_from(["chat", "embed", "other"]),
        size=st.sampled_from([0, 40, 400, 2_000, 50_000]),
        cap=st.sampled_from([None, 1, 100, 1_500]),
        mode=st.sampled_from([None, *Mode]),
        patience=st.sampled_from([None, None, 0, 10 * MILLISECOND, 3 * SECOND]),
        priority=st.integers(0, 2),
        hold_back=st.sampled_from([0.0, 0.0, 0.4]),
        screened=st.booleans(),
        shows_ticket=st.sampled_from([False, False, True]),
    )
    def offer(
        self,
        key: str,
        model: str,
        size: int,
        cap: int | None,
        mode: Mode | None,
        patience: int | None,
        priority: int,
        hold_back: float,
        screened: bool,
        shows_ticket: bool,
    ) -> None:
        request = Request(
            key=key,
            model=model,
            body_bytes=size + 60,
            text_bytes=size,
            max_output_tokens=cap,
            generates=model != "embed",
            mode=mode,
            deadline=None if patience is None else self.now + patience,
            priority=priority,
            stream=cap is not None,
            weight=1.0 + priority,
            hold_back=hold_back,
            holds_place=shows_ticket,
        )
        self.offered += 1
        before = self.budgets()
        if screened:
            refuse = self.pipeline.screen(request, self.now)
            assert self.budgets() == before, "a screening charged something"
            if refuse is not None:
                self.apply([refuse])
                return
        room = self._may_wait(request)
        effects = self.pipeline.offer(request, self.now)
        if isinstance(effects[0], Refuse) and effects[0].ticket is None:
            assert len(effects) == 1, "a shed request has no other effect"
            assert self.budgets() == before, "a refusal changed a budget"
        else:
            assert isinstance(effects[0], Queued | Dispatch), "an admitted request waits or runs"
            held = request.holds_place  # a ticket for which no place is left is taken back
            assert isinstance(effects[0], Dispatch) or room or held, "it waits though its mode has no place for it"
            if key == "requests":
                left, was = self.pipeline.budget(key).path.headers(self.now)[0][2], before[key][2][0][2]
                # One that is evicted in the same instant never ran, and does not count.
                evicted = sum(isinstance(e, Refuse) and e.request.key == key for e in effects)
                assert left == was - 1 + evicted, "what is admitted is charged"
        self.apply(effects)

    def _may_wait(self, request: Request) -> bool:
        """Is there a place in line by the mode's own bound, or in a batch that forms?"""
        pool = self.pipeline.pool_for(request.model)
        assert pool is not None
        here = sum(ticket.pool is pool for ticket in self.waiting)
        return here < max(pool.depth.limit(request.mode or pool.mode), pool.batcher.max_size - pool.single)

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data(), usage=usages)
    def cancel(self, data: st.DataObject, usage: Usage | None) -> None:
        tickets = [*self.waiting, *(lease.ticket for lease in self.running)]
        ticket = data.draw(st.sampled_from(tickets))
        if ticket in self.waiting:
            self.waiting.remove(ticket)
            self.ended[Outcome.CANCELLED] += 1
        else:
            assert ticket.lease is not None
            self._closes(ticket.lease, Outcome.CANCELLED)
        self.apply(self.pipeline.cancel(ticket, self.now, usage))
        assert self.pipeline.cancel(ticket, self.now) == [], "the second cancel does nothing"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.running))
        was = lease.ticket.first_token
        assert self.pipeline.report(FirstToken(lease), self.now) == []
        assert lease.ticket.first_token == (was or self.now)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.sampled_from([1, 40, 5_000]))
    def stream(self, data: st.DataObject, tokens: int) -> None:
        """A stream goes on; what goes beyond its reservation is debited once."""
        lease = data.draw(st.sampled_from(self.running))
        lease.generated += tokens
        assert self.pipeline.meter(lease, self.now) == 0, "as a debt, by default"
        before = self.budgets()
        assert self.pipeline.meter(lease, self.now) == 0
        assert self.budgets() == before, "nothing is debited twice"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), usage=usages, healthy=st.booleans())
    def finish(self, data: st.DataObject, usage: Usage | None, healthy: bool) -> None:
        lease = data.draw(st.sampled_from(self.running))
        self._closes(lease, Outcome.COMPLETED)
        self.apply(self.pipeline.report(Finished(lease, usage, healthy), self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), usage=usages, blame=st.booleans())
    def fail(self, data: st.DataObject, usage: Usage | None, blame: bool) -> None:
        lease = data.draw(st.sampled_from(self.running))
        self._closes(lease, Outcome.FAILED)
        self.apply(self.pipeline.report(Failed(lease, FailReason.ENGINE_ERROR, usage, blame), self.now))

    @precondition(lambda self: any(not lease.ticket.first_token for lease in self.running))
    @rule(data=st.data())
    def undelivered(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([lease for lease in self.running if not lease.ticket.first_token]))
        again = lease.ticket.redispatched
        self.running.remove(lease)
        self.past = [*self.past[-5:], lease]
        self.waiting.append(lease.ticket)  # until the effects decide
        self.apply(self.pipeline.report(Undelivered(lease), self.now))
        assert not lease.open
        if again and lease.ticket.mode is not Mode.BACKPRESSURE:
            assert lease.ticket.outcome is Outcome.EVICTED, "a request is tried on two engines at most"

    @precondition(lambda self: self.past)
    @rule(data=st.data(), usage=usages)
    def late_report(self, data: st.DataObject, usage: Usage | None) -> None:
        """A report on a closed lease changes nothing."""
        lease = data.draw(st.sampled_from(self.past))
        before = self.budgets()
        for event in (Finished(lease, usage), Failed(lease, FailReason.ENGINE_TIMEOUT, usage), Undelivered(lease)):
            assert self.pipeline.report(event, self.now) == []
        assert self.pipeline.report(FirstToken(lease), self.now) == []
        assert self.budgets() == before

    @rule(engine=st.sampled_from("abcd"), event=st.sampled_from([EngineUp, EngineUp, EngineWarming, EngineDown]))
    def engine(self, engine: str, event: type[EngineUp | EngineWarming | EngineDown]) -> None:
        self.apply(self.pipeline.report(event(engine), self.now))

    @rule(by=durations)
    def tick(self, by: int) -> None:
        """Time passes as a driver lets it pass: with one timer, polled when it fires."""
        end = self.now + by
        wakeups = 0
        while (at := self.pipeline.next_wakeup(self.now)) is not None and at <= end:
            self.now = max(self.now, at)
            self.apply(self.pipeline.poll(self.now))
            following = self.pipeline.next_wakeup(self.now)
            assert following is None or following > self.now, "the timer spins"
            check_invariants(self.pipeline, self.now)
            wakeups += 1
            assert wakeups < 1_000, "the timer fires without end"
        self.now = end

    # ---- invariants ------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        check_invariants(self.pipeline, self.now)
        snapshot = self.pipeline.snapshot(self.now)
        assert snapshot.offered == self.offered == sum(self.ended.values()) + len(self.waiting) + len(self.running)
        assert snapshot.outcomes == {outcome.value: count for outcome, count in self.ended.items()}
        assert snapshot.queued == len(self.waiting)
        assert snapshot.in_flight == len(self.running)
        assert len(self.watcher.closed_tickets) + self.watcher.sheds == sum(self.ended.values())
        for key in LIMITS:
            mine = [t for t in self.waiting if t.request.key == key]
            mine += [lease.ticket for lease in self.running if lease.ticket.request.key == key]
            assert self.pipeline.budget(key).open == len(mine)

    def teardown(self) -> None:
        """The process drains: nothing more is admitted, what runs ends, what waits is abandoned, all is zero."""
        self.apply(self.pipeline.drain(self.now))
        effects = self.pipeline.offer(Request(key="free", model="chat"), self.now)
        self.offered += 1
        assert isinstance(effects[0], Refuse)
        assert effects[0].refusal.reason is ShedReason.DRAINING
        self.apply(effects)
        while self.running:
            lease = self.running[0]
            self._closes(lease, Outcome.COMPLETED)
            self.apply(self.pipeline.report(Finished(lease, Usage(1, 1)), self.now))
        self.apply(self.pipeline.abandon(self.now))
        self.holds()
        check_empty(self.pipeline, self.now)
        for ticket in self.watcher.closed_tickets:
            assert ticket.arrived <= (ticket.dispatched or ticket.closed) <= ticket.closed <= self.now
            assert not ticket.first_token or ticket.dispatched <= ticket.first_token <= ticket.closed


TestPipeline = PipelineMachine.TestCase
TestPipeline.settings = settings(
    max_examples=400,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
