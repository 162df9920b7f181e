"""The table of the admin port's endpoints: which method and path leads where, and what each takes and gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

JSON = b"application/json"


class Problem(Exception):  # noqa: N818 - it is an answer, not a fault of ours
    """An answer that says what is wrong with the request."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None, extra: bytes = b"") -> None:
        super().__init__(message)
        self.reply = Reply(status, problem(code, message, param), extra=extra)


class ErrorDetail(msgspec.Struct, frozen=True):
    """What is wrong, and what to do."""

    code: str  # for programs
    message: str  # for people
    param: str | None = None  # the field that is meant


class Error(msgspec.Struct, frozen=True):
    """Every answer that is no success."""

    error: ErrorDetail


def problem(code: str, message: str, param: str | None = None) -> bytes:
    """The body of an error."""
    return msgspec.json.encode(Error(ErrorDetail(code, message, param)))


class Asked(NamedTuple):
    """One request."""

    path: str = ""
    place: str = ""  # the one part of the path that varies
    query: str = ""
    body: bytes = b""
    content_type: str = ""
    actor: str = ""
    idempotency: str | None = None


class Reply(NamedTuple):
    """One answer. `pieces` instead of a body: it is sent as it is made."""

    status: int
    body: bytes = b""
    kind: bytes = JSON
    extra: bytes = b""  # further header lines
    pieces: AsyncIterator[bytes] | None = None


Answer = Callable[[Asked], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. A path may end in, or hold, one `{part}` that varies."""

    method: str
    path: str
    summary: str
    answer: Answer
    takes: Any = None  # type of the JSON body; None: none is taken
    query: type[msgspec.Struct] | None = None
    gives: Any = None  # type of the JSON answer; None: any JSON
    kind: bytes = JSON
    status: int = 200
    open: bool = False  # needs no token
    repeatable: bool = False  # takes an idempotency key
    errors: tuple[int, ...] = ()

    @property
    def changes(self) -> bool:
        """Does it change anything?"""
        return self.method != "GET"


class Table:
    """Looks endpoints up by method and path."""

    def __init__(self, endpoints: Iterable[Endpoint], absent: Mapping[str, str] | None = None) -> None:
        """`absent`: how paths begin that this gateway does not have, and why."""
        self.endpoints = tuple(endpoints)
        self._absent = absent or {}
        self._exact: dict[str, dict[str, Endpoint]] = {}
        self._varying: dict[tuple[str, str], dict[str, Endpoint]] = {}
        for endpoint in self.endpoints:
            before, brace, rest = endpoint.path.partition("{")
            methods = (
                self._varying.setdefault((before, rest.partition("}")[2]), {})
                if brace
                else self._exact.setdefault(endpoint.path, {})
            )
            methods[endpoint.method] = endpoint

    def find(self, method: str, path: str) -> tuple[Endpoint, str]:
        """(endpoint, the part that varies); HEAD is answered as GET. Raises Problem: 404, or 405 with what may be."""
        methods, place = self._methods(path)
        endpoint = methods.get("GET" if method == "HEAD" else method)
        if endpoint is None:
            allowed = [name for known in methods for name in ((known, "HEAD") if known == "GET" else (known,))]
            raise Problem(
                405,
                "method_not_allowed",
                f"use {' or '.join(methods)}",
                extra=f"allow: {', '.join(allowed)}\r\n".encode(),
            )
        return endpoint, place

    def _methods(self, path: str) -> tuple[dict[str, Endpoint], str]:
        if (methods := self._exact.get(path)) is not None:
            return methods, ""
        for (before, after), methods in self._varying.items():
            place = path[len(before) : len(path) - len(after)]
            if path.startswith(before) and path.endswith(after) and place and "/" not in place:
                return methods, unquote(place)
        for start, why in self._absent.items():
            if path.startswith(start):
                raise Problem(404, "not_here", why)
        known = ", ".join(dict.fromkeys(endpoint.path for endpoint in self.endpoints))
        raise Problem(404, "not_found", f"nothing is here; there is: {known}")


def phrase(status: int) -> bytes:
    """The reason phrase of a status."""
    return HTTPStatus(status).phrase.encode()
