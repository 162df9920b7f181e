"""The demand of a request before any tokenizer has seen it, learned from what engines report.

Prompt tokens are the text's bytes at their price (byte_prices) times a ratio, plus the overhead of the chat template.
The ratio is what a model's tokenizer makes of a kind of text: learned per (key, model, kind), shrunk towards
(model, kind) and that towards 1: weight n / (n + 3) after n observations, step 1 / n down to 0.05. Long texts teach the
ratio, short ones the overhead: of a greeting nearly all tokens are template. Images, sound and files have list prices,
corrected per (key, model). Output tokens are learned per (key, model, streamed) as a mean and, by the pinball step, as
the amount that nine in ten answers stay below; they are never above the caller's own cap. The table is bounded; the
oldest learner is forgotten first.

What an engine reports is its word, so it is clipped to what a tokenizer can do before anything is learned from it:
an estimate beyond every bound would refuse all requests, and nothing would ever be learned again.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from forebay.core.admission.byte_prices import LEAST
from forebay.core.model import Demand, Request, Usage

PRIOR_TOKENS_PER_BYTE = (1 / 4.2, 1 / 3.5, 1 / 4, 1 / 4, 1 / 3, 1 / 5, 1 / 10, 1 / 8, 1 / 6)
"""By ByteClass, for text whose bytes nobody looked at. They err towards too many tokens: too few cost engines more."""

DENSITIES = (0.20, 0.26, 0.34)  # tokens per byte that part prose, code, figures and noise: tokenizers differ in them
DENSITY_STEPS = len(DENSITIES) + 1
KINDS = len(LEAST) * DENSITY_STEPS
STEP = 0.05
SHRINKAGE = 3  # observations after which a learner counts as much as its parent
OUTPUT_SHRINKAGE = 20
HIGH_SHARE = 0.9  # of answers that stay below what is reserved for one without a cap
SHORT_TEXT_BYTES = 256  # below this the template outweighs the text
RATIO_LEAST, RATIO_MOST = 1 / 4, 4.0  # a tokenizer against the price
MEDIA_LEAST, MEDIA_MOST = 1 / 32, 8.0  # against the list price
OVERHEAD_MOST = 512  # tokens
OUTPUT_MOST = 1_000_000  # tokens
LEARNERS_MAX = 50_000
SETTLED = 200  # observations after which a learner samples
SAMPLED_EVERY = 8


@dataclass(frozen=True, slots=True)
class EstimateConfig:
    """Assumptions for requests that nothing was learned about yet."""

    output_tokens_default: int = 256  # reserved and expected when the caller sets no cap
    message_overhead_tokens: int = 8  # chat template tokens around the text
    cached_weight: float = 1.0  # of a prompt token from the engine's prefix cache, in what a key is charged


class _Ratio(msgspec.Struct, gc=False):
    """A tokenizer against the price, as one learner saw it, and its blend with the parent, which is used."""

    own: float
    blended: float
    seen: int = 0


AT_PRICE = _Ratio(1.0, 1.0)


class _Output(msgspec.Struct, gc=False):
    """Output tokens of one learner: running mean, and what nine in ten stay below."""

    mean: float
    high: float
    seen: int = 0


class _Learner(msgspec.Struct, gc=False):
    """What one key gets from one model. The model's own learner, of all keys, has the key ''."""

    overhead: float
    ratios: list[_Ratio | None]  # by kind
    outputs: list[_Output | None]  # of whole answers, and of streams
    media: float = 1.0
    cached: float = 0.0  # share of the input that engines had in their prefix caches
    seen: int = 0


