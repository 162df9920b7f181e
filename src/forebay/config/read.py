"""Turns plain nested data into a Config and reports every problem it finds, not only the first.

Each field is converted by itself against its declared type, so that one mistake does not hide another.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT
from msgspec.structs import FieldInfo, fields

from forebay.config.fields import NAME_RULE, Section
from forebay.config.lines import Path
from forebay.config.schema import Config
from forebay.config.secret import Secret, resolve

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong (or, as a warning, odd) at one place: why, and what to do."""

    path: Path
    reason: str
    todo: str


class Text(str):
    """A value from an environment variable or flag, which is text whatever its field's type is."""

    __slots__ = ()


class Reader:
    """Reads sections; `problems` collects what is wrong."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.problems: list[Problem] = []
        self._environment = environment

    def section(self, kind: type[S], data: object, path: Path) -> S | None:
        """The section that `data` states, or None with the reasons in `problems`."""
        data = _parsed(data)
        if not isinstance(data, dict):
            self._wrong(path, f"is {_shown(data)}, must be a table", "write it as a section of its own")
            return None
        known = {f.encode_name: f for f in fields(kind)}
        for name in data:
            if name not in known:
                self._unknown(name, known, path)
        values: dict[str, Any] = {}
        before = len(self.problems)
        for name, info in known.items():
            if name in data:
                values[info.name] = self._value(info.type, data[name], (*path, name))
            elif info.default is NODEFAULT and info.default_factory is NODEFAULT:
                self._wrong((*path, name), "is missing", "add it")
        if len(self.problems) > before:
            return None
        return kind(**values)

    def _value(self, kind: Any, data: object, path: Path) -> Any:
        kind = bare(kind)
        if isinstance(kind, type) and issubclass(kind, Section):
            return self.section(kind, data, path)
        if get_origin(kind) is tuple and is_section(item := bare(get_args(kind)[0])):
            return self._sections(item, data, path)
        if get_origin(kind) is dict and is_section(item := bare(get_args(kind)[1])):
            return self._named_sections(item, get_args(kind)[0], data, path)
        return self._leaf(kind, data, path)

    def _sections(self, kind: type[Section], data: object, path: Path) -> tuple[Section | None, ...]:
        data = _parsed(data)
        if not isinstance(data, list | tuple):
            self._wrong(path, f"is {_shown(data)}, must be a list of tables", f"write [[{'.'.join(map(str, path))}]]")
            return ()
        return tuple(self.section(kind, item, (*path, number)) for number, item in enumerate(data))

    def _named_sections(self, kind: type[Section], name_kind: Any, data: object, path: Path) -> dict[str, Any]:
        data = _parsed(data)
        if not isinstance(data, dict):
            self._wrong(path, f"is {_shown(data)}, must be a table", f"write [{path[-1]}.NAME]")
            return {}
        for name in data:
            self._leaf(name_kind, name, (*path, name))
        return {name: self.section(kind, item, (*path, name)) for name, item in data.items()}

    def _leaf(self, kind: Any, data: object, path: Path) -> Any:
        text = isinstance(data, Text)
        if text and not _takes_text(kind):
            data = _parsed(data)
        if isinstance(data, float) and not math.isfinite(data):
            self._wrong(path, f"is {data}, must be a finite number", "give a number")
            return None
        try:
            return msgspec.convert(data, kind, strict=not text, dec_hook=self._secret)
        except msgspec.ValidationError as error:
            self._explain(str(error), kind, data, path)
            return None

    def _secret(self, kind: type, data: object) -> Secret:
        if kind is not Secret or not isinstance(data, str):
            raise ValueError("must be a string in quotes; a secret may also be env:NAME or file:PATH")
        return resolve(data, self._environment)

    def _wrong(self, path: Path, reason: str, todo: str) -> None:
        self.problems.append(Problem(path, reason, todo))

    def _unknown(self, name: str, known: Mapping[str, FieldInfo], path: Path) -> None:
        what = "unknown field" if path else "unknown section"
        close = get_close_matches(name, known, n=1, cutoff=0.6)
        homes = [home for home, names in _places() if name in names]
        if close:
            todo = f"did you mean {close[0]!r}?"
        elif homes:
            todo = f"it belongs in {' or '.join(homes[:3])}"
        else:
            todo = f"use one of: {', '.join(known)}"
        self._wrong((*path, name), what, todo)

    def _explain(self, message: str, kind: Any, data: object, path: Path) -> None:
        """Say in TOML's words what msgspec says in Python's."""
        message, _, inner = message.partition(" - at `$")
        if inner.startswith("["):
            place = inner.strip("`").strip("[]").split("]")[0]
            if place.isdigit() and isinstance(data, list | tuple):
                path, data = (*path, int(place)), data[int(place)]
        if _holds_secret(kind):
            reason, _, todo = message.partition("; ")
            self._wrong(path, reason, todo or "correct it")
            return
        if choices := _choices(kind):
            close = get_close_matches(str(data), choices, n=1, cutoff=0.6)
            todo = f"did you mean {close[0]!r}?" if close else "choose one of them"
            self._wrong(path, f"is {_shown(data)}, must be one of {', '.join(choices)}", todo)
            return
        if "matching regex" in message:
            rule = "a path: '/' first, no spaces" if "^/" in message else NAME_RULE
            self._wrong(path, f"is {_shown(data)}, which is not allowed", f"use {rule}")
            return
        for word, plain in _WORDS:
            message = message.replace(word, plain)
        wanted = message.removeprefix("Expected ").partition(", got ")[0]
        self._wrong(path, f"is {_shown(data)}, must be {wanted}", "change it")


_WORDS = (
    (" | null", ""), ("`int`", "a whole number"), ("`float`", "a number"), ("`str`", "a string in quotes"),
    ("`bool`", "true or false"), ("`array`", "a list"), ("`object`", "a table"),
)  # fmt: skip


def _parsed(data: object) -> object:
    """A text value as the TOML value that it spells, or as it is."""
    if not isinstance(data, Text):
        return data
    try:
        return tomllib.loads(f"value = {data}")["value"]
    except tomllib.TOMLDecodeError:
        return data


def _shown(value: object) -> str:
    """A value as its file would spell it, cut short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def bare(kind: Any) -> Any:
    """A section type out of its annotations and its `| None`; any other type as it is."""
    inner = kind
    while get_origin(inner) is Annotated:
        inner = get_args(inner)[0]
    if get_origin(inner) in (Union, UnionType):
        options = [bare(option) for option in get_args(inner) if option is not type(None)]
        if len(options) == 1 and is_section(options[0]):
            return options[0]
    if is_section(inner) or get_origin(inner) in (tuple, dict):
        # Lengths are checked by msgspec, for which the annotation is kept on lists of plain values.
        arguments = get_args(inner)
        if is_section(inner) or any(is_section(bare(argument)) for argument in arguments if argument is not ...):
            return inner
    return kind


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def walk(kind: Any) -> Iterator[Any]:
    """The type and everything it is made of."""
    yield kind
    for argument in get_args(kind):
        if get_origin(kind) is not Literal:
            yield from walk(argument)


