"""A simulated GPU running a language model: continuous batching with chunked prefill, under a KV limit.

Pure: no clock, no event loop. Time is integer nanoseconds passed in, chance a generator passed in, so that the
same model runs behind a port in real time and in a simulation on a virtual clock.

The scheduler follows vLLM's: decodes first, then the prefills under way, then new admissions in arrival order, all
within a token budget per step; when the KV cache is full the sequence admitted last is preempted, and later
computed again from its prompt and the tokens it already has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from forebay.engines.simulated.profiles import StepProfile


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of the engine. Raises ValueError when they cannot hold together.

    `reserve_output` admits a sequence only when its prompt and its whole output fit beside those of all running
    ones: no preemption ever, and a smaller batch. Without it, as in vLLM, only what is computed now must fit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    reserve_output: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence decodes one token per step"
            )


@dataclass(frozen=True, slots=True)
class StepResult:
    """One forward pass. Its tokens exist at its start plus `duration_ns`, not before.

    `tokens` are (sequence id, tokens made); `finished` the ids whose last token is among them; `admitted` those
    that left the queue for this pass (after a preemption once more); `batch_seqs` and `batch_tokens` count the
    sequences and the new tokens that it computes.
    """

    duration_ns: int
    tokens: list[tuple[str, int]]
    finished: list[str]
    admitted: list[str]
    batch_seqs: int
    batch_tokens: int


class _Sequence:
    __slots__ = ("computed", "generated", "goal", "gone", "id", "output_tokens", "prompt_tokens")

    def __init__(self, id: str, prompt_tokens: int, output_tokens: int) -> None:  # noqa: A002
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.generated = 0
        self.computed = 0  # tokens in the KV cache
        self.goal = prompt_tokens  # tokens that must be there before the next one can be sampled
        self.gone = False


class EngineModel:
    """The engine. Call `step` whenever the last step's time is over; it returns None when there is nothing to do."""

    def __init__(
        self,
        profile: StepProfile,
        limits: EngineLimits,
        *,
        prefix_hit: float = 0.0,
        noise: float = 0.0,
        rng: Random | None = None,
    ) -> None:
        """`prefix_hit`: share of each prompt that is found in the prefix cache; `noise`: relative standard
        deviation of the step time, drawn from `rng`."""
        if not 0.0 <= prefix_hit < 1.0:
            raise ValueError(f"prefix_hit must be in [0, 1), got {prefix_hit}")
        if noise < 0 or (noise > 0 and rng is None):
            raise ValueError("noise must not be negative, and needs a generator")
        self.profile, self.limits = profile, limits
        self.slowdown = 1.0
        """Factor on every step time from now on: a throttled or shared GPU."""
        self.preemptions = 0
        self.kv_used = 0
        self._prefix_hit, self._noise, self._rng = prefix_hit, noise, rng
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}  # in order of admission
        self._decoding: dict[str, _Sequence] = {}
        self._prefilling: dict[str, _Sequence] = {}
        self._finishing: list[str] = []
        self._admitted: list[str] = []
        self._known: dict[str, _Sequence] = {}
        self._num_waiting = 0
        self._context = 0  # KV tokens of the decoding sequences
        self._reserved = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def kv_usage(self) -> float:
        """Used share of the KV cache, 0 to 1."""
        return self.kv_used / self.limits.kv_tokens

    def submit(self, id: str, prompt_tokens: int, output_tokens: int, now: int) -> None:  # noqa: A002, ARG002
        """Queue a sequence. Raises ValueError when it can never fit, or the id is in use."""
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a sequence has at least one prompt token and one output token")
        if prompt_tokens + output_tokens > self.limits.kv_tokens:
            raise ValueError(
                f"{prompt_tokens} + {output_tokens} tokens do not fit a KV cache of {self.limits.kv_tokens}"
            )
        if id in self._known:
            raise ValueError(f"sequence {id!r} is already in the engine")
        self._known[id] = sequence = _Sequence(id, prompt_tokens, output_tokens)
        self._waiting.append(sequence)
        self._num_waiting += 1

    def abort(self, id: str, now: int) -> bool:  # noqa: A002, ARG002
        """Forget a sequence at once, in the middle of a step too; false when it is not here."""
        sequence = self._known.pop(id, None)
        if sequence is None:
            return False
        if id in self._running:
            self._remove(sequence)
        else:
            # A deque has no cheap removal from the middle: the entry is skipped when its turn comes.
            sequence.gone = True
            self._num_waiting -= 1
            self._skip_gone()
        return True

    def step(self, now: int) -> StepResult | None:  # noqa: ARG002
        """Compute the next batch; None when no sequence can be computed.

        Sequences that finish keep their slot and their KV until the next call, which is when the step is over.
        """
        for id in self._finishing:  # noqa: A001
            if id in self._running:
                self._remove(self._known.pop(id))
        self._finishing = []
        self._admitted = []
        preempted = self._make_room_for_decodes()
        decodes = list(self._decoding.values())
        context = self._context
        self._context += len(decodes)
        self.kv_used += len(decodes)
        chunks = self._prefill(self.limits.max_num_batched_tokens - len(decodes), admit=not preempted)
        if not decodes and not chunks:
            return None
        tokens, finished = self._advance(decodes, chunks)
        self._finishing = finished
        prefill_tokens = sum(chunk for _, chunk, _ in chunks)
        pairs = sum(chunk * (before + chunk / 2) for _, chunk, before in chunks)
        batch_tokens = len(decodes) + prefill_tokens
        batch_seqs = len(decodes) + len(chunks)
        step_ms = self.profile.step_ms(batch_tokens, batch_seqs, context, pairs) * self.slowdown
        if self._noise and self._rng is not None:
            step_ms *= max(0.1, self._rng.gauss(1.0, self._noise))
        return StepResult(max(1, round(step_ms * 1e6)), tokens, finished, self._admitted, batch_seqs, batch_tokens)

    def _make_room_for_decodes(self) -> bool:
        """Preempt from the end until every decoding sequence can grow by one token."""
        preempted = False
        while self._decoding and self.kv_used + len(self._decoding) > self.limits.kv_tokens:
            self._preempt(next(reversed(self._running.values())))
            preempted = True
        return preempted

    def _prefill(self, budget: int, *, admit: bool) -> list[tuple[_Sequence, int, int]]:
        """Share `budget` tokens out: to prefills under way, then to new admissions. (sequence, chunk, before)."""
        chunks: list[tuple[_Sequence, int, int]] = []
        for sequence in list(self._prefilling.values()):
            if budget <= 0:
                return chunks
            if sequence.id not in self._prefilling:  # preempted for an earlier one just now
                continue
            while self.kv_used >= self.limits.kv_tokens:
                last = next(reversed(self._running.values()))
                if last is sequence or last.id in self._decoding:
                    break
                self._preempt(last)
                admit = False
            chunk = min(budget, sequence.goal - sequence.computed, self.limits.kv_tokens - self.kv_used)
            if chunk > 0:
                chunks.append((sequence, chunk, sequence.computed))
                self.kv_used += chunk
                budget -= chunk
        while admit and budget > 0 and self._waiting and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            cached = min(int(sequence.prompt_tokens * self._prefix_hit), sequence.goal - 1)
            chunk = min(budget, sequence.goal - cached)
            if not self._fits(sequence, cached + chunk):
                break
            self._waiting.popleft()
            self._num_waiting -= 1
            self._skip_gone()
            self._admitted.append(sequence.id)
            self._running[sequence.id] = self._prefilling[sequence.id] = sequence
            self._reserved += sequence.prompt_tokens + sequence.output_tokens
            sequence.computed = cached
            chunks.append((sequence, chunk, cached))
            self.kv_used += cached + chunk
            budget -= chunk
        return chunks

    def _fits(self, sequence: _Sequence, now_tokens: int) -> bool:
        if self.limits.reserve_output:
            whole = sequence.prompt_tokens + sequence.output_tokens
            return self._reserved + whole <= self.limits.kv_tokens
        return self.kv_used + now_tokens <= self.limits.kv_tokens

    def _advance(
        self, decodes: list[_Sequence], chunks: list[tuple[_Sequence, int, int]]
    ) -> tuple[list[tuple[str, int]], list[str]]:
        """Apply the step to its sequences; returns the tokens made and the ids that finish with them."""
        tokens: list[tuple[str, int]] = []
        finished: list[str] = []
        for sequence in decodes:
            sequence.computed += 1
            sequence.goal += 1
            sequence.generated += 1
            tokens.append((sequence.id, 1))
            if sequence.generated == sequence.output_tokens:
                finished.append(sequence.id)
        for sequence, chunk, _ in chunks:
            sequence.computed += chunk
            if sequence.computed < sequence.goal:
                continue
            del self._prefilling[sequence.id]
            self._decoding[sequence.id] = sequence
            self._context += sequence.computed
            sequence.goal += 1
            sequence.generated += 1
            tokens.append((sequence.id, 1))
            if sequence.generated == sequence.output_tokens:
                finished.append(sequence.id)
        return tokens, finished

    def _preempt(self, sequence: _Sequence) -> None:
        self._remove(sequence)
        self.preemptions += 1
        sequence.computed = 0
        sequence.goal = sequence.prompt_tokens + sequence.generated
        self._waiting.appendleft(sequence)
        self._num_waiting += 1

    def _remove(self, sequence: _Sequence) -> None:
        del self._running[sequence.id]
        self.kv_used -= sequence.computed
        self._reserved -= sequence.prompt_tokens + sequence.output_tokens
        if self._decoding.pop(sequence.id, None) is not None:
            self._context -= sequence.computed
        else:
            self._prefilling.pop(sequence.id, None)

    def _skip_gone(self) -> None:
        while self._waiting and self._waiting[0].gone:
            self._waiting.popleft()
