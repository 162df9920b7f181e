"""Naive: a gate of several stages, each of which looks and takes for itself, with the loop running in between."""

import asyncio
from collections import deque

from .token_budget import TokenBudget


class TwoStepGate:
    """The budget first, then the queue's depth, then the queue."""

    def __init__(self, budget: TokenBudget, depth_limit: int) -> None:
        self.budget = budget
        self.waiting: deque[str] = deque()
        self._depth_limit = depth_limit

    async def handle(self, prompt: str) -> int:
        """The status to answer with; 200 means that the prompt was queued."""
        status = self.budget.admit(prompt)
        if status != 200:
            return status
        if len(self.waiting) >= self._depth_limit:
            return 503  # the budget has been charged for it
        await self._authorise(prompt)
        self.waiting.append(prompt)  # the place that was seen above may be gone
        return 200

    async def _authorise(self, prompt: str) -> None:
        """Anything that is awaited will do: a database, a cache, a log."""
        del prompt
        await asyncio.sleep(0)
