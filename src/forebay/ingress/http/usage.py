"""Reads what an answer cost while its bytes go by.

JSON answers are kept (up to a bound) and decoded once at the end for their `usage` alone. Streams are watched by their
last bytes: engines put the usage, or a running total of it, near the end; the last one counts. Events are counted, so
that a stream without usage, or one that broke off, is charged for what was generated.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from forebay.core.model import Usage

TAIL = 4096
DONE = b"data: [DONE]"
EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
# vLLM that drains ends some streams so: with the terminator and nothing before it.
NOTHING_SAID = (
    b'{"error":{"message":"the engine ended its answer without having begun it; retry","type":"server_error",'
    b'"param":null,"code":"engine_error"}}'
)
DONE_EVENTS = (DONE + b"\n\n", DONE + b"\r\n\r\n")


class _UsageFields(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: Any = None  # whatever stands there must not cost us the rest
    input_tokens_details: Any = None


NO_ERROR = msgspec.Raw()
"""In the place of an error that the answer does not have; known by its identity."""


class _Answer(msgspec.Struct):
    usage: _UsageFields | None = None
    error: msgspec.Raw = NO_ERROR


class _ErrorFields(msgspec.Struct):
    message: Any = None
    code: Any = None


class _ErrorEvent(msgspec.Struct):
    error: _ErrorFields
    choices: msgspec.Raw = msgspec.Raw(b"")


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_error_event = msgspec.json.Decoder(_ErrorEvent).decode
_scan = json.JSONDecoder().raw_decode
_AFTER_EVENT = re.compile(rb"(?<=\n\n)|(?<=\r\n\r\n)")


def document_usage(body: bytes, estimated_input: int, *, cut: bool = False) -> tuple[Usage | None, bool]:
    """(what a JSON answer cost or None, is it an error object?). `cut`: only the end of the body is here."""
    if cut:
        return last_usage(body, estimated_input) or Usage(estimated_input, 0, exact=False), False
    try:
        answer = _decode_answer(body)
    except (msgspec.DecodeError, RecursionError):
        return None, False
    is_error = answer.error is not NO_ERROR and bytes(answer.error) != b"null"
    return _to_usage(answer.usage, estimated_input), is_error


def last_usage(tail: bytes, estimated_input: int) -> Usage | None:
    """The last usage object in these bytes, or None."""
    at = tail.rfind(b'"usage"')
    while at >= 0:
        start = tail.find(b"{", at, at + 16)
        if start >= 0:
            try:
                value, _ = _scan(tail[start:].decode("utf-8", "replace"))
                found = _to_usage(msgspec.convert(value, _UsageFields), estimated_input)
            except (ValueError, RecursionError, msgspec.ValidationError):
                found = None
            if found is not None:
                return found
        at = tail.rfind(b'"usage"', 0, at)
    return None


class StreamReader:
    """Watches one stream of server-sent events."""

    __slots__ = ("_carry", "_tail", "events", "finished", "pending", "strip")

    def __init__(self, *, strip: bool) -> None:
        self.strip = strip  # take the usage event out
        self.events = 0
        self.finished = False  # the stream's terminator went by
        self.pending = 0  # bytes of an event that is not whole yet; held back when usage events are taken out
        self._tail = b""
        self._carry: list[bytes] = []  # pieces of the event that is not whole yet

    @property
    def inside_event(self) -> bool:
        """Did the stream stop in the middle of an event?"""
        return bool(self._tail) and not self._tail.endswith(EVENT_ENDS)

    def pass_through(self, data: bytes, done: bool) -> bytes:
        """Look at the next bytes; returns those that the client gets now."""
        self.events += data.count(b"data:")
        tail = self._tail = data if len(data) >= TAIL else self._tail[-TAIL:] + data
        # The terminator counts once its blank line is here too, which may come in a piece of its own.
        if tail.endswith(DONE_EVENTS) and not self.finished and self._terminated():
            self.finished = True
            self.events -= 1
        if self.strip:
            return self._without_usage_event(data, done or self.finished)
        if tail.endswith(EVENT_ENDS):
            self.pending = 0
        else:
            cut = _end_of_last_event(data)
            self.pending = len(data) - cut if cut else self.pending + len(data)
        return data

    def _terminated(self) -> bool:
        at = self._tail.rfind(DONE)
        return at == 0 or self._tail[at - 1 : at] == b"\n"

    def _without_usage_event(self, data: bytes, last: bool) -> bytes:
        rest = b""
        if not last and not self._tail.endswith(EVENT_ENDS):
            # Pieces are joined once, when their event is whole: a large event must not be copied for each of them.
            seam = b"".join([piece[-3:] for piece in self._carry[-3:]])[-3:]
            cut = max(0, _end_of_last_event(seam + data) - len(seam))
            data, rest = data[:cut], data[cut:]
            if not cut:
                self._carry.append(rest)
                self.pending += len(rest)
                return b""
        if self._carry:
            data = b"".join((*self._carry, data))
        self._carry = [rest] if rest else []
        self.pending = len(rest)
        if b'"usage"' not in data:
            return data
        kept = []
        for event in split_events(data):
            if b'"usage"' in event and _is_usage_only(event):
                self.events -= 1
            else:
                kept.append(event)
        return b"".join(kept)

    def error_status(self) -> int | None:
        """The status that the stream's last event stands for when it is an error, else None.

        Engines that fail in the middle say so in an event, and may send the terminator all the same.
        """
        if b'"error"' not in self._tail:
            return None
        for event in reversed(split_events(self._tail)):
            data = _event_data(event)
            if data is not None and data != b"[DONE]":
                refused = first_event_error(event)
                return None if refused is None else refused[0]
        return None

    def usage(self, estimated_input: int) -> Usage | None:
        """What the stream cost; None when it has no usage and nothing was generated."""
        found = last_usage(self._tail, estimated_input)
        if found is None and self.events > 0:
            return Usage(estimated_input, self.events, exact=False)
        return found


def _to_usage(fields: _UsageFields | None, estimated_input: int) -> Usage | None:
    """Usage under either family of names; exact only when the engine gave the input too."""
    if fields is None:
        return None
    tokens_in = fields.prompt_tokens if fields.prompt_tokens is not None else fields.input_tokens
    tokens_out = fields.completion_tokens if fields.completion_tokens is not None else fields.output_tokens
    if tokens_in is None and tokens_out is None:
        tokens_in = fields.total_tokens
        if tokens_in is None:
            return None
    exact = tokens_in is not None
    if tokens_in is None:
        tokens_in = estimated_input
    tokens_out = tokens_out or 0
    if tokens_in < 0 or tokens_out < 0:
        return None
    details = fields.prompt_tokens_details or fields.input_tokens_details
    return Usage(tokens_in, tokens_out, exact, _cached(details, tokens_in) if details else 0)


def _cached(details: Any, tokens_in: int) -> int:
    """Of the input, what the engine says it had cached, and never more than all of it."""
    if not isinstance(details, dict):
        return 0
    cached = details.get("cached_tokens")
    return min(cached, tokens_in) if type(cached) is int and cached > 0 else 0


def _end_of_last_event(data: bytes) -> int:
    """Where the last whole event ends; 0 when there is none."""
    lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    return max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)


def split_events(data: bytes) -> list[bytes]:
    """Events with their blank lines. Only LF LF and CRLF CRLF end an event; no other character ends a line."""
    return [event for event in _AFTER_EVENT.split(data) if event]


def _event_data(event: bytes) -> bytes | None:
    """The data of an event of one data line."""
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            return line[5:].strip()
    return None


def _is_usage_only(event: bytes) -> bool:
    """Is this the event that include_usage adds: usage, and no choices?"""
    data = _event_data(event)
    if data is None:
        return False
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("choices") == [] and isinstance(value.get("usage"), dict)


def first_event_error(data: bytes) -> tuple[int, bytes] | None:
    """(status, JSON body) when a stream begins with an error, or with its terminator; else None."""
    if data.startswith(DONE):
        return 502, NOTHING_SAID
    if b'"error"' not in data:
        return None
    body = _event_data(split_events(data)[0])
    if body is None:
        return None
    try:
        event = _decode_error_event(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if memoryview(event.choices):
        return None
    code = event.error.code
    if isinstance(code, str) and len(code) == 3 and code.isdecimal():
        code = int(code)
    status = code if isinstance(code, int) and 400 <= code <= 599 else 502
    return status, body
