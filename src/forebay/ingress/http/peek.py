"""What a body says about its own cost, read without building it: typed decode of a few fields, raw bytes for the rest.

The rule of this file: the gate and the engine must never read a body differently. A body is judged from the same
bytes that are forwarded; duplicate keys, which parsers resolve differently, are refused; whatever is not valid JSON or
UTF-8 is refused. The oracle of its fuzz test: `peek` returns, or raises BadRequest, and nothing else.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from forebay.core.model import ByteClass

CHOICES_MAX = 128
OUTPUT_TOKENS_MAX = 10_000_000
MODEL_NAME_MAX = 512
IMAGE_TOKENS = 1024  # an image part until an engine reports otherwise; about one high-resolution tile set
ITEMS_MAX = 16_384  # inputs of one embeddings request

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode

# Keys that the gate judges. A second copy of any of these is refused.
JUDGED = (
    "model", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "stream_options",
    "messages", "prompt", "input",
)  # fmt: skip
_JUDGED_QUOTED = tuple(f'"{name}"'.encode() for name in JUDGED)

_TRUE, _FALSE, _NULL = b"true", b"false", b"null"


class BadRequest(Exception):  # noqa: N818 - named after what it becomes
    """The body cannot be served. `message` is for the caller, `field` names the culprit when there is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class Peek(msgspec.Struct):
    """Facts about one body. Token counts are exact only where the body gives token ids."""

    model: str = ""
    stream: bool = False
    max_output_tokens: int | None = None
    choices: int = 1
    text_bytes: int = 0
    byte_class: ByteClass = ByteClass.ASCII
    counted_tokens: int = 0
    has_stream_options: bool = False
    include_usage: bool = False


def peek(body: bytes, *, generates: bool = True) -> Peek:
    """Read the judged fields of a JSON object. Raises BadRequest."""
    ascii_only = body.isascii()
    if not ascii_only:
        try:
            body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    fields = _object(body)
    _refuse_duplicates(body, fields)
    seen = Peek()
    seen.model = _model(fields.get("model"))
    seen.stream = _boolean(fields, "stream")
    if generates:
        seen.max_output_tokens = _output_cap(fields)
        seen.choices = _choices(fields)
        if (options := fields.get("stream_options")) is not None:
            seen.has_stream_options = True
            seen.include_usage = seen.stream and _include_usage(options)
    text_bytes = len(body) - 20 * len(fields)
    if (prompt := fields.get("prompt")) is not None or (prompt := fields.get("input")) is not None:
        text_bytes = _count_prompt(bytes(prompt), seen, len(body))
    if b";base64," in body:
        text_bytes = _take_out_base64(body, seen, text_bytes)
    seen.text_bytes = max(0, text_bytes)
    if ascii_only:
        seen.byte_class = ByteClass.ESCAPED if b"\\u" in body else ByteClass.ASCII
    else:
        seen.byte_class = ByteClass.UTF8
    return seen


