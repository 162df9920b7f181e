"""Request bodies of the OpenAI routes, checked and turned into jobs."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from forebay.engines.serving.engine import Job, JobKind, ServedEngine

MAX_CHOICES = 128
MAX_INPUTS = 2048
MAX_STOPS = 16

Count = Annotated[int, Meta(ge=1, le=1 << 31)]
TokenId = Annotated[int, Meta(ge=0)]
_Prompt = tuple[list[dict[str, Any]] | None, str | list[int] | None]


class BadRequestError(Exception):
    """A request that cannot be served: the HTTP status and the OpenAI error fields."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param = message, status, kind, param


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Generation(msgspec.Struct, kw_only=True):
    model: str | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None


class _ChatBody(_Generation, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None


class _CompletionBody(_Generation, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]


class _EmbeddingBody(msgspec.Struct, kw_only=True):
    input: str | list[str | TokenId | list[TokenId]]
    model: str | None = None
    encoding_format: str | None = None


_CHAT = msgspec.json.Decoder(_ChatBody)
_COMPLETION = msgspec.json.Decoder(_CompletionBody)
_EMBEDDING = msgspec.json.Decoder(_EmbeddingBody)


class Asked(msgspec.Struct, kw_only=True):
    """One HTTP request as jobs: `jobs[i]` is choice i, a prompt's `per_prompt` choices stand side by side."""

    id: str
    kind: JobKind
    model: str
    created: int
    jobs: list[Job]
    per_prompt: int = 1
    stream: bool = False
    include_usage: bool = False
    base64: bool = False


def parse_chat(body: bytes, engine: ServedEngine) -> Asked:
    """The body of /v1/chat/completions. Raises `BadRequestError`."""
    asked: _ChatBody = _decode(_CHAT, body)
    messages = [{"role": message.role, "content": _text_of(message.content)} for message in asked.messages]
    if asked.max_completion_tokens is not None:
        asked.max_tokens = asked.max_completion_tokens
    return _generation("chat", "chatcmpl-", asked, engine, [(messages, None)])


def parse_completion(body: bytes, engine: ServedEngine) -> Asked:
    """The body of /v1/completions. Raises `BadRequestError`."""
    asked: _CompletionBody = _decode(_COMPLETION, body)
    prompts: list[_Prompt] = [(None, one) for one in _inputs(asked.prompt, "prompt")]
    return _generation("completion", "cmpl-", asked, engine, prompts)


def parse_embedding(body: bytes, engine: ServedEngine) -> Asked:
    """The body of /v1/embeddings. Raises `BadRequestError`."""
    asked: _EmbeddingBody = _decode(_EMBEDDING, body)
    if asked.encoding_format not in (None, "float", "base64"):
        _refuse("encoding_format must be 'float' or 'base64'", "encoding_format")
    model = _model(asked.model, engine)
    request_id = "embd-" + secrets.token_hex(16)
    inputs = _inputs(asked.input, "input")
    return Asked(
        id=request_id,
        kind="embedding",
        model=model,
        created=int(time.time()),
        base64=asked.encoding_format == "base64",
        jobs=[
            Job(
                id=f"{request_id}-{index}",
                kind="embedding",
                model=model,
                prompt=one,
                request_id=request_id,
                siblings=len(inputs),
            )
            for index, one in enumerate(inputs)
        ],
    )


def _generation(
    kind: JobKind,
    prefix: str,
    asked: _Generation,
    engine: ServedEngine,
    prompts: list[_Prompt],
) -> Asked:
    stream = bool(asked.stream)
    if asked.stream_options is not None and not stream:
        _refuse("stream_options can only be set when stream is true", "stream_options")
    per_prompt = asked.n or 1
    siblings = len(prompts) * per_prompt
    if siblings > MAX_INPUTS:
        _refuse(f"n times the number of prompts is {siblings}, the most allowed is {MAX_INPUTS}", "n")
    model = _model(asked.model, engine)
    stop = _stops(asked.stop)
    request_id = prefix + secrets.token_hex(16)
    jobs = [
        Job(
            id=f"{request_id}-{number * per_prompt + choice}",
            kind=kind,
            model=model,
            messages=messages,
            prompt=prompt,
            max_tokens=asked.max_tokens,
            stop=stop,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            # Choices of one prompt must differ from each other, and still come out the same the next time.
            seed=None if asked.seed is None else asked.seed + choice,
            ignore_eos=bool(asked.ignore_eos),
            request_id=request_id,
            siblings=siblings,
            stream=stream,
        )
        for number, (messages, prompt) in enumerate(prompts)
        for choice in range(per_prompt)
    ]
    return Asked(
        id=request_id,
        kind=kind,
        model=model,
        created=int(time.time()),
        jobs=jobs,
        per_prompt=per_prompt,
        stream=stream,
        include_usage=asked.stream_options is not None and bool(asked.stream_options.include_usage),
    )


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        path = message.partition("`$.")[2].rstrip("`") or None
        raise BadRequestError(message, param=path) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequestError("The body is nested too deeply") from None


def _model(name: str | None, engine: ServedEngine) -> str:
    if name is None or name == engine.model_id:
        return engine.model_id
    raise BadRequestError(f"The model `{name}` does not exist.", status=404, kind="NotFoundError", param="model")


def _text_of(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        text = part.get("text")
        if part.get("type") not in (None, "text") or not isinstance(text, str):
            _refuse(f"content parts of type {part.get('type')!r} are not supported, only text is", "messages")
        texts.append(text)
    return "\n".join(texts)


def _inputs(given: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """One text, one list of token ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    if not given:
        _refuse(f"{param} must not be empty", param)
    ids = [one for one in given if isinstance(one, int)]
    if len(ids) == len(given):
        return [ids]
    if ids:
        _refuse(f"{param} mixes token ids with texts", param)
    if len(given) > MAX_INPUTS:
        _refuse(f"{param} has {len(given)} entries, the most allowed is {MAX_INPUTS}", param)
    several = [one for one in given if not isinstance(one, int)]
    if any(one == [] for one in several):
        _refuse(f"{param} has an empty list of token ids", param)
    return several


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > MAX_STOPS:
        _refuse(f"stop has {len(stops)} strings, the most allowed is {MAX_STOPS}", "stop")
    if any(not stop for stop in stops):
        _refuse("stop must not hold an empty string", "stop")
    return stops


def _refuse(message: str, param: str) -> NoReturn:
    raise BadRequestError(message, param=param)
