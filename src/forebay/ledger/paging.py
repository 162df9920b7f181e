"""Cursors: where a page ended, as a word that callers hand back unread."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Generic, TypeVar

import msgspec

from forebay.ledger.key import InvalidError

PAGE_MOST = 1000
PAGE_DEFAULT = 100
CURSOR_CHARACTERS_MOST = 256

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True):
    """Some of a list. `next_cursor` asks for what follows; None: nothing does."""

    data: list[T]
    next_cursor: str | None


def written(*place: int | str) -> str:
    """The cursor of a place in an order."""
    return urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def read(cursor: str, kind: type[T]) -> T:
    """The place that a cursor stands for. Raises InvalidError for what is none of ours."""
    try:
        if len(cursor) > CURSOR_CHARACTERS_MOST:
            raise ValueError("too long")
        return msgspec.json.decode(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)), type=kind)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise InvalidError("is not one that was handed out; leave it away to begin anew", "cursor") from None


def check_limit(limit: int) -> int:
    """A size of a page. Raises InvalidError."""
    if not 1 <= limit <= PAGE_MOST:
        raise InvalidError(f"is {limit}; from 1 to {PAGE_MOST} are given at once", "limit")
    return limit
