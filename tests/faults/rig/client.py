"""A client at socket level: sends exact bytes, half-closes, resets, and reads answers piece by piece with times."""

from __future__ import annotations

import json
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

RECEIVE = 256 * 1024


class EndedShortError(Exception):
    """The connection ended before the answer was whole; `how` is "fin" or "rst"."""

    def __init__(self, how: str) -> None:
        super().__init__(f"the connection ended short ({how})")
        self.how = how


@dataclass
class Head:
    """Status line and headers of an answer."""

    status: int
    version: str
    headers: list[tuple[str, str]]  # names in lower case
    raw: bytes
    at: float  # when its last byte was read

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def get(self, name: str) -> str | None:
        values = self.all(name)
        return values[0] if values else None


@dataclass
class Answer:
    """A whole answer, or as much as came: `ended` is "whole", "fin" or "rst"."""

    head: Head
    body: bytes
    pieces: list[tuple[float, bytes]]
    ended: str = "whole"
    interim: list[Head] = field(default_factory=list)

    @property
    def status(self) -> int:
        return self.head.status

    def header(self, name: str) -> str | None:
        return self.head.get(name)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a refusal in OpenAI's shape."""
        error = self.json()["error"]
        assert isinstance(error, dict)
        return error

    @property
    def reason(self) -> str | None:
        return self.head.get("x-forebay-reason")

    @property
    def retry_after(self) -> int:
        value = self.head.get("retry-after")
        assert value is not None, f"no retry-after on {self.status} {self.body!r}"
        assert value.isdigit(), f"retry-after is no whole number: {value!r}"
        return int(value)


def marker() -> str:
    """A word that no other request carries."""
    return f"mk-{secrets.token_hex(8)}"


def chat(mark: str | None = None, *, stream: bool = False, **more: Any) -> dict[str, Any]:
    """The body of a chat request."""
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "user": mark or marker()}
    if stream:
        body["stream"] = True
    return body | more


