"""The access log, one JSON line per request, and the log of the process.

Lines are made on the event loop and written by a thread, so a slow disk delays no request. What the thread cannot
take in time is dropped and counted; the count goes out as a line of its own. No prompt and no secret is ever in a line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from queue import Full, Queue
from threading import Thread
from time import time
from typing import Any, BinaryIO

import msgspec

from forebay.core.instant import MILLISECOND
from forebay.core.model import Refusal, Request, Ticket

CHUNK_BYTES = 32 * 1024  # handed to the thread at once
CHUNKS_MAX = 64  # waiting for the thread: about 2 MiB
NAME_MAX = 128  # characters of a name that a client chose


def configure(level: str) -> None:
    """Send log lines of the process to stderr, from this severity (`debug` … `error`) up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("forebay")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


class AccessLog:
    """An observer that writes a line for every request's end and every refusal.

    `flush()` must be called now and then (by a timer); `close()` writes the rest. `identify` gives a request's id.
    """

    def __init__(
        self,
        sink: BinaryIO,
        *,
        identify: Callable[[Request], str] = lambda _request: "",
        wall: Callable[[], float] = time,
    ) -> None:
        self.dropped = 0
        self._sink = sink
        self._identify = identify
        self._wall = wall
        self._lines: list[bytes] = []
        self._size = 0
        self._dropped_told = 0
        self._chunks: Queue[bytes | None] = Queue(CHUNKS_MAX)
        self._broken: OSError | None = None
        self._encode = msgspec.json.Encoder().encode
        self._thread = Thread(target=self._write, name="access-log", daemon=True)
        self._thread.start()

    # ---- what is told ----------------------------------------------------------------------------------------

    def closed(self, ticket: Ticket) -> None:
        """One line for the end of an admitted request."""
        line = self._line(ticket.request, str(ticket.outcome), ticket.reason)
        line["engine"] = None if ticket.lease is None else ticket.lease.engine.name
        line["queue_wait_ms"] = ticket.queue_wait_ns / MILLISECOND
        line["duration_ms"] = (ticket.closed - ticket.arrived) / MILLISECOND
        if ticket.met_queue:
            line["predicted_wait_ms"] = ticket.predicted_wait_ns / MILLISECOND
        if ticket.first_token:
            line["ttft_ms"] = (ticket.first_token - ticket.arrived) / MILLISECOND
        if ticket.outcome == "evicted":
            line["limit_ms"] = (ticket.expires - ticket.arrived) / MILLISECOND
        line["estimated_tokens"] = ticket.demand.tokens
        usage = ticket.usage
        if usage is not None:
            line["input_tokens"], line["output_tokens"] = usage.input_tokens, usage.output_tokens
        self._append(line)

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        """One line for a refusal: which limit, and what stood against it."""
        line = self._line(request, "shed", refusal.reason)
        line["limit"], line["actual"], line["unit"] = refusal.limit, refusal.actual, refusal.unit
        if predicted_wait_ns:
            line["predicted_wait_ms"] = predicted_wait_ns / MILLISECOND
        if refusal.retry_after_ns is not None:
            line["retry_after_ms"] = refusal.retry_after_ns / MILLISECOND
        self._append(line)

    def rejected(self, status: int, reason: str, request_id: str = "", detail: str = "") -> None:
        """One line for a request that the HTTP layer refused; `detail` must hold nothing that is secret."""
        self._append(
            {
                "time": self._wall(),
                "id": _cut(request_id),
                "outcome": "rejected",
                "reason": reason,
                "status": status,
                "detail": _cut(detail),
            }
        )

    def _line(self, request: Request, outcome: str, reason: str | None) -> dict[str, Any]:
        return {
            "time": self._wall(),
            "id": _cut(self._identify(request)),
            "key": request.key,
            "route": request.route,
            "class": request.priority_class,
            "model": _cut(request.model),
            "stream": request.stream,
            "outcome": outcome,
            "reason": reason,
        }

    # ---- the buffer and the thread ---------------------------------------------------------------------------

    def _append(self, line: dict[str, Any]) -> None:
        encoded = self._encode(line)
        self._lines.append(encoded)
        self._size += len(encoded)
        if self._size >= CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand what is buffered to the thread; never waits."""
        if not self._lines:
            return
        lines, self._lines, self._size = self._lines, [], 0
        if self.dropped > self._dropped_told:
            lines.append(self._encode({"time": self._wall(), "dropped_lines": self.dropped - self._dropped_told}))
        try:
            self._chunks.put_nowait(b"\n".join(lines) + b"\n")
        except Full:
            self.dropped += len(lines) - (self.dropped > self._dropped_told)
        else:
            self._dropped_told = self.dropped

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
            return f"the access log cannot be written: {self._broken}"
        return f"{self.dropped} lines of the access log were dropped" if self.dropped else None

    def _write(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            try:
                self._sink.write(chunk)
                self._sink.flush()
                self._broken = None
            except (OSError, ValueError) as error:
                if self._broken is None:
                    logging.getLogger("forebay.access").warning("the access log cannot be written: %s", error)
                self._broken = error if isinstance(error, OSError) else OSError(str(error))


def _cut(text: str) -> str:
    return text if len(text) <= NAME_MAX else text[: NAME_MAX - 1] + "…"
