"""F. Automatic tuning of depth and concurrency, first part: the production pipeline in the simulator's world.

Feedback loops that stick at an end, climb while idle, trust one lucky sample, or silently stop. A window is the 250 ms
of a guarded limit. `guarded` is what Forebay offers for tuning; the known algorithms beside it are there to compare
with, keep to their published rules, and are held to the cases that those rules can meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from forebay.core.events import EngineUp, Finished, Signalled
from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.limits import LimitConfig
from forebay.core.limits.aimd import AimdConfig
from forebay.core.limits.envoy import EnvoyConfig
from forebay.core.limits.gradient2 import Gradient2Config
from forebay.core.limits.guarded import GuardedConfig
from forebay.core.limits.vegas import VegasConfig
from forebay.core.model import EngineSignal, Lease, Request, Usage
from forebay.core.pipeline import PipelineConfig
from forebay.core.pool import PoolConfig
from forebay.sim.run import Simulation
from forebay.sim.scenario import FaultSpec
from forebay.testing import EventWorld, poisson

from . import worlds

KINDS = ["guarded", "aimd", "vegas", "gradient2", "envoy"]
WINDOW_S = 0.25
CLIMB_WINDOWS = 40
"""From the least limit of 4 to four fifths of 64, as docs/policies/limit-guarded.md says."""


def concurrency(kind: str, *, limit: int = 16, least: int = 4, most: int = 64) -> str:
    return f'kind = "{kind}"\nlimit = {limit}\nleast = {least}\nmost = {most}'


def column(series: Sequence[Sequence[int]], engine: int = 0) -> list[int]:
    return [row[engine] for row in series]


def refusals(run: Simulation) -> int:
    counts = run.outcome().result.counts
    return counts.shed + counts.evicted


@pytest.mark.parametrize("kind", KINDS)
def test_f01_stays_within_its_bounds(tmp_path: Path, kind: str) -> None:
    """F-01: least 4, most 64; answers take 0.4 s or 10 s, changing at random every two seconds for 400 windows."""
    chance = Random("f01")
    swings = [
        FaultSpec(kind="slow", from_s=2.0 * k + 0.001, to_s=2.0 * (k + 1), factor=chance.choice([1.0, 25.0]))
        for k in range(50)
    ]
    run = worlds.simulation(
        worlds.trace(tmp_path / "load.csv", [(0, 100, 100)]), concurrency=concurrency(kind), seats=64, faults=swings
    )
    series = column(worlds.watched(run, WINDOW_S / 5))
    assert len(series) > 1900
    assert all(type(limit) is int and 4 <= limit <= 64 for limit in series)
    if kind == "guarded":
        assert (min(series), max(series)) == (4, 64), "and it uses them"


def test_f02_climbs_back_after_a_slow_time(tmp_path: Path) -> None:
    """F-02: sixty slow windows drive the limit to the least; fast again under full load it is back at four fifths of
    its earlier level within CLIMB_WINDOWS, and stays there."""
    run = worlds.simulation(
        worlds.trace(tmp_path / "load.csv", [(0, 60, 80)]),
        concurrency=concurrency("guarded"),
        seats=64,
        faults=[FaultSpec(kind="slow", from_s=20, to_s=35, factor=8)],
    )
    series = column(worlds.watched(run, WINDOW_S))
    before = sum(series[60:80]) / 20
    assert before >= 40
    assert min(series[100:140]) == 4
    back = next(at for at in range(140, len(series)) if series[at] >= 0.8 * before)
    assert back - 140 <= CLIMB_WINDOWS
    assert min(series[back:]) >= 0.7 * before, "and stays"


def test_f02_whatever_the_limit_was_driven_to(tmp_path: Path) -> None:
    """F-02 again and again: three slow times in a row leave nothing behind."""
    slow = [FaultSpec(kind="slow", from_s=at, to_s=at + 5, factor=8) for at in (20, 40, 60)]
    run = worlds.simulation(
        worlds.trace(tmp_path / "load.csv", [(0, 80, 80)]), concurrency=concurrency("guarded"), seats=64, faults=slow
    )
    series = column(worlds.watched(run, WINDOW_S))
    levels = [sum(series[int(at / WINDOW_S) - 12 : int(at / WINDOW_S)]) / 12 for at in (20, 40, 60, 80)]
    assert min(levels) >= 0.8 * max(levels), levels


@pytest.mark.parametrize("kind", ["guarded", "aimd", "vegas", "gradient2"])
def test_f04_does_not_climb_while_under_used(tmp_path: Path, kind: str) -> None:
    """F-04: one request a second for 100 windows, and an engine that says its memory is 95 % used. The limit does not
    grow, so that 200 requests at once do not get the whole of what it might have grown to.

    Envoy's rule does grow while nobody feels the limit, by its headroom; that is said in docs/policies/limit-envoy.md.
    """
    run = worlds.simulation(
        worlds.trace(tmp_path / "load.csv", [(0, 25, 1), (25, 25.05, 4000)]),
        concurrency=concurrency(kind, most=256),
        seats=256,
    )
    (pipeline,) = run.pipelines
    (engine,) = pipeline.pools[0].engines
    for second in range(26):
        signal = Signalled(engine.name, EngineSignal(running=1, waiting=0, kv_share=0.95))
        run.world.at(second * SECOND, lambda signal=signal: pipeline.report(signal, run.world.now))
    most = 0

    def look() -> None:
        nonlocal most
        if run.world.now <= 25_300 * MILLISECOND:
            most = max(most, engine.in_flight)

    run.world.after_event = look
    series = column(worlds.watched(run, WINDOW_S))
    assert max(series[:100]) <= 16
    assert most <= 17


def test_f05_goes_on_after_silence(tmp_path: Path) -> None:
    """F-05: traffic, a minute without any, traffic again on an engine that became slow: the limit is where it was, and
    moves again. Then a window with a single answer: it holds."""
    run = worlds.simulation(
        worlds.trace(tmp_path / "load.csv", [(0, 20, 80), (80, 100, 80), (130, 130.5, 4), (131, 132, 1)]),
        concurrency=concurrency("guarded"),
        seats=64,
        faults=[FaultSpec(kind="slow", from_s=70, to_s=110, factor=8)],
    )
    series = column(worlds.watched(run, WINDOW_S))
    assert series[80] > 30
    # A few windows pass until the last of what was in flight has ended.
    assert len(set(series[100:318])) == 1, "held through the silence"
    assert min(series[320:400]) == 4, "alive"
    assert len(set(series[460:519])) == 1
    assert abs(series[-1] - series[518]) <= 1, "single answers say little"


def test_f05_a_stalled_engine_is_no_reason_to_move(tmp_path: Path) -> None:
    """F-05: the engine computes nothing for 10 s, with streams open: nothing is seen, so nothing moves; then it does
    again."""
    run = worlds.simulation(
        worlds.trace(tmp_path / "load.csv", [(0, 60, 80)]),
        concurrency=concurrency("guarded"),
        seats=64,
        faults=[FaultSpec(kind="stalled", from_s=30, to_s=40)],
    )
    series = column(worlds.watched(run, WINDOW_S))
    before = sum(series[100:120]) / 20
    assert sum(series[-40:]) / 40 >= 0.8 * before, "not stuck afterwards"


# ---- F-06: samples that are none ----------------------------------------------------------------------------------

LIMITS: dict[str, LimitConfig] = {
    "guarded": GuardedConfig(initial=16, least=4, most=32),
    "aimd": AimdConfig(initial=20, least=4, most=32),
    "vegas": VegasConfig(initial=20, least=4, most=32),
    "gradient2": Gradient2Config(initial=20, least=4, most=32),
    "envoy": EnvoyConfig(least=4, most=32),
}
TYPICAL = 400 * MILLISECOND


class Odd(NamedTuple):
    """Every lease is served in 400 ms, more or less, but for a share that ends in another way."""

    share: float = 0.0
    took: int = 0
    usage: Usage | None = None

    def start(self, leases: Sequence[Lease], world: EventWorld) -> None:
        for lease in leases:
            odd = world.chance.random() < self.share
            took = self.took if odd else int(TYPICAL * world.chance.uniform(0.9, 1.1))
            world.at(world.now + took, partial(self._end, lease, self.usage if odd else Usage(20, 20), world))

    @staticmethod
    def _end(lease: Lease, usage: Usage | None, world: EventWorld) -> None:
        if lease.open:
            world.report(Finished(lease, usage))

    def abort(self, lease: Lease, world: EventWorld) -> None:
        """Nobody leaves here."""


@cache
def settled(kind: str, model: Odd) -> float:
    """Mean limit over the last 20 of 40 s under full load."""
    pool = PoolConfig(name="p", engines=("e",), limit=LIMITS[kind])
    made = EventWorld(PipelineConfig((pool,)), {"e": model}, seed=6)
    made.report(EngineUp("e"))
    made.arrivals((at, Request(key="k", counted_tokens=20)) for at in poisson(Random(6), 150, 0, 40 * SECOND))
    limit = made.pipeline.pools[0].engines[0].limit
    seen = []
    for tenth in range(200, 400):
        made.run(tenth * SECOND // 10)
        seen.append(limit.requests)
    return sum(seen) / len(seen)


@pytest.mark.parametrize("kind", ["guarded", "aimd", "gradient2", "envoy"])
def test_f06_one_lucky_fast_answer(kind: str) -> None:
    """F-06: one answer in 500 is twenty times faster: the limit does not collapse.

    Vegas takes the fastest answer for the idle engine's until its next probe: its published rule, and the report's
    own subject. It is not held to this."""
    plain = settled(kind, Odd())
    assert settled(kind, Odd(1 / 500, TYPICAL // 20, Usage(20, 1))) >= 0.8 * plain > 4


@pytest.mark.parametrize("kind", KINDS)
def test_f06_errors_are_no_samples(kind: str) -> None:
    """F-06: a fifth of the requests is refused by the engine itself after 1 ms (a 400): no sample for any limit."""
    plain = settled(kind, Odd())
    with_errors = settled(kind, Odd(0.2, MILLISECOND, None))
    assert 0.8 * plain <= with_errors <= 1.2 * plain


# ---- F-07, F-09: several gateways, steady load --------------------------------------------------------------------


def reversals(series: Sequence[int]) -> int:
    """How often a limit turned round."""
    moves = [after - before for before, after in pairwise(series) if after != before]
    return sum((before > 0) != (after > 0) for before, after in pairwise(moves))


def square_wave(tmp_path: Path, kind: str, **fields: Any) -> list[list[int]]:
    """Three gateways on one engine; ten seconds at 30 % and ten at 150 % of its capacity, in turn."""
    full = worlds.capacity(concurrency(kind), seats=64)
    load = [(10.0 * k, 10.0 * k + 10, (1.5 if k % 2 else 0.3) * full) for k in range(12)]
    run = worlds.simulation(
        worlds.trace(tmp_path / "load.csv", load), concurrency=concurrency(kind, least=2), seats=64,
        gateways=3, engines_shared=True, **fields,
    )  # fmt: skip
    return worlds.watched(run, WINDOW_S)


def test_f07_no_oscillation_and_no_lockstep(tmp_path: Path) -> None:
    """F-07: three gateways, square-wave load: each limit turns round at most 25 times in 100 windows, moves in
    small steps, and the three do not move as one. A guarded limit has no probing phases."""
    series = square_wave(tmp_path, "guarded")
    gateways = [column(series, number) for number in range(3)]
    for limits in gateways:
        assert reversals(limits) <= 25 * len(limits) / 100
        # A large step is the one from an allowance that nobody used to what was in flight when the pace was lost.
        steps = sorted(abs(after - before) for before, after in pairwise(limits))
        assert steps[int(0.99 * len(steps))] <= 0.25 * max(limits)
    same = sum(len(set(row)) == 1 for row in series[60:])
    assert same < 0.2 * len(series)


def test_f07_probes_of_a_fleet_are_not_synchronised(tmp_path: Path) -> None:
    """F-07 for Envoy's rule, which does probe: apart from the first one, at the start, no two begin together."""
    series = square_wave(tmp_path, "envoy")
    begun = [
        [at for at in range(60, len(series)) if series[at][number] == 2 != series[at - 1][number]]
        for number in range(3)
    ]
    assert all(begun)
    assert len({at for each in begun for at in each}) == sum(map(len, begun)), begun


