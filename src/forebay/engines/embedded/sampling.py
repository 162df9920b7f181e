"""Picks tokens from logits: the likeliest at temperature 0, else by chance from a generator of the sequence's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]


def greedy(logits: Floats) -> list[int]:
    """The likeliest token of each column of [vocabulary, columns]; the lowest id of equals."""
    columns = logits.shape[1]
    if columns == 1:
        return [int(logits[:, 0].argmax())]
    # Two passes along the memory's grain beat one argmax per column across it.
    tokens, of_column = np.nonzero(logits == logits.max(axis=0))
    best: list[int] = [-1] * columns
    for token, column in zip(tokens.tolist(), of_column.tolist(), strict=True):
        if best[column] < 0:
            best[column] = token
    return best


def draw(logits: Floats, temperature: float, chance: Random) -> int:
    """One token of [vocabulary] logits, with probability softmax(logits / temperature)."""
    scaled = logits / np.float32(temperature)
    scaled -= scaled.max()
    # Cumulated in double: 49152 float32 additions would lose the tail's small probabilities.
    cumulated = np.cumsum(np.exp(scaled), dtype=np.float64)
    token = int(np.searchsorted(cumulated, chance.random() * cumulated[-1], side="right"))
    return min(token, len(logits) - 1)


def choose(logits: Floats, draws: Sequence[tuple[float, Random] | None]) -> list[int]:
    """A token per column: greedy where the draw is None, else by its (temperature, generator)."""
    if all(each is None for each in draws):
        return greedy(logits)
    tokens = []
    for column, each in enumerate(draws):
        own = np.ascontiguousarray(logits[:, column])
        tokens.append(int(own.argmax()) if each is None else draw(own, *each))
    return tokens
