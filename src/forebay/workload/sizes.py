"""Distributions of token counts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from random import Random

from forebay.errors import UsageError

MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """A distribution of token counts: uniform from `low` to `high`, or log-normal when `mean` is set."""

    low: int
    high: int
    mean: float | None = None
    cv: float = 1.0

    def draw(self, rng: Random) -> int:
        """One size in tokens, at least 1."""
        if self.mean is not None:
            sigma2 = math.log(1.0 + self.cv * self.cv)
            drawn = rng.lognormvariate(math.log(self.mean) - sigma2 / 2.0, math.sqrt(sigma2))
            return min(self.high, max(self.low, round(drawn)))
        return self.low if self.low == self.high else rng.randint(self.low, self.high)

    @classmethod
    def parse(cls, text: str) -> Sizes:
        """`128`, `64-256` (uniform) or `~300` / `~300/1.5` (log-normal: mean, coefficient of variation)."""
        shape = re.fullmatch(r"(?:(\d+)|(\d+)-(\d+)|~(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?))?)", text.strip())
        if shape is None:
            raise UsageError(f"{text!r} is not a size: use 128, 64-256, or ~300/1.5 (mean/coefficient of variation)")
        exact, low, high, mean, cv = shape.groups()
        if mean is not None:
            sizes = cls(1, max(1, round(float(mean) * 20)), float(mean), float(cv or 1.0))
        else:
            sizes = cls(int(exact or low), int(exact or high))
        if not 1 <= sizes.low <= sizes.high <= MAX_TOKENS or sizes.mean == 0 or sizes.cv == 0:
            raise UsageError(f"{text!r} is not a size: it must lie within 1 to {MAX_TOKENS}, the lower bound first")
        return sizes

    def __str__(self) -> str:
        if self.mean is not None:
            return f"~{self.mean:g}/{self.cv:g}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"
