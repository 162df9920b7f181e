"""Readiness probes: is the engine up, warming, or away?

One probe at a time per engine, on a connection of its own, closed when it ends, so that probes of an engine that hangs
never pile up. `/health` is asked first (vLLM, SGLang, llama.cpp, TGI); a server that does not know it is asked for its
models. 2xx is up; 503 and a time-out with an open port mean warming; no connection means down.

An engine that is up may be too busy to answer a probe in time (vLLM on a loaded machine is): taking it out of rotation
for that would turn load into an outage. Only several missing answers in a row speak against it, and none while bytes of
answers to others come from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

from forebay.engines.openai import OpenAIEngine
from forebay.engines.watching import Watch

HEAD_LINE_MAX = 1024
MISSES_MAX = 3  # probes in a row that an engine which is up may leave without an answer


class Probed(Enum):
    UP = "up"
    WARMING = "warming"
    DOWN = "down"


NO_ANSWER = 0  # the port is open, but no answer came in time
NO_CONNECTION = -1  # nor was there a connection in time
MISSES = {NO_ANSWER: Probed.WARMING, NO_CONNECTION: Probed.DOWN}


class Prober(Watch):
    """Probes one engine for ever."""

    def __init__(
        self,
        engine: OpenAIEngine,
        told: Callable[[OpenAIEngine, Probed], None],
        *,
        paths: tuple[str, ...] = ("/health", "/v1/models"),
        interval_s: float = 1.0,
        timeout_s: float = 2.0,
    ) -> None:
        self._engine = engine
        self._told = told
        self._paths = paths
        self._known: str | None = None
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._misses = 0
        self.last: Probed | None = None

    async def once(self) -> Probed:
        """One probe, told when it says something new."""
        state = await self._probe()
        self.last = state
        self._told(self._engine, state)
        return state

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.once()

    async def _probe(self) -> Probed:
        heard = self._engine.connections.heard
        for path in (self._known,) if self._known else self._paths:
            status = await self._status(path)
            if status in MISSES:
                if self.last is Probed.UP and self._engine.connections.heard != heard:
                    self._misses = 0  # it sent answers to others meanwhile: busy, not away
                    return Probed.UP
                self._misses += 1
                return Probed.UP if self.last is Probed.UP and self._misses < MISSES_MAX else MISSES[status]
            self._misses = 0
            if status is None:
                return Probed.DOWN
            if status in {404, 405, 501}:
                continue
            if status >= 500:
                return Probed.WARMING
            self._known = path
            return Probed.UP  # 401 and 403 included: it answers, the credential is another matter
        self._known = None
        return Probed.UP  # it answers HTTP and knows none of the paths

    async def _status(self, path: str) -> int | None:
        """The status code, one of MISSES, or None when the connection was refused."""
        engine = self._engine
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_connection(engine.host, engine.port, ssl=engine.tls)
                head = engine.head(b"GET", path.encode()) + b"connection: close\r\n\r\n"
                writer.write(head)
                line = await reader.readline()
            parts = line[:HEAD_LINE_MAX].split()
            return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else NO_ANSWER
        except TimeoutError:
            return NO_CONNECTION if writer is None else NO_ANSWER
        except (OSError, ValueError, asyncio.IncompleteReadError):
            return None if writer is None else NO_ANSWER
        finally:
            if writer is not None:
                writer.transport.abort()
