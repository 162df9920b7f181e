"""Memory pressure: while the GPUs of an engine are nearly full, it holds less; when they are not any more, it slowly
gets its window back.

What is measured is the memory of the device, whoever uses it: an allocation that finds none kills the engine. Memory of
which nothing is known is neither full nor free: a window that was lowered goes on recovering.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.core.instant import SECOND, Instant


@dataclass(frozen=True, slots=True)
class PressureConfig:
    """When memory is short, and what is done about it."""

    high: float = 0.97  # used share from which on the window is lowered
    relief: float = 0.02  # so far below `high` it begins to recover
    cut: float = 0.8  # of the window is left by a step
    step_ns: int = SECOND  # between two steps
    least: float = 0.25  # of the window always stays
    up_per_s: float = 0.02  # of the whole window is given back per second


class MemoryPressure:
    """The share of its window that one engine may use: `factor`, from `least` to 1."""

    __slots__ = ("_at", "_cut_at", "config", "factor")

    def __init__(self, config: PressureConfig) -> None:
        self.config = config
        self.factor = 1.0
        self._at: Instant = 0
        self._cut_at: Instant = -config.step_ns

    def read(self, share: float | None, now: Instant) -> None:
        """So much of the device's memory is used, 0 to 1; None: it is not known."""
        config = self.config
        elapsed_ns, self._at = min(config.step_ns, now - self._at), now
        if share is not None and share >= config.high:
            if now - self._cut_at >= config.step_ns:
                self.factor = max(config.least, config.cut * self.factor)
                self._cut_at = now
        elif share is None or share <= config.high - config.relief:
            self.factor = min(1.0, self.factor + config.up_per_s * elapsed_ns / SECOND)
