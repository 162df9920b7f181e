"""Continuous batching without I/O: who runs in the next step, and what a step's tokens mean.

One step gives every running sequence one token and spends what is left of a row budget on prompts. Prompts are
computed in chunks, so that a long one does not stall the others for long. A sequence holds one slot of the KV cache
from its admission to its end; waiting is first come, first served, and bounded.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from random import Random


class Want(Enum):
    """What a span of tokens is computed for, beside filling the cache."""

    NOTHING = "nothing"
    TOKEN = "token"  # noqa: S105 (a token of text)
    VECTOR = "vector"


class Text(Protocol):
    """Turns a sequence's tokens into text and watches for its stop strings."""

    def push(self, token: int) -> tuple[str, bool]:
        """Text to show now (may be empty) and whether a stop string was completed."""

    def flush(self) -> str:
        """What was held back, at an end that was not a stop string."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and what grows from it.

    Args:
        id: unique among the live ones.
        prompt: token ids, at least one, shorter than the context (a vector's may fill it).
        max_new: most tokens to generate; 0 for a vector.
        text: None for a vector.
        eos: token ids that end the answer and are not shown; empty to ignore them.
        draw: temperature and generator to draw tokens with; None for the likeliest one.
    """

    id: str
    prompt: list[int]
    max_new: int
    text: Text | None
    eos: Collection[int] = ()
    draw: tuple[float, Random] | None = None
    slot: int = -1
    computed: int = 0
    """Positions in the KV cache."""
    generated: int = 0
    last: int = -1
    """The newest token, not yet in the cache."""
    sums: list[float] | None = None
    """Of a vector: the summed hidden states of the prompt so far."""

    @property
    def prefilled(self) -> bool:
        return self.computed >= len(self.prompt)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence to run through the model."""

    sequence: Sequence
    slot: int
    start: int
    """Position of the first token; the cache holds all before it."""
    tokens: list[int]
    want: Want


@dataclass(frozen=True, slots=True)
class Shown:
    """A token was generated; `text` may be empty."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence is complete (`vector` when it was an embedding) and its slot is free."""

    id: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    vector: list[float] | None = None


Event = Shown | Finished


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0


class WaitingFullError(Exception):
    """As many sequences wait as may."""


@dataclass(slots=True)
class Scheduler:
    """Decides each step. Not thread-safe: one thread owns it.

    Args:
        slots: sequences that run at once.
        context: most positions of a sequence, prompt and answer together.
        busy_rows: tokens of a step that generates, prompts' and answers' together: bounds how long prompts delay the
            answers. Prompts get a quarter of it even when the answers take it all.
        idle_rows: most prompt tokens in a step that delays nobody.
        max_waiting: most sequences that wait for a slot.
    """

    slots: int
    context: int
    busy_rows: int = 64
    idle_rows: int = 128
    max_waiting: int = 1024
    totals: Totals = field(default_factory=Totals)
    _free: list[int] = field(default_factory=list)
    _waiting: deque[Sequence] = field(default_factory=deque)
    _running: dict[str, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Lowest slot first: active slots stay close together, which attention over the cache is cheaper for.
        self._free = list(range(self.slots))

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def cache_usage(self) -> float:
        """Used part of the KV cache, 0 to 1."""
        return sum(sequence.computed for sequence in self._running.values()) / (self.slots * self.context)

    def add(self, sequence: Sequence) -> None:
        """Appends to the waiting line.

        Raises:
            WaitingFullError: the line is full.
        """
        if len(self._waiting) >= self.max_waiting:
            raise WaitingFullError
        self._waiting.append(sequence)

    def abort(self, sequence_id: str) -> bool:
        """Forgets a sequence and frees its slot; false when it is unknown (it may have ended by itself)."""
        sequence = self._running.get(sequence_id)
        if sequence is not None:
            self._release(sequence)
            return True
        for sequence in self._waiting:
            if sequence.id == sequence_id:
                self._waiting.remove(sequence)
                return True
        return False

    def plan(self) -> list[Span]:
        """The next step's spans: generating ones by slot, then prompts by age. Empty when there is no work."""
        self._admit()
        spans = [
            Span(sequence, sequence.slot, sequence.computed, [sequence.last], Want.TOKEN)
            for sequence in sorted(self._running.values(), key=_slot_of)
            if sequence.prefilled
        ]
        busy = max(self.busy_rows - len(spans), self.busy_rows // 4)
        budget = busy if spans else self.idle_rows
        for sequence in self._running.values():
            if budget == 0:
                break
            if not sequence.prefilled:
                span = self._prompt_span(sequence, budget)
                budget -= len(span.tokens)
                spans.append(span)
        return spans

    def commit(self, spans: Iterable[Span], tokens: Iterable[int], vectors: Iterable[list[float]]) -> list[Event]:
        """Takes a step's results, in span order: a token per span that wants one, a vector per span that wants one.

        The spans are those of the last `plan`, with no `abort` in between.
        """
        events: list[Event] = []
        next_token, next_vector = iter(tokens), iter(vectors)
        for span in spans:
            sequence = span.sequence
            if not sequence.prefilled:
                self.totals.prompt_tokens += len(span.tokens)
            sequence.computed += len(span.tokens)
            if span.want is Want.TOKEN:
                self._accept(sequence, next(next_token), events)
            elif span.want is Want.VECTOR:
                self._add_vector(sequence, next(next_vector), events)
        return events

    def _admit(self) -> None:
        while self._waiting and self._free:
            sequence = self._waiting.popleft()
            sequence.slot = heapq.heappop(self._free)
            self._running[sequence.id] = sequence

    def _prompt_span(self, sequence: Sequence, budget: int) -> Span:
        start = sequence.computed
        tokens = sequence.prompt[start : start + budget]
        complete = start + len(tokens) == len(sequence.prompt)
        final = Want.TOKEN if complete else Want.NOTHING
        want = Want.VECTOR if sequence.text is None else final
        return Span(sequence, sequence.slot, start, tokens, want)

    def _accept(self, sequence: Sequence, token: int, events: list[Event]) -> None:
        text = sequence.text
        assert text is not None, "only generating sequences want tokens"
        sequence.last = token
        sequence.generated += 1
        self.totals.generated_tokens += 1
        if token in sequence.eos:
            self._finish(sequence, "stop", text.flush(), events)
            return
        shown, stopped = text.push(token)
        if stopped:
            self._finish(sequence, "stop", shown, events)
        elif sequence.generated >= sequence.max_new or len(sequence.prompt) + sequence.generated >= self.context:
            self._finish(sequence, "length", shown + text.flush(), events)
        else:
            events.append(Shown(sequence.id, shown))

    def _add_vector(self, sequence: Sequence, summed: list[float], events: list[Event]) -> None:
        """Adds a chunk's sum of hidden states; the mean over the prompt is the vector."""
        sums = sequence.sums
        sequence.sums = summed if sums is None else [a + b for a, b in zip(sums, summed, strict=True)]
        if sequence.prefilled:
            count = len(sequence.prompt)
            vector = [value / count for value in sequence.sums]
            self._release(sequence)
            events.append(Finished(sequence.id, "stop", count, 0, vector))

    def _finish(self, sequence: Sequence, reason: str, text: str, events: list[Event]) -> None:
        self._release(sequence)
        events.append(Shown(sequence.id, text))
        events.append(Finished(sequence.id, reason, len(sequence.prompt), sequence.generated))

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence.id]
        heapq.heappush(self._free, sequence.slot)


def _slot_of(sequence: Sequence) -> int:
    return sequence.slot
