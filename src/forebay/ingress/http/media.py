"""Images, sound and files in a body: found, priced by parts, and cut out of what is priced as text.

Their base64 is never text that a model reads. What stands behind a URL is priced without being fetched: nobody may make
the gateway call an address. The list prices are corrected by what engines report (core/admission/estimate).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

IMAGE_TOKENS = 1024  # about one high-resolution set of tiles
SOUND_BYTES_PER_TOKEN = 2048  # of base64: some ten tokens a second of compressed sound, twenty of plain
FILE_BYTES_PER_TOKEN = 64  # of base64: a page of a PDF is some 50 kB and a thousand tokens
PARTS_MAX = 4096  # of one request that are priced apart

SLASH, SEMICOLON = b"/;"
_MARK = b";base64,"
_DATA_FIELD = re.compile(rb'"data"\s*:\s*"')
_BASE64 = re.compile(rb"[A-Za-z0-9+/_=-]+")
_NAMED_BY_URL = re.compile(rb'"(?:image|video|audio|file)_url"\s*:|"type"\s*:\s*"url"')
SMALL_BYTES = 1024  # bodies in which no payload is looked for but in data URLs
LOOKED_BACK = 160  # bytes before a payload, where its part says what it is
LOOKED_AT = 64  # bytes of a payload that must be base64


class Media(msgspec.Struct):
    """What was found: the rest of the body, and the price of the parts in tokens."""

    text: bytes
    tokens: int = 0
    payload_bytes: int = 0


def has_media(body: bytes) -> bool:
    """May there be any? URLs, and base64 of any length, have a slash, and parts stand in a list inside a list."""
    if SLASH in body and body.find(b"[", body.find(b"[") + 1) > 0:
        return True
    return SEMICOLON in body and _MARK in body


def price_media(body: bytes) -> Media:
    """Find the parts of a body, which must be valid JSON."""
    media, kept, begin, images = Media(body), [], 0, 0
    for start, end in sorted(_payloads(body))[:PARTS_MAX]:
        if start < begin:
            continue
        described = body[max(0, start - LOOKED_BACK) : start]
        size = end - start
        if b"audio" in described:
            media.tokens += size // SOUND_BYTES_PER_TOKEN + 1
        elif b"image" in described:
            media.tokens += IMAGE_TOKENS
            images += 1
        else:
            media.tokens += size // FILE_BYTES_PER_TOKEN + IMAGE_TOKENS
        kept.append(body[begin:start])
        begin = end
        media.payload_bytes += size
    if kept:
        media.text = b"".join([*kept, body[begin:]])
    if b"url" in media.text:
        named = len(_NAMED_BY_URL.findall(media.text))
        media.tokens += IMAGE_TOKENS * min(PARTS_MAX, max(0, named - images))
    return media


def _payloads(body: bytes) -> Iterator[tuple[int, int]]:
    """Where base64 begins and ends: in data URLs, and in fields named `data`."""
    at = body.find(_MARK) if SEMICOLON in body else -1
    for _ in range(PARTS_MAX):
        if at < 0:
            break
        end = body.find(b'"', at)
        # Prose behind the marker stays text: base64 has no spaces, and begins a data URL.
        if body.find(b" ", at, end) < 0 and body.startswith(b'"data:', body.rfind(b'"', 0, at)):
            yield at, end
        at = body.find(_MARK, end)
    at = body.find(b'"data"') if len(body) > SMALL_BYTES else -1
    for _ in range(PARTS_MAX):
        if at < 0:
            break
        end = at + 6
        if (field := _DATA_FIELD.match(body, at)) is not None:
            start, end = field.end(), body.find(b'"', field.end())
            if _is_base64(body, start, end):
                yield start, end
        at = body.find(b'"data"', end)


def _is_base64(body: bytes, start: int, end: int) -> bool:
    size = end - start
    if size < LOOKED_AT or body.find(b" ", start, end) >= 0 or body.find(b"\\n", start, end) >= 0:
        return False
    return all(_BASE64.fullmatch(body, at, at + LOOKED_AT) for at in (start, end - LOOKED_AT))