def half_load(tmp_path: Path, kind: str, seed: int, burst: int = 0) -> Simulation:
    """Thirty seconds at 50 % of the capacity; `burst`: about so many at once, each two seconds, beside a trickle."""
    full = worlds.capacity(concurrency("guarded"), seats=64)
    often = [(at + 1.0, at + 1.001, burst * 1000.0) for at in range(0, 30, 2)] if burst else []
    rate = 5.0 if burst else 0.5 * full
    load = worlds.trace(tmp_path / "load.csv", [(0, 30, rate), *often], seed=seed)
    text = concurrency(kind, limit=64) if kind != "fixed" else 'kind = "fixed"\nlimit = 64'
    return worlds.simulation(load, concurrency=text, seats=64, seed=seed)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_f09_tuning_sheds_nothing_at_half_load(tmp_path: Path, seed: int) -> None:
    """F-09: steady load at 50 % of the capacity for 100 windows: not one refusal, and the limit stays where it is."""
    run = half_load(tmp_path, "guarded", seed)
    series = column(worlds.watched(run, WINDOW_S))
    assert len(series) >= 100
    assert min(series) >= 0.9 * 64
    assert refusals(run) == 0


def test_f09_tuning_sheds_no_bursts_that_can_be_served(tmp_path: Path) -> None:
    """F-09: a load of a third, half of it in bursts: a fixed limit of as many serves all of it within half of the
    first-token objective. A limit that tunes itself may not refuse more than one request in twenty of it."""
    fixed, guarded = half_load(tmp_path, "fixed", 1, burst=16), half_load(tmp_path, "guarded", 1, burst=16)
    fixed.run()
    guarded.run()
    assert refusals(fixed) == 0
    assert (fixed.outcome().result.ttft_ms.p99 or 0) < 500
    assert refusals(guarded) <= 0.05 * len(guarded.records)
