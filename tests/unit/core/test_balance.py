"""Which engine gets the work."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.dispatch.balance.affinity import Affinity, AffinityConfig
from forebay.core.dispatch.balance.p2c import P2c
from forebay.core.dispatch.balance.random import Random as AnyOne
from forebay.core.dispatch.health import HealthConfig, Readiness
from forebay.core.dispatch.leases import Engine
from forebay.core.limits.fixed import Fixed, FixedConfig
from forebay.core.model import Request


def engines(*tokens: int, limit: int = 1_000) -> list[Engine]:
    made = []
    for number, held in enumerate(tokens):
        one = Engine(f"e/{number}", Fixed(FixedConfig(limit=limit)), HealthConfig())
        one.health.readiness = Readiness.UP
        one.tokens = held
        one.places = one.in_flight = held // 100
        made.append(one)
    return made


def request(prefix: int = 0) -> Request:
    return Request("k", prefix=prefix)


PREFIXES = [crc32(str(number).encode()) << 32 | number + 1 for number in range(2000)]


# ---- two choices ----------------------------------------------------------------------------------------------


def test_the_fuller_one_of_two_is_never_taken_and_the_rest_share() -> None:
    among = engines(0, 500, 1_000, 2_000)
    p2c = P2c(Random(1))
    taken = Counter(p2c.choose(among, request(), 10, 0).name for _ in range(6_000))  # type: ignore[union-attr]
    assert taken["e/3"] == 0
    shares = [taken[f"e/{number}"] / 6_000 for number in range(3)]
    assert shares == pytest.approx([1 / 2, 1 / 3, 1 / 6], abs=0.03)


def test_every_pair_is_drawn_alike() -> None:
    among = engines(0, 0, 0)
    p2c = P2c(Random(2))
    taken = Counter(p2c.choose(among, request(), 10, 0).name for _ in range(6_000))  # type: ignore[union-attr]
    assert all(count == pytest.approx(2_000, rel=0.1) for count in taken.values())


def test_chance_spreads_evenly_whatever_is_held() -> None:
    among = engines(0, 10_000, 500)
    taken = Counter(AnyOne(Random(3)).choose(among, request(), 10, 0).name for _ in range(1))  # type: ignore[union-attr]
    assert sum(taken.values()) == 1
    policy = AnyOne(Random(3))
    taken = Counter(policy.choose(among, request(), 10, 0).name for _ in range(3_000))  # type: ignore[union-attr]
    assert all(count == pytest.approx(1_000, rel=0.1) for count in taken.values())


# ---- affinity -------------------------------------------------------------------------------------------------


def chosen(policy: Affinity, among: list[Engine], prefix: int) -> str:
    engine = policy.choose(among, request(prefix), 10, 0)
    assert engine is not None
    return engine.name


def test_the_same_beginning_meets_the_same_engine_and_beginnings_spread() -> None:
    among = engines(*[1_000] * 5)
    here, there = Affinity(AffinityConfig()), Affinity(AffinityConfig())
    homes = {prefix: chosen(here, among, prefix) for prefix in PREFIXES}
    assert homes == {prefix: chosen(there, among, prefix) for prefix in PREFIXES}, "on every gateway"
    assert all(count == pytest.approx(400, rel=0.2) for count in Counter(homes.values()).values())


def test_an_engine_that_goes_takes_only_its_own_beginnings_along() -> None:
    among = engines(*[1_000] * 5)
    policy = Affinity(AffinityConfig())
    before = {prefix: chosen(policy, among, prefix) for prefix in PREFIXES}
    among[2].health.readiness = Readiness.DOWN
    after = {prefix: chosen(policy, among, prefix) for prefix in PREFIXES}
    moved = {prefix for prefix in PREFIXES if before[prefix] != after[prefix]}
    assert moved == {prefix for prefix in PREFIXES if before[prefix] == "e/2"}


def test_a_popular_beginning_overflows_at_a_quarter_above_the_average() -> None:
    among = engines(*[0] * 4)
    policy = Affinity(AffinityConfig(detour=1e9))
    for _ in range(400):
        engine = policy.choose(among, request(PREFIXES[0]), 10, 0)
        assert engine is not None
        engine.in_flight += 1
        engine.places += 1
        engine.tokens += 10
    held = sorted(engine.in_flight for engine in among)
    assert sum(held) == 400
    assert held[-1] <= 1.25 * 100 + 2
    assert held[0] < 100, "the others get what is too much for the first"


def test_no_cache_is_worth_a_wait_a_fifth_longer() -> None:
    policy = Affinity(AffinityConfig(bound=1e9))
    quiet = engines(*[1_000] * 4)
    home = chosen(policy, quiet, PREFIXES[0])
    index = int(home[-1])
    quiet[index].tokens = 1_250
    assert chosen(policy, quiet, PREFIXES[0]) == home, "1250 + 10, and the best one 1000 + 10 and 4 × 10 for the prompt"
    quiet[index].tokens = 1_251
    assert chosen(policy, quiet, PREFIXES[0]) != home


def test_without_a_beginning_it_is_the_least_loaded() -> None:
    assert chosen(Affinity(AffinityConfig()), engines(300, 100, 200), 0) == "e/1"


@given(st.lists(st.integers(0, 5_000), min_size=1, max_size=8), st.integers(0, (1 << 64) - 1), st.integers(1, 9_000))
def test_it_goes_nowhere_where_the_bounds_are_not_kept(held: list[int], prefix: int, tokens: int) -> None:
    among = engines(*held)
    config = AffinityConfig()
    engine = Affinity(config).choose(among, request(prefix), tokens, 0)
    assert engine is not None
    best = min(held)
    in_bounds = engine.in_flight < config.bound * (1 + sum(e.in_flight for e in among)) / len(among)
    assert engine.tokens == best or (in_bounds and engine.tokens + tokens <= config.detour * (best + 5 * tokens))


# ---- all ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made", [lambda: P2c(Random(1)), lambda: Affinity(AffinityConfig()), lambda: AnyOne(Random(1))]
)
def test_one_of_those_with_room_or_none(made: Any) -> None:
    among = engines(100, 100, 100, limit=1)
    policy = made()
    assert policy.choose(among, request(7), 10, 0) is None
    among[1].places = 0
    assert policy.choose(among, request(7), 10, 0) is among[1]
