"""Simulated engines on the heap: what is told when, and what their faults do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.outcome import FailReason
from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.encoder import EncoderModel
from forebay.engines.simulated.model import EngineLimits, EngineModel
from forebay.engines.simulated.profile import EncoderProfile, StepProfile
from forebay.sim.call import Call
from forebay.sim.engines import EncoderEngine, LanguageEngine
from forebay.sim.world import ARRIVAL, World

PROFILE = profile_named("h100-80g/llama-3.1-8b/bf16/tp1/trtllm")
CURVE = EncoderProfile("test/encoder", "test", "encoder", a=10.0, c=1.0, p=1.0)  # 10 ms + 1 ms per input


class _Heard:
    """A front that writes down what engines tell."""

    def __init__(self, world: World) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self.stalls: list[tuple[int, int, int]] = []
        self._world = world

    def _note(self, what: str, call: Call, *figures: object) -> None:
        self.lines.append((self._world.now, what, call.index, *figures))

    def offer(self, call: Call, request: object) -> None:
        raise NotImplementedError

    def leave(self, call: Call) -> int:
        raise NotImplementedError

    def first_token(self, call: Call) -> None:
        self._note("first", call)

    def finished(self, call: Call, input_tokens: int, output_tokens: int) -> None:
        call.done = True
        self._note("finished", call, input_tokens, output_tokens)

    def failed(self, call: Call, reason: FailReason, made: int, *, blame: bool) -> None:
        call.done = True
        self._note("failed", call, made, blame)

    def unfit(self, call: Call) -> None:
        self._note("unfit", call)

    def undelivered(self, call: Call) -> None:
        self._note("undelivered", call)

    def stalled(self, call: Call, until: int) -> None:
        self.stalls.append((self._world.now, call.index, until))

    def of(self, what: str) -> list[tuple[Any, ...]]:
        return [line for line in self.lines if line[1] == what]


class _Bench:
    def __init__(self) -> None:
        self.world = World()
        self.heard = _Heard(self.world)

    def call(self, index: int, prompt: int = 100, output: int = 50) -> Call:
        call = Call(index, "k", prompt, output, "", 0)
        call.front = self.heard
        return call

    def language(self, **limits: Any) -> LanguageEngine:
        assert isinstance(PROFILE, StepProfile)
        bounds = {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "kv_tokens": 100_000} | limits
        return LanguageEngine(self.world, "e", lambda: EngineModel(PROFILE, EngineLimits(**bounds)))  # type: ignore[arg-type]

    def encoder(self, *, joins: bool = False) -> EncoderEngine:
        return EncoderEngine(self.world, "e", EncoderModel(CURVE, 8), joins=joins)

    def at(self, at_ns: int, action: Callable[[], object]) -> None:
        self.world.at(at_ns, action, ARRIVAL)


@pytest.fixture
def b() -> _Bench:
    return _Bench()


def test_first_and_last_token_are_told_when_they_exist(b: _Bench) -> None:
    engine = b.language()
    engine.start((b.call(0), b.call(1, output=1)))
    b.world.run_out()
    stepped = EngineModel(PROFILE, EngineLimits(8, 2048, 100_000))  # type: ignore[arg-type]
    stepped.submit("a", 100, 50, 0)
    stepped.submit("b", 100, 1, 0)
    ends, now = [], 0
    while (step := stepped.step(now)) is not None:
        now += step.duration_ns
        ends.append(now)
    assert b.heard.lines == [
        (ends[0], "first", 0),
        (ends[0], "first", 1),
        (ends[0], "finished", 1, 100, 1),
        (ends[-1], "finished", 0, 100, 50),
    ]
    work = engine.work()
    assert (work.busy_ns, work.steps, work.output_tokens, work.prompt_tokens) == (ends[-1], 50, 51, 200)
    assert work.batch_seqs == 51
    assert engine.leaps == 2


def test_an_arrival_joins_at_the_next_step_and_one_that_leaves_frees_its_place(b: _Bench) -> None:
    engine = b.language(max_num_seqs=1)
    first, second = b.call(0, output=10_000), b.call(1)
    engine.start((first,))
    b.at(SECOND, lambda: engine.start((second,)))
    b.world.run(2 * SECOND)
    assert [line[2] for line in b.heard.of("first")] == [0]
    made = engine.made(first)
    assert 200 < made < 400
    engine.abort(first)
    assert engine.work().output_tokens == made
    b.world.run_out()
    (_, (second_at, *_)) = b.heard.of("first")
    assert 2 * SECOND < second_at < 2 * SECOND + 50 * MILLISECOND
    assert [line[2] for line in b.heard.of("finished")] == [1]
    assert engine.held == 0


def test_tokens_made_are_counted_within_a_leap(b: _Bench) -> None:
    engine, call = b.language(), b.call(0, output=400)
    engine.start((call,))
    seen: list[int] = []
    for at in range(1, 3_000, 7):
        b.at(at * MILLISECOND, lambda: seen.append(call.output_tokens if call.done else engine.made(call)))
    b.world.run_out()
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == 400
    assert len(set(seen)) > 200


def test_what_never_fits_is_refused_in_an_event_of_its_own(b: _Bench) -> None:
    engine = b.language()
    engine.start((b.call(0, prompt=200_000),))
    assert b.heard.lines == []
    b.world.run_out()
    assert b.heard.lines == [(0, "unfit", 0)]


def test_a_slow_engine_takes_longer_from_the_next_step_on(b: _Bench) -> None:
    quick, slow = b.language(), b.language()
    quick.start((b.call(0, output=100),))
    slow.start((b.call(1, output=100),))
    b.at(200 * MILLISECOND, lambda: slow.slow_down(3.0))
    b.world.run_out()
    ends = {index: at for at, _, index, *_ in b.heard.of("finished")}
    left = ends[0] - 200 * MILLISECOND
    assert ends[1] - 200 * MILLISECOND == pytest.approx(3 * left, rel=0.05)


def test_a_stall_holds_every_step_and_loses_nothing(b: _Bench) -> None:
    engine = b.language()
    engine.start((b.call(0, output=100),))
    b.at(100 * MILLISECOND, lambda: engine.stall(5 * SECOND))
    b.at(SECOND, lambda: engine.start((b.call(1),)))
    b.at(5 * SECOND, engine.go_on)
    b.world.run(4 * SECOND)
    busy = engine.work().busy_ns
    assert busy < 120 * MILLISECOND
    assert len(b.heard.lines) == 1
    b.world.run_out()
    assert {line[2] for line in b.heard.of("finished")} == {0, 1}
    assert all(line[0] > 5 * SECOND for line in b.heard.of("finished"))
    assert b.heard.stalls == [(100 * MILLISECOND, 0, 5 * SECOND), (SECOND, 1, 5 * SECOND)]


def test_a_crash_fails_what_is_held_and_takes_no_connection_until_it_is_back(b: _Bench) -> None:
    engine = b.language()
    engine.start((b.call(0, output=1000), b.call(1, output=1000)))
    b.at(SECOND, lambda: engine.fall(reachable=False))
    b.at(2 * SECOND, lambda: engine.start((b.call(2),)))
    b.at(3 * SECOND, engine.rise)
    b.at(4 * SECOND, lambda: engine.start((b.call(3),)))
    b.world.run_out()
    failed = b.heard.of("failed")
    assert [(line[0], line[2], line[4]) for line in failed] == [(SECOND, 0, True), (SECOND, 1, True)]
    assert 100 < failed[0][3] == failed[1][3] < 200
    assert b.heard.of("undelivered") == [(2 * SECOND, "undelivered", 2)]
    assert [line[2] for line in b.heard.of("finished")] == [3]


def test_a_warming_engine_refuses_without_blame(b: _Bench) -> None:
    engine = b.language()
    engine.fall(reachable=True)
    engine.start((b.call(0),))
    b.world.run_out()
    assert b.heard.lines == [(0, "failed", 0, 0, False)]


def test_an_engine_may_lie_about_usage(b: _Bench) -> None:
    engine = b.language()
    engine.usage_factor = 2.5
    engine.start((b.call(0, prompt=100, output=11),))
    b.world.run_out()
    assert b.heard.of("finished")[0][3:] == (250, 28)


def test_an_encoder_computes_one_batch_at_a_time(b: _Bench) -> None:
    engine = b.encoder()
    engine.start([b.call(n, output=0) for n in range(3)])
    b.at(MILLISECOND, lambda: engine.start((b.call(3, output=0),)))
    b.at(2 * MILLISECOND, lambda: engine.start((b.call(4, output=0),)))
    b.world.run_out()
    assert [(line[0], line[2]) for line in b.heard.lines] == [
        *((13 * MILLISECOND, n) for n in range(3)),
        (24 * MILLISECOND, 3),
        (35 * MILLISECOND, 4),
    ]
    assert (engine.work().steps, engine.work().batch_seqs) == (3, 5)


def test_an_encoder_that_batches_by_itself_joins_what_waits(b: _Bench) -> None:
    engine = b.encoder(joins=True)
    calls = [b.call(n, output=0) for n in range(11)]
    engine.start(calls[:1])
    b.at(MILLISECOND, lambda: [engine.start((call,)) for call in calls[1:]])
    b.at(2 * MILLISECOND, lambda: engine.abort(calls[5]))
    b.world.run_out()
    assert [(line[0] // MILLISECOND, line[2]) for line in b.heard.lines] == [
        (11, 0),
        *((29, n) for n in (1, 2, 3, 4, 6, 7, 8, 9)),
        (40, 10),
    ]
