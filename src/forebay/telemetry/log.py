"""The access log, one JSON line per request, and the log of the process.

What the disk is too slow for is dropped and counted; the count goes out as a line of its own. No prompt and no secret
is ever in a line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from time import time
from typing import Any, BinaryIO

import msgspec

from forebay.core.instant import MILLISECOND
from forebay.core.model import Refusal, Request, Ticket
from forebay.telemetry.lines import LineWriter, cut


def configure(level: str) -> None:
    """Send log lines of the process to stderr, from this severity (`debug` … `error`) up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("forebay")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


class AccessLog(LineWriter):
    """An observer that writes a line for every request's end and every refusal. `identify` gives a request's id."""

    def __init__(
        self,
        sink: BinaryIO,
        *,
        identify: Callable[[Request], str] = lambda _request: "",
        wall: Callable[[], float] = time,
    ) -> None:
        super().__init__(sink, "the access log", self._loss)
        self._identify = identify
        self._wall = wall
        self._encode = msgspec.json.Encoder().encode

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
        self.append(self._encode(line))

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:
        """One line for a refusal: which limit, and what stood against it."""
        line = self._line(request, "shed", refusal.reason)
        line["limit"], line["actual"], line["unit"] = refusal.limit, refusal.actual, refusal.unit
        if refusal.level:
            line["level"] = refusal.level
        if predicted_wait_ns:
            line["predicted_wait_ms"] = predicted_wait_ns / MILLISECOND
        if refusal.retry_after_ns is not None:
            line["retry_after_ms"] = refusal.retry_after_ns / MILLISECOND
        self.append(self._encode(line))

    def rejected(self, status: int, reason: str, request_id: str = "", detail: str = "") -> None:
        """One line for a request that the HTTP layer refused; `detail` must hold nothing that is secret."""
        line = {
            "time": self._wall(),
            "id": cut(request_id),
            "outcome": "rejected",
            "reason": reason,
            "status": status,
            "detail": cut(detail),
        }
        self.append(self._encode(line))

    def _line(self, request: Request, outcome: str, reason: str | None) -> dict[str, Any]:
        return {
            "time": self._wall(),
            "id": cut(self._identify(request)),
            "key": request.key,
            "route": request.route,
            "class": request.priority_class,
            "model": cut(request.model),
            "stream": request.stream,
            "outcome": outcome,
            "reason": reason,
        }

    def _loss(self, lines: int) -> bytes:
        return self._encode({"time": self._wall(), "dropped_lines": lines})
