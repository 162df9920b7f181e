"""Forebay's own commands as processes of their own, started, awaited and always stopped."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from forebay.errors import EngineError
from forebay.load.target import Target

LISTENING = re.compile(rb"listening on (https?://\S+)")
POLL_S = 0.05
STOP_TIMEOUT_S = 10.0
TAIL_BYTES = 2000


class Child:
    """A `forebay` command that serves HTTP. A context manager: leaving it, for whatever reason, ends the process.

    `url` is where it listens, once `wait_listening` returned.
    """

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self.url = ""
        # A file, not a pipe: a child that talks much never blocks on a parent that does not read.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        with _interrupts_held_back() as interrupted:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from forebay.cli import main; main()", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                # Ctrl-C is for the parent alone: it stops its children in order.
                start_new_session=True,
            )
        if interrupted:
            self.stop()
            raise KeyboardInterrupt

    @property
    def target(self) -> Target:
        return Target.parse(self.url)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_listening(self, timeout_s: float = 60.0) -> str:
        """The URL that the child announces. EngineError with its last words when it ends or stays silent."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := LISTENING.search(self._words()):
                self.url = found.group(1).decode()
                return self.url
            if self._process.poll() is not None:
                raise EngineError(f"the {self.name} did not start: {self._last_words()}")
            time.sleep(POLL_S)
        raise EngineError(f"the {self.name} did not listen within {timeout_s:.0f} s: {self._last_words()}")

    def wait_answer(self, path: str, timeout_s: float = 120.0) -> None:
        """Waits until `path` is answered with 200."""
        deadline = time.monotonic() + timeout_s
        status = 0
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineError(f"the {self.name} ended while it started: {self._last_words()}")
            try:
                status = get(self.target, path)[0]
            except (OSError, http.client.HTTPException):
                status = 0
            if status == 200:
                return
            time.sleep(POLL_S)
        raise EngineError(f"the {self.name} was not ready within {timeout_s:.0f} s ({path} answers {status})")

    def stop(self) -> None:
        """Asks the process to end, and makes it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _words(self) -> bytes:
        # `pread` leaves the offset alone, which the child shares and writes at.
        return os.pread(self._output.fileno(), 1 << 20, 0)

    def _last_words(self) -> str:
        lines = self._words()[-TAIL_BYTES:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with status {self._process.poll()} and said nothing"


@contextmanager
def _interrupts_held_back() -> Iterator[list[int]]:
    """Ctrl-C is noted in here, not obeyed: while a process is being made, nobody holds it yet who could stop it."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # no other is interrupted
        yield seen
        return
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def end_in_order() -> None:
    """Makes a polite kill unwind the stack as Ctrl-C does, so that what was started is stopped on that path too."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    # Not an exception from here: an event loop may be anywhere, and has its own way to end at Ctrl-C.
    signal.raise_signal(signal.SIGINT)


def get(target: Target, path: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """Status and body of a GET."""
    return _request(target, "GET", path, None, timeout_s)


def post_json(target: Target, path: str, body: bytes, timeout_s: float = 120.0) -> tuple[int, bytes]:
    """Status and body of a POST of JSON."""
    return _request(target, "POST", path, body, timeout_s)


def _request(target: Target, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    try:
        connection.request(method, target.prefix + path, body, {"content-type": "application/json"} if body else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
