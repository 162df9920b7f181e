"""What is looked at for ever."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod


class Watch(ABC):
    """A task of its own from `start` to `stop`."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. Needs the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End, wherever it stands; what it failed with, if it did, is not raised."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @abstractmethod
    async def _run(self) -> None:
        """Look again and again."""
