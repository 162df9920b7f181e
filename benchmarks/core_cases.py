"""Situations in which the core's decisions are timed: the production pipeline, as a configuration makes it.

A case is stepped: requests are offered at an instant, then the oldest leases end. Nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, Literal

from forebay.config.build import pipeline_config
from forebay.config.load import loads
from forebay.core.effects import Dispatch, Effect
from forebay.core.events import EngineUp, Finished, FirstToken
from forebay.core.instant import MILLISECOND
from forebay.core.model import Lease, Refusal, Request, Ticket, Usage
from forebay.core.pipeline import Pipeline
from forebay.core.quota.terms import KeyLimits, KeyTerms

State = Literal["room", "waits", "overload"]
"""Half of the places are free; all are taken and QUEUED wait, one comes as one leaves; or OFFERED come for one that
leaves, so that most are refused."""

PLACES: Final = 64
QUEUED: Final = 100
OFFERED: Final = 3
STEP_NS: Final = MILLISECOND
USAGE: Final = Usage(input_tokens=231, output_tokens=16)
USUAL: Final = KeyTerms(
    KeyLimits(
        requests_per_minute=100_000_000,
        tokens_per_minute=10_000_000_000,
        tokens_per_second=1_000_000_000,
        concurrency=100_000,
    )
)
EVERY: Final = KeyTerms(
    KeyLimits(
        requests_per_minute=100_000_000,
        tokens_per_minute=10_000_000_000,
        input_tokens_per_minute=10_000_000_000,
        output_tokens_per_minute=10_000_000_000,
        weighted_tokens_per_minute=10_000_000_000,
        tokens_per_second=1_000_000_000,
        concurrency=100_000,
        tokens_per_day=10**15,
        tokens_per_month=10**16,
    ),
    groups=("team:t", "class:c", "all"),
)
UNLIMITED: Final = KeyTerms()


@dataclass(frozen=True, slots=True)
class Case:
    """One situation. `terms` are those of every key."""

    title: str
    state: State
    mode: Literal["backpressure", "admission", "hybrid"] = "hybrid"
    guarded: bool = False
    fair: bool = False
    engines: int = 1
    keys: int = 1
    terms: KeyTerms = USUAL


def _states(title: str, case: Case, states: Sequence[State] = ("room", "waits", "overload")) -> list[Case]:
    return [replace(case, title=title, state=state) for state in states]


_PLAIN = Case("", "room")
_FULL = replace(_PLAIN, guarded=True, fair=True)
CASES: Final = (
    *_states("hybrid", _PLAIN),
    *_states("backpressure", replace(_PLAIN, mode="backpressure")),
    *_states("admission", replace(_PLAIN, mode="admission"), ("room", "overload")),
    *_states("hybrid, key without limits", replace(_PLAIN, terms=UNLIMITED), ("room",)),
    *_states("hybrid, every limit of key, team, class and all", replace(_PLAIN, terms=EVERY)),
    *_states("hybrid, fair share", replace(_PLAIN, fair=True)),
    *_states("hybrid, guarded window", replace(_PLAIN, guarded=True)),
    *_states("hybrid, both", _FULL),
    *_states("hybrid, both, 8 engines", replace(_FULL, engines=8)),
    *_states("hybrid, both, 64 engines", replace(_FULL, engines=64)),
    *_states("hybrid, both, 1,000 keys", replace(_FULL, keys=1000)),
    *_states("hybrid, both, 100,000 keys", replace(_FULL, keys=100_000)),
)
STATES: Final = {
    "room": "there is room",
    "waits": f"all places taken, {QUEUED} wait",
    "overload": f"{OFFERED} come for one that leaves",
}


class _Unobserved:
    """The observer's own cost belongs to telemetry, not to the decision."""

    def closed(self, ticket: Ticket) -> None:
        pass

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        pass


