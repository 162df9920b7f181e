"""Samples an engine's metrics while the load runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from forebay.errors import EngineError
from forebay.load.target import Target
from forebay.report.engine_metrics import engine_sample
from forebay.report.records import EngineSample

MAX_METRICS_BYTES = 8 << 20
SCRAPE_TIMEOUT_S = 2.0


class Observer:
    """Scrapes `{target}/metrics` every `interval_s` until cancelled. A failed scrape is counted and leaves a gap."""

    def __init__(
        self, target: Target, start_ns: int, sink: Callable[[EngineSample], None], interval_s: float = 0.25
    ) -> None:
        self._target = target
        self._start_ns = start_ns
        self._sink = sink
        self._interval_s = interval_s
        self.failures = 0

    async def run(self) -> None:
        while True:
            began_ns = time.monotonic_ns()
            await self.sample()
            spent_s = (time.monotonic_ns() - began_ns) / 1e9
            await asyncio.sleep(max(0.01, self._interval_s - spent_s))

    async def sample(self) -> None:
        """Takes one sample now."""
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                status, text = await get_text(self._target, "/metrics")
        except (OSError, TimeoutError, ValueError):
            self.failures += 1
            return
        if status != 200:
            self.failures += 1
            return
        self._sink(engine_sample(text, time.monotonic_ns() - self._start_ns))


async def get_text(target: Target, path: str, secret: str = "") -> tuple[int, str]:
    """Status and body of a small GET on a connection of its own. OSError or ValueError when there is no such answer."""
    # A given URL may already name the page.
    full = target.prefix if target.prefix.endswith(path) else target.prefix + path
    reader, writer = await asyncio.open_connection(
        target.host, target.port, ssl=target.ssl_context(), limit=MAX_METRICS_BYTES
    )
    try:
        # HTTP/1.0: no chunks, and the end of the connection ends the answer.
        credential = f"authorization: Bearer {secret}\r\n" if secret else ""
        writer.write(f"GET {full} HTTP/1.0\r\nhost: {target.authority}\r\n{credential}\r\n".encode())
        raw = await reader.read(MAX_METRICS_BYTES)
        while not reader.at_eof() and len(raw) < MAX_METRICS_BYTES:
            more = await reader.read(MAX_METRICS_BYTES)
            raw += more
    finally:
        writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    fields = head.split(b" ", 2)
    if len(fields) < 2 or not fields[0].startswith(b"HTTP/1.") or not fields[1].isdigit():
        raise ValueError(f"{target.url} does not speak HTTP/1")
    return int(fields[1]), body.decode(errors="replace")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def first_model(target: Target, secret: str = "") -> str:
    """The first model that the target lists. EngineError when it cannot be reached or lists none."""
    return asyncio.run(_first_model(target, secret))


async def _first_model(target: Target, secret: str) -> str:
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            status, text = await get_text(target, "/v1/models", secret)
    except (OSError, TimeoutError, ValueError) as error:
        raise EngineError(f"{target.url} cannot be reached: {error or 'no answer in time'}") from None
    try:
        models = msgspec.json.decode(text, type=_Models).data
    except msgspec.DecodeError:
        models = []
    if status != 200 or not models:
        raise EngineError(f"{target.url}/v1/models lists no model (status {status}): name one with --model")
    return models[0].id
