"""Scripts for the fake backend: the usual answers, and the ways they go wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from .backend import Call, FakeBackend, Script, early

Headers = Sequence[tuple[str, str]]

DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}


class Do(Enum):
    """Steps that are not bytes or pauses."""

    RESET = "reset"
    CLOSE = "close"
    HOLD = "hold"  # until the peer closes


Step = bytes | float | Do


# ---- bytes --------------------------------------------------------------------------------------------------------


def head(status: int = 200, headers: Headers = (), reason: str = "Scripted") -> bytes:
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def answer(status: int = 200, body: bytes | dict[str, Any] = b"", headers: Headers = ()) -> bytes:
    """A whole response with Content-Length; a dict is sent as JSON."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
        if not any(name == "content-type" for name, _ in headers):
            headers = [("content-type", "application/json"), *headers]
    return head(status, [*headers, ("content-length", str(len(body)))]) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def sse_head(headers: Headers = ()) -> bytes:
    return head(200, [("content-type", "text/event-stream; charset=utf-8"), ("transfer-encoding", "chunked"), *headers])


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def delta(text: str = "x", finish: str | None = None, **more: Any) -> bytes:
    """One event of a chat completion stream."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **more})


def usage_event(usage: dict[str, int] | None = None) -> bytes:
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": usage or USAGE})


def completion(text: str = "hello", usage: dict[str, int] | None = None) -> dict[str, Any]:
    """The body of a chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": usage or USAGE,
    }


# ---- scripts ------------------------------------------------------------------------------------------------------


async def run(call: Call, todo: Iterable[Step]) -> None:
    for step in todo:
        if isinstance(step, bytes):
            await call.send(step)
        elif isinstance(step, Do):
            await _do(call, step)
        else:
            await asyncio.sleep(step)


async def _do(call: Call, step: Do) -> None:
    if step is Do.RESET:
        call.reset()
    elif step is Do.CLOSE:
        call.close()
    else:
        await call.hold()


def steps(*todo: Step) -> Script:
    """Bytes are sent, numbers are seconds of silence, `Do` resets, closes or holds."""

    async def script(call: Call) -> None:
        await run(call, todo)

    return script


def on_head(*todo: Step) -> Script:
    """As `steps`, but on the request's head, leaving its body unread."""

    async def script(call: Call) -> None:
        await run(call, todo)

    return early(script)


def says(text: str = "hello", *, after: float = 0.0) -> Script:
    """A chat completion, after some seconds."""
    return steps(after, answer(200, completion(text)))


def refuses(status: int, body: bytes | dict[str, Any] | None = None, headers: Headers = ()) -> Script:
    """An error in OpenAI's shape, or the given body."""
    if body is None:
        body = {"error": {"message": f"scripted {status}", "type": "scripted", "param": None, "code": None}}
    return steps(answer(status, body, headers))


def streams(
    events: Iterable[bytes],
    *,
    every: float = 0.0,
    first_after: float = 0.0,
    done: bool = True,
    end: Sequence[Step] = (LAST_CHUNK,),
    headers: Headers = (),
) -> Script:
    """A stream: the head at once, then each event as one chunk, then `[DONE]` and the end."""
    listed = list(events)

    async def script(call: Call) -> None:
        await call.send(sse_head(headers))
        await asyncio.sleep(first_after)
        for i, each in enumerate(listed):
            if i and every:
                await asyncio.sleep(every)
            await call.send(chunk(each))
        await run(call, [*([chunk(DONE)] if done else []), *end])

    return script


def deltas(count: int, text: str = "x") -> list[bytes]:
    return [delta(f"{text}{i}") for i in range(count)]


silent: Script = steps(Do.HOLD)


class Gate:
    """A script that keeps every request until it is opened, and then does as `then` says."""

    def __init__(self, then: Script) -> None:
        self._then = then
        self._opened = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await self._opened.wait()
        await self._then(call)

    def open(self, backend: FakeBackend) -> None:
        backend.soon(self._opened.set)


async def ordinary(call: Call) -> None:
    """What a healthy engine does: a completion, or a short stream when asked for one."""
    asked = json.loads(call.body or b"{}")
    if "embeddings" in call.target:
        count = len(asked["input"]) if isinstance(asked.get("input"), list) else 1
        data = [{"object": "embedding", "index": i, "embedding": [0.5, 0.25]} for i in range(count)]
        usage = {"prompt_tokens": 5, "total_tokens": 5}
        await call.send(answer(200, {"object": "list", "data": data, "model": "m", "usage": usage}))
    elif asked.get("stream") is True:
        wants_usage = (asked.get("stream_options") or {}).get("include_usage")
        tail = [delta("", "stop"), *([usage_event()] if wants_usage else [])]
        await streams([*deltas(3), *tail])(call)
    else:
        await call.send(answer(200, completion()))


async def healthy(call: Call) -> None:
    """What a healthy engine says to probes."""
    if call.target == "/health":
        await call.send(answer(200))
    elif call.target == "/v1/models":
        model = {"id": "m", "object": "model", "created": 1, "owned_by": "rig"}
        await call.send(answer(200, {"object": "list", "data": [model]}))
    else:
        await refuses(404)(call)