def _object(body: bytes) -> dict[str, msgspec.Raw]:
    if not body:
        raise BadRequest("the body is empty; send a JSON object")
    try:
        return _decode_object(body)
    except msgspec.ValidationError:
        raise BadRequest("the body must be a JSON object") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _refuse_duplicates(body: bytes, fields: dict[str, msgspec.Raw]) -> None:
    """Refuse a second copy of a judged key.

    A body without spare bytes at its top level has as many bytes as its keys and values make: no room for a duplicate.
    Otherwise each judged key is counted by its spelling, which is enough unless keys are spelt with escapes.
    """
    size = 1  # braces, less the comma that the last pair lacks
    for key, value in fields.items():
        size += len(key) + len(memoryview(value)) + 4
    if size == len(body) and body.isascii():
        return
    if b"\\u" not in body:
        for quoted, name in zip(_JUDGED_QUOTED, JUDGED, strict=True):
            if name in fields and body.count(quoted) > 1:
                break
        else:
            return
    try:
        pairs = json.loads(body, object_pairs_hook=_Pairs, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not valid JSON") from None
    names = [name for name, _ in pairs]
    for name in JUDGED:
        if names.count(name) > 1:
            raise BadRequest(f"the key {name!r} appears more than once", name)


class _Pairs(list[tuple[str, Any]]):
    """An object as the pairs that it was written with."""


def _value(raw: msgspec.Raw, field: str) -> Any:
    try:
        return _decode_any(raw)
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest(f"{field!r} cannot be read", field) from None


def _model(raw: msgspec.Raw | None) -> str:
    if raw is None:
        return ""
    value = _value(raw, "model")
    if not isinstance(value, str) or not value:
        raise BadRequest("'model' must be a non-empty string", "model")
    if len(value) > MODEL_NAME_MAX or not value.isprintable():
        raise BadRequest("'model' is not a model name", "model")
    return value


def _boolean(fields: dict[str, msgspec.Raw], field: str) -> bool:
    raw = fields.get(field)
    if raw is None:
        return False
    text = bytes(raw)
    if text == _TRUE:
        return True
    if text in {_FALSE, _NULL}:
        return False
    raise BadRequest(f"{field!r} must be true or false", field)


def _whole_number(fields: dict[str, msgspec.Raw], field: str, least: int, most: int) -> int | None:
    raw = fields.get(field)
    if raw is None or bytes(raw) == _NULL:
        return None
    value = _value(raw, field)
    if type(value) is not int or not least <= value <= most:
        raise BadRequest(f"{field!r} must be a whole number from {least} to {most}", field)
    return value


def _output_cap(fields: dict[str, msgspec.Raw]) -> int | None:
    """The smallest cap the body gives; null counts as absent."""
    caps = [
        cap
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens")
        if field in fields and (cap := _whole_number(fields, field, 0, OUTPUT_TOKENS_MAX)) is not None
    ]
    return min(caps) if caps else None


def _choices(fields: dict[str, msgspec.Raw]) -> int:
    """Completions computed per prompt: the larger of n and best_of."""
    choices = 1
    for field in ("n", "best_of"):
        if field in fields:
            choices = max(choices, _whole_number(fields, field, 1, CHOICES_MAX) or 1)
    return choices


def _include_usage(raw: msgspec.Raw) -> bool:
    options = _value(raw, "stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise BadRequest("'stream_options' must be an object", "stream_options")
    wanted = options.get("include_usage")
    if wanted is not None and not isinstance(wanted, bool):
        raise BadRequest("'stream_options.include_usage' must be true or false", "stream_options")
    return bool(wanted)


def _count_prompt(raw: bytes, seen: Peek, body_bytes: int) -> int:
    """Text bytes of a prompt; token ids are counted one by one, several prompts multiply the choices."""
    head = raw[:256].lstrip()
    if not head.startswith(b"["):
        return body_bytes
    items = _value(msgspec.Raw(raw), "prompt")
    if not items:
        raise BadRequest("the prompt is empty", "prompt")
    if len(items) > ITEMS_MAX and not isinstance(items[0], int):
        raise BadRequest(f"more than {ITEMS_MAX} inputs in one request", "input")
    kind = type(items[0])
    if any(type(item) is not kind for item in items):
        raise BadRequest("the prompt mixes kinds: give strings, or token ids, or lists of token ids", "prompt")
    if kind is int:
        _check_ids(items)
        seen.counted_tokens = len(items)
        return body_bytes - len(raw)
    if kind is list:
        for item in items:
            if not item:
                raise BadRequest("one of the prompts is empty", "prompt")
            _check_ids(item)
        seen.counted_tokens = sum(len(item) for item in items)
        seen.choices *= len(items)
        return body_bytes - len(raw)
    if kind is str:
        seen.choices *= len(items)
    return body_bytes  # strings, or the message objects of /v1/responses


def _check_ids(ids: list[Any]) -> None:
    if any(type(token) is not int or token < 0 for token in ids):
        raise BadRequest("token ids must be whole numbers from 0", "prompt")


def _take_out_base64(body: bytes, seen: Peek, text_bytes: int) -> int:
    """Price inlined images and files apart: their base64 is not text that the model reads."""
    at = body.find(b";base64,")
    while at >= 0:
        end = body.find(b'"', at)
        if end < 0:
            break
        text_bytes -= end - at
        seen.counted_tokens += IMAGE_TOKENS
        at = body.find(b";base64,", end)
    return text_bytes


def with_usage(body: bytes, seen: Peek) -> bytes:
    """The same body asking for a usage event at the end of its stream; nothing else changes."""
    if not seen.has_stream_options:
        start = body.index(b"{") + 1
        return body[:start] + b'"stream_options":{"include_usage":true},' + body[start:]
    fields = _decode_object(body)
    options = _value(fields["stream_options"], "stream_options") or {}
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode({**options, "include_usage": True}))
    return msgspec.json.encode(fields)
