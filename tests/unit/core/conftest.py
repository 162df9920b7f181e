"""A pipeline on a manual clock, small enough to follow by hand."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from forebay.core.effects import Dispatch, Effect, Refuse
from forebay.core.events import EngineUp, Event
from forebay.core.model import Lease, Refusal, Request, Ticket
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.testing import ManualClock, check_invariants


class Bench:
    """One pipeline, its clock, and what it asked for."""

    def __init__(
        self, *pools: PoolConfig, keys: dict[str, KeyLimits | KeyTerms] | None = None, up: bool = True, **config: Any
    ) -> None:
        terms = {key: k if isinstance(k, KeyTerms) else KeyTerms(k) for key, k in (keys or {}).items()}
        self.clock = ManualClock()
        self.ended: list[Ticket] = []
        self.refused: list[Refusal] = []
        self.effects: list[Effect] = []
        self.pipeline = Pipeline(PipelineConfig(pools, terms, **config), Random(1), self)
        if up:
            for pool in pools:
                for engine in pool.engines:
                    self.report(EngineUp(engine))

    def closed(self, ticket: Ticket) -> None:
        self.ended.append(ticket)

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        self.refused.append(refusal)

    def _took(self, effects: list[Effect]) -> list[Effect]:
        self.effects = effects
        check_invariants(self.pipeline, self.clock.now)
        return effects

    @staticmethod
    def request(key: str, tokens: int, cap: int) -> Request:
        """A request of exactly so many tokens in, and at most so many out."""
        return Request(key=key, counted_tokens=tokens, max_output_tokens=cap)

    def offer(self, key: str = "k", tokens: int = 10, **fields: Any) -> list[Effect]:
        """Offer a request of exactly `tokens` expected tokens."""
        fields.setdefault("generates", False)
        return self._took(self.pipeline.offer(Request(key=key, counted_tokens=tokens, **fields), self.clock.now))

    def report(self, event: Event) -> list[Effect]:
        return self._took(self.pipeline.report(event, self.clock.now))

    def cancel(self, ticket: Ticket) -> list[Effect]:
        return self._took(self.pipeline.cancel(ticket, self.clock.now))

    def advance(self, by_ns: int) -> list[Effect]:
        """Let time pass as a driver does: polling at each wake-up. Returns all effects on the way."""
        end = self.clock.now + by_ns
        effects: list[Effect] = []
        while (at := self.pipeline.next_wakeup(self.clock.now)) is not None and at <= end:
            self.clock.advance_to(max(self.clock.now, at))
            effects += self._took(self.pipeline.poll(self.clock.now))
        self.clock.advance_to(end)
        return effects


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench


@pytest.fixture
def leases() -> Callable[[list[Effect]], list[Lease]]:
    """The leases that effects dispatch."""

    def pick(effects: list[Effect]) -> list[Lease]:
        return [lease for e in effects if isinstance(e, Dispatch) for lease in e.leases]

    return pick


@pytest.fixture
def refusals() -> Callable[[list[Effect]], list[Refusal]]:
    """The refusals among effects."""

    def pick(effects: list[Effect]) -> list[Refusal]:
        return [e.refusal for e in effects if isinstance(e, Refuse)]

    return pick
