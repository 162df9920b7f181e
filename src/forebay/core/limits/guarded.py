"""The guarded window: as many requests as keep every guard, and no response time among the guards.

Batching makes an answer slower all by itself, long before anything queues, so a rule on response times stops an engine
that batches at half of what it can do. What must hold instead is asked for directly:

- *slack*: a prompt is let in when the streams can spare the time that it takes (dispatch/slack.py);
- *step time*: the gap between tokens of the streams stays about the objective for it;
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
from forebay.core.limits.limit import UNBOUNDED, Answer, SlackConfig, View
from forebay.core.model import EngineSignal


@dataclass(frozen=True, slots=True)
class GuardedConfig:
    """The objectives are the operator's; the rest follows from them and rarely needs a hand."""

    kind: Literal["guarded"] = "guarded"
    tpot_ns: int = 50 * MILLISECOND  # objective: mean time between two tokens of a stream
    ttft_ns: int = SECOND  # objective: first token
    latency_ns: int = SECOND  # objective: the whole answer, of engines that generate no tokens
    kv_tokens: int | None = None  # the engine's KV cache; None: as the engine says, else not guarded
    initial: int = 16
    least: int = 2
    most: int = 1024
    interval_ns: int = 250 * MILLISECOND
    tpot_share: float = 0.9  # of the objective is aimed at by answers that are not streamed
    stream_share: float = 1.05  # by streams, which have their slack looked at one by one
    poor_share: float = 0.2  # of the streams may have less slack than a prompt takes
    prompt_share: float = 0.85  # of the time that reading a prompt takes is lost to the streams
    kv_share: float = 0.92
    prefill_share: float = 0.3  # of the first-token objective may pass before a new prompt's turn
    prefill_kept: float = 0.99  # of the best rate seen, from one view to the next
    memory_slow: float = 0.92  # of what was seen is kept from one view to the next: about three seconds
    memory_fast: float = 0.75  # about one second
    alarm: float = 1.3  # times the aim, over the last second, is too late for small steps
    down_slow: float = 0.96  # per view, at most
    down_fast: float = 0.85  # the same after an alarm
    up_most: float = 1.25
    beyond: float = 1.15  # of what streams can bear may be in flight: what lower classes bear is not asked of all
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
        self.prefill_rate = 0.0  # the best of the last while
        self.interval_ns = config.interval_ns
        self.gap_ns = 0.0
        self._kv_tokens = config.kv_tokens
        self._signal = EngineSignal()
        self._signal_at: Instant = -config.signal_ns
        self._frozen_until: Instant = 0
        self._overfull = 0  # signals in a row that spoke of a queue inside the engine
        self.slack: SlackConfig | None = SlackConfig(
            config.tpot_ns, config.poor_share, config.prompt_share, config.least
        )
        self._config = config
        self._limit = float(self.requests)
        self._prefilled = self._prefilling_ns = 0.0  # prompt tokens, and the time that it took; older ones fade
        self._slow, self._fast = _Pace(config.memory_slow), _Pace(config.memory_fast)
        self._whole_ns = self._whole_tokens = 0  # of answers that were not streamed, since the last view
        self._shots_ns = self._shots = 0  # of answers that have no tokens: embeddings, scores, images

    def answered(self, answer: Answer, now: Instant) -> None:  # noqa: ARG002
        """An answer that was not streamed shows its pace only at the end, its first token's wait included; one
        without tokens is one step."""
        if answer.first_ns:
            return
        if answer.output_tokens > 1:
            self._whole_ns += answer.held_ns
            self._whole_tokens += answer.output_tokens
        elif not answer.output_tokens:
            self._shots_ns += answer.held_ns
            self._shots += 1

    def failed(self, now: Instant) -> None:
        """A failure says nothing about the pace; the engine's health is kept elsewhere."""

    def restarted(self, now: Instant) -> None:
        """Begin as small as at first: a cold engine compiles, fills its caches, and holds none of our requests."""
        config = self._config
        self._shrink(config.initial)
        self._slow, self._fast = _Pace(config.memory_slow), _Pace(config.memory_fast)
        self._signal, self._signal_at = EngineSignal(), now - config.signal_ns
        self._overfull = 0

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
        self._overfull = self._overfull + 1 if self._waits_inside(signal) else 0
        if self._overfull >= 2:
            self._overfull = 0
            # What it runs is what it can hold; a few waiting inside it keep it from running dry.
            holds = in_flight if signal.running is None else signal.running + config.waiting_most
            self._shrink(min(self._limit * 0.9, max(1, holds)))

    def _waits_inside(self, signal: EngineSignal) -> bool:
        """Is there a queue in the engine that keeps nobody from running dry? One that runs batch after batch needs the
        next one waiting, and tells waiting and working apart: more than that one is too much."""
        if signal.service_ns is not None and signal.queue_wait_ns is not None:
            return signal.queue_wait_ns > signal.service_ns
        return (signal.waiting or 0) > self._config.waiting_most

    def _shrink(self, limit: float) -> None:
        self._limit = max(self._config.least, min(self._limit, limit))
        self.requests = int(self._limit)

    def viewed(self, view: View, now: Instant) -> None:
        """Trim the window by the pace, and set the other guards anew."""
        self._guard_memory(view)
        self._guard_prefill(view)
        config, slow, fast = self._config, self._slow, self._fast
        spent_ns, tokens, objective_ns = self._paced(view)
        slow.take(spent_ns, tokens, view)
        fast.take(spent_ns, tokens, view)
        if slow.tokens < config.tokens_min:
            return
        self.gap_ns = slow.gap_ns
        aim_ns, limit = (config.stream_share if view.generated else config.tpot_share) * objective_ns, self._limit
        if fast.gap_ns > config.alarm * aim_ns and fast.tokens >= config.tokens_min:
            self._shrink(max(fast.window(aim_ns), config.down_fast * min(limit, max(1, view.in_flight_most))))
        elif slow.gap_ns > aim_ns:
            self._shrink(max(slow.window(aim_ns), config.down_slow * limit))
        elif view.kept_out:
            # What is in flight is what the streams can bear; above it is room for those who may hold others up.
            self._shrink(max(config.beyond * view.in_flight_most, config.down_fast * limit))
        elif self._may_grow(now) and (view.in_flight_most >= 0.9 * limit or (view.waiting and not view.restrained)):
            self._limit = min(config.most, max(limit, min(slow.window(aim_ns), config.up_most * limit + 1.0)))
            self.requests = int(self._limit)

    def _paced(self, view: View) -> tuple[int, int, int]:
        """(time, tokens made in it, objective for each), by what shows the pace best: streams, answers that were not
        streamed, else answers without tokens."""
        config = self._config
        paced = view.decoding_ns, view.generated, config.tpot_ns
        if not view.generated and self._whole_tokens:
            paced = self._whole_ns, self._whole_tokens, config.tpot_ns
        elif not view.generated and self._shots and not view.decoding_ns:
            paced = self._shots_ns, self._shots, config.latency_ns
        self._whole_ns = self._whole_tokens = self._shots_ns = self._shots = 0
        return paced

    def _may_grow(self, now: Instant) -> bool:
        """Not after a preemption, and not while the cache is full as far as is known."""
        if now < self._frozen_until:
            return False
        full = (self._signal.kv_share or 0.0) >= self._config.kv_full
        return not full or now - self._signal_at > self._config.signal_ns

    def _guard_memory(self, view: View) -> None:
        """Leases do not all peak together: what the sum of their peaks has too much, the sum may have more."""
        kv_tokens = self._kv_tokens
        if kv_tokens is not None:
            spare = max(0, view.expected_tokens - view.peak_tokens)
            self.tokens = max(1, int(self._config.kv_share * kv_tokens) + spare)

    def _guard_prefill(self, view: View) -> None:
        """The best rate of the last while, over the time in which there was anything to prefill: what the engine can
        do, where tokens over all of the time would only say what was asked of it."""
        config = self._config
        self._prefilled = config.memory_slow * self._prefilled + view.prefilled
        self._prefilling_ns = config.memory_slow * self._prefilling_ns + view.prefilling_ns
        if self._prefilling_ns > 0:
            best = config.prefill_kept * self.prefill_rate
            self.prefill_rate = max(best, self._prefilled / self._prefilling_ns)
        if self.prefill_rate > 0:
            self.prefill_tokens = max(1, int(config.prefill_share * config.ttft_ns * self.prefill_rate))


