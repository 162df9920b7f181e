"""What a calibrated GPU takes: for a step of a language model, for a batch of an encoder."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One model on one GPU (or tensor-parallel group). Coefficients in ms, as in the calibration file.

    The defaults of a server on that GPU come with it: KV capacity in tokens, batch limits.
    """

    name: str
    gpu: str
    gpus: int
    model: str
    engine: str
    confidence: str
    c0: float
    w: float
    r: float
    p: float
    e: float
    seq: float
    kv: float
    att: float
    kv_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    decode_tokens_per_s: dict[int, float]
    """Decode rate by batch size at 1,024 tokens of context each, as published with the calibration."""
    prefill_tokens_per_s: dict[int, float]
    """Prefill rate by prompt size in one step."""
    max_mixed_tokens: int | None = None
    """See `EngineLimits`."""
    curve: tuple[tuple[float, float], ...] = ()
    """Points (tokens, ms), ascending, of an engine that was measured in such detail: straight between them and beyond
    the last. A step takes that in place of c0, w, r, p and e, which then only come near it, for bounds and estimates.
    """

    def step_ms(self, tokens: int, sequences: int, context: int, pairs: float) -> float:
        """Time of one forward pass in ms.

        `tokens`: new tokens computed (decodes and prefill chunks); `sequences` in the batch; `context`: KV tokens
        read by the decoding sequences; `pairs`: (query, key) pairs of the prefill chunks.
        """
        if self.curve:
            base = _along(self.curve, tokens)
            return base + self.seq * sequences + self.kv * context / 1e3 + self.att * pairs / 1e6
        roofline = float((self.w**self.p + (self.r * tokens) ** self.p) ** (1.0 / self.p))
        fixed = self.c0 + roofline + self.e * tokens + self.seq * sequences
        return fixed + self.kv * context / 1e3 + self.att * pairs / 1e6


def _along(curve: tuple[tuple[float, float], ...], tokens: int) -> float:
    """The curve's value in ms."""
    index = min(max(1, bisect_right(curve, (tokens, math.inf))), len(curve) - 1)
    (low, low_ms), (high, high_ms) = curve[index - 1], curve[index]
    return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)


@dataclass(frozen=True, slots=True)
class EncoderProfile:
    """A one-shot model: a batch of b inputs takes (a^p + (c*b)^p)^(1/p) ms, whatever its inputs are."""

    name: str
    gpu: str
    model: str
    a: float
    c: float
    p: float

    def batch_ms(self, size: int) -> float:
        """Time of one batch of `size` inputs, in ms."""
        return float((self.a**self.p + (self.c * size) ** self.p) ** (1.0 / self.p))


Profile = StepProfile | EncoderProfile
