"""Reads the GPUs every so often, and tells how full those of each engine are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from forebay.engines.gpu.reading import GpuReading, GpuSource
from forebay.engines.watching import Watch


class GpuWatch(Watch):
    """`engines` names the GPUs of each, by number or UUID; `told` hears of every engine at every reading."""

    def __init__(
        self,
        source: GpuSource,
        engines: Mapping[str, Sequence[str]],
        told: Callable[[str, float | None], None],
        *,
        interval_s: float = 1.0,
    ) -> None:
        """`told(engine, share)`: the used share of the fullest of its GPUs; None when not all of them are known."""
        self._source = source
        self._engines = engines
        self._told = told
        self._interval_s = interval_s
        self._missing: list[str] = []
        self.readings: tuple[GpuReading, ...] = ()
        self.read_at: float | None = None
        """Loop time of the last reading of any GPU; None before the first."""

    async def once(self) -> None:
        """Read now, and tell."""
        self.readings = tuple(await self._source.read())
        if self.readings:
            self.read_at = asyncio.get_running_loop().time()
        self._missing = []
        for engine, names in self._engines.items():
            shares = [self._share(engine, name) for name in names]
            known = [share for share in shares if share is not None]
            self._told(engine, max(known) if known and len(known) == len(shares) else None)

    @property
    def degraded(self) -> list[str]:
        """What is not known, and what to do about it; empty when all is."""
        trouble = self._source.trouble
        return [*self._missing, *([f"{trouble} (no window is lowered for it)"] if trouble is not None else [])]

    def named(self) -> dict[str, GpuReading]:
        """The GPUs that engines name, as last read."""
        names = dict.fromkeys(name for names in self._engines.values() for name in names)
        return {name: found[0] for name in names if (found := self._find(name))}

    def _find(self, name: str) -> list[GpuReading]:
        return [reading for reading in self.readings if name in (reading.number, reading.uuid)]

    def _share(self, engine: str, name: str) -> float | None:
        found = self._find(name)
        if not found and self.readings:
            known = ", ".join(reading.uuid or reading.number for reading in self.readings)
            self._missing.append(f"[[engines]] gpus: {engine} names GPU {name!r}, which is not among {known}")
        shares = [reading.memory_share for reading in found if reading.memory_share is not None]
        return max(shares) if shares else None

    async def _run(self) -> None:
        while True:
            await self.once()
            await asyncio.sleep(self._interval_s)