class RawClient:
    """One connection."""

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self.sock = socket.socket()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(5)
        try:
            self.sock.connect(("127.0.0.1", port))
        except OSError:
            self.sock.close()
            raise
        self.buffer = bytearray()
        self.interim: list[Head] = []
        self.closed_at: float | None = None  # when we closed
        self._framing = "none"
        self._left = 0
        self._events = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- sending

    def send(self, data: bytes) -> None:
        self.sock.settimeout(10)
        self.sock.sendall(data)

    def request(self, body: bytes | dict[str, Any] | None = None, **how: Any) -> None:
        """Send one request, as `wire` writes it."""
        self.send(wire(body, **how))

    def half_close(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self.closed_at is None:
            self.closed_at = time.monotonic()
            self.sock.close()

    def reset(self) -> None:
        """Close with RST."""
        if self.closed_at is None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close()

    # ---- reading

    def read_head(self, within: float = 5.0, *, method: str = "POST") -> Head:
        """The next final head; interim ones are kept in `interim`."""
        deadline = time.monotonic() + within
        while True:
            while (end := self.buffer.find(b"\r\n\r\n")) < 0:
                self._fill(deadline)
            raw = bytes(self.buffer[: end + 4])
            del self.buffer[: end + 4]
            head = _parse_head(raw)
            if head.status >= 200:
                self._begin_body(head, method)
                return head
            self.interim.append(head)

    def read_piece(self, within: float = 5.0) -> bytes | None:
        """The next bytes of the body, framing removed; None at its end. Raises EndedShortError, or TimeoutError."""
        deadline = time.monotonic() + within
        while True:
            piece = self._take()
            if piece is None or piece:
                return piece
            try:
                self._fill(deadline)
            except EndedShortError as end:
                if self._framing == "close" and end.how == "fin":
                    return None
                raise

    def read_answer(self, within: float = 5.0, *, method: str = "POST") -> Answer:
        """Head and body; an answer cut short is returned with how it ended."""
        deadline = time.monotonic() + within
        head = self.read_head(within, method=method)
        pieces: list[tuple[float, bytes]] = []
        ended = "whole"
        try:
            while (piece := self.read_piece(deadline - time.monotonic())) is not None:
                pieces.append((time.monotonic(), piece))
        except EndedShortError as end:
            ended = end.how
        return Answer(head, b"".join(piece for _, piece in pieces), pieces, ended, self.interim)

    def read_rest(self, within: float = 5.0) -> bytes:
        """The rest of the body."""
        deadline = time.monotonic() + within
        pieces = []
        while (piece := self.read_piece(deadline - time.monotonic())) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    def read_event(self, within: float = 5.0) -> bytes | None:
        """The next server-sent event with its blank line, as received; None at the end of the body."""
        deadline = time.monotonic() + within
        while (cut := _event_end(self._events)) is None:
            piece = self.read_piece(deadline - time.monotonic())
            if piece is None:
                assert not self._events, f"the stream ended inside an event: {bytes(self._events)!r}"
                return None
            self._events += piece
        event = bytes(self._events[:cut])
        del self._events[:cut]
        return event

    def events(self, within: float = 5.0) -> Iterator[bytes]:
        """All events up to the end of the body, each within some seconds."""
        while (event := self.read_event(within)) is not None:
            yield event

    def closed_by_peer(self, within: float = 1.0) -> bool:
        """Did the peer close within so many seconds, sending nothing more?"""
        try:
            self._fill(time.monotonic() + within)
        except EndedShortError:
            return True
        except TimeoutError:
            return False
        raise AssertionError(f"bytes after the answer: {bytes(self.buffer)!r}")

    def _fill(self, deadline: float) -> None:
        self.sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data = self.sock.recv(RECEIVE)
        except (ConnectionResetError, BrokenPipeError):
            raise EndedShortError("rst") from None
        if not data:
            raise EndedShortError("fin")
        self.buffer += data

    def _begin_body(self, head: Head, method: str) -> None:
        self._left = 0
        self._events.clear()
        if "chunked" in (head.get("transfer-encoding") or ""):
            assert head.get("content-length") is None, "an answer with two framings"
            self._framing = "chunked"
        elif method == "HEAD" or head.status in {204, 304}:
            self._framing = "length"
        elif head.get("content-length") is not None:
            assert len(head.all("content-length")) == 1, "an answer with two lengths"
            self._framing, self._left = "length", int(head.get("content-length") or 0)
        else:
            self._framing = "close"

    def _take(self) -> bytes | None:
        """Body bytes that are here already: None at the end of the body, empty when more must be read."""
        if self._framing == "close":
            piece = bytes(self.buffer)
            self.buffer.clear()
            return piece
        if self._framing == "length":
            if not self._left:
                return None
            piece = bytes(self.buffer[: self._left])
            del self.buffer[: len(piece)]
            self._left -= len(piece)
            return piece
        return self._take_chunked()

    def _take_chunked(self) -> bytes | None:
        # `_left` counts the open chunk with its line end, so that 0 means a size line comes next.
        if not self._left:
            end = self.buffer.find(b"\r\n")
            if end < 0:
                return b""
            size = int(bytes(self.buffer[:end]).split(b";")[0], 16)
            if size == 0:
                if len(self.buffer) < end + 4:
                    return b""
                del self.buffer[: end + 4]
                return None
            del self.buffer[: end + 2]
            self._left = size + 2
        piece = bytes(self.buffer[: max(0, self._left - 2)])
        del self.buffer[: len(piece)]
        self._left -= len(piece)
        if self._left <= 2 and len(self.buffer) >= self._left:
            assert self.buffer[: self._left] == b"\r\n"[2 - self._left :], "a chunk without its line end"
            del self.buffer[: self._left]
            self._left = 0
            return piece or self._take_chunked()
        return piece


def wire(
    body: bytes | dict[str, Any] | None = None,
    *,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    headers: Sequence[tuple[str, str]] = (),
    key: str | None = None,
    chunked: bool = False,
    version: str = "1.1",
) -> bytes:
    """The bytes of one request; a dict is sent as JSON."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", "host: gateway.test"]
    given = {name.lower() for name, _ in headers}
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    if body is not None and "content-type" not in given:
        lines.append("content-type: application/json")
    if chunked:
        lines.append("transfer-encoding: chunked")
    elif body is not None and "content-length" not in given:
        lines.append(f"content-length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in headers]
    framed = b"" if body is None else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + framed


def ask(port: int, body: bytes | dict[str, Any] | None = None, *, within: float = 5.0, **how: Any) -> Answer:
    """One request on a connection of its own, and its answer."""
    with RawClient(port) as client:
        client.request(chat() if body is None and how.get("method", "POST") == "POST" else body, **how)
        return client.read_answer(within, method=how.get("method", "POST"))


def _event_end(data: bytearray) -> int | None:
    ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n", b"\r\r") if (at := data.find(mark)) >= 0]
    return min(ends) if ends else None


def _parse_head(raw: bytes) -> Head:
    lines = raw[:-4].decode("latin-1").split("\r\n")
    version, status, *_ = lines[0].split(" ", 2)
    assert version in {"HTTP/1.1", "HTTP/1.0"}, f"not a status line: {lines[0]!r}"
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:])]
    return Head(int(status), version, headers, raw, time.monotonic())
