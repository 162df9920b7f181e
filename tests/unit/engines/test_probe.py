"""Readiness probes against a scripted port on the loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from forebay.engines.openai import OpenAIEngine
from forebay.engines.probe import MISSES_MAX, Probed, Prober

UP, WARMING, DOWN = Probed.UP, Probed.WARMING, Probed.DOWN
TIMEOUT_S = 0.2


class Port:
    """Answers every request with `status`, or not at all when that is None; notes the paths."""

    def __init__(self) -> None:
        self.status: int | None = 200
        self.unknown: set[str] = set()
        self.paths: list[str] = []
        self.number = 0
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.number)
        self.number = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            self.paths.append(path)
            status = 404 if path in self.unknown else self.status
            if status is None:
                await reader.read()
            else:
                writer.write(b"HTTP/1.1 %d x\r\ncontent-length: 0\r\n\r\n" % status)
        finally:
            writer.close()


@asynccontextmanager
async def probing() -> AsyncIterator[tuple[Port, Prober, list[Probed]]]:
    """A port, its prober, and what the prober told."""
    port, told = Port(), []
    await port.open()
    engine = OpenAIEngine("e", f"http://127.0.0.1:{port.number}", asyncio.get_running_loop())
    try:
        yield port, Prober(engine, lambda _, state: told.append(state), timeout_s=TIMEOUT_S), told
    finally:
        engine.close()
        port.close()


Case = Callable[[Port, Prober, list[Probed]], Awaitable[None]]


def play(case: Case) -> None:
    async def run() -> None:
        async with probing() as (port, prober, told):
            await case(port, prober, told)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "state"), [(200, UP), (204, UP), (401, UP), (503, WARMING), (500, WARMING), (None, WARMING)]
)
def test_the_first_probe_says_what_the_engine_is(status: int | None, state: Probed) -> None:
    async def case(port: Port, prober: Prober, told: list[Probed]) -> None:
        port.status = status
        assert await prober.once() is state
        assert told == [state]

    play(case)


def test_a_closed_port_is_down_and_an_open_one_up_again() -> None:
    async def case(port: Port, prober: Prober, told: list[Probed]) -> None:
        await prober.once()
        port.close()
        await prober.once()
        await port.open()
        await prober.once()
        assert told == [UP, DOWN, UP]

    play(case)


def test_an_engine_without_health_is_asked_for_its_models() -> None:
    async def case(port: Port, prober: Prober, told: list[Probed]) -> None:
        port.unknown = {"/health"}
        await prober.once()
        await prober.once()
        assert told == [UP, UP]
        assert port.paths == ["/health", "/v1/models", "/v1/models"]

    play(case)


def test_a_busy_engine_may_miss_some_probes() -> None:
    """Load must not become an outage: an engine that was up stays so until it has missed several in a row."""

    async def case(port: Port, prober: Prober, told: list[Probed]) -> None:
        for _ in range(2):
            port.status = 200
            await prober.once()
            port.status = None
            for _ in range(MISSES_MAX - 1):
                await prober.once()
        assert told == [UP] * (2 * MISSES_MAX), "an answer in between begins the count anew"
        await prober.once()
        await prober.once()
        assert told[-2:] == [WARMING, WARMING]
        port.status = 200
        await prober.once()
        assert told[-1] is UP

    play(case)


def test_an_engine_that_says_no_is_believed_at_once() -> None:
    async def case(port: Port, prober: Prober, told: list[Probed]) -> None:
        await prober.once()
        port.status = 503
        await prober.once()
        assert told == [UP, WARMING]

    play(case)


def test_an_engine_that_sends_answers_meanwhile_misses_nothing() -> None:
    """Bytes of answers say more than a probe that finds no turn; without them the misses count."""

    async def case(port: Port, prober: Prober, told: list[Probed]) -> None:
        await prober.once()
        port.status = None
        connections = prober._engine.connections
        for _ in range(3 * MISSES_MAX):
            asyncio.get_running_loop().call_later(TIMEOUT_S / 2, setattr, connections, "heard", connections.heard + 1)
            assert await prober.once() is UP
        for _ in range(MISSES_MAX):
            await prober.once()
        assert told[-2:] == [UP, WARMING]

    play(case)
