"""The answer to one HTTP request: the sinks that its jobs fill, and the bytes that come of it."""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from forebay.engines.serving.engine import ServedEngine
    from forebay.engines.serving.requests import Asked

_json = msgspec.json.encode

STREAM_TYPE = b"text/event-stream; charset=utf-8"


class Channel(Protocol):
    """The connection, as an exchange sees it."""

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None: ...
    def open_stream(self) -> None: ...
    def write_stream(self, data: bytes) -> None: ...
    def close_stream(self) -> None: ...


def error_body(status: int, message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """An OpenAI-style error object; without a `code` of its own the status stands there, as vLLM has it."""
    fields = {"message": message, "type": kind, "param": param, "code": status if code is None else code}
    return _json({"error": fields})


class Exchange:
    """Base of the three kinds of answer: counts the jobs down and closes once."""

    __slots__ = (
        "_handed_in",
        "asked", "channel", "closed", "engine", "open_jobs", "prompt_tokens", "token_count", "usage_known",
    )  # fmt: skip

    def __init__(self, asked: Asked, engine: ServedEngine, channel: Channel) -> None:
        self.asked, self.engine, self.channel = asked, engine, channel
        self.closed = False
        self.open_jobs = dict.fromkeys(range(len(asked.jobs)))
        self._handed_in = 0
        self.prompt_tokens = [0] * (len(asked.jobs) // asked.per_prompt)
        self.token_count = 0
        self.usage_known = True

    def start(self) -> None:
        """Hand all jobs to the engine."""
        for index, job in enumerate(self.asked.jobs):
            if self.closed:  # a sibling was refused at once
                return
            self._handed_in += 1
            self.engine.submit(job, self.sink(index))

    def sink(self, index: int) -> ChoiceSink:
        return ChoiceSink(self, index)

    def abort(self) -> None:
        """The client left, or a sibling failed: free what the engine still works on."""
        self.closed = True
        for index in self.open_jobs:
            if index < self._handed_in:
                self.engine.abort(self.asked.jobs[index].id)
        self.open_jobs.clear()

    def settle(self, index: int, prompt_tokens: int, completion_tokens: int) -> bool:
        """Account for a job's end; true when it was the last one."""
        self.open_jobs.pop(index, None)
        if prompt_tokens < 0:
            self.usage_known = False
        self.prompt_tokens[index // self.asked.per_prompt] = prompt_tokens
        self.token_count += completion_tokens
        self.closed = not self.open_jobs
        return self.closed

    def usage(self) -> dict[str, Any] | None:
        if not self.usage_known:
            return None
        prompt = sum(self.prompt_tokens)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self.token_count,
            "completion_tokens": self.token_count,
            "prompt_tokens_details": None,
        }

    def begin(self) -> None:
        """A 200 is certain; only a stream has anything to send then."""

    def token(self, index: int, text: str) -> None:  # noqa: ARG002
        raise TypeError(f"{self.asked.kind} takes no tokens")

    def done(self, index: int, finish_reason: str, prompt_tokens: int, completion_tokens: int) -> None:  # noqa: ARG002
        raise TypeError(f"{self.asked.kind} is not generated")

    def vector(self, index: int, values: list[float], prompt_tokens: int) -> None:  # noqa: ARG002
        raise TypeError(f"{self.asked.kind} takes no vector")

    def error(self, index: int, status: int, message: str, kind: str, code: str | None) -> None:
        self.open_jobs.pop(index, None)
        self.abort()
        self.channel.respond(status, error_body(status, message, kind, code=code))


class ChoiceSink:
    """`Sink` of one job. Guards the exchange against calls after its end."""

    __slots__ = ("_exchange", "_index", "_over")

    def __init__(self, exchange: Exchange, index: int) -> None:
        self._exchange, self._index, self._over = exchange, index, False

    def begin(self) -> None:
        if not (self._over or self._exchange.closed):
            self._exchange.begin()

    def token(self, text: str) -> None:
        if not (self._over or self._exchange.closed):
            self._exchange.token(self._index, text)

    def done(self, finish_reason: str, prompt_tokens: int, completion_tokens: int) -> None:
        if self._ends():
            self._exchange.done(self._index, finish_reason, prompt_tokens, completion_tokens)

    def vector(self, values: list[float], prompt_tokens: int) -> None:
        if self._ends():
            self._exchange.vector(self._index, values, prompt_tokens)

    def error(self, status: int, message: str, kind: str, code: str | None = None) -> None:
        if self._ends():
            self._exchange.error(self._index, status, message, kind, code)

    def _ends(self) -> bool:
        if self._over or self._exchange.closed:
            return False
        self._over = True
        return True


class StreamExchange(Exchange):
    """Server-sent events. What stays the same in every event of a choice is rendered once."""

    __slots__ = ("_begun", "_prefixes", "_suffix", "_top")

    def __init__(self, asked: Asked, engine: ServedEngine, channel: Channel) -> None:
        super().__init__(asked, engine, channel)
        self._begun = False
        chat = asked.kind == "chat"
        shape = b"chat.completion.chunk" if chat else b"text_completion"
        self._top = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            _json(asked.id),
            shape,
            asked.created,
            _json(asked.model),
        )
        self._suffix = (
            b'},"logprobs":null,"finish_reason":null}]}\n\n'
            if chat
            else b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        )
        opening = b'{"index":%d,"delta":{"content":' if chat else b'{"index":%d,"text":'
        self._prefixes = [self._top + opening % index for index in range(len(asked.jobs))]

    def begin(self) -> None:
        if not self._begun:
            self._begun = True
            self.channel.open_stream()

    def token(self, index: int, text: str) -> None:
        if not self._begun:
            self.begin()
            self._roles()
        self.channel.write_stream(self._prefixes[index] + _json(text) + self._suffix)

    def done(self, index: int, finish_reason: str, prompt_tokens: int, completion_tokens: int) -> None:
        if not self._begun:
            self.begin()
            self._roles()
        chat = self.asked.kind == "chat"
        body = b'"delta":{"content":""}' if chat else b'"text":""'
        self.channel.write_stream(
            self._top
            + b'{"index":%d,%b,"logprobs":null,"finish_reason":%b,"stop_reason":null}]}\n\n'
            % (index, body, _json(finish_reason))
        )
        if self.settle(index, prompt_tokens, completion_tokens):
            usage = self.usage() if self.asked.include_usage else None
            if usage is not None:
                self.channel.write_stream(self._top + b'],"usage":' + _json(usage) + b"}\n\n")
            self.channel.write_stream(b"data: [DONE]\n\n")
            self.channel.close_stream()

    def error(self, index: int, status: int, message: str, kind: str, code: str | None) -> None:
        if not self._begun:
            super().error(index, status, message, kind, code)
            return
        self.open_jobs.pop(index, None)
        self.abort()
        # vLLM ends a failed stream with [DONE] as well, so a client that only waits for the end gets one.
        self.channel.write_stream(b"data: " + error_body(status, message, kind, code=code) + b"\n\n")
        self.channel.write_stream(b"data: [DONE]\n\n")
        self.channel.close_stream()

    def _roles(self) -> None:
        if self.asked.kind != "chat":
            return
        for index in range(len(self.asked.jobs)):
            opening = b'{"index":%d,"delta":{"role":"assistant","content":""' % index
            self.channel.write_stream(self._top + opening + self._suffix)


class WholeExchange(Exchange):
    """A generation answered in one JSON body."""

    __slots__ = ("_reasons", "_texts")

    def __init__(self, asked: Asked, engine: ServedEngine, channel: Channel) -> None:
        super().__init__(asked, engine, channel)
        self._texts: list[list[str]] = [[] for _ in asked.jobs]
        self._reasons = [""] * len(asked.jobs)

    def token(self, index: int, text: str) -> None:
        self._texts[index].append(text)

    def done(self, index: int, finish_reason: str, prompt_tokens: int, completion_tokens: int) -> None:
        self._reasons[index] = finish_reason
        if not self.settle(index, prompt_tokens, completion_tokens):
            return
        chat = self.asked.kind == "chat"
        body: dict[str, Any] = {
            "id": self.asked.id,
            "object": "chat.completion" if chat else "text_completion",
            "created": self.asked.created,
            "model": self.asked.model,
            "choices": [self._choice(at, chat) for at in range(len(self.asked.jobs))],
            "service_tier": None,
            "system_fingerprint": None,
        }
        usage = self.usage()
        if usage is not None:
            body["usage"] = usage
        self.channel.respond(200, _json(body))

    def _choice(self, index: int, chat: bool) -> dict[str, Any]:
        text = "".join(self._texts[index])
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}}
            if chat
            else {"text": text}
        )
        return {
            "index": index,
            **said,
            "logprobs": None,
            "finish_reason": self._reasons[index],
            "stop_reason": None,
        }