class DemandEstimator:
    """Turns a request into a Demand, and learns from its Usage."""

    def __init__(self, config: EstimateConfig) -> None:
        self._config = config
        self._learners: dict[tuple[str, str], _Learner] = {}

    def reconfigure(self, config: EstimateConfig) -> None:
        """Take other assumptions. What was learned stays; whose overhead was only assumed assumes the new one."""
        assumed, overhead = float(self._config.message_overhead_tokens), float(config.message_overhead_tokens)
        self._config = config
        for learner in self._learners.values():
            if learner.overhead == assumed:
                learner.overhead = overhead

    def recount(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        """Prompts are counted by other tokenizers from now on: model (or "*": all others) -> which.

        Ratios to what the old one counted say nothing of the new one, and are forgotten; all else stays.
        """
        for (_, model), learner in self._learners.items():
            if before.get(model, before.get("*")) != after.get(model, after.get("*")):
                learner.ratios = [None] * KINDS

    def estimate(self, request: Request) -> Demand:
        """Expected tokens in and out, and what to reserve. O(1)."""
        learners, model, cap = self._learners, request.model, request.max_output_tokens
        learner = learners.get((request.key, model)) or learners.get(("", model))
        tokens = request.counted_tokens
        if request.text_bytes or request.media_tokens:
            tokens += self._input_tokens(request, learner)
        cached = int(tokens * learner.cached) if learner is not None and learner.cached else 0
        if not request.generates:
            return Demand(tokens, 0, 0, cap is None, cached)
        learned = None if learner is None else learner.outputs[request.stream]
        if learned is None or learned.seen < OUTPUT_SHRINKAGE:
            expected = reserved = self._config.output_tokens_default if cap is None else cap
        elif cap is None:
            expected = int(learned.mean) + 1
            reserved = max(int(learned.high), expected)
        else:
            mean = int(learned.mean) + 1
            expected, reserved = (mean if mean < cap else cap), cap
        choices = request.choices
        return Demand(tokens, expected * choices, reserved * choices, cap is None, cached)

    def _input_tokens(self, request: Request, learner: _Learner | None) -> int:
        """Tokens of text and media."""
        byte_class, text_bytes = request.byte_class, request.text_bytes
        per_byte = request.tokens_per_byte or PRIOR_TOKENS_PER_BYTE[byte_class]
        tokens, media = text_bytes * per_byte, request.media_tokens
        overhead: float = self._config.message_overhead_tokens
        if learner is not None:
            kind = byte_class * DENSITY_STEPS + bisect(DENSITIES, per_byte)
            ratio = learner.ratios[kind] or self._shared(request.model).ratios[kind] or AT_PRICE
            tokens, overhead = tokens * ratio.blended, learner.overhead
            if media:
                media = int(media * learner.media)
        least = text_bytes * LEAST[byte_class]
        return int((tokens if tokens > least else least) + overhead) + 1 + media

    def learn(self, request: Request, usage: Usage) -> Usage:
        """Move the learners of this request towards what the engine measured. Returns it with what is not charged.

        Those that have learned enough look at every eighth answer only: slower to turn, and an eighth of the cost.
        """
        learner = self._learners.get((request.key, request.model)) or self._newcomer(request.key, request.model)
        learner.seen += 1
        if learner.seen <= SETTLED or not learner.seen % SAMPLED_EVERY:
            self._learn(request, usage, learner)
        return self.weighed(usage) if usage.cached_tokens else usage

    def _learn(self, request: Request, usage: Usage, learner: _Learner) -> None:
        shared = self._shared(request.model)
        if usage.cached_tokens or learner.cached:
            _learn_cached(learner, usage)
        tokens = usage.input_tokens - request.counted_tokens
        if tokens > 0:
            if request.media_tokens:
                self._learn_media(request, tokens, learner, shared)
            elif request.text_bytes:
                _learn_text(request, tokens, learner, shared)
        if request.generates and usage.output_tokens > 0:
            observed = min(OUTPUT_MOST, usage.output_tokens / request.choices)
            _learn_output(shared, request.stream, observed)
            if learner is not shared:
                _learn_output(learner, request.stream, observed)

    def weighed(self, usage: Usage) -> Usage:
        """The usage with what its key is not charged of the tokens that the engine had cached."""
        forgiven = int(usage.cached_tokens * (1 - self._config.cached_weight))
        return msgspec.structs.replace(usage, forgiven_tokens=forgiven) if forgiven else usage

    def _shared(self, model: str) -> _Learner:
        """The learner of a model, whatever the key."""
        return self._learners.get(("", model)) or self._newcomer("", model)

    def _newcomer(self, key: str, model: str) -> _Learner:
        """A learner that begins where that of its model stands."""
        overhead, media = float(self._config.message_overhead_tokens), 1.0
        if key:
            shared = self._shared(model)
            overhead, media = shared.overhead, shared.media
        learners = self._learners
        if len(learners) >= LEARNERS_MAX:
            del learners[next(iter(learners))]
        learner = learners[key, model] = _Learner(overhead, [None] * KINDS, [None, None], media)
        return learner

    def _learn_media(self, request: Request, tokens: int, learner: _Learner, shared: _Learner) -> None:
        """What the text does not explain is the price of the images."""
        text = self._input_tokens(msgspec.structs.replace(request, media_tokens=0), learner)
        observed = min(MEDIA_MOST, max(MEDIA_LEAST, (tokens - text) / request.media_tokens))
        shared.media += STEP * (observed - shared.media)
        if learner is not shared:
            learner.media += STEP * (observed - learner.media)


def _learn_text(request: Request, tokens: int, learner: _Learner, shared: _Learner) -> None:
    """Move the overhead by a short text, the ratio of its kind by a longer one."""
    byte_class, text_bytes = request.byte_class, request.text_bytes
    per_byte = request.tokens_per_byte or PRIOR_TOKENS_PER_BYTE[byte_class]
    kind = byte_class * DENSITY_STEPS + bisect(DENSITIES, per_byte)
    price = text_bytes * per_byte
    parent = shared.ratios[kind]
    if parent is None:
        parent = shared.ratios[kind] = _Ratio(1.0, 1.0)
    own = learner.ratios[kind]
    if own is None:
        own = learner.ratios[kind] = _Ratio(parent.blended, parent.blended)
    if text_bytes < SHORT_TEXT_BYTES:
        overhead = min(OVERHEAD_MOST, max(0.0, tokens - price * own.blended))
        learner.overhead += STEP * (overhead - learner.overhead)
        if learner is not shared:
            shared.overhead += STEP * (overhead - shared.overhead)
        return
    observed = (tokens - learner.overhead) / price if price else 1.0
    observed = min(RATIO_MOST, max(RATIO_LEAST, observed))
    _move(parent, observed, 1.0)
    if own is not parent:
        _move(own, observed, parent.blended)


def _move(ratio: _Ratio, observed: float, parent: float) -> None:
    """Take one observation into account; early ones count more, so that a learner starts fast."""
    ratio.seen = seen = ratio.seen + 1
    ratio.own += (1 / seen if seen < 20 else STEP) * (observed - ratio.own)
    weight = seen / (seen + SHRINKAGE)
    ratio.blended = weight * ratio.own + (1 - weight) * parent


def _learn_cached(learner: _Learner, usage: Usage) -> None:
    if usage.input_tokens > 0:
        share = min(1.0, max(0.0, usage.cached_tokens / usage.input_tokens))
        learner.cached += STEP * (share - learner.cached)


def _learn_output(learner: _Learner, stream: bool, observed: float) -> None:
    output = learner.outputs[stream]
    if output is None:
        output = learner.outputs[stream] = _Output(observed, observed)
    output.seen += 1
    output.mean += STEP * (observed - output.mean)
    step = max(1.0, STEP * output.mean)
    output.high = max(1.0, output.high + (step * HIGH_SHARE if observed > output.high else -step * (1 - HIGH_SHARE)))