def _choices(kind: Any) -> list[str]:
    for part in walk(kind):
        if get_origin(part) is Literal:
            return [str(option) for option in get_args(part)]
        if isinstance(part, type) and issubclass(part, Enum):
            return [str(member.value) for member in part]
    return []


def _holds_secret(kind: Any) -> bool:
    return any(part is Secret for part in walk(kind))


def _takes_text(kind: Any) -> bool:
    """Is the value of this type written as text, whatever it looks like?"""
    parts = list(walk(kind))
    if any(get_origin(part) in (tuple, dict) for part in parts):
        return False
    return any(part in (str, Secret) or (isinstance(part, type) and issubclass(part, Enum)) for part in parts) or any(
        isinstance(option, str) for part in parts if get_origin(part) is Literal for option in get_args(part)
    )


def _places() -> Iterator[tuple[str, set[str]]]:
    """Every section's header with the names of its fields."""
    yield from _places_in(Config, "", lambda name: f"[{name}]")


def _places_in(kind: type[Section], prefix: str, header: Callable[[str], str]) -> Iterator[tuple[str, set[str]]]:
    found = fields(kind)
    if prefix:
        yield header(prefix), {f.encode_name for f in found}
    for info in found:
        inner = bare(info.type)
        name = f"{prefix}.{info.encode_name}" if prefix else info.encode_name
        if is_section(inner):
            yield from _places_in(inner, name, lambda n: f"[{n}]")
        elif get_origin(inner) is tuple and is_section(item := bare(get_args(inner)[0])):
            yield from _places_in(item, name, lambda n: f"[[{n}]]")
        elif get_origin(inner) is dict and is_section(item := bare(get_args(inner)[1])):
            yield from _places_in(item, name + ".NAME", lambda n: f"[{n}]")
