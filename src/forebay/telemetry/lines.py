"""Lines on their way to a file: made on the event loop, written by a thread, so a slow disk delays no request.

What the thread cannot take in time is dropped and counted. No prompt and no secret is ever in a line: whoever makes the
lines sees to that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import Full, Queue
from threading import Thread
from typing import BinaryIO

CHUNK_BYTES = 32 * 1024  # handed to the thread at once
CHUNKS_MAX = 64  # waiting for the thread: about 2 MiB
NAME_MAX = 128  # characters of a name that a client chose


def cut(text: str) -> str:
    """A name that a client chose, at a length that does not matter."""
    return text if len(text) <= NAME_MAX else text[: NAME_MAX - 1] + "…"


class LineWriter:
    """A bounded buffer and the thread behind it.

    `flush()` must be called now and then (by a timer); `close()` writes the rest. `name` is what a person calls the
    file, and `tell_loss` makes the line that tells how many were dropped.
    """

    def __init__(self, sink: BinaryIO, name: str, tell_loss: Callable[[int], bytes] | None = None) -> None:
        self.dropped = 0
        self._sink = sink
        self._name = name
        self._tell_loss = tell_loss
        self._lines: list[bytes] = []
        self._size = 0
        self._dropped_told = 0
        self._chunks: Queue[bytes | None] = Queue(CHUNKS_MAX)
        self._broken: OSError | None = None
        self._thread = Thread(target=self._write, name=name, daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        """Take a line, without its end; never waits."""
        self._lines.append(line)
        self._size += len(line)
        if self._size >= CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand what is buffered to the thread; never waits."""
        if not self._lines:
            return
        lines, self._lines, self._size = self._lines, [], 0
        count, lost = len(lines), self.dropped - self._dropped_told
        if lost and self._tell_loss is not None:
            lines.append(self._tell_loss(lost))
        try:
            self._chunks.put_nowait(b"\n".join(lines) + b"\n")
        except Full:
            self.dropped += count
        else:
            self._dropped_told += lost

    def close(self, patience_s: float = 2.0) -> None:
        """Write the rest and end the thread; a sink that hangs is left behind after `patience_s` seconds."""
        self.flush()
        try:
            self._chunks.put(None, timeout=patience_s)
        except Full:
            return
        self._thread.join(patience_s)

    @property
    def degraded(self) -> str | None:
        """What is wrong with the sink, for status pages; None when it takes lines."""
        if self._broken is not None:
            return f"{self._name} cannot be written: {self._broken}"
        return f"{self.dropped} lines of {self._name} were dropped" if self.dropped else None

    def _write(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            try:
                self._sink.write(chunk)
                self._sink.flush()
                self._broken = None
            except (OSError, ValueError) as error:
                if self._broken is None:
                    logging.getLogger("forebay.telemetry").warning("%s cannot be written: %s", self._name, error)
                self._broken = error if isinstance(error, OSError) else OSError(str(error))
