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
    completions: int = 1  # per prompt
    prompts: int = 1
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
    seen = Peek()
    size = 1  # of the same object without spare bytes: its braces, less the comma that the last pair lacks
    for name, raw in fields.items():
        value = bytes(raw)
        size += len(name) + len(value) + 4
        read = _READERS.get(name)
        if read is not None:
            read(seen, name, value, generates)
    # No spare bytes at the top level leave no room for a duplicate key.
    if size != len(body) or not ascii_only:
        _refuse_duplicates(body, fields)
    seen.text_bytes += len(body) - 20 * len(fields)
    if b";base64," in body:
        _take_out_base64(body, seen)
    if seen.text_bytes < 0:
        seen.text_bytes = 0
    if not ascii_only:
        seen.byte_class = ByteClass.UTF8
    elif b"\\u" in body:
        seen.byte_class = ByteClass.ESCAPED
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
    """Refuse a second copy of a judged key. Counting its spelling is enough unless keys are spelt with escapes."""
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


def _value(raw: bytes, field: str) -> Any:
    try:
        return _decode_any(raw)
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest(f"{field!r} cannot be read", field) from None


# Readers of one field each: (what is seen so far, field, its raw value, does the route generate?).


def _model(seen: Peek, field: str, raw: bytes, generates: bool) -> None:  # noqa: ARG001
    value = _value(raw, field)
    if not isinstance(value, str) or not value:
        raise BadRequest("'model' must be a non-empty string", field)
    if len(value) > MODEL_NAME_MAX or not value.isprintable():
        raise BadRequest("'model' is not a model name", field)
    seen.model = value


def _stream(seen: Peek, field: str, raw: bytes, generates: bool) -> None:  # noqa: ARG001
    if raw == _TRUE:
        seen.stream = True
    elif raw not in {_FALSE, _NULL}:
        raise BadRequest(f"{field!r} must be true or false", field)


def _whole_number(field: str, raw: bytes, least: int, most: int) -> int | None:
    """A whole number in a range; null counts as absent."""
    if raw == _NULL:
        return None
    value = int(raw) if raw.isdigit() and len(raw) < 10 else _value(raw, field)
    if type(value) is not int or not least <= value <= most:
        raise BadRequest(f"{field!r} must be a whole number from {least} to {most}", field)
    return value


def _output_cap(seen: Peek, field: str, raw: bytes, generates: bool) -> None:
    """The smallest of the caps that the body gives."""
    if generates and (cap := _whole_number(field, raw, 0, OUTPUT_TOKENS_MAX)) is not None:
        seen.max_output_tokens = cap if seen.max_output_tokens is None else min(cap, seen.max_output_tokens)


def _choices(seen: Peek, field: str, raw: bytes, generates: bool) -> None:
    """Completions computed per prompt: the larger of n and best_of."""
    if generates and (choices := _whole_number(field, raw, 1, CHOICES_MAX)) is not None:
        seen.completions = max(seen.completions, choices)


def _stream_options(seen: Peek, field: str, raw: bytes, generates: bool) -> None:
    if not generates:
        return
    seen.has_stream_options = True
    options = _value(raw, field)
    if options is None:
        return
    if not isinstance(options, dict):
        raise BadRequest("'stream_options' must be an object", field)
    wanted = options.get("include_usage")
    if wanted is not None and not isinstance(wanted, bool):
        raise BadRequest("'stream_options.include_usage' must be true or false", field)
    seen.include_usage = bool(wanted)


def _prompt(seen: Peek, field: str, raw: bytes, generates: bool) -> None:  # noqa: ARG001
    """Token ids are counted one by one; several prompts multiply the completions."""
    if not raw.startswith(b"["):
        return
    items = _value(raw, field)
    if not items:
        raise BadRequest(f"{field!r} is empty", field)
    kind = type(items[0])
    if kind is not int and len(items) > ITEMS_MAX:
        raise BadRequest(f"more than {ITEMS_MAX} inputs in one request", field)
    if any(type(item) is not kind for item in items):
        raise BadRequest(f"{field!r} mixes kinds: give strings, or token ids, or lists of token ids", field)
    if kind is int:
        _check_ids(items, field)
        seen.counted_tokens += len(items)
        seen.text_bytes -= len(raw)
    elif kind is list:
        for item in items:
            if not item:
                raise BadRequest(f"a part of {field!r} is empty", field)
            _check_ids(item, field)
        seen.counted_tokens += sum(len(item) for item in items)
        seen.prompts = len(items)
        seen.text_bytes -= len(raw)
    elif kind is str:
        seen.prompts = len(items)


_READERS = {
    "model": _model,
    "stream": _stream,
    "max_tokens": _output_cap,
    "max_completion_tokens": _output_cap,
    "max_output_tokens": _output_cap,
    "n": _choices,
    "best_of": _choices,
    "stream_options": _stream_options,
    "prompt": _prompt,
    "input": _prompt,
}


def _check_ids(ids: list[Any], field: str) -> None:
    if any(type(token) is not int or token < 0 for token in ids):
        raise BadRequest("token ids must be whole numbers from 0", field)


def _take_out_base64(body: bytes, seen: Peek) -> None:
    """Price inlined images and files apart: their base64 is not text that the model reads."""
    at = body.find(b";base64,")
    while at >= 0:
        end = body.find(b'"', at)
        if end < 0:
            break
        seen.text_bytes -= end - at
        seen.counted_tokens += IMAGE_TOKENS
        at = body.find(b";base64,", end)


def with_usage(body: bytes, seen: Peek) -> bytes:
    """The same body asking for a usage event at the end of its stream; nothing else changes."""
    if not seen.has_stream_options:
        start = body.index(b"{") + 1
        return body[:start] + b'"stream_options":{"include_usage":true},' + body[start:]
    fields = _decode_object(body)
    options = _value(bytes(fields["stream_options"]), "stream_options") or {}
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode({**options, "include_usage": True}))
    return msgspec.json.encode(fields)
