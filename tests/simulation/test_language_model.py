"""The pipeline in front of the simulated GPU: continuous batching, so that service slows as the batch grows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

import pytest

from forebay.core.events import EngineUp, Finished, FirstToken
from forebay.core.instant import SECOND
from forebay.core.limits.fixed import FixedConfig
from forebay.core.model import Lease, Mode, Request, Usage
from forebay.core.outcome import Outcome
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.model import EngineLimits, EngineModel
from forebay.engines.simulated.profile import StepProfile
from forebay.testing import EventWorld, check_empty, check_invariants, poisson

PROFILE = "h100-80g/llama-3.1-8b/bf16/tp1/trtllm"
PROMPT, OUTPUT = 500, 200
PLACES = 64


class SimulatedGpu:
    """Steps the engine's model on the world's clock."""

    def __init__(self) -> None:
        profile = profile_named(PROFILE)
        assert isinstance(profile, StepProfile)
        limits = EngineLimits(max_num_seqs=256, max_num_batched_tokens=8_192, kv_tokens=profile.kv_tokens)
        self.model = EngineModel(profile, limits)
        self.tokens = 0
        self._leases: dict[str, Lease] = {}
        self._stepping = False

    def start(self, leases: Sequence[Lease], world: EventWorld) -> None:
        for lease in leases:
            name = str(lease.ticket.sequence)
            self._leases[name] = lease
            self.model.submit(name, PROMPT, lease.ticket.request.max_output_tokens or OUTPUT, world.now)
        if not self._stepping:
            self._step(world)

    def _step(self, world: EventWorld) -> None:
        step = self.model.step(world.now)
        self._stepping = step is not None
        if step is not None:
            world.at(world.now + step.duration_ns, partial(self._after, step.tokens, step.finished, world))

    def _after(self, tokens: list[tuple[str, int]], finished: list[str], world: EventWorld) -> None:
        self.tokens += len(tokens)
        for name, _ in tokens:
            lease = self._leases.get(name)
            if lease is not None and lease.open and not lease.ticket.first_token:
                world.report(FirstToken(lease))
        for name in finished:
            lease = self._leases.pop(name)
            if lease.open:
                output = lease.ticket.request.max_output_tokens or OUTPUT
                world.report(Finished(lease, Usage(PROMPT, output)))
        self._step(world)

    def abort(self, lease: Lease, world: EventWorld) -> None:
        name = str(lease.ticket.sequence)
        self._leases.pop(name, None)
        self.model.abort(name, world.now)


def drive(mode: Mode, rate_per_s: float, seconds: int, seed: int = 1) -> tuple[EventWorld, SimulatedGpu]:
    gpu = SimulatedGpu()
    pool = PoolConfig(name="p", engines=("gpu",), mode=mode, limit=FixedConfig(limit=PLACES))
    world = EventWorld(PipelineConfig((pool,)), {"gpu": gpu}, seed=seed)
    world.report(EngineUp("gpu"))
    chance = Random(seed)
    world.arrivals(
        (
            at,
            Request(
                key=f"k{chance.randrange(3)}",
                model="m",
                text_bytes=2_000,
                body_bytes=2_100,
                max_output_tokens=1 + int(chance.expovariate(1 / OUTPUT)),
            ),
        )
        for at in poisson(Random(f"{seed}/arrivals"), rate_per_s, 0, seconds * SECOND)
    )
    world.run(seconds * SECOND)
    check_invariants(world.pipeline, world.now)
    return world, gpu


@pytest.fixture(scope="module")
def capacity_tokens() -> int:
    """What the engine makes in 30 s when the queue in front of it is never empty, at the same limit."""
    world, gpu = drive(Mode.BACKPRESSURE, 120.0, 30)
    assert len(world.pipeline.pools[0].queue) > 0
    return gpu.tokens


@pytest.mark.parametrize("seed", [1, 2])
def test_ten_times_overload_for_thirty_seconds(capacity_tokens: int, seed: int) -> None:
    world, gpu = drive(Mode.HYBRID, 400.0, 30, seed)
    assert gpu.tokens >= 0.9 * capacity_tokens
    dispatched = [t for t in world.ended if t.dispatched or t.outcome is Outcome.COMPLETED]
    waits = sorted(t.queue_wait_ns for t in dispatched)
    budget = max(t.wait_budget_ns for t in world.ended)
    assert waits[len(waits) * 99 // 100] <= budget <= SECOND
    late = [t for t in world.ended if t.outcome is Outcome.EVICTED and t.arrived > 5 * SECOND]
    queued = [t for t in world.ended if t.met_queue and t.arrived > 5 * SECOND]
    assert len(late) <= 0.015 * len(queued) + 5
    assert world.refused
    assert all(
        r.retry_after_ns and SECOND <= r.retry_after_ns <= (55 if r.obeyed else 121) * SECOND
        for _, _, r in world.refused
    )
    world.run(90 * SECOND)
    check_empty(world.pipeline, world.now)


def test_the_same_seed_gives_the_same_bytes() -> None:
    logs = ["\n".join(drive(Mode.HYBRID, 100.0, 5, seed)[0].log) for seed in (3, 3, 4)]
    assert logs[0] == logs[1] != logs[2]