class Situation:
    """A case, brought about."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.names = [f"key-{number}" for number in range(case.keys)]
        self.pipeline = self._make()
        self.refused = 0
        self.now = 0
        self._open: deque[Lease] = deque()
        self._turns = Random("turns")
        self._step_ns = STEP_NS // case.engines
        self._fill()

    def _make(self) -> Pipeline:
        case = self.case
        kind = "guarded" if case.guarded else "fixed"
        bounds = f", least = {PLACES}, most = {PLACES}" if case.guarded else ""
        urls = ", ".join(f'"http://127.0.0.1:{9000 + number}"' for number in range(case.engines))
        patient = "wait_budget_ms = 3_600_000" if case.state == "waits" else ""
        text = f"""
            [admission]
            mode = "{case.mode}"
            fair_share = {str(case.fair).lower()}
            {patient}
            [queue]
            depth_limit = {100 * QUEUED if case.state == "waits" else QUEUED}
            held_limit = {100 * QUEUED if case.state == "waits" else QUEUED}
            deadline_s = 3600
            [[engines]]
            name = "engine"
            urls = [{urls}]
            concurrency = {{ kind = "{kind}", limit = {PLACES}{bounds} }}
        """
        config = pipeline_config(loads(text, name="benchmark", environment={}).config)
        shared = dict.fromkeys(("team:t", "class:c", "all"), USUAL.limits)
        config = replace(config, keys=dict.fromkeys(self.names, case.terms), groups=shared)
        pipeline = Pipeline(config, Random(1), _Unobserved())
        for pool in config.pools:
            for engine in pool.engines:
                pipeline.report(EngineUp(engine), 0)
        return pipeline

    def _fill(self) -> None:
        case, places = self.case, PLACES * self.case.engines
        for name in self.names if case.keys > places else ():
            self.now += self._step_ns  # every key has been there before
            self.follow(self.pipeline.offer(self.request(name), self.now))
            self.end(1)
        for _ in range(places // 2 if case.state == "room" else places):
            self.now += self._step_ns
            self.follow(self.pipeline.offer(self.request(self._turns.choice(self.names)), self.now))
        if case.state == "waits":
            self._top_up(10 * QUEUED)

    def _top_up(self, attempts: int) -> None:
        while self.pipeline.queued < QUEUED and attempts:
            attempts -= 1
            self.follow(self.pipeline.offer(self.request(self._turns.choice(self.names)), self.now))

    def request(self, key: str) -> Request:
        """As the data port makes it."""
        return Request(key=key, model="m", body_bytes=1024, text_bytes=860, max_output_tokens=128, stream=True)

    def coming(self, steps: int) -> list[list[Request]]:
        """The requests of the next steps, made beforehand: making them is the data port's work."""
        offered = OFFERED if self.case.state == "overload" else 1
        return [[self.request(key) for key in self._turns.choices(self.names, k=offered)] for _ in range(steps)]

    def tick(self) -> int:
        """The instant of the next step."""
        self.now += self._step_ns
        if self.case.state == "waits":
            self._top_up(2)  # the fair share refuses some of those that are meant to wait
        return self.now

    def follow(self, effects: Iterable[Effect]) -> None:
        """Do what the pipeline asks for: what is dispatched has its first token at once."""
        for effect in effects:
            if isinstance(effect, Dispatch):
                for lease in effect.leases:
                    lease.generated = 1
                    self.pipeline.report(FirstToken(lease), self.now)
                    self._open.append(lease)

    def end(self, number: int) -> None:
        """The oldest leases end, and timers that are due fire."""
        pipeline, now = self.pipeline, self.now
        for _ in range(min(number, len(self._open))):
            lease = self._open.popleft()
            lease.generated = USAGE.output_tokens
            self.follow(pipeline.report(Finished(lease, USAGE), now))
        if pipeline.queued or pipeline.learning:
            wake = pipeline.next_wakeup(now)
            if wake is not None and wake <= now:
                self.follow(pipeline.poll(now))

    def check(self) -> None:
        """It is still the situation that its name says."""
        places = PLACES * self.case.engines
        free = places - len(self._open)
        assert self.pipeline.offered == sum(self.pipeline.outcomes.values()) + self.pipeline.queued + len(self._open)
        if self.case.state == "room":
            assert free >= places // 3, f"{self.case}: {free} of {places} places are free"
        elif self.case.state == "waits":
            assert free == 0, f"{self.case}: {free} places are free"
            assert self.pipeline.queued >= 0.9 * QUEUED, f"{self.case}: {self.pipeline.queued} wait"
        else:
            assert free <= 1, f"{self.case}: {free} places are free"
