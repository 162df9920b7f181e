"""Filler text for simulated models, how long answers get, and how many tokens a prompt has."""

from __future__ import annotations

import math
from random import Random
from typing import Any

_SENTENCES = (
    "The water rises slowly behind the dam and waits for its turn.",
    "A full pool keeps the turbine at its best point without a pause.",
    "What cannot be used in time goes over the spillway at once.",
    "Nobody downstream notices how carefully the gate is set.",
    "Every hour the keeper writes down the level and the flow.",
    "When the snow melts, the river brings more than the house can take.",
    "A short queue is cheap, a long one only hides the shortage.",
    "The engineers measure first and change one thing afterwards.",
    "At night the load is low and the basin fills again.",
    "Small waves on the surface say little about the depth below.",
    "It is better to refuse early than to promise too much.",
    "Steady work at the rated flow wears the bearings least.",
)

BYTES_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 4  # role and separators of a chat template


def filler_tokens(rng: Random, sentences: int = 256) -> tuple[str, ...]:
    """A long row of token texts (words with their leading space) in an order that `rng` decides."""
    words: list[str] = []
    for _ in range(sentences):
        words += rng.choice(_SENTENCES).split()
    return tuple(" " + word for word in words)


class OutputLengths:
    """Lengths of answers that end by themselves: lognormal, as production traces are to a first approximation."""

    def __init__(self, mean: float, sigma: float) -> None:
        """`mean` in tokens; `sigma` is the standard deviation of the logarithm, 0 for always `mean`."""
        if mean < 1 or sigma < 0:
            raise ValueError("the mean output must be at least one token, and its sigma not negative")
        self._mu = math.log(mean) - sigma * sigma / 2
        self._sigma = sigma

    def draw(self, rng: Random) -> int:
        """Tokens of the next answer, at least 1."""
        return max(1, round(rng.lognormvariate(self._mu, self._sigma)))


def tokens_of(text: str | list[int]) -> int:
    """About how many tokens a prompt has; exact when it is token ids."""
    if isinstance(text, list):
        return max(1, len(text))
    return max(1, math.ceil(len(text.encode("utf-8", "surrogatepass")) / BYTES_PER_TOKEN))


def tokens_of_chat(messages: list[dict[str, Any]]) -> int:
    """About how many tokens a chat has, its template included."""
    return sum(tokens_of(str(message.get("content") or "")) + TOKENS_PER_MESSAGE for message in messages)
