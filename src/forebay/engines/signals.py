"""What an engine says of itself on its metrics page: how much runs and waits there, and how full its memory is.

Read every so often on a connection of its own, and bounded in time and size. These figures correct what the gateway
knows from its own counters, which are never stale; they never replace them. A page that cannot be had, or says nothing
of use, is no failure of the engine: the last figures simply grow old, and what is old is not known.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from forebay.core.model import EngineSignal
from forebay.engines.openai import OpenAIEngine

PAGE_MAX = 4 * 1024 * 1024
READ_S = 2.0

# Names of the same figure in vLLM (V1 and before), SGLang and TensorRT-LLM. The first that a page has counts.
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "trtllm:num_active_requests")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm:num_queued_requests")
KV_SHARE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
KV_TOKENS = ("sglang:max_total_num_tokens",)
PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions", "sglang:num_retractions_total")
CACHE_CONFIG = "vllm:cache_config_info"
NAMES = (*RUNNING, *WAITING, *KV_SHARE, *KV_TOKENS, *PREEMPTIONS, CACHE_CONFIG)


def read_signal(page: str) -> EngineSignal | None:
    """The figures of a metrics page, summed over the engine's own replicas (shares: the fullest); None if it has none.

    A figure that is no finite number from 0 on is left out, whatever the rest of the page says.
    """
    found: dict[str, list[float]] = {}
    kv_tokens: int | None = None
    for line in page.splitlines():
        if not line.startswith(NAMES):
            continue
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition("}")
        if not rest:
            name, _, value = line.partition(" ")
        if name == CACHE_CONFIG:
            kv_tokens = (kv_tokens or 0) + _blocks(labels) or None
        elif (number := _number(value)) is not None:
            found.setdefault(name, []).append(number)
    running, waiting = _first(found, RUNNING), _first(found, WAITING)
    share, preemptions = _first(found, KV_SHARE), _first(found, PREEMPTIONS)
    if kv_tokens is None and (told := _first(found, KV_TOKENS)):
        kv_tokens = int(sum(told))
    signal = EngineSignal(
        running=None if running is None else int(sum(running)),
        waiting=None if waiting is None else int(sum(waiting)),
        kv_share=None if share is None else min(1.0, max(share)),
        kv_tokens=kv_tokens,
        preemptions=None if preemptions is None else int(sum(preemptions)),
    )
    return None if all(figure is None for figure in signal) else signal


def _first(found: dict[str, list[float]], names: tuple[str, ...]) -> list[float] | None:
    return next((found[name] for name in names if name in found), None)


def _number(text: str) -> float | None:
    try:
        number = float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _blocks(labels: str) -> int:
    """Tokens of the KV cache by vLLM's labels: its own word for it, else blocks times their size; 0 if not said."""
    said = dict(pair.partition("=")[::2] for pair in labels.split(","))
    figures = [said.get(name, "").strip('"') for name in ("kv_cache_size_tokens", "num_gpu_blocks", "block_size")]
    whole, blocks, size = (int(figure) if figure.isdigit() else 0 for figure in figures)
    return whole or blocks * size


class SignalReader:
    """Reads one engine's metrics page for ever."""

    def __init__(
        self,
        engine: OpenAIEngine,
        told: Callable[[OpenAIEngine, EngineSignal], None],
        *,
        path: str = "/metrics",
        interval_s: float = 1.0,
    ) -> None:
        self.name = engine.name
        self._engine = engine
        self._told = told
        self._path = path
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self.read_at: float | None = None
        """Loop time of the last page that said something; None before the first."""

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def once(self) -> EngineSignal | None:
        """Read the page now; what it says is told."""
        page = await self._page()
        signal = None if page is None else read_signal(page)
        if signal is not None:
            self.read_at = asyncio.get_running_loop().time()
            self._told(self._engine, signal)
        return signal

    async def _run(self) -> None:
        while True:
            await self.once()
            # An engine without such a page is not asked every second for ever.
            await asyncio.sleep(self._interval_s if self.read_at is not None else 10 * self._interval_s)

    async def _page(self) -> str | None:
        engine = self._engine
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(READ_S):
                reader, writer = await asyncio.open_connection(engine.host, engine.port, ssl=engine.tls)
                # HTTP/1.0: the page comes unchunked, and ends with the connection.
                head = engine.head(b"GET", self._path.encode()).replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)
                writer.write(head + b"\r\n")
                answer = await _all(reader)
        except (OSError, asyncio.IncompleteReadError):  # a time-out is an OSError too
            return None
        finally:
            if writer is not None:
                writer.transport.abort()
        head, _, body = answer.partition(b"\r\n\r\n")
        return body.decode("utf-8", "replace") if b" 200" in head.partition(b"\r\n")[0] else None


async def _all(reader: asyncio.StreamReader) -> bytes:
    pieces, size = [], 0
    while piece := await reader.read(65_536):
        pieces.append(piece)
        size += len(piece)
        if size > PAGE_MAX:
            return b""
    return b"".join(pieces)
