"""Starts one of our own engines as a process beside the gateway, and ends it with the gateway."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from collections.abc import Callable

from forebay.errors import EngineError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
LISTENING = b"listening on "


class LocalEngine:
    """A child process that runs `forebay engine KIND` on a free port of the loopback address."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start it; returns its URL once it listens. It may still be loading its model."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "forebay", "engine", self.kind, "--port", "0",
            stdout=asyncio.subprocess.PIPE, preexec_fn=_dies_with_us(),
        )  # fmt: skip
        self._process = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while line := await process.stdout.readline():
                    if line.startswith(LISTENING):
                        self.url = line[len(LISTENING) :].decode().strip()
                        self._reader = asyncio.get_running_loop().create_task(self._drain_output(process.stdout))
                        return self.url
        except TimeoutError:
            await self.stop()
            raise EngineError(f"the {self.kind} engine did not start within {START_TIMEOUT_S:.0f} s") from None
        code = await process.wait()
        raise EngineError(f"the {self.kind} engine ended with status {code} before it was up; see its message above")

    @staticmethod
    async def _drain_output(stream: asyncio.StreamReader) -> None:
        while await stream.read(65_536):
            pass

    async def stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._reader is not None:
            self._reader.cancel()


def _dies_with_us() -> Callable[[], object] | None:
    """Asks the kernel to end the child when this process is killed and cannot; None where it cannot be asked."""
    if sys.platform != "linux":
        return None
    prctl, set_parent_death_signal = ctypes.CDLL(None).prctl, 1  # looked up before the fork: only a call is left then
    return lambda: prctl(set_parent_death_signal, int(signal.SIGTERM))
