"""Leaping over steps is stepping: the same instants, the same batches, the same cache, to the nanosecond."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.model import EngineLimits, EngineModel
from forebay.engines.simulated.profile import StepProfile

A100 = profile_named("a100-80g/llama-3.1-8b/bf16/tp1/vllm")
assert isinstance(A100, StepProfile)


@dataclass(frozen=True)
class Submission:
    at: int
    prompt: int
    output: int
    cached: int
    session: str
    abort_after: int | None


@dataclass
class Seen:
    """What an engine did, with the state that each submission and abort found."""

    first: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    admitted: list[tuple[int, list[str]]] = field(default_factory=list)
    found: list[tuple[int, int, int, int, int, int, float]] = field(default_factory=list)
    end: int = 0

    def look(self, model: EngineModel, now: int, slowdown: float) -> None:
        counts = (model.num_running, model.num_waiting, model.preemptions, model.cached_tokens)
        self.found.append((now, model.kv_used_at(now), *counts, slowdown))


Action = tuple[int, str, Submission | float | None]


def actions(submissions: list[Submission], slow_at: int | None) -> list[Action]:
    """(instant, id, submission | None for an abort | a slowdown), in order of time."""
    all_: list[Action] = []
    for number, one in enumerate(submissions):
        all_.append((one.at, str(number), one))
        if one.abort_after is not None:
            all_.append((one.at + one.abort_after, str(number), None))
    if slow_at is not None:
        all_.append((slow_at, "", 1.7))
    return sorted(all_, key=lambda one: one[0])


def act(model: EngineModel, seen: Seen, action: Action) -> None:
    now, id_, what = action
    if isinstance(what, Submission):
        model.submit(id_, what.prompt, what.output, now, cached_tokens=what.cached, session=what.session)
    elif what is None:
        model.abort(id_, now)
    else:
        model.cut(now)
        model.slowdown = what
    seen.look(model, now, model.slowdown)
    if model._cache is not None:
        assert model._cache.tokens + model.kv_used <= model.limits.kv_tokens


def by_steps(model: EngineModel, todo: list[Action]) -> Seen:
    """One pass at a time. What happens at the end of a step finds the next one begun."""
    seen = Seen()
    known: set[str] = set()
    result, end = None, 0
    for action in [*todo, None]:
        while result is not None and (action is None or end <= action[0]):
            now = end
            for id_, _ in result.tokens:
                if id_ not in known and id_ in model._known:
                    known.add(id_)
                    seen.first[id_] = now
            for id_ in result.finished:
                if id_ in model._known:
                    seen.finished[id_] = now
            result = model.step(now)
            if result is not None:
                end = now + result.duration_ns
                if result.admitted:
                    seen.admitted.append((now, result.admitted))
        if action is not None:
            act(model, seen, action)
            if result is None:
                result = model.step(action[0])
                if result is not None:
                    end = action[0] + result.duration_ns
                    if result.admitted:
                        seen.admitted.append((action[0], result.admitted))
    seen.end = end
    return seen


def by_leaps(model: EngineModel, todo: list[Action]) -> Seen:
    seen = Seen()
    stretch, end = None, 0
    for action in [*todo, None]:
        while stretch is not None and (action is None or stretch.end <= action[0]):
            end = stretch.end
            seen.first |= dict.fromkeys(stretch.first, end)
            seen.finished |= dict.fromkeys(stretch.finished, end)
            stretch = model.leap(end)
            if stretch is not None and stretch.admitted:
                seen.admitted.append((end, stretch.admitted))
        if action is not None:
            act(model, seen, action)
            if stretch is None:
                stretch = model.leap(action[0])
                if stretch is not None and stretch.admitted:
                    seen.admitted.append((action[0], stretch.admitted))
    seen.end = end
    return seen


SUBMISSIONS = st.lists(
    st.builds(
        Submission,
        at=st.integers(0, 2_000_000_000),
        prompt=st.integers(1, 60),
        output=st.integers(1, 60),
        cached=st.integers(0, 70),
        session=st.sampled_from(["", "a", "b", "c"]),
        abort_after=st.none() | st.integers(0, 900_000_000),
    ),
    min_size=1,
    max_size=24,
)
LIMITS = st.builds(
    EngineLimits,
    max_num_seqs=st.sampled_from([1, 3, 16]),
    max_num_batched_tokens=st.sampled_from([16, 40, 200]),
    kv_tokens=st.sampled_from([120, 200, 1000]),
    reserve_output=st.booleans(),
)


@given(
    submissions=SUBMISSIONS,
    limits=LIMITS,
    prefix_cache=st.booleans(),
    slow_at=st.none() | st.integers(0, 2_500_000_000),
)
@example(
    # An abort at the very instant at which a step ends, and the next one, which counts, begins.
    submissions=[Submission(0, 1, 3, 0, "", None), Submission(1, 1, 60, 0, "", 10_848_000)],
    limits=EngineLimits(3, 16, 120),
    prefix_cache=False,
    slow_at=None,
)
@example(
    # The one in the middle grows until the cache has no room left, and gives it back when it finishes.
    submissions=[
        Submission(0, 1, 54, 0, "a", None),
        Submission(0, 8, 60, 0, "", None),
        Submission(0, 2, 1, 0, "a", None),
    ],
    limits=EngineLimits(1, 16, 120),
    prefix_cache=True,
    slow_at=None,
)
def test_leaps_and_steps_are_the_same(
    submissions: list[Submission], limits: EngineLimits, prefix_cache: bool, slow_at: int | None
) -> None:
    assert isinstance(A100, StepProfile)
    todo = actions(submissions, slow_at)
    one_by_one = EngineModel(A100, limits, prefix_cache=prefix_cache)
    leaping = EngineModel(A100, limits, prefix_cache=prefix_cache)
    steps, leaps = by_steps(one_by_one, todo), by_leaps(leaping, todo)
    assert leaps == steps
    assert leaping.steps == one_by_one.steps
    assert leaping.preemptions == one_by_one.preemptions
    assert (leaping.kv_used, leaping.num_running, leaping.num_waiting) == (0, 0, 0)
