"""What is kept of a decision, and how it is put into words."""

from __future__ import annotations

from random import Random
from typing import Any

from forebay.core.effects import Dispatch, Effect
from forebay.core.events import EngineUp, Finished, FirstToken
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits import LimitConfig
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Mode, Request, Usage
from forebay.core.pipeline import Pipeline, PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.telemetry.recent import Recent


class World:
    """A pipeline with one place, whose decisions are kept."""

    def __init__(
        self, *, completed: bool = True, kept: int = 10, shadow: LimitConfig | None = None, **keys: KeyLimits
    ) -> None:
        self.now = SECOND
        self.recent = Recent(
            kept,
            completed=completed,
            identify=lambda request: request.owner,
            estimate=lambda request: self.pipeline.estimator.estimate(request),
            pool_of=lambda request: self.pipeline.pool_for(request.model),
            path_of=lambda request: self.pipeline.budget(request.key).path_for(request.model),
            clock=lambda: self.now,
        )
        pools = (PoolConfig(name="p", engines=("p/0",), limit=FixedConfig(limit=1), limit_shadow=shadow),)
        terms = {key: KeyTerms(limits) for key, limits in keys.items()}
        self.pipeline = Pipeline(PipelineConfig(pools, terms), Random(1), self.recent)
        self.pipeline.report(EngineUp("p/0"), self.now)

    def offer(self, name: bytes, **fields: Any) -> list[Effect]:
        return self.pipeline.offer(Request("k", "m", owner=name, counted_tokens=100, **fields), self.now)

    def explain(self, name: str) -> dict[str, Any]:
        found = self.recent.explain(name)
        assert found is not None
        return found


def test_an_answer_with_every_figure() -> None:
    world = World()
    (dispatch,) = world.offer(b"one", stream=True, max_output_tokens=20)
    assert isinstance(dispatch, Dispatch)
    world.now += 30 * MILLISECOND
    world.pipeline.report(FirstToken(dispatch.leases[0]), world.now)
    world.now += 70 * MILLISECOND
    world.pipeline.report(Finished(dispatch.leases[0], Usage(100, 11)), world.now)
    said = world.explain("one")
    assert said["outcome"] == "completed"
    assert (said["queue_wait_ms"], said["first_token_ms"], said["total_ms"]) == (0, 30, 100)
    assert said["usage"] == {"input_tokens": 100, "output_tokens": 11, "exact": True}
    assert said["estimate"]["output_tokens"] == 20
    assert (said["engine"], said["key"], said["model"], said["decided_at_ms"]) == ("p/0", "k", "m", 1000)


def test_a_refusal_says_what_it_was_held_against() -> None:
    world = World(k=KeyLimits(requests_per_minute=2))
    world.offer(b"one")
    world.offer(b"between", mode=Mode.BACKPRESSURE)
    world.offer(b"two")
    said = world.explain("two")
    assert (said["outcome"], said["reason"]) == ("shed", "key_requests")
    assert (said["limit"], said["actual"], said["unit"]) == (2, 3, "requests/min")
    assert said["should_retry"] is True
    assert 30_000 <= said["retry_after_ms"] < 32_000
    assert said["pool"]["in_flight"] == said["pool"]["places"] == 1


def test_one_that_waited_in_vain() -> None:
    world = World(completed=False)
    world.offer(b"one")
    world.offer(b"two")
    world.now += SECOND
    world.pipeline.poll(world.now)
    said = world.explain("two")
    assert (said["outcome"], said["reason"], said["met_queue"], said["engine"]) == ("evicted", "expired", True, None)
    assert said["queue_wait_ms"] == 1000


def test_the_answered_are_kept_only_on_demand_and_the_oldest_are_forgotten() -> None:
    world = World(completed=False, kept=2)
    (dispatch,) = world.offer(b"good")
    assert isinstance(dispatch, Dispatch)
    world.pipeline.report(Finished(dispatch.leases[0], Usage(1, 1)), world.now)
    assert world.recent.explain("good") is None
    world.offer(b"running")
    for number in range(4):
        (queued,) = world.offer(b"left %d" % number)
        world.pipeline.cancel(queued.ticket, world.now)  # type: ignore[union-attr]
    assert [world.recent.explain(f"left {n}") is not None for n in range(4)] == [False, False, True, True]


def test_what_a_setting_in_shadow_would_have_said() -> None:
    world = World(shadow=FixedConfig(limit=2))
    (dispatch,) = world.offer(b"one")
    assert isinstance(dispatch, Dispatch)
    world.offer(b"two", mode=Mode.ADMISSION)
    looser = {"window": {"verdict": "looser", "limit": 2, "actual": 1, "unit": "requests in flight"}}
    assert (world.explain("two")["outcome"], world.explain("two")["shadow"]) == ("shed", looser)
    world.pipeline.report(Finished(dispatch.leases[0], Usage(100, 11)), world.now)
    assert world.explain("one")["shadow"]["window"]["verdict"] == "same"
    plain = World()
    plain.offer(b"one")
    plain.offer(b"two", mode=Mode.ADMISSION)
    assert plain.explain("two")["shadow"] == {}
