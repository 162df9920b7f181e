"""The record: who sent how much and when, as a trace that can be replayed. Never what: no prompt, no secret.

One CSV line per request, written when it ends, so the lines are not in the order of arrival. `docs/traces.md` tells
what each column means; `forebay.workload.trace` reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from time import time_ns
from typing import BinaryIO

import msgspec

from forebay.core.instant import MILLISECOND, Instant
from forebay.core.model import Demand, Refusal, Request, Ticket
from forebay.core.outcome import Outcome
from forebay.errors import ForebayError
from forebay.telemetry.lines import CHUNK_BYTES, LineWriter, cut

COLUMNS = (
    *("arrival_s", "prompt_tokens", "output_tokens", "key_id", "session_id", "sizes", "outcome", "reason"),
    *("queue_wait_ms", "ttft_ms", "latency_ms", "model", "route", "estimated_prompt_tokens", "estimated_output_tokens"),
    "max_tokens",
)
HEADER = ",".join(COLUMNS).encode() + b"\n"

MEASURED, COUNTED, PARTIAL, ESTIMATED, UNREAD = "measured", "counted", "partial", "estimated", "unread"
"""How far a line's sizes can be trusted: the engine said so; we counted; the answer broke off and this is what there
was of it; nobody answered, so this is the estimate; the same, from the declared length alone."""

FRAME_BYTES = 64  # of a body that was not read: keys, roles and punctuation rather than text
_AWKWARD = re.compile(r'[",\x00-\x1f\x7f]')


class Recorder(LineWriter):
    """An observer that writes a line for every request's end and every refusal.

    `clock` is that of the pipeline, `estimate` its estimator. `unread` tells a request that was refused before its body
    was looked at. Times are written as seconds since 1970, and never step back while the process lives.
    """

    def __init__(
        self,
        sink: BinaryIO,
        *,
        clock: Callable[[], Instant],
        estimate: Callable[[Request], Demand],
        unread: Callable[[Request], bool] = lambda _request: False,
        wall_ns: Callable[[], int] = time_ns,
    ) -> None:
        super().__init__(sink, "the record")
        self._clock = clock
        self._estimate = estimate
        self._unread = unread
        self._since_1970_ns = wall_ns() - clock()

    def closed(self, ticket: Ticket) -> None:
        """One line for the end of an admitted request."""
        demand, usage, arrived = ticket.demand, ticket.usage, ticket.arrived
        if usage is None or not usage.tokens:
            sizes, prompt, output = ESTIMATED, demand.input_tokens, demand.output_tokens
        else:
            sizes = MEASURED if usage.exact else COUNTED
            prompt, output = usage.input_tokens or demand.input_tokens, usage.output_tokens
            if ticket.outcome is not Outcome.COMPLETED:
                sizes = PARTIAL
        self._record(
            arrived, ticket.request, demand, prompt, output, sizes, str(ticket.outcome), ticket.reason or "",
            f"{ticket.queue_wait_ns / MILLISECOND:.3f}",
            f"{(ticket.first_token - arrived) / MILLISECOND:.3f}" if ticket.first_token else "",
            f"{(ticket.closed - arrived) / MILLISECOND:.3f}",
        )  # fmt: skip

    def shed(self, request: Request, refusal: Refusal, predicted_wait_ns: int) -> None:  # noqa: ARG002
        """One line for a refusal: it would have been as large as estimated."""
        sizes = ESTIMATED
        if self._unread(request):
            sizes, text_bytes = UNREAD, max(0, request.body_bytes - FRAME_BYTES)
            request = msgspec.structs.replace(request, text_bytes=text_bytes, counted_tokens=0, max_output_tokens=None)
        demand = self._estimate(request)
        self._record(
            self._clock(), request, demand, demand.input_tokens, demand.output_tokens, sizes,
            "shed", refusal.reason, "", "", "",
        )  # fmt: skip

    def _record(
        self, arrived: Instant, request: Request, demand: Demand, prompt: int, output: int, sizes: str, outcome: str,
        reason: str, queue_wait_ms: str, ttft_ms: str, latency_ms: str,
    ) -> None:  # fmt: skip
        seconds, rest_us = divmod((self._since_1970_ns + arrived) // 1000, 1_000_000)
        most = request.max_output_tokens
        self.append(
            f"{seconds}.{rest_us:06d},{prompt},{output},{_field(request.key)},,{sizes},{outcome},{reason},"
            f"{queue_wait_ms},{ttft_ms},{latency_ms},{_field(request.model)},{_field(request.route)},"
            f"{demand.input_tokens},{demand.output_tokens},{'' if most is None else most}".encode()
        )


def open_record(path: Path) -> BinaryIO:
    """The file to append to, begun with the header; a line that a crash cut short is taken off its end.

    Raises ForebayError when it cannot be opened, or holds something else.
    """
    try:
        file = path.open("ab+")
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        begin = file.read(len(HEADER))
        if begin and begin != HEADER[: len(begin)]:
            file.close()
            raise ForebayError(
                f"[telemetry] record_path {str(path)!r} holds something else, or a record of another version: "
                "name a new file"
            )
        if len(begin) < len(HEADER):
            file.truncate(0)
            file.write(HEADER)
            file.flush()
        else:
            file.seek(max(0, size - CHUNK_BYTES))
            tail = file.read()
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
    except OSError as error:
        raise ForebayError(f"[telemetry] record_path {str(path)!r} cannot be opened: {error.strerror}") from None
    return file


def _field(text: str) -> str:
    """A name as a CSV field on one line, whatever a client put into it."""
    text = cut(text)
    if _AWKWARD.search(text) is None:
        return text
    return '"' + re.sub(r"[\x00-\x1f\x7f]", " ", text).replace('"', '""') + '"'
