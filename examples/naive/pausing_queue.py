"""Naive: backpressure as a pause. A full queue delays the sender a little, and then takes the request all the same."""

import asyncio
from collections import deque
from typing import Any


class PausingQueue:
    """At most `depth_limit` requests wait. (Except that nothing stops one more.)"""

    def __init__(self, depth_limit: int, pause_s: float = 0.05) -> None:
        self.waiting: deque[Any] = deque()
        self._depth_limit = depth_limit
        self._pause_s = pause_s

    async def push(self, request: Any) -> None:
        """Add a request, after a pause when the queue is full."""
        if len(self.waiting) >= self._depth_limit:
            await asyncio.sleep(self._pause_s)
        self.waiting.append(request)

    def take(self, size: int) -> list[Any]:
        """The next batch."""
        return [self.waiting.popleft() for _ in range(min(size, len(self.waiting)))]
