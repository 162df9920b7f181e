"""One engine, given requests at given times, and every step that it took: the forward model of a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import NamedTuple

from forebay.engines.simulated.fitted import FrontEnd
from forebay.engines.simulated.model import EngineLimits, EngineModel
from forebay.engines.simulated.profile import StepProfile

SAME_NS = 500_000
"""First tokens of one step reach their callers within this time."""


class Offer(NamedTuple):
    """A request as it reaches the server, in ns from the start of the run."""

    at_ns: int
    prompt_tokens: int
    output_tokens: int


class Timing(NamedTuple):
    """What became of an offer, in ns: when it reached the scheduler, had its first token, had its last."""

    queued_ns: int
    first_ns: int
    done_ns: int


class Step(NamedTuple):
    """A forward pass and what it computed; see `StepProfile.step_ms`."""

    from_ns: int
    to_ns: int
    tokens: int
    sequences: int
    context: int
    pairs: float


@dataclass(frozen=True, slots=True)
class _Recording(StepProfile):
    """A profile that remembers the prompts of the step that it was asked for last."""

    pairs: list[float] = field(default_factory=lambda: [0.0])

    def step_ms(self, tokens: int, sequences: int, context: int, pairs: float) -> float:
        self.pairs[0] = pairs
        return StepProfile.step_ms(self, tokens, sequences, context, pairs)


def replay(
    profile: StepProfile,
    limits: EngineLimits,
    front: FrontEnd,
    offers: Sequence[Offer],
    seen: Sequence[tuple[int, int]] | None = None,
) -> tuple[list[Timing], list[Step]]:
    """Serves the offers, in order of time, on an engine that is idle at first.

    With `seen`, the instants at which the first and the last token of each offer really came, the clock is set by them:
    a step that makes such a token ends then, however long the profile would have it take. The profile only places the
    steps between, so that even a poor one puts every request beside the ones that it really met.

    Raises ValueError for an offer that can never fit the engine.
    """
    recording = _Recording(**{one.name: getattr(profile, one.name) for one in fields(StepProfile)})
    model = EngineModel(recording, limits)
    queued = [offer.at_ns + front.delay_ns(offer.prompt_tokens) for offer in offers]
    order = sorted(range(len(offers)), key=queued.__getitem__)
    first: dict[int, int] = {}
    done: dict[int, int] = {}
    steps: list[Step] = []
    now = next_up = context = 0
    while True:
        while next_up < len(order) and queued[order[next_up]] <= now:
            index = order[next_up]
            model.submit(str(index), offers[index].prompt_tokens, offers[index].output_tokens, now)
            next_up += 1
        result = model.step(now)
        if result is None:
            if next_up == len(order):
                break
            now = queued[order[next_up]] if seen is None else _shared_start(order[next_up:], queued, seen)
            continue
        end = now + result.duration_ns
        if seen is not None:
            told = [seen[int(id)][0] for id, _ in result.tokens if int(id) not in first]  # noqa: A001
            told += [seen[int(id)][1] for id in result.finished]  # noqa: A001
            if told:
                end = max(now + 1, round(median(told)))
        steps.append(Step(now, end, result.batch_tokens, result.batch_seqs, context, recording.pairs[0]))
        # Every sequence that made a token has one more to read in the next step; a new one has its whole prompt.
        for id, _ in result.tokens:  # noqa: A001
            index = int(id)
            if index in first:
                context += 1
            else:
                first[index] = end
                context += offers[index].prompt_tokens
        for id in result.finished:  # noqa: A001
            index = int(id)
            done[index] = end
            context -= offers[index].prompt_tokens + offers[index].output_tokens - 1
        now = end
    return [Timing(queued[index], first[index], done[index]) for index in range(len(offers))], steps


def _shared_start(order: Sequence[int], queued: Sequence[int], seen: Sequence[tuple[int, int]]) -> int:
    """When an idle engine really began: it cannot have begun before what it answered at the same time had come."""
    first = seen[order[0]][0]
    start = queued[order[0]]
    for index in order:
        if queued[index] >= first or seen[index][0] > first + SAME_NS:
            break
        start = queued[index]
    return start
