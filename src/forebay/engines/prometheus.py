"""Pages in Prometheus' text format: fetched within bounds of time and size, and read for the few lines that matter."""

from __future__ import annotations

import asyncio
import math
import re
import ssl
from collections.abc import Iterator
from typing import NamedTuple

PAGE_MAX = 4 * 1024 * 1024
READ_S = 2.0

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    """One line of a page."""

    name: str
    labels: dict[str, str]
    value: float  # finite, from 0 on


def samples(page: str, names: tuple[str, ...]) -> Iterator[Sample]:
    """The lines of these metrics, in order. What is no finite number from 0 on is left out, as is what is no line."""
    for line in page.splitlines():
        if not line.startswith(names):
            continue
        name, brace, rest = line.partition("{")
        if brace:
            labels, _, value = rest.rpartition("}")
        else:
            name, _, value = line.partition(" ")
            labels = ""
        if name in names and (number := _number(value)) is not None:
            yield Sample(name, dict(_LABEL.findall(labels)), number)


def _number(text: str) -> float | None:
    try:
        number = float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return None
    return number if math.isfinite(number) and number >= 0 else None


async def fetch_page(host: str, port: int, head: bytes, tls: ssl.SSLContext | None = None) -> str | None:
    """A page over a connection of its own, or None when there is none to be had within two seconds.

    `head` is the request line and headers, HTTP/1.0, so that the page comes unchunked and ends with the connection.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(READ_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            writer.write(head + b"\r\n")
            answer = await _all(reader)
    except (OSError, asyncio.IncompleteReadError):  # a time-out is an OSError too
        return None
    finally:
        if writer is not None:
            writer.transport.abort()
    first, _, body = answer.partition(b"\r\n\r\n")
    return body.decode("utf-8", "replace") if b" 200" in first.partition(b"\r\n")[0] else None


async def _all(reader: asyncio.StreamReader) -> bytes:
    pieces, size = [], 0
    while piece := await reader.read(65_536):
        pieces.append(piece)
        size += len(piece)
        if size > PAGE_MAX:
            return b""
    return b"".join(pieces)