class _Pace:
    """Time and tokens of the streams, and requests in flight, all over the same stretch of the past, which fades.

    Because they belong together, what they say of a larger window does not depend on how late they say it.
    """

    __slots__ = ("_elapsed_ns", "_held_ns", "_memory", "_spent_ns", "tokens")

    def __init__(self, memory: float) -> None:
        self.tokens = 0.0
        self._memory = memory
        self._spent_ns = self._held_ns = self._elapsed_ns = 0.0

    def take(self, spent_ns: int, tokens: int, view: View) -> None:
        """Take in a view. `spent_ns` is the time in which these tokens were made, summed over their streams."""
        memory = self._memory
        self._spent_ns = memory * self._spent_ns + spent_ns
        self.tokens = memory * self.tokens + tokens
        self._held_ns = memory * self._held_ns + view.in_flight * view.elapsed_ns
        self._elapsed_ns = memory * self._elapsed_ns + view.elapsed_ns

    @property
    def gap_ns(self) -> float:
        """Mean time between two tokens of a stream."""
        return self._spent_ns / self.tokens

    def window(self, aim_ns: float) -> float:
        """The requests in flight that would make this gap, were the gap in proportion to them.

        It is a constant and a part in proportion: below the aim this many keep it, and a little less than it; above
        it the way down takes several steps.
        """
        return self._held_ns / max(1.0, self._elapsed_ns) * aim_ns * self.tokens / max(1.0, self._spent_ns)
