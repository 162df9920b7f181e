"""What is known of one GPU, and who tells."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class GpuReading(NamedTuple):
    """One GPU, or one instance of a partitioned one. Shares are 0 to 1; None: not told."""

    number: str  # on its machine, from "0"
    uuid: str
    memory_share: float | None  # used, of all that there is
    busy_share: float | None  # of the time in which any kernel ran: no measure of what it could still do


class GpuSource(Protocol):
    """Where readings come from."""

    trouble: str | None  # what the last reading lacked, and what to do about it; None: nothing

    async def read(self) -> list[GpuReading]:
        """What can be read now; never raises for what is missing, and returns within some seconds."""
        ...