class EmbeddingExchange(Exchange):
    """Vectors answered in one JSON body, as numbers or as base64 of little-endian float32."""

    __slots__ = ("_vectors",)

    def __init__(self, asked: Asked, engine: ServedEngine, channel: Channel) -> None:
        super().__init__(asked, engine, channel)
        self._vectors: list[list[float] | str] = [[] for _ in asked.jobs]

    def vector(self, index: int, values: list[float], prompt_tokens: int) -> None:
        if self.asked.base64:
            packed = struct.pack(f"<{len(values)}f", *values)
            self._vectors[index] = base64.b64encode(packed).decode()
        else:
            self._vectors[index] = values
        if not self.settle(index, prompt_tokens, 0):
            return
        data = [{"index": at, "object": "embedding", "embedding": one} for at, one in enumerate(self._vectors)]
        body: dict[str, Any] = {
            "id": self.asked.id,
            "object": "list",
            "created": self.asked.created,
            "model": self.asked.model,
            "data": data,
        }
        usage = self.usage()
        if usage is not None:
            body["usage"] = usage
        self.channel.respond(200, _json(body))


def exchange_for(asked: Asked, engine: ServedEngine, channel: Channel) -> Exchange:
    """The kind of answer that `asked` wants."""
    if asked.kind == "embedding":
        return EmbeddingExchange(asked, engine, channel)
    return StreamExchange(asked, engine, channel) if asked.stream else WholeExchange(asked, engine, channel)
