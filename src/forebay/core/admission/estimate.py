"""The demand of a request before any tokenizer has seen it, learned from what engines report.

Prompt tokens are text bytes times a ratio learned per (key, model, byte class), shrunk towards the ratio of
(model, byte class) and that towards a prior: weight n / (n + 20) after n observations, step 0.05. Output tokens are
learned per (key, model, streamed) as a running median by the pinball step, and are never above the caller's own cap.
Every table is bounded; the oldest learner is forgotten first.
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
LEARNERS_MAX = 50_000

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class EstimateConfig:
    """Assumptions for requests that nothing was learned about yet."""

    output_tokens_default: int = 256  # reserved and expected when the caller sets no cap
    message_overhead_tokens: int = 8  # chat template tokens around the text


class _Ratio(msgspec.Struct, gc=False):
    """Tokens per byte as seen by one learner, and the blend with its parent that is used."""

    own: float
    seen: int
    blended: float


class _Output(msgspec.Struct, gc=False):
    """Running median and mean of output tokens of one learner."""

    median: float
    mean: float
    seen: int


class DemandEstimator:
    """Turns a request into a Demand, and learns from its Usage."""

    def __init__(self, config: EstimateConfig) -> None:
        self._config = config
        self._ratios: dict[tuple[str, str, ByteClass], _Ratio] = {}
        self._outputs: dict[tuple[str, str, bool], _Output] = {}

    def estimate(self, request: Request) -> Demand:
        """Expected tokens in and out, and what to reserve. O(1)."""
        return Demand(self._input_tokens(request), *self._output_tokens(request))

    def _input_tokens(self, request: Request) -> int:
        if not request.text_bytes:
            return request.counted_tokens
        ratio = self._ratios.get((request.key, request.model, request.byte_class)) or self._ratios.get(
            ("", request.model, request.byte_class)
        )
        rate = ratio.blended if ratio is not None else PRIOR_TOKENS_PER_BYTE[request.byte_class]
        overhead = self._config.message_overhead_tokens if ratio is None else 0
        return int(request.text_bytes * rate) + 1 + overhead + request.counted_tokens

    def _output_tokens(self, request: Request) -> tuple[int, int]:
        """(expected, reserved)."""
        if not request.generates:
            return 0, 0
        learned = self._outputs.get((request.key, request.model, request.stream))
        median = int(learned.median) if learned is not None and learned.seen >= SHRINKAGE else None
        mean = int(learned.mean) + 1 if learned is not None and learned.seen >= SHRINKAGE else None
        cap = request.max_output_tokens
        if cap is None:
            expected = self._config.output_tokens_default if mean is None else mean
            reserved = self._config.output_tokens_default if median is None else max(median, expected)
        else:
            expected = cap if mean is None else min(cap, mean)
            reserved = cap
        return expected * request.choices, reserved * request.choices

    def learn(self, request: Request, usage: Usage) -> None:
        """Move the learners of this request towards what the engine measured."""
        tokens = usage.input_tokens - request.counted_tokens
        if request.text_bytes and tokens > 0:
            self._learn_ratio(request, tokens / request.text_bytes)
        if request.generates and usage.output_tokens > 0:
            self._learn_output(request, usage.output_tokens / request.choices)

    def _learn_ratio(self, request: Request, observed: float) -> None:
        shared_key = ("", request.model, request.byte_class)
        shared = self._ratios.get(shared_key)
        if shared is None:
            prior = PRIOR_TOKENS_PER_BYTE[request.byte_class]
            shared = _remember(self._ratios, shared_key, _Ratio(observed, 0, prior))
        _move(shared, observed, PRIOR_TOKENS_PER_BYTE[request.byte_class])
        own_key = (request.key, request.model, request.byte_class)
        own = self._ratios.get(own_key)
        if own is None:
            own = _remember(self._ratios, own_key, _Ratio(observed, 0, shared.blended))
        _move(own, observed, shared.blended)

    def _learn_output(self, request: Request, observed: float) -> None:
        key = (request.key, request.model, request.stream)
        output = self._outputs.get(key)
        if output is None:
            output = _remember(self._outputs, key, _Output(observed, observed, 0))
        output.seen += 1
        output.mean += RATIO_STEP * (observed - output.mean)
        step = max(1.0, MEDIAN_STEP * output.mean)
        output.median = max(1.0, output.median + (step / 2 if observed > output.median else -step / 2))


def _move(ratio: _Ratio, observed: float, parent: float) -> None:
    """Take one observation into account; early ones count more, so that a learner starts fast."""
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
