"""A simulated GPU running a language model: continuous batching with chunked prefill, under a KV limit.

Pure: no clock, no event loop. Time is integer nanoseconds passed in, chance a generator passed in, so that the
same model runs behind a port in real time and in a simulation on a virtual clock.

The scheduler follows vLLM's: decodes first, then the prefills under way, then new admissions in arrival order, all
within a token budget per step; when the KV cache is full the sequence admitted last is preempted, and later
computed again from its prompt and the tokens it already has.

Two ways to run it, with the same instants to the nanosecond: `step` makes one forward pass and lists its tokens;
`leap` makes all passes until the batch changes at once, at a cost that depends on neither their number nor the size of
the batch. Step times are sums in fractions of a nanosecond, so that no rounding tells the two apart.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from forebay.engines.simulated.prefix import PrefixCache
from forebay.engines.simulated.stretch import FRACTION_BITS, Stretch

if TYPE_CHECKING:
    from random import Random

    from forebay.engines.simulated.profile import StepProfile


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of the engine. Raises ValueError when they cannot hold together.

    `reserve_output` admits a sequence only when its prompt and its whole output fit beside those of all running
    ones: no preemption ever, and a smaller batch. Without it, as in vLLM, only what is computed now must fit.
    `max_mixed_tokens` bounds the tokens of a step in which sequences decode too, for an engine that guards its answers
    from long prompts so (the embedded one does); prompts get at least a quarter of it. None: no bound of its own.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    reserve_output: bool = False
    max_mixed_tokens: int | None = None

    def prefill_budget(self, decodes: int) -> int:
        """Prompt tokens that a step may compute beside so many decoding sequences."""
        if decodes and self.max_mixed_tokens is not None:
            return max(self.max_mixed_tokens - decodes, self.max_mixed_tokens // 4)
        return self.max_num_batched_tokens - decodes

    def __post_init__(self) -> None:
        if self.max_mixed_tokens is not None and self.max_mixed_tokens < 4:
            raise ValueError(f"max_mixed_tokens must be at least 4, got {self.max_mixed_tokens}")
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
    """A sequence. While it decodes, what it has computed and generated follows from the engine's count of steps."""

    __slots__ = (
        "cached", "computed", "generated", "gone", "id", "joined", "output_tokens", "prompt_tokens", "session", "turn",
    )  # fmt: skip

    def __init__(self, id: str, prompt_tokens: int, output_tokens: int, cached: int, session: str) -> None:  # noqa: A002
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cached = cached
        self.session = session
        self.generated = 0
        self.computed = 0  # tokens in the KV cache
        self.joined = -1  # the step whose token was its first since it decodes; -1 when it does not decode
        self.turn = -1  # its entry among those that end; of older entries with another number nothing comes
        self.gone = False

    @property
    def goal(self) -> int:
        """Tokens that must be in the cache before the next one can be sampled, while it is prefilled."""
        return self.prompt_tokens + self.generated


