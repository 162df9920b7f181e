"""The GPUs of this machine, by NVIDIA's management library.

Its calls may block for as long as a driver is in trouble, so every reading is a short thread of its own, one at a time,
which the process does not wait for when it ends.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from forebay.engines.gpu.reading import GpuReading

READ_S = 2.0

NOT_INSTALLED = "[gpu] source = \"nvml\": NVIDIA's library for Python is not installed: pip install 'forebay[gpu]'"
NO_ANSWER = f"[gpu] NVIDIA's driver has not answered for {READ_S:g} s: see its log (dmesg, nvidia-smi)"


class NvmlSource:
    """Reads all GPUs that the driver shows."""

    def __init__(self) -> None:
        self.trouble: str | None = None
        self._reading: asyncio.Future[tuple[list[GpuReading], str | None]] | None = None
        self._ready = False

    async def read(self) -> list[GpuReading]:
        if self._reading is None:
            loop = asyncio.get_running_loop()
            self._reading = loop.create_future()
            threading.Thread(target=self._run, args=(loop, self._reading), name="nvml", daemon=True).start()
        try:
            async with asyncio.timeout(READ_S):
                readings, self.trouble = await asyncio.shield(self._reading)
        except TimeoutError:
            self.trouble = NO_ANSWER
            return []  # the thread may still come back: it is asked for again
        self._reading = None
        return readings

    def _run(
        self, loop: asyncio.AbstractEventLoop, reading: asyncio.Future[tuple[list[GpuReading], str | None]]
    ) -> None:
        told = self._ask()
        try:
            loop.call_soon_threadsafe(_tell, reading, told)
        except RuntimeError:
            pass  # the loop is closed: nobody wants to know any more

    def _ask(self) -> tuple[list[GpuReading], str | None]:
        try:
            import pynvml
        except ImportError:
            return [], NOT_INSTALLED
        try:
            if not self._ready:
                pynvml.nvmlInit()
                self._ready = True
            return [_of(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())], None
        except pynvml.NVMLError as error:
            self._ready = False  # the driver may have been loaded anew
            return [], f"[gpu] NVIDIA's driver cannot be asked: {error}; is there a GPU, and does nvidia-smi work?"


def _of(nvml: Any, number: int) -> GpuReading:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError:  # partitioned GPUs do not tell
        busy = None
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return GpuReading(
        str(number),
        uuid.decode() if isinstance(uuid, bytes) else uuid,
        memory.used / memory.total if memory.total else None,
        busy,
    )


def _tell(reading: asyncio.Future[Any], told: tuple[list[GpuReading], str | None]) -> None:
    if not reading.done():
        reading.set_result(told)
