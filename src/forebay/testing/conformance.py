"""What every policy of a room must keep, whatever it decides. Each check raises AssertionError with the case."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from forebay.core.batching.former import Batcher
from forebay.core.dispatch.balance import Balancer
from forebay.core.dispatch.health import HealthConfig
from forebay.core.dispatch.leases import Engine
from forebay.core.instant import MILLISECOND, MINUTE, SECOND
from forebay.core.limits.fixed import Fixed, FixedConfig
from forebay.core.limits.limit import Answer, Limit, View
from forebay.core.model import EngineSignal, Request
from forebay.core.tuning.tuner import DepthTuner, Reading


def check_batching(batcher: Batcher, *, seed: int = 1, cases: int = 500) -> None:
    """A batcher lets a batch go in the end, at once when it is full, and never asks for an earlier wake-up twice."""
    chance = Random(seed)
    assert batcher.max_size >= 1, "a batch holds at least one request"
    assert batcher.max_tokens >= 1, "a batch holds at least one token"
    for _ in range(cases):
        oldest = chance.randrange(10 * SECOND)
        now = oldest + chance.randrange(SECOND)
        waiting, tokens = chance.randrange(1, 2 * batcher.max_size + 1), chance.randrange(1, 100_000)
        at = batcher.ready_at(waiting, tokens, oldest, now)
        case = f"waiting={waiting} tokens={tokens} oldest={oldest} now={now} at={at}"
        assert isinstance(at, int), f"instants are integers: {case}"
        assert at == batcher.ready_at(waiting, tokens, oldest, now), f"asking changes nothing: {case}"
        assert at <= now + 60 * SECOND, f"no batch waits for company that may never come: {case}"
        later = max(now, at)
        assert batcher.ready_at(waiting, tokens, oldest, later) <= later, f"it leaves when it said it would: {case}"
        full = batcher.ready_at(max(waiting, batcher.max_size), tokens, oldest, now)
        assert full <= now, f"a full batch leaves at once: {case}"
        more = batcher.ready_at(waiting + 1, tokens + 1, oldest, now)
        assert more <= max(at, now), f"company never delays a batch: {case}"


def check_limit(limit: Limit, *, seed: int = 1, cases: int = 2000) -> None:
    """A concurrency limit stays a positive number of requests and tokens under any history, however odd."""
    chance = Random(seed)
    now = 0
    for _ in range(cases):
        now += chance.randrange(100 * MILLISECOND)
        held_ns = chance.choice((1, chance.randrange(1, 10 * SECOND), 10 * MINUTE))
        in_flight = chance.randrange(1, 2 + limit.requests)
        happened = chance.randrange(20)
        if happened == 0:
            (limit.failed if chance.random() < 0.8 else limit.restarted)(now)
        elif happened == 1:
            kv_tokens, preemptions = chance.choice((None, 1, 500_000)), chance.choice((None, chance.randrange(99)))
            signal = EngineSignal(chance.randrange(500), chance.randrange(50), chance.random(), kv_tokens, preemptions)
            limit.signalled(signal, in_flight, now)
        elif happened < 4:
            limit.viewed(_odd_view(chance, in_flight), now)
        else:
            limit.answered(Answer(held_ns, chance.randrange(held_ns), chance.randrange(2000), in_flight), now)
        assert isinstance(limit.requests, int), f"a limit is a whole number of requests, not {limit.requests!r}"
        assert isinstance(limit.tokens, int), f"a limit is a whole number of tokens, not {limit.tokens!r}"
        assert limit.requests >= 1, "a limit below one would stop the engine for ever"
        assert limit.tokens >= 1, "a limit below one token would stop the engine for ever"
        assert limit.prefill_tokens >= 1, "a bound below one prompt token would stop the engine for ever"


def _odd_view(chance: Random, in_flight: int) -> View:
    """A view with nothing in it, or with figures that no engine would have."""
    if chance.random() < 0.2:
        return View(0, 0, 0, False, 0, 0, 0, 0, 0, 0, 0)
    return View(
        elapsed_ns=chance.randrange(1, SECOND),
        in_flight=in_flight,
        in_flight_most=in_flight,
        waiting=chance.random() < 0.5,
        decoding_ns=chance.randrange(100 * SECOND),
        generated=chance.randrange(5000),
        prefilled=chance.randrange(50_000),
        prefilling_ns=chance.randrange(SECOND),
        prefilling=chance.randrange(50_000),
        expected_tokens=chance.randrange(1_000_000),
        peak_tokens=chance.randrange(1_000_000),
    )


def check_balancer(make: Callable[[int], Balancer], *, seed: int = 1, cases: int = 500) -> None:
    """A balancer finds an engine with room if there is one, and no other; the same stream of chance chooses the same.

    `make` makes one with the stream of a seed.
    """
    chance = Random(seed)
    balancer, twin = make(seed), make(seed)
    assert balancer.prefix_bytes >= 0, "a number of bytes"
    for _ in range(cases):
        engines = [_odd_engine(chance, number) for number in range(chance.randrange(1, 9))]
        request, tokens = Request("k", prefix=chance.choice((0, chance.getrandbits(64)))), chance.randrange(1, 5_000)
        now = chance.randrange(10 * SECOND)
        before = [(e.places, e.in_flight, e.tokens, e.prefill_tokens) for e in engines]
        able = [engine.name for engine in engines if engine.has_room(tokens, now)]
        chosen = balancer.choose(engines, request, tokens, now)
        case = f"able={able} chosen={chosen and chosen.name} tokens={tokens} engines={before}"
        assert (chosen is not None) == bool(able), f"room is found if there is any: {case}"
        assert chosen is None or chosen.name in able, f"an engine without room is not chosen: {case}"
        assert before == [(e.places, e.in_flight, e.tokens, e.prefill_tokens) for e in engines], "nothing is changed"
        assert twin.choose(engines, request, tokens, now) is chosen, f"the same chance, the same choice: {case}"


def _odd_engine(chance: Random, number: int) -> Engine:
    """An engine somewhere in its life."""
    engine = Engine(f"e/{number}", Fixed(FixedConfig(limit=chance.randrange(1, 6), tokens=10_000)), HealthConfig())
    if chance.random() < 0.8:
        engine.came(0)
    if chance.random() < 0.2:
        engine.went(warming=False)
        engine.came(chance.randrange(10 * SECOND))
    if chance.random() < 0.2:
        engine.health.ejected_until = chance.randrange(10 * SECOND)
    engine.places = engine.in_flight = chance.randrange(6)
    engine.tokens = engine.places * chance.randrange(3_000)
    engine.prefill_tokens = chance.randrange(1 + engine.tokens)
    if chance.random() < 0.3:
        engine.shared, engine.tokens_each = True, 500.0
        engine.others.read(chance.randrange(100), engine.in_flight, chance.randrange(10 * SECOND))
    return engine


def check_tuner(tuner: DepthTuner, *, seed: int = 1, cases: int = 2000) -> None:
    """A depth stays a whole number within the tuner's bounds, one or more, and nothing missing is read as load."""
    chance = Random(seed)
    assert tuner.most >= tuner.least >= (1 if tuner.interval_ns else 0), "a tuner may never block all traffic"
    depth = max(tuner.least, min(tuner.most, 16))
    for _ in range(cases):
        reading = _odd_reading(chance)
        advice = tuner.tuned(depth, reading)
        assert advice == tuner.tuned(depth, reading), f"asking changes nothing: {reading}"
        assert isinstance(advice.depth, int), f"a depth is a whole number, not {advice.depth!r}"
        assert tuner.least <= advice.depth <= tuner.most, f"out of bounds: {advice} for {reading}"
        blind = tuner.tuned(depth, reading._replace(busy=None))
        silent = tuner.tuned(depth, reading._replace(releases=0, answers=0, p99_ns=0))
        assert blind.depth == silent.depth == depth, f"what is missing is no reason to move: {reading}"
        depth = advice.depth


def _odd_reading(chance: Random) -> Reading:
    """What a pool did since the last look, or what no pool would do."""
    return Reading(
        elapsed_ns=chance.choice((0, chance.randrange(1, MINUTE))),
        releases=chance.choice((0, chance.randrange(100), 10**9)),
        answers=chance.choice((0, chance.randrange(100), 10**9)),
        p99_ns=chance.choice((0, chance.randrange(SECOND), 10 * MINUTE)),
        busy=chance.choice((None, chance.random(), 1.0, 7.0)),
        waiting_most=chance.randrange(10_000),
        felt=chance.random() < 0.5,
        wait_budget_ns=chance.choice((0, 50 * MILLISECOND, MINUTE)),
        correction=chance.choice((0.2, 1.0, 5.0)),
        batch=chance.choice((1, 32)),
    )
