"""What is read of engines beside their answers: metrics pages and GPUs. It corrects; nothing waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from forebay.config.build import engine_names, guarded
from forebay.config.schema import Config
from forebay.config.schema import Engine as Entry
from forebay.core.dispatch.others import FORGOTTEN_NS
from forebay.core.events import MemoryRead, Signalled
from forebay.core.instant import SECOND
from forebay.core.model import EngineSignal
from forebay.engines.gpu import GpuReading, GpuWatch
from forebay.engines.gpu.dcgm import DcgmSource
from forebay.engines.gpu.nvml import NvmlSource
from forebay.engines.openai import OpenAIEngine
from forebay.engines.signals import SignalReader
from forebay.live.gateway import Gateway


class Watch:
    """Reads for ever, and reports to the gateway."""

    def __init__(self, config: Config, engines: Mapping[str, OpenAIEngine], gateway: Gateway) -> None:
        self._gateway = gateway
        self._engines = engines
        self.pages = self._readers(config, ())
        self.gpus = self._gpu_watch(config)

    def start(self) -> None:
        for part in self._parts():
            part.start()

    def reload(self, config: Config) -> None:
        """Read also the pages that other settings make use of; those that nobody uses any more are still shown."""
        for reader in self._readers(config, [reader.name for reader in self.pages]):
            self.pages.append(reader)
            reader.start()

    async def stop(self) -> None:
        for part in self._parts():
            await part.stop()

    def ages_s(self) -> dict[str, float]:
        """Seconds since each signal was last heard; those that never were are not in it."""
        now = asyncio.get_running_loop().time()
        heard = {f"metrics:{reader.name}": reader.read_at for reader in self.pages}
        if self.gpus is not None:
            heard["gpu"] = self.gpus.read_at
        return {name: now - at for name, at in heard.items() if at is not None}

    def degraded(self) -> list[str]:
        """What was known once and is not any more, and what the GPUs' source lacks."""
        ages = self.ages_s()
        silent = [
            f"{reader.name}: its metrics page has said nothing for {age:.0f} s; our own counters are used alone"
            for reader in self.pages
            if (age := ages.get(f"metrics:{reader.name}", 0.0)) > FORGOTTEN_NS / SECOND
        ]
        return silent if self.gpus is None else silent + self.gpus.degraded

    def gpu_readings(self) -> tuple[GpuReading, ...]:
        """All GPUs that were read last, engines' or not."""
        return () if self.gpus is None else self.gpus.readings

    def named_gpus(self) -> dict[str, GpuReading]:
        """The GPUs that engines name, as last read."""
        return {} if self.gpus is None else self.gpus.named()

    def _parts(self) -> list[SignalReader | GpuWatch]:
        return [*self.pages, *([] if self.gpus is None else [self.gpus])]

    def _readers(self, config: Config, known: Collection[str]) -> list[SignalReader]:
        return [
            SignalReader(
                self._engines[name],
                self._engine_said,
                path=entry.metrics_path,
                port=entry.metrics_port,
                models=() if "*" in entry.models else entry.models,
            )
            for entry in config.engines
            if _is_read(config, entry)
            for name in engine_names(entry)
            if name not in known
        ]

    def _gpu_watch(self, config: Config) -> GpuWatch | None:
        gpu = config.gpu
        if gpu.source == "none":
            return None
        named = {
            name: names
            for entry in config.engines
            if entry.gpus
            for name, names in zip(engine_names(entry), entry.gpus, strict=True)
        }
        source = NvmlSource() if gpu.source == "nvml" else DcgmSource(gpu.urls)
        return GpuWatch(source, named, self._memory_read, interval_s=gpu.interval_s)

    def _engine_said(self, engine: OpenAIEngine, signal: EngineSignal) -> None:
        self._gateway.report(Signalled(engine.name, signal))

    def _memory_read(self, engine: str, share: float | None) -> None:
        self._gateway.report(MemoryRead(engine, share))


def _is_read(config: Config, entry: Entry) -> bool:
    """Is there any use for what these engines say of themselves?"""
    return bool(entry.metrics_path) and (guarded(config, entry) or len(entry.urls) > 1)
