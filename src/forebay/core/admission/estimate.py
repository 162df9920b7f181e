"""The demand of a request before any tokenizer has seen it, learned from what engines report.

Prompt tokens are text bytes times a ratio, plus the overhead of the chat template. Both are learned per (key, model,
byte class), shrunk towards those of (model, byte class) and the ratio of that towards a prior: weight n / (n + 20)
after n observations, step 0.05. Long texts teach the ratio, short ones the overhead: of a greeting nearly all tokens
are template. Output tokens are learned per (key, model, streamed) as a running median by the pinball step, and are
never above the caller's own cap. Every table is bounded; the oldest learner is forgotten first.

What an engine reports is its word, so it is clipped to what a tokenizer can do before anything is learned from it:
an estimate beyond every bound would refuse all requests, and nothing would ever be learned again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from forebay.core.model import ByteClass, Demand, Request, Usage

PRIOR_TOKENS_PER_BYTE = {ByteClass.ASCII: 1 / 4.2, ByteClass.UTF8: 1 / 3.0, ByteClass.ESCAPED: 1 / 5.0}
"""Priors err towards too many tokens for text that is not English: an under-estimate costs the engine more."""

RATIO_STEP = 0.05
SHRINKAGE = 20  # observations after which a learner counts as much as its parent
MEDIAN_STEP = 0.02
SHORT_TEXT_BYTES = 256  # below this the template outweighs the text
RATIO_LEAST, RATIO_MOST = 1 / 64, 1.0  # no tokenizer makes more tokens than bytes
OVERHEAD_MOST = 512  # tokens
OUTPUT_MOST = 1_000_000  # tokens
LEARNERS_MAX = 50_000
SETTLED = 200  # observations after which a learner samples
SAMPLED_EVERY = 4

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class EstimateConfig:
    """Assumptions for requests that nothing was learned about yet."""

    output_tokens_default: int = 256  # reserved and expected when the caller sets no cap
    message_overhead_tokens: int = 8  # chat template tokens around the text


class _Ratio(msgspec.Struct, gc=False):
    """Tokens per byte as seen by one learner, the blend with its parent that is used, and the tokens on top."""

    own: float
    seen: int
    blended: float
    overhead: float


class _Output(msgspec.Struct, gc=False):
    """Running median and mean of output tokens of one learner."""

    median: float
    mean: float
    seen: int
    skipped: int = 0


class DemandEstimator:
    """Turns a request into a Demand, and learns from its Usage."""

    def __init__(self, config: EstimateConfig) -> None:
        self._config = config
        self._ratios: dict[tuple[str, str, ByteClass], _Ratio] = {}
        self._outputs: dict[tuple[str, str, bool], _Output] = {}

    def estimate(self, request: Request) -> Demand:
        """Expected tokens in and out, and what to reserve. O(1)."""
        cap, tokens = request.max_output_tokens, self._input_tokens(request)
        if not request.generates:
            return Demand(tokens, 0, 0, cap is None)
        learned = self._outputs.get((request.key, request.model, request.stream))
        if learned is None or learned.seen < SHRINKAGE:
            expected = reserved = self._config.output_tokens_default if cap is None else cap
        elif cap is None:
            expected = int(learned.mean) + 1
            reserved = max(int(learned.median), expected)
        else:
            mean = int(learned.mean) + 1
            expected, reserved = (mean if mean < cap else cap), cap
        choices = request.choices
        return Demand(tokens, expected * choices, reserved * choices, cap is None)

    def _input_tokens(self, request: Request) -> int:
        text_bytes, counted = request.text_bytes, request.counted_tokens
        if not text_bytes:
            return counted
        ratio = self._ratios.get((request.key, request.model, request.byte_class))
        if ratio is None:
            ratio = self._ratios.get(("", request.model, request.byte_class))
        if ratio is not None:
            return int(text_bytes * ratio.blended + ratio.overhead) + 1 + counted
        tokens = int(text_bytes * PRIOR_TOKENS_PER_BYTE[request.byte_class]) + 1
        return tokens + self._config.message_overhead_tokens + counted

    def learn(self, request: Request, usage: Usage) -> None:
        """Move the learners of this request towards what the engine measured.

        Those that have learned enough look at every fourth answer only: slower to turn, and a quarter of the cost.
        """
        output = self._outputs.get((request.key, request.model, request.stream))
        if output is not None and output.seen >= SETTLED:
            output.skipped += 1
            if output.skipped % SAMPLED_EVERY:
                return
        tokens = usage.input_tokens - request.counted_tokens
        if request.text_bytes and tokens > 0:
            self._learn_input(request, tokens)
        if request.generates and usage.output_tokens > 0:
            self._learn_output(request, min(OUTPUT_MOST, usage.output_tokens / request.choices))

    def _learn_input(self, request: Request, tokens: int) -> None:
        prior = PRIOR_TOKENS_PER_BYTE[request.byte_class]
        shared_key = ("", request.model, request.byte_class)
        shared = self._ratios.get(shared_key)
        if shared is None:
            overhead = float(self._config.message_overhead_tokens)
            shared = _remember(self._ratios, shared_key, _Ratio(prior, 0, prior, overhead))
        own_key = (request.key, request.model, request.byte_class)
        own = self._ratios.get(own_key)
        if own is None:
            own = _remember(self._ratios, own_key, _Ratio(shared.blended, 0, shared.blended, shared.overhead))
        _move(shared, request.text_bytes, tokens, prior)
        _move(own, request.text_bytes, tokens, shared.blended)

    def _learn_output(self, request: Request, observed: float) -> None:
        key = (request.key, request.model, request.stream)
        output = self._outputs.get(key)
        if output is None:
            output = _remember(self._outputs, key, _Output(observed, observed, 0))
        output.seen += 1
        output.mean += RATIO_STEP * (observed - output.mean)
        step = max(1.0, MEDIAN_STEP * output.mean)
        output.median = max(1.0, output.median + (step / 2 if observed > output.median else -step / 2))


def _move(ratio: _Ratio, text_bytes: int, tokens: int, parent: float) -> None:
    """Take one observation into account; early ones count more, so that a learner starts fast."""
    if text_bytes < SHORT_TEXT_BYTES:
        overhead = min(OVERHEAD_MOST, max(0.0, tokens - text_bytes * ratio.blended))
        ratio.overhead += RATIO_STEP * (overhead - ratio.overhead)
        return
    observed = min(RATIO_MOST, max(RATIO_LEAST, (tokens - ratio.overhead) / text_bytes))
    ratio.seen += 1
    step = max(RATIO_STEP, 1 / ratio.seen)
    ratio.own += step * (observed - ratio.own)
    weight = ratio.seen / (ratio.seen + SHRINKAGE)
    ratio.blended = weight * ratio.own + (1 - weight) * parent


def _remember(table: dict[K, V], key: K, value: V) -> V:
    if len(table) >= LEARNERS_MAX:
        del table[next(iter(table))]
    table[key] = value
    return value
