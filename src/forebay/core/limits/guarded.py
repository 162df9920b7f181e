"""The guarded window: as many requests as keep every guard, and no response time among the guards.

Batching makes an answer slower all by itself, long before anything queues, so a rule on response times stops an engine
that batches at half of what it can do. What must hold instead is asked for directly:

- *step time*: the gap between tokens of the streams stays under the objective for it;
- *memory*: the expected peak of the KV cache stays under its capacity, where that is known;
- *prefill*: prompt tokens that are ahead of a new request take no more than a share of the first-token objective.

The queue's wait is the admission room's guard. The window goes down at once and up slowly, because engines fall off a
cliff on the high side; it grows only while it is felt; and where there is nothing to see it holds.
Described in docs/policies/limit-guarded.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.core.instant import MILLISECOND, SECOND, Instant
from forebay.core.limits.limit import UNBOUNDED, Answer, View
from forebay.core.model import EngineSignal


@dataclass(frozen=True, slots=True)
class GuardedConfig:
    """The objectives are the operator's; the rest follows from them and rarely needs a hand."""

    kind: Literal["guarded"] = "guarded"
    tpot_ns: int = 50 * MILLISECOND  # objective: mean time between two tokens of a stream
    ttft_ns: int = SECOND  # objective: first token
    kv_tokens: int | None = None  # the engine's KV cache; None: as the engine says, else not guarded
    initial: int = 16
    least: int = 2
    most: int = 1024
    interval_ns: int = 250 * MILLISECOND
    tpot_share: float = 0.94  # of the objective is aimed at
    kv_share: float = 0.92
    prefill_share: float = 0.45  # of the first-token objective may pass before a new prompt's turn
    down_most: float = 0.85
    up_most: float = 1.25  # per view
    memory: float = 0.75  # share of what was seen that is kept from one view to the next
    tokens_min: int = 16  # fewer say nothing yet
    signal_ns: int = 3 * SECOND  # what the engine says of itself is not known any more after this long
    kv_full: float = 0.97  # used share of the cache from which on the window does not grow
    preempted: float = 0.8  # of the window is left when the engine had to preempt
    freeze_ns: int = 5 * SECOND  # in which it does not grow after that
    waiting_most: int = 2  # requests in the engine's own queue; more, twice in a row, are a window too many


class Guarded:
    """Moves once per view."""

    learns = True

    def __init__(self, config: GuardedConfig) -> None:
        self.requests = min(config.most, max(config.least, config.initial))
        self.tokens = UNBOUNDED if config.kv_tokens is None else max(1, int(config.kv_share * config.kv_tokens))
        self.prefill_tokens = UNBOUNDED
        self.interval_ns = config.interval_ns
        self.gap_ns = 0.0
        self._kv_tokens = config.kv_tokens
        self._signal = EngineSignal()
        self._signal_at: Instant = -config.signal_ns
        self._frozen_until: Instant = 0
        self._overfull = 0  # signals in a row that spoke of a queue inside the engine
        self._config = config
        self._limit = float(self.requests)
        self._prefill_rate = 0.0  # prompt tokens per ns while prompts were waiting in the engine
        self._spent_ns = self._tokens = 0.0  # time and tokens of the streams, the older ones fading
        self._whole_ns = self._whole_tokens = 0  # of answers that were not streamed, since the last view

    def answered(self, answer: Answer, now: Instant) -> None:  # noqa: ARG002
        """An answer that was not streamed shows its pace only at the end, its first token's wait included."""
        if not answer.first_ns and answer.output_tokens > 1:
            self._whole_ns += answer.held_ns
            self._whole_tokens += answer.output_tokens

    def failed(self, now: Instant) -> None:
        """A failure says nothing about the pace; the engine's health is kept elsewhere."""

    def signalled(self, signal: EngineSignal, in_flight: int, now: Instant) -> None:
        """Correct what our own counters cannot know: the cache's size, a queue inside the engine, preemptions."""
        config, before = self._config, self._signal
        known, self._signal, self._signal_at = now - self._signal_at <= config.signal_ns, signal, now
        if signal.kv_tokens and config.kv_tokens is None:
            self._kv_tokens = signal.kv_tokens
        more = (signal.preemptions or 0) - (before.preemptions or 0)
        if known and before.preemptions is not None and more > 0 and now >= self._frozen_until:
            self._shrink(min(self._limit, max(in_flight, 1)) * config.preempted)
            self._frozen_until = now + config.freeze_ns
        self._overfull = self._overfull + 1 if (signal.waiting or 0) > config.waiting_most else 0
        if self._overfull >= 2:
            self._overfull = 0
            self._shrink(self._limit * 0.9)

    def _shrink(self, limit: float) -> None:
        self._limit = max(self._config.least, min(self._limit, limit))
        self.requests = int(self._limit)

    def viewed(self, view: View, now: Instant) -> None:
        """Trim the window by the pace, and set the other guards anew."""
        self._guard_memory(view)
        self._guard_prefill(view)
        gap_ns = self._gap(view)
        if gap_ns <= 0:
            return
        self.gap_ns = gap_ns
        config = self._config
        aim_ns = config.tpot_share * config.tpot_ns
        if gap_ns > aim_ns:
            # What made the gap is what was in flight, not what was allowed.
            self._limit = min(self._limit, max(view.in_flight_most, 1.0)) * max(config.down_most, aim_ns / gap_ns)
        elif gap_ns < aim_ns and self._may_grow(now) and (view.waiting or view.in_flight_most >= 0.9 * self._limit):
            # The gap grows no faster than the window (it is a constant and a part in proportion), so a window larger by
            # aim / gap still keeps the aim. That step is spread over the views that it takes to see what it did.
            self._limit += max(1.0, self._limit * (min(config.up_most, (aim_ns / gap_ns) ** (1 - config.memory)) - 1.0))
        self._limit = max(config.least, min(config.most, self._limit))
        self.requests = int(self._limit)

    def _may_grow(self, now: Instant) -> bool:
        """Not after a preemption, and not while the cache is full as far as is known."""
        if now < self._frozen_until:
            return False
        full = (self._signal.kv_share or 0.0) >= self._config.kv_full
        return not full or now - self._signal_at > self._config.signal_ns

    def _gap(self, view: View) -> float:
        """The pace over the last few views: one step that carried long prompts is no reason to act."""
        config = self._config
        streams = bool(view.generated) or not self._whole_tokens
        self._spent_ns = config.memory * self._spent_ns + (view.decoding_ns if streams else self._whole_ns)
        self._tokens = config.memory * self._tokens + (view.generated if streams else self._whole_tokens)
        self._whole_ns = self._whole_tokens = 0
        return self._spent_ns / self._tokens if self._tokens >= config.tokens_min else 0.0

    def _guard_memory(self, view: View) -> None:
        """Leases do not all peak together: what the sum of their peaks has too much, the sum may have more."""
        kv_tokens = self._kv_tokens
        if kv_tokens is not None:
            spare = max(0, view.expected_tokens - view.peak_tokens)
            self.tokens = max(1, int(self._config.kv_share * kv_tokens) + spare)

    def _guard_prefill(self, view: View) -> None:
        config = self._config
        if view.prefilled and view.prefilling and view.elapsed_ns:
            rate = view.prefilled / view.elapsed_ns
            self._prefill_rate += 0.3 * (rate - self._prefill_rate) if self._prefill_rate else rate
        if self._prefill_rate:
            self.prefill_tokens = max(1, int(config.prefill_share * config.ttft_ns * self._prefill_rate))
