"""Rivals in the control benchmark keep to their published rules."""

from __future__ import annotations

from benchmarks.control_policies import ARTICLE, FOREBAY, LEARNING, SIGNALS, KeyClass, policy
from benchmarks.control_rivals import VllmCaps
from benchmarks.control_world import Run, Stream, drawn, simulate
from forebay.config.load import loads
from forebay.sim.records import COMPLETED, SHED

A100 = "a100-80g/llama-3.1-8b/bf16/tp1/vllm"


def _run(name: str, *, rate: float, seconds: float = 2.0) -> Run:
    arrivals = drawn([Stream("chat", rate, 0.0, seconds)], 1)
    return simulate(policy(name), A100, arrivals, seconds=seconds, seed=1)


def test_every_policy_is_a_valid_configuration_or_a_front() -> None:
    classes = (KeyClass("critical", ("one",), 10, weight=8.0), KeyClass("rest", ("two",), hold_back=0.1))
    names = [FOREBAY, "forebay, unfair", "fixed 96", *ARTICLE, *(f"{kind} {SIGNALS[0]}" for kind in LEARNING)]
    for name in names:
        text = policy(name, classes=classes)
        assert isinstance(text, str)
        assert loads(text, name=name, environment={}).config.classes["critical"].priority == 10


def test_the_same_seed_draws_the_same_whoever_serves_it() -> None:
    streams = [Stream("chat", 20.0, 0.0, 3.0, ("a", "b")), Stream("rag", 5.0, 1.0, 3.0)]
    assert drawn(streams, 7) == drawn(streams, 7) != drawn(streams, 8)
    moments = [arrival.at_ns for arrival in drawn(streams, 7)]
    assert moments == sorted(moments)


def test_nothing_in_the_way_refuses_nobody() -> None:
    assert SHED not in _run("none", rate=40.0).callers.records.outcome


def test_vllm_refuses_beyond_its_sequences_or_its_prompts() -> None:
    arrivals = drawn([Stream("chat", 200.0, 0.0, 2.0)], 1)
    most: list[int] = []

    def front(world, engines, callers, seed):  # type: ignore[no-untyped-def]
        caps = VllmCaps(world, engines, callers, requests=10, tokens=1e9)
        world.after_event = lambda: most.append(max(engine.held for engine in engines))
        return caps

    run = simulate(front, A100, arrivals, seconds=2.0, seed=1)
    assert max(most) == 10
    assert {COMPLETED, SHED} == set(run.callers.records.outcome)


def test_vllm_counts_prompts_until_their_first_token() -> None:
    arrivals = drawn([Stream("rag", 40.0, 0.0, 2.0)], 1)

    def front(world, engines, callers, seed):  # type: ignore[no-untyped-def]
        return VllmCaps(world, engines, callers, requests=1000, tokens=4000)

    run = simulate(front, A100, arrivals, seconds=2.0, seed=1)
    columns = run.callers.records
    first = [columns.first_token_ns[row] - columns.intended_ns[row] for row in range(len(columns))
             if columns.outcome[row] == COMPLETED]  # fmt: skip
    assert SHED in columns.outcome
    assert max(first) < 3_000_000_000  # at most one prompt past the cap is ahead of anybody


def test_the_probabilistic_gate_sheds_nothing_on_an_idle_engine_and_most_on_a_full_one() -> None:
    assert SHED not in _run("llm-d gate", rate=10.0).callers.records.outcome
    outcomes = list(_run("llm-d gate", rate=2000.0, seconds=3.0).callers.records.outcome)
    late = outcomes[len(outcomes) * 2 // 3 :]
    assert late.count(SHED) > 0.9 * len(late)
