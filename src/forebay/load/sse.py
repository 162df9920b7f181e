"""Counts the events of a completion stream: when the first token came, how many followed, what `usage` says.

Events are decoded only while they can say something new: before the first token, and those with `usage`, an error or
the end. The rest is counted by its separators, which JSON text cannot contain.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_EVENT_BYTES = 4 << 20


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


class _Answer(msgspec.Struct):
    usage: Usage | None = None


_event_decoder = msgspec.json.Decoder(_Event)
_answer_decoder = msgspec.json.Decoder(_Answer)


def usage_of(body: bytes) -> Usage | None:
    """The `usage` object of an answer that is not a stream; None when there is none or the body is not JSON."""
    try:
        return _answer_decoder.decode(body).usage
    except msgspec.DecodeError:
        return None


class SseCounter:
    """Watches one stream. `first_token_ns` is -1 until a token came; `error` holds the text of an error event."""

    __slots__ = ("_tail", "error", "events", "finished", "first_token_ns", "usage")

    def __init__(self) -> None:
        self.first_token_ns = -1
        self.events = 0
        self.usage: Usage | None = None
        self.error = ""
        self.finished = False
        self._tail = b""

    @property
    def output_tokens(self) -> int:
        """Tokens received: the engine's count when it told, else one per event."""
        return self.usage.completion_tokens if self.usage is not None else self.events

    def feed(self, chunk: bytes, now_ns: int) -> None:
        """Takes the next bytes of the body, cut anywhere."""
        data = self._tail + chunk if self._tail else chunk
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        end = data.rfind(b"\n\n")
        if end < 0:
            if len(data) > MAX_EVENT_BYTES:
                self.error = self.error or f"an event exceeds {MAX_EVENT_BYTES} bytes"
                data = b""
            self._tail = data
            return
        self._tail = data[end + 2 :]
        if (
            self.first_token_ns < 0
            or b'"usage":{' in data
            or b'"usage": {' in data
            or b'"error"' in data
            or b"data: [DONE]" in data
        ):
            self._read(data[:end], now_ns)
        else:
            # Separators followed by data: a keep-alive comment is no token.
            self.events += data.count(b"\n\ndata:", 0, end) + data.startswith(b"data:")

    def _read(self, events: bytes, now_ns: int) -> None:
        for event in events.split(b"\n\n"):
            payload = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if payload == b"[DONE]":
                self.finished = True
            elif payload:
                self._read_event(payload, now_ns)

    def _read_event(self, payload: bytes, now_ns: int) -> None:
        try:
            event = _event_decoder.decode(payload)
        except msgspec.DecodeError as error:
            self.error = self.error or f"an event is not a completion chunk: {error}"
            return
        if event.usage is not None:
            self.usage = event.usage
        if event.error is not None:
            self.error = self.error or msgspec.json.encode(event.error).decode()[:500]
        if any(_has_token(choice) for choice in event.choices):
            self.events += 1
            if self.first_token_ns < 0:
                self.first_token_ns = now_ns


def _has_token(choice: _Choice) -> bool:
    if choice.text:
        return True
    delta = choice.delta
    if delta is None:
        return False
    return bool(delta.content or delta.reasoning_content or delta.tool_calls is not None)
