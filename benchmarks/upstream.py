"""A scripted OpenAI-style engine that costs far less CPU than any proxy in front of it.

It is an ``asyncio.Protocol`` on uvloop that looks for the few bytes it needs instead of parsing:

- a POST is answered at once with a chat completion of about 0.4 KB that carries ``usage``;
- a POST with ``"stream": true`` is answered by ``max_tokens`` SSE chunks at a fixed rate, one write per chunk;
- a POST whose body holds ``HOLD`` is never answered, so that what queues behind it stays queued;
- a GET is answered with an empty model list, which satisfies the readiness checks of the routers.

Run as ``python -m benchmarks.upstream --port N --chunks-per-s R``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import re
from typing import Final, cast

import uvloop

HOLD: Final = b"hold-this-request"

_CONTENT_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAM: Final = re.compile(rb'"stream": ?true')
_MAX_TOKENS: Final = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
_INCLUDE_USAGE: Final = re.compile(rb'"include_usage": ?true')

_ANSWER_BODY: Final = (
    b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1764500000,"model":"bench",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"The pool in front of the turbine is just deep '
    b'enough to keep it full."},"logprobs":null,"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":231,"completion_tokens":16,"total_tokens":247,"prompt_tokens_details":null}}'
)
_MODELS_BODY: Final = b'{"object":"list","data":[{"id":"bench","object":"model","owned_by":"bench"}]}'


def _json_response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _event(payload: bytes) -> bytes:
    event = b"data: %b\n\n" % payload
    return b"%x\r\n%b\r\n" % (len(event), event)


def _chunk(delta: bytes, finish: bytes = b"null") -> bytes:
    return _event(
        b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1764500000,"model":"bench",'
        b'"choices":[{"index":0,"delta":{%b},"logprobs":null,"finish_reason":%b}]}' % (delta, finish)
    )


_ANSWER: Final = _json_response(_ANSWER_BODY)
_MODELS: Final = _json_response(_MODELS_BODY)
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
# Two in turn: LiteLLM ends a stream whose chunks repeat a hundred times as a runaway model.
_TOKENS: Final = (_chunk(b'"content":" turbine"'), _chunk(b'"content":" forebay"'))
_LAST_TOKEN: Final = _chunk(b'"content":"."', b'"stop"')
_USAGE: Final = _event(
    b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1764500000,"model":"bench",'
    b'"choices":[],"usage":{"prompt_tokens":231,"completion_tokens":200,"total_tokens":431}}'
)
_STREAM_END: Final = _event(b"[DONE]") + b"0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection. A request is answered when its body is complete; requests on a connection do not overlap."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chunk_interval_s: float) -> None:
        self._loop = loop
        self._interval_s = chunk_interval_s
        self._buffer = b""
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class, not a subclass

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
        while data:
            end = self._end_of_request(data)
            if end < 0:
                break
            self._answer(data[:end])
            data = data[end:]
        self._buffer = data

    @staticmethod
    def _end_of_request(data: bytes) -> int:
        head_end = data.find(b"\r\n\r\n")
        if head_end < 0:
            return -1
        length = _CONTENT_LENGTH.search(data, 0, head_end)
        if length is not None:
            end = head_end + 4 + int(length[1])
            return end if len(data) >= end else -1
        if b"chunked" in data[:head_end].lower():
            last = data.find(b"\r\n0\r\n\r\n", head_end)
            return last + 7 if last >= 0 else -1
        return head_end + 4

    def _answer(self, request: bytes) -> None:
        if not request.startswith(b"POST"):
            self._transport.write(_MODELS)
        elif HOLD in request:
            pass
        elif _STREAM.search(request):
            limit = _MAX_TOKENS.search(request)
            chunks = int(limit[1]) if limit is not None else 16
            end = (_USAGE if _INCLUDE_USAGE.search(request) else b"") + _STREAM_END
            self._transport.write(_STREAM_HEAD)
            self._stream(self._loop.time(), 0, chunks, end)
        else:
            self._transport.write(_ANSWER)

    def _stream(self, start: float, sent: int, chunks: int, end: bytes) -> None:
        """Write one chunk; the times are absolute, so that a late chunk does not slow the stream down."""
        if sent + 1 >= chunks:
            self._timer = None
            self._transport.write(_LAST_TOKEN)
            self._transport.write(end)
            return
        self._transport.write(_TOKENS[sent & 1])
        sent += 1
        self._timer = self._loop.call_at(start + sent * self._interval_s, self._stream, start, sent, chunks, end)


async def _serve(port: int, chunks_per_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(loop, 1 / chunks_per_s), "127.0.0.1", port, backlog=4096)
    gc.freeze()
    async with server:
        await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--chunks-per-s", type=float, default=50.0)
    options = parser.parse_args()
    uvloop.run(_serve(options.port, options.chunks_per_s))


if __name__ == "__main__":
    main()