class EngineModel:
    """The engine. Call `step` or `leap` whenever the last one's time is over; None means there is nothing to do.

    For `leap`, keep one timer per engine at `stretch.end`. `submit`, `abort` and `cut` may bring the end of the
    stretch under way forward: compare `stretch.end` after each call, and move the timer when it has changed.
    """

    def __init__(
        self,
        profile: StepProfile,
        limits: EngineLimits,
        *,
        prefix_hit: float = 0.0,
        prefix_cache: bool = False,
        noise: float = 0.0,
        rng: Random | None = None,
    ) -> None:
        """`prefix_hit`: share of each prompt that is found in the prefix cache; `prefix_cache`: keep what sessions
        leave behind, see `submit`; `noise`: relative standard deviation of the step time, drawn from `rng`."""
        if not 0.0 <= prefix_hit < 1.0:
            raise ValueError(f"prefix_hit must be in [0, 1), got {prefix_hit}")
        if noise < 0 or (noise > 0 and rng is None):
            raise ValueError("noise must not be negative, and needs a generator")
        self.profile, self.limits = profile, limits
        self.slowdown = 1.0
        """Factor on the time of every step that begins from now on: a throttled or shared GPU. With `leap`, call
        `cut` before setting it."""
        self.preemptions = 0
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache so far."""
        self.kv_used = 0
        """KV tokens of the running sequences; in a stretch of several steps, as of its last submission, abort or
        cut: see `kv_used_at`."""
        self.stretch: Stretch | None = None
        """What `leap` returned last."""
        self._prefix_hit, self._noise, self._rng = prefix_hit, noise, rng
        self._cache = PrefixCache() if prefix_cache else None
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}  # in order of admission
        self._decoding: dict[str, _Sequence] = {}
        self._prefilling: dict[str, _Sequence] = {}
        self._finishing: list[_Sequence] = []
        self._ends: list[tuple[int, int, _Sequence]] = []  # heap: (step of its last token, turn, sequence)
        self._known: dict[str, _Sequence] = {}
        self._num_waiting = 0
        self._context = 0  # KV tokens of the decoding sequences
        self._reserved = 0
        self._steps = 0  # begun so far
        self._ahead = 0  # of these, steps of the stretch under way that count already
        self._turns = 0
        self._fraction = 0  # what rounding down has left of the last step's end

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

    @property
    def steps(self) -> int:
        """Forward passes that have begun; in a stretch, as of the same moment as `kv_used`."""
        return self._steps

    def kv_used_at(self, now: int) -> int:
        """KV tokens in use at `now`, which lies in the stretch under way. Changes nothing."""
        stretch = self.stretch
        if stretch is None or stretch.steps == self._ahead:
            return self.kv_used
        return self.kv_used + len(self._decoding) * (stretch.begun(now) - self._ahead)

    def submit(
        self,
        id: str,  # noqa: A002
        prompt_tokens: int,
        output_tokens: int,
        now: int,
        *,
        cached_tokens: int = 0,
        session: str = "",
    ) -> None:
        """Queue a sequence. Raises ValueError when it can never fit, or the id is in use.

        `cached_tokens` of its prompt are in the prefix cache: they need no computing, take part in attention and hold
        KV. In a model with `prefix_cache`, where a `session` is named, they are only the most that can be reused
        (0: the whole prompt), and what is there depends on what the session's last sequence left and what room the
        cache has had since.
        """
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a sequence has at least one prompt token and one output token")
        if prompt_tokens + output_tokens > self.limits.kv_tokens:
            raise ValueError(
                f"{prompt_tokens} + {output_tokens} tokens do not fit a KV cache of {self.limits.kv_tokens}"
            )
        if id in self._known:
            raise ValueError(f"sequence {id!r} is already in the engine")
        cached = max(cached_tokens, int(prompt_tokens * self._prefix_hit))
        self._known[id] = sequence = _Sequence(id, prompt_tokens, output_tokens, cached, session)
        # Behind others it waits whatever it needs: they could not be admitted, and the stretch changes nothing there.
        if self.stretch is not None and not self._waiting:
            self._settle(now)
            if len(self._running) < self.limits.max_num_seqs and self._fits(sequence, self._first_chunk(sequence)):
                self.cut(now)
        self._waiting.append(sequence)
        self._num_waiting += 1

    def abort(self, id: str, now: int) -> bool:  # noqa: A002
        """Forget a sequence at once, in the middle of a step too; false when it is not here.

        The stretch under way ends with the step under way, and no longer names the sequence.
        """
        sequence = self._known.pop(id, None)
        if sequence is None:
            return False
        if id in self._running:
            self.cut(now)
            if self.stretch is not None:
                self.stretch.forget(id)
            self._finishing = [one for one in self._finishing if one is not sequence]
            self._remove(sequence)
            self._leave(sequence)
        else:
            if self._waiting[0] is sequence:
                self.cut(now)  # the next in the queue may be one that fits
            # A deque has no cheap removal from the middle: the entry is skipped when its turn comes.
            sequence.gone = True
            self._num_waiting -= 1
            self._skip_gone()
        return True

    def cut(self, now: int) -> None:
        """Let the stretch under way end with the step that is under way at `now`.

        A step that begins at this very instant counts as under way: what happens at the end of a step, like an
        arrival, finds the next one begun.
        """
        stretch = self.stretch
        if stretch is None or self._ahead == stretch.steps:
            return
        self._settle(now)
        if self._ahead < stretch.steps:
            stretch.shorten(self._ahead)
            for sequence in self._finishing:
                self._await_end(sequence, self._steps + sequence.output_tokens - self._generated(sequence))
            self._finishing = []

    def step(self, now: int) -> StepResult | None:
        """Compute the next batch; None when no sequence can be computed.

        Sequences that finish keep their slot and their KV until the next call, which is when the step is over.
        """
        stretch = self._begin(now, most=1)
        if stretch is None:
            return None
        tokens = [(id, 1) for id in self._decoding]  # noqa: A001
        return StepResult(
            stretch.end - now, tokens, stretch.finished, stretch.admitted, stretch.batch_seqs, stretch.batch_tokens
        )

    def leap(self, now: int) -> Stretch | None:
        """Compute all steps until the batch changes; None when no sequence can be computed.

        The batch changes when a sequence finishes, is admitted, ends its prefill or is preempted, which only the last
        step of a stretch does. `now` is the last stretch's `end`, or later when the engine was idle or held up.
        """
        return self._begin(now, most=0)

    # ---- a stretch ----------------------------------------------------------------------------------------------

    def _begin(self, now: int, *, most: int) -> Stretch | None:
        """Begin the next stretch, of `most` steps at most; 0 sets no bound."""
        self._conclude()
        preempted = self._make_room_for_decodes()
        decodes, context = len(self._decoding), self._context
        self._context += decodes
        self.kv_used += decodes
        admitted: list[str] = []
        budget = self.limits.prefill_budget(decodes)
        chunks: list[tuple[_Sequence, int, int]] = []
        if self._prefilling or self._waiting:
            chunks = self._prefill(budget, admitted, admit=not preempted)
        if not decodes and not chunks:
            self.stretch = None
            return None
        self._steps += 1
        self._ahead = 1
        batch_tokens = decodes
        pairs = 0.0
        for _, chunk, before in chunks:
            batch_tokens += chunk
            pairs += chunk * (before + chunk / 2)
        self.stretch = stretch = self._timed(now, batch_tokens, decodes + len(chunks), context, pairs)
        stretch.admitted, stretch.decodes = admitted, decodes
        if chunks:
            stretch.first, stretch.joined = self._join(chunks)
        if not chunks and not preempted and not self._prefilling and not self._noise and most != 1:
            room = (self.limits.kv_tokens - self.kv_used) // decodes
            stretch.lengthen(1 + min(self._next_end() - self._steps, room))
        self._collect_finishing(stretch)
        self._shrink_cache()
        return stretch

    def _timed(self, now: int, batch_tokens: int, batch_seqs: int, context: int, pairs: float) -> Stretch:
        """A stretch of one step, with what it takes to make it longer."""
        profile, slowdown = self.profile, self.slowdown
        unit = 1e6 * (1 << FRACTION_BITS) * slowdown
        took = round(profile.step_ms(batch_tokens, batch_seqs, 0, pairs) * unit)
        per_context_token = round(profile.kv / 1e3 * unit)
        took = max(1 << FRACTION_BITS, took + per_context_token * context)
        if self._noise and self._rng is not None:
            took = round(took * max(0.1, self._rng.gauss(1.0, self._noise)))
        return Stretch(now, self._fraction, took, per_context_token * batch_seqs, batch_seqs, batch_tokens)

    def _conclude(self) -> None:
        """The stretch under way is over: count its steps, and let go of the sequences that finished in it."""
        stretch = self.stretch
        if stretch is None:
            return
        if self._ahead < stretch.steps:
            self._count(stretch.steps - self._ahead)
        self._fraction = stretch.fraction_left
        for sequence in self._finishing:
            del self._known[sequence.id]
            self._remove(sequence)
            self._leave(sequence)
        self._finishing = []

    def _settle(self, now: int) -> None:
        """Count the steps of the stretch under way that have begun by `now`."""
        stretch = self.stretch
        if stretch is not None and self._ahead < stretch.steps:
            self._count(stretch.begun(now) - self._ahead)

    def _count(self, steps: int) -> None:
        """So many more decode steps of the stretch under way."""
        grown = steps * len(self._decoding)
        self._steps += steps
        self._ahead += steps
        self._context += grown
        self.kv_used += grown
        self._shrink_cache()

    def _shrink_cache(self) -> None:
        """What the sequences take is taken from the prefix cache."""
        if self._cache is not None:
            self._cache.shrink(self.limits.kv_tokens - self.kv_used)

    def _next_end(self) -> int:
        """The step in which the first of the decoding sequences makes its last token."""
        ends = self._ends
        while ends[0][2].turn != ends[0][1]:
            heappop(ends)
        return ends[0][0]

    def _collect_finishing(self, stretch: Stretch) -> None:
        """Find the sequences that finish in the last step of the stretch."""
        last = self._steps + stretch.steps - 1
        ends = self._ends
        while ends and (ends[0][0] == last or ends[0][2].turn != ends[0][1]):
            _, turn, sequence = heappop(ends)
            if sequence.turn == turn:
                self._finishing.append(sequence)
                stretch.finished.append(sequence.id)

    # ---- scheduling ---------------------------------------------------------------------------------------------

    def _make_room_for_decodes(self) -> bool:
        """Preempt from the end until every decoding sequence can grow by one token."""
        preempted = False
        while self._decoding and self.kv_used + len(self._decoding) > self.limits.kv_tokens:
            self._preempt(next(reversed(self._running.values())))
            preempted = True
        return preempted

    def _prefill(self, budget: int, admitted: list[str], *, admit: bool) -> list[tuple[_Sequence, int, int]]:
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
            cached = self._cached(sequence)
            chunk = min(budget, sequence.goal - cached)
            if not self._fits(sequence, cached + chunk):
                break
            self._admit(sequence, cached)
            admitted.append(sequence.id)
            chunks.append((sequence, chunk, cached))
            self.kv_used += cached + chunk
            budget -= chunk
        return chunks

    def _admit(self, sequence: _Sequence, cached: int) -> None:
        """Move the head of the queue into the batch."""
        self._waiting.popleft()
        self._num_waiting -= 1
        self._skip_gone()
        self._running[sequence.id] = self._prefilling[sequence.id] = sequence
        self._reserved += sequence.prompt_tokens + sequence.output_tokens
        sequence.computed = cached
        self.cached_tokens += cached
        if self._cache is not None and sequence.session:
            self._cache.take(sequence.session)

    def _cached(self, sequence: _Sequence) -> int:
        """Tokens of its prompt that need no computing; the last one always does, as the next is sampled from it."""
        cached = sequence.cached
        if self._cache is not None and sequence.session:
            cached = min(cached or sequence.prompt_tokens, self._cache.held(sequence.session))
        return min(cached, sequence.goal - 1)

    def _first_chunk(self, sequence: _Sequence) -> int:
        """Tokens that the first step would put into the cache, for a sequence that were admitted now."""
        cached = self._cached(sequence)
        budget = self.limits.prefill_budget(len(self._decoding))
        return cached + min(budget, sequence.goal - cached)

    def _fits(self, sequence: _Sequence, now_tokens: int) -> bool:
        if self.limits.reserve_output:
            whole = sequence.prompt_tokens + sequence.output_tokens
            return self._reserved + whole <= self.limits.kv_tokens
        return self.kv_used + now_tokens <= self.limits.kv_tokens

    def _join(self, chunks: list[tuple[_Sequence, int, int]]) -> tuple[list[str], int]:
        """Apply the chunks; those whose prefill ends decode from now on. Returns whose first token it is, and how many
        prefills ended (one after a preemption makes a token too, but not the first)."""
        first: list[str] = []
        joined = 0
        for sequence, chunk, _ in chunks:
            sequence.computed += chunk
            if sequence.computed < sequence.goal:
                continue
            del self._prefilling[sequence.id]
            self._decoding[sequence.id] = sequence
            self._context += sequence.computed
            if sequence.generated == 0:
                first.append(sequence.id)
            joined += 1
            sequence.generated += 1
            sequence.joined = self._steps
            self._await_end(sequence, self._steps + sequence.output_tokens - sequence.generated)
        return first, joined

    def _await_end(self, sequence: _Sequence, step: int) -> None:
        if sequence.turn < 0:
            self._turns += 1
            sequence.turn = self._turns
        heappush(self._ends, (step, sequence.turn, sequence))

    def _generated(self, sequence: _Sequence) -> int:
        """Tokens made so far by a decoding sequence."""
        return sequence.generated + self._steps - sequence.joined

    def _preempt(self, sequence: _Sequence) -> None:
        self._remove(sequence)
        self.preemptions += 1
        sequence.computed = 0
        self._waiting.appendleft(sequence)
        self._num_waiting += 1

    def _remove(self, sequence: _Sequence) -> None:
        """Take it out of the batch; afterwards it knows itself what it has computed and generated."""
        del self._running[sequence.id]
        if self._decoding.pop(sequence.id, None) is not None:
            made = self._steps - sequence.joined
            sequence.computed += made
            sequence.generated += made
            sequence.joined = sequence.turn = -1
            self._context -= sequence.computed
        else:
            self._prefilling.pop(sequence.id, None)
        self.kv_used -= sequence.computed
        self._reserved -= sequence.prompt_tokens + sequence.output_tokens

    def _leave(self, sequence: _Sequence) -> None:
        """It is gone for good; what it has computed stays in the prefix cache as long as there is room."""
        if self._cache is not None and sequence.session:
            self._cache.keep(sequence.session, sequence.computed)
            self._shrink_cache()

    def _skip_gone(self) -> None:
        while self._waiting and self._waiting[0].gone:
            self._waiting.popleft()
