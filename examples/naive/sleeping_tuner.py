"""Naive: a loop that tunes the queue's depth by the GPU's utilization, and sleeps between two looks."""

import time
from collections.abc import Callable

BUSY = 0.90
P99_FINE_MS = 200.0
P99_BAD_MS = 500.0
DEPTH_LEAST, DEPTH_MOST = 4, 64


class SleepingTuner:
    """Grows the depth while the GPU is busy and p99 is low, shrinks it when p99 is bad."""

    def __init__(self, utilization: Callable[[], float], p99_ms: Callable[[], float], interval_s: float = 30.0) -> None:
        self.depth = 16
        self._utilization = utilization
        self._p99_ms = p99_ms
        self._interval_s = interval_s

    def step(self) -> None:
        """One look."""
        p99_ms = self._p99_ms()
        # A GPU is as busy with a batch of one as with a full one; and an idle one is not helped by a short queue.
        if self._utilization() > BUSY and p99_ms < P99_FINE_MS:
            self.depth = min(self.depth + 4, DEPTH_MOST)
        if p99_ms > P99_BAD_MS:
            self.depth = max(self.depth - 2, DEPTH_LEAST)

    async def run(self, steps: int) -> None:
        """Looks for ever, were it not for `steps`."""
        for _ in range(steps):
            self.step()
            time.sleep(self._interval_s)  # noqa: ASYNC251 - the fault that this example shows
