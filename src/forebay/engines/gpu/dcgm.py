"""GPUs by NVIDIA's DCGM exporter: a page in Prometheus' format, often of another machine.

The exporter measures at its own interval (30 s unless told otherwise) and repeats itself between. When its measuring
hangs it repeats itself for ever: temperatures and clocks of a GPU never stand still for a minute, so a page that does
is old.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from urllib.parse import urlsplit

from forebay.engines.gpu.reading import GpuReading
from forebay.engines.prometheus import fetch_page, samples

BUSY = "DCGM_FI_DEV_GPU_UTIL"  # per cent
USED, FREE, RESERVED = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_RESERVED"  # MiB
NAMES = (BUSY, USED, FREE, RESERVED)

UNCHANGED_S = 60.0


def read_gpus(page: str) -> list[GpuReading]:
    """The GPUs of an exporter's page, instances of partitioned ones each for itself."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for sample in samples(page, NAMES):
        labels = sample.labels
        gpu = (labels.get("gpu", ""), labels.get("UUID", ""), labels.get("GPU_I_ID", ""))
        found.setdefault(gpu, {})[sample.name] = sample.value
    return [_of(index, uuid, figures) for (index, uuid, _), figures in found.items()]


def _of(index: str, uuid: str, figures: dict[str, float]) -> GpuReading:
    used, free = figures.get(USED), figures.get(FREE)
    share = None
    if used is not None and free is not None:
        used += figures.get(RESERVED, 0.0)
        share = used / (used + free) if used + free else None
    busy = figures.get(BUSY)
    return GpuReading(index, uuid, share, None if busy is None else min(1.0, busy / 100))


class _Exporter:
    """One page, and since when it has been the same."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self.host = parts.hostname or ""
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self.tls else 80)
        self.head = f"GET {parts.path or '/metrics'} HTTP/1.0\r\nhost: {parts.netloc}\r\n".encode()
        self.page = ""
        self.changed_at = 0.0


class DcgmSource:
    """Reads the pages of all exporters at once."""

    def __init__(self, urls: Sequence[str], *, unchanged_s: float = UNCHANGED_S) -> None:
        self.trouble: str | None = None
        self._exporters = [_Exporter(url) for url in urls]
        self._unchanged_s = unchanged_s

    async def read(self) -> list[GpuReading]:
        pages = await asyncio.gather(*(self._read(exporter) for exporter in self._exporters))
        troubles = [trouble for _, trouble in pages if trouble is not None]
        self.trouble = "; ".join(troubles) or None
        return [reading for readings, _ in pages for reading in readings]

    async def _read(self, exporter: _Exporter) -> tuple[list[GpuReading], str | None]:
        url = exporter.url
        page = await fetch_page(exporter.host, exporter.port, exporter.head, exporter.tls)
        if page is None:
            return [], f"[gpu] the DCGM exporter at {url} does not answer: is it running, and reachable from here?"
        now = asyncio.get_running_loop().time()
        if page != exporter.page:
            exporter.page, exporter.changed_at = page, now
        readings = read_gpus(page)
        if not readings:
            return [], f"[gpu] {url} tells of no GPU: is it a DCGM exporter's page, with {USED} and {FREE}?"
        if now - exporter.changed_at >= self._unchanged_s:
            text = f"has told the same for {self._unchanged_s:g} s, which no GPU does: restart it"
            return [], f"[gpu] the DCGM exporter at {url} {text}"
        return readings, None
