"""On which line of a TOML text a value stands. The text is known to be valid, so the scanner only finds its way."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left

Path = tuple[str | int, ...]

_KEY_PART = re.compile(r"""\s*([A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')\s*""")
_SKIP = re.compile(r"[^\"'\[\]{}#\n]+")


def index(text: str) -> dict[Path, int]:
    """Line (from 1) of every table and key by its path; array items are counted from 0.

    Values inside inline tables and arrays have no entry: `line_of` finds that of the key that holds them.
    """
    lines: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    breaks = [match.start() for match in re.finditer("\n", text)]
    table: Path = ()
    position = 0
    while position < len(text):
        character = text[position]
        if character in " \t\r\n":
            position += 1
        elif character == "#":
            position = _line_end(text, position)
        elif character == "[":
            array = text.startswith("[[", position)
            names, position = _key(text, position + 1 + array)
            table = _resolve(names, counts, new_item=array)
            lines.setdefault(table, bisect_left(breaks, position) + 1)
            position = _line_end(text, position)
        else:
            names, end = _key(text, position)
            line = bisect_left(breaks, position) + 1
            for depth in range(1, len(names) + 1):
                lines.setdefault((*table, *names[:depth]), line)
            position = _value_end(text, end + 1)
    return lines


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """The line of the value at `path`, or of the nearest thing around it."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _key(text: str, position: int) -> tuple[tuple[str, ...], int]:
    """A dotted key, and the position of what follows it."""
    names = []
    while (part := _KEY_PART.match(text, position)) is not None:
        name = part[1]
        names.append(tomllib.loads(f"k = {name}")["k"] if name[0] in "\"'" else name)
        position = part.end()
        if text[position : position + 1] != ".":
            break
        position += 1
    return tuple(names), position


def _resolve(names: tuple[str, ...], counts: dict[Path, int], *, new_item: bool) -> Path:
    """The path of a table header: names of arrays of tables lead to their last item."""
    path: Path = ()
    for depth, name in enumerate(names, 1):
        path = (*path, name)
        if new_item and depth == len(names):
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _value_end(text: str, position: int) -> int:
    """The end of the line on which the value that begins at `position` ends."""
    depth = 0
    while position < len(text):
        character = text[position]
        if character == "\n" and not depth:
            return position
        if character == "#":
            position = _line_end(text, position)
        elif character in "\"'":
            position = _string_end(text, position)
        elif character in "[]{}\n":
            depth += (character in "[{") - (character in "]}")
            position += 1
        else:
            skipped = _SKIP.match(text, position)
            position = position + 1 if skipped is None else skipped.end()
    return position


def _string_end(text: str, position: int) -> int:
    quote = text[position]
    if text.startswith(quote * 3, position):
        end = position + 3
        while not text.startswith(quote * 3, end):
            end += 2 if quote == '"' and text[end] == "\\" else 1
        end += 3
        # Up to two quotes may stand before the closing three; they belong to the string.
        while text.startswith(quote, end):
            end += 1
        return end
    end = position + 1
    while text[end] != quote:
        end += 2 if quote == '"' and text[end] == "\\" else 1
    return end + 1
