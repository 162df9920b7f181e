"""What was asked for as one of the types of key.py; what is wrong with it is said in words of the request."""

from __future__ import annotations

import re
from typing import Any, TypeVar, get_args

import msgspec

from forebay.ledger.key import InvalidError, suggestion

S = TypeVar("S", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_PLACE = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_NAME = "is no name: 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit"
_WORDS = (
    (" | null", ""), ("`int`", "a whole number"), ("`float`", "a number"), ("`str`", "text"),
    ("`bool`", "true or false"), ("`array`", "a list"), ("`object`", "an object"),
    ("`datetime`", "a time"), ("Expected ", "must be "),
)  # fmt: skip


def converted(values: dict[str, Any], kind: type[S], *, strict: bool = True) -> S:
    """Plain data as this type; not `strict`: numbers may be spelt as text. Raises InvalidError."""
    try:
        return msgspec.convert(values, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise explained(error, kind) from None


def decoded(body: bytes, kind: type[S]) -> S:
    """JSON as this type. Raises InvalidError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise explained(error, kind) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidError(f"the body is no valid JSON: {error}") from None


def explained(error: msgspec.ValidationError, kind: Any) -> InvalidError:
    """What msgspec found, for the one who asked."""
    text = str(error)
    place = _PLACE.search(text)
    field = place[1] if place else ""
    text = text[: place.start()] if place else text
    if unknown := _UNKNOWN.fullmatch(text):
        name = unknown[1]
        struct = _within(kind, field)
        known = [f.encode_name for f in msgspec.structs.fields(struct)] if struct is not None else []
        return InvalidError(f"is not known here; {suggestion(name, known)}", f"{field}.{name}" if field else name)
    if "matching regex '^[A-Za-z0-9]" in text:
        text = _NAME
    elif "matching regex" in text:
        text = "is empty, or holds control characters"
    for word, plain in _WORDS:
        text = text.replace(word, plain)
    return InvalidError(text, field or None)


def _within(kind: Any, path: str) -> type[msgspec.Struct] | None:
    """The struct that stands at a path of a type."""
    struct = _struct(kind)
    for name in filter(None, re.split(r"\.|\[[^\]]*\]", path)):
        if struct is None:
            return None
        inner = next((f.type for f in msgspec.structs.fields(struct) if f.encode_name == name), None)
        struct = _struct(inner) or struct
    return struct


def _struct(kind: Any) -> type[msgspec.Struct] | None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next((found for part in get_args(kind) if (found := _struct(part)) is not None), None)
