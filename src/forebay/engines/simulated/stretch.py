"""A run of forward passes over one batch, known in closed form."""

from __future__ import annotations

from math import sqrt

FRACTION_BITS = 20
"""Step times are counted in 2^-20 ns."""


class Stretch:
    """Steps of one batch, back to back. Each takes longer than the one before by the same time: the context grows.

    What the steps make is there at their ends. Only the last step changes the batch, so `first` and `finished` take
    effect at `end`. A stretch under way may be shortened, see `EngineModel.cut`: read `end` anew when it is over.
    """

    __slots__ = (
        "_fraction", "_growth", "_took", "admitted", "batch_seqs", "batch_tokens", "decodes", "end", "finished",
        "first", "joined", "start", "steps",
    )  # fmt: skip

    def __init__(self, start: int, fraction: int, took: int, growth: int, batch_seqs: int, batch_tokens: int) -> None:
        """`took`: time of the first step, `growth`: what each next one takes longer, both in 2^-20 ns like `fraction`,
        which is what the start has lost by rounding."""
        self._fraction, self._took, self._growth = fraction, took, growth
        self.start = start
        """ns"""
        self.steps = 1
        self.end = self.end_of(1)
        """When the last step is over, in ns."""
        self.batch_seqs = batch_seqs
        """Sequences computed in each step."""
        self.batch_tokens = batch_tokens
        """New tokens computed in each step, prefill chunks included."""
        self.decodes = 0
        """Sequences that were decoding before: each makes a token in every step."""
        self.joined = 0
        """Prefills that end here: each makes one token."""
        self.admitted: list[str] = []
        """Sequences that left the queue at the start (after a preemption once more)."""
        self.first: list[str] = []
        """Sequences whose first token is there at the end. Such a stretch has one step."""
        self.finished: list[str] = []
        """Sequences whose last token is there at the end."""

    @property
    def tokens(self) -> int:
        """Output tokens made by all steps together."""
        return self.steps * self.decodes + self.joined

    def end_of(self, step: int) -> int:
        """When a step is over, in ns; the first is number 1, and step 0 is over at the start."""
        return self.start + (self._since_start(step) >> FRACTION_BITS)

    def begun(self, now: int) -> int:
        """How many of the steps have begun at `now` or before; at least one."""
        # Step j+1 begins when j are over: the largest j for which (the time of j steps) is less than `bound`.
        bound = (now - self.start + 1) << FRACTION_BITS
        half = self._took - self._growth / 2
        over = int(2 * bound / (half + sqrt(half * half + 2 * self._growth * bound)))
        if over >= self.steps:
            over = self.steps - 1
        while over > 0 and self._since_start(over) >= bound:
            over -= 1
        while over < self.steps - 1 and self._since_start(over + 1) < bound:
            over += 1
        return over + 1

    @property
    def fraction_left(self) -> int:
        """What `end` has lost by rounding down, in 2^-20 ns."""
        return self._since_start(self.steps) & ((1 << FRACTION_BITS) - 1)

    def lengthen(self, steps: int) -> None:
        """Go on for so many steps in all."""
        self.steps = steps
        self.end = self.end_of(steps)

    def shorten(self, steps: int) -> None:
        """End after so many steps, fewer than there were: nothing finishes."""
        self.steps = steps
        self.end = self.end_of(steps)
        self.finished = []

    def forget(self, id: str) -> None:  # noqa: A002
        """This sequence was aborted."""
        for ids in (self.first, self.finished):
            if id in ids:
                ids.remove(id)

    def _since_start(self, step: int) -> int:
        return self._fraction + step * self._took + self._growth * (step * (step - 1) // 2)
